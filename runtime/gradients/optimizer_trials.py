"""Trials: whether an optimizer may step shards, tried on small tensors before it changes anything.

Most of torch's treat each element by itself; these are known. Others are tried on small DTensors and on plain tensors.
One that steps both alike may step DTensors. One that cannot step DTensors may step local tensors if it treats each
element by itself: pieces stepped separately get the values of the whole. Any other is refused.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop
from torch.optim.optimizer import Optimizer

from zcompile.errors import OptimizerError
from zcompile.runtime.device import is_gpu
from zcompile.runtime.tensors.owned import owner_of
from zcompile.runtime.tensors.parameter import sharded
from zcompile.runtime.tensors.placement import Placing
from zcompile.torch_internals.optimizers import no_step_hooks, unhooked_step

_ELEMENTWISE = (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD)
"""Optimizers known to treat each element by itself; a class derived from one of them may not."""
_ROWS, _COLUMNS, _RATE, _STEPS = 7, 4, 0.01, 12


def sharing(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """An object that shares all attributes of `optimizer` except these and its hooks, which are for whole steps."""
    made = object.__new__(type(optimizer))
    made.__dict__ = {**optimizer.__dict__, **no_step_hooks(), **attributes}
    return made


def first_state(optimizer: Optimizer, group: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """State of the parameters in `group` before any step: empty, but for torch 2.11's Adagrad, created with it."""
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    if isinstance(optimizer, Adagrad):
        options = {name: group[name] for name in ("initial_accumulator_value", "fused")}
        state |= Adagrad(group["params"], **options).state
    return state


def parameters_held(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def steps_local_tensors(optimizer: Optimizer) -> bool:
    """True if the optimizer is to step this rank's rows as plain tensors; False if it is to step DTensors. Collective.

    Raises:
        OptimizerError: on every rank: it would step either of them differently from the whole.
    """
    params = [param for param in parameters_held(optimizer) if isinstance(param, DTensor)]
    if isinstance(optimizer, LBFGS):
        _check_flattened(optimizer, params)
        return False
    if not params or type(optimizer) in _ELEMENTWISE:
        return bool(params)
    everything = list(parameters_held(optimizer))
    gradients = [param.grad for param in everything]
    devices = [params[0].device] if is_gpu(params[0].device) else []
    try:
        for param in everything:  # an optimizer within this one must not step meanwhile
            param.grad = None
        with torch.random.fork_rng(devices):
            for group in optimizer.param_groups:
                if owned := [param for param in group["params"] if owner_of(param) is not None]:
                    _check_per_parameter(optimizer, group, owned[0])
            return _fails_on_shards(optimizer)
    finally:
        for param, gradient in zip(everything, gradients, strict=True):
            param.grad = gradient


def _fails_on_shards(optimizer: Optimizer) -> bool:
    """False if it steps DTensors right; True if it cannot, or also has plain ones, and treats each element by itself.

    Raises:
        OptimizerError: it steps them differently from plain tensors, or cannot, and needs more than the element.
    """
    trials = [trial for group in optimizer.param_groups for trial in _trials(group)]
    failures = [failure for trial in trials if (failure := _failure_on_shards(optimizer, trial))]
    mixed = bool(trials) and any(owner_of(param) is not None for param in parameters_held(optimizer))
    if not failures and not mixed:
        return False
    if not all(_elementwise(optimizer, trial) for trial in trials):
        what = f"cannot step parameters that are sharded: {failures[0]}" if failures else _MIXED
        raise OptimizerError("optimizer", f"{type(optimizer).__name__} {what}", _FIX)
    return True


def _check_per_parameter(optimizer: Optimizer, group: dict[str, Any], owned: torch.Tensor) -> None:
    """Compare two parameters like `owned` stepped at once with each stepped by an optimizer that has no other.

    Raises:
        OptimizerError: they differ, or the options of their groups after the steps do.
    """
    first = _values((_ROWS, *[_COLUMNS] * (owned.ndim - 1)), owned)
    values = [first, 3 * first.flip(0)]
    gradients = [
        [scale * (5 * one + step).cos() for step in range(_STEPS)] for scale, one in zip((1, 1e-2), values, strict=True)
    ]
    try:
        together, options = _stepped_at_once(optimizer, group, values, gradients)
        apart = [
            _stepped_at_once(optimizer, group, [one], [grads]) for one, grads in zip(values, gradients, strict=True)
        ]
    except Exception:  # it needs something unknown here
        return
    # The last bits differ in optimizers that batch matrices of one shape, in bfloat16.
    equal = all(
        (whole - alone).abs().max() <= _ROUNDING * (whole - value).abs().max()
        for value, whole, ((alone,), _) in zip(values, together, apart, strict=True)
    )
    counts = (sum(one.numel() for one in values), first.numel())
    if not equal or any(not _same_options(options, own, counts) for _, own in apart):
        what = f"{type(optimizer).__name__} steps a parameter differently when others are present; no rank has them all"
        fix = "choose stage=0, or an optimizer that treats each parameter by itself, such as Muon, Shampoo or SOAP"
        raise OptimizerError("optimizer", what, fix)


def _same_options(
    one: dict[str, Any], other: dict[str, Any], elements: tuple[int, int] = (0, 0), *, rounded: bool = False
) -> bool:
    """True for equal options of a group; `rounded`: also for those that differ only by rounding.

    So are counts of the `elements` that each has stepped: their effect on a step is in its values.
    """
    pairs = [(one.get(key), other.get(key)) for key in {**one, **other}]
    return all(
        bool(torch.as_tensor(a == b).all())
        or (rounded and _is_rounded(a, b))
        or (type(a) is type(b) is int and (a, b) == elements)
        for a, b in pairs
    )


def _is_rounded(one: Any, other: Any) -> bool:
    """True for numbers that differ only by the order of sums."""
    if not all(isinstance(value, (float, torch.Tensor)) for value in (one, other)):
        return False
    first, second = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    return torch.allclose(first, second, rtol=_SUMMED, atol=0)


_SUMMED = 1e-3


def _check_flattened(optimizer: Optimizer, params: Sequence[DTensor]) -> None:
    """L-BFGS concatenates all parameters, which DTensor supports if they divide evenly."""
    for param in params:
        if owner_of(param) is not None:
            problem = f"{type(optimizer).__name__} concatenates it with all others, and one rank keeps it whole"
            raise OptimizerError(getattr(param, "zcompile_name", "a parameter"), problem, "leave it out of whole=")
        dividing = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]
        name = getattr(param, "zcompile_name", "a parameter")
        ranks = math.prod(param.device_mesh.size(dim) for dim in dividing)
        if dividing and param.shape[0] % ranks:
            problem = (
                f"{type(optimizer).__name__} flattens it, and {ranks} ranks do not divide its {param.shape[0]} rows"
            )
            raise OptimizerError(name, problem, "choose stage=0, which keeps parameters whole, or another optimizer")


@dataclass(frozen=True)
class _Trial:
    """Steps of a parameter with the options of a group."""

    group: dict[str, Any]
    values: torch.Tensor
    like: DTensor
    """A parameter of the group."""

    def gradients(self, scale: float) -> list[torch.Tensor]:
        """Gradients of several steps, with different sizes and directions; elements are independent of each other."""
        first = scale * (5 * self.values.flip(0) + self.values).cos()
        steps = (first, first * (1 + 9 * (first > 0)), first / -8)
        return [steps[number % 3] for number in range(_STEPS)]


def _trials(group: dict[str, Any]) -> Iterator[_Trial]:
    params = [p for p in group["params"] if isinstance(p, DTensor) and p.ndim and owner_of(p) is None]
    for ndim in sorted({param.ndim for param in params}):
        # Rows on every rank: what an optimizer does without rows, it would do on one rank alone.
        shape = (max(_ROWS, 2 * params[0].device_mesh.size(0) - 1), *[_COLUMNS] * min(ndim - 1, 3))
        yield _Trial(group, _values(shape, params[0]), params[0])


def small_parameter(like: torch.Tensor) -> nn.Parameter:
    """A small parameter with a gradient, like those that optimizers are tried on."""
    made = nn.Parameter(_values((_ROWS, *[_COLUMNS] * (like.ndim - 1)), like))
    made.grad = made.detach().cos()
    return made


def _values(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Values in which no row is a combination of others."""
    count = torch.arange(torch.Size(shape).numel(), device=like.device)
    return (1.0 + count * count).sin().view(shape).to(like.dtype)


def _elementwise(optimizer: Optimizer, trial: _Trial) -> bool:
    """True if pieces stepped separately, along each dimension, get the values of the whole.

    Not always the same bits: kernels round differently at the end of a tensor than within it.

    Raises:
        OptimizerError: they do, but leave other options in their group, so that later steps will differ.
    """
    rounding = 16 * torch.finfo(trial.values.dtype).eps
    try:
        for scale in (1.0, 1e3):
            gradients = trial.gradients(scale)
            (whole,), left = _stepped_at_once(optimizer, trial.group, [trial.values], [gradients])
            for dim in range(trial.values.ndim):
                apart, options, counts = _step_pieces(optimizer, trial, gradients, dim)
                if not torch.allclose(whole, apart, rtol=rounding, atol=rounding):
                    return False
                pairs = zip(options, counts, strict=True)
                if any(not _same_options(left, own, (whole.numel(), count)) for own, count in pairs):
                    raise _adapting(optimizer)
    except OptimizerError:
        raise
    except Exception:  # it needs something unknown here
        return False
    return True


def _step_pieces(
    optimizer: Optimizer, trial: _Trial, gradients: Sequence[torch.Tensor], dim: int
) -> tuple[torch.Tensor, list[dict[str, Any]], list[int]]:
    """The concatenated results of two pieces stepped separately; each group's options after it; each piece's size."""
    width = trial.values.shape[dim] // 2 + 1
    pieces = zip(trial.values.split(width, dim), *(gradient.split(width, dim) for gradient in gradients), strict=True)
    stepped, options = [], list[dict[str, Any]]()
    for piece, *grads in pieces:
        (one,), left = _stepped_at_once(optimizer, trial.group, [piece], [grads])
        stepped.append(one)
        options.append(left)
    return torch.cat(stepped, dim), options, [piece.numel() for piece in stepped]


def _stepped_at_once(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters with these values after a step with each of their gradients, and the options of their group then."""
    params = [value if isinstance(value, nn.Parameter) else nn.Parameter(value.clone()) for value in values]
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    if (rate := options.get("lr")) is not None:  # a schedule may begin at 0; small changes are lost in rounding
        options["lr"] = rate.clamp(min=_RATE) if isinstance(rate, torch.Tensor) else max(rate, _RATE)
    kept = {name: copy.copy(value) for name, value in vars(optimizer).items() if isinstance(value, (dict, list, set))}
    tried_group = {**options, "params": params}
    state = first_state(optimizer, tried_group)
    tried = sharing(optimizer, **{**kept, "state": state, "param_groups": [tried_group]})
    for brought in zip(*gradients, strict=True):
        for param, gradient in zip(params, brought, strict=True):
            param.grad = gradient.clone()
        unhooked_step(tried)
    left = {key: value for key, value in tried_group.items() if key != "params"}
    return [param.detach() for param in params], left


def _failure_on_shards(optimizer: Optimizer, trial: _Trial) -> str:
    """Why it cannot step a DTensor, which is collective; empty if it can, or if it cannot be tried at all.

    Raises:
        OptimizerError: it steps one differently from a plain tensor.
    """
    values, mesh = [trial.values, 3 * trial.values.flip(0)], trial.like.device_mesh
    gradients = [trial.gradients(1.0), trial.gradients(0.1)]
    try:
        whole, left = _stepped_at_once(optimizer, trial.group, values, gradients)
    except Exception as error:  # it needs something unknown here
        _warn_untried(optimizer, error)
        return ""
    ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    placing = Placing(mesh, (Shard(0), *[Replicate()] * (mesh.ndim - 1)), trial.values.shape)
    height = len(trial.values)
    rows = -(-height // ranks)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return placing.place(tensor[min(rank * rows, height) : min((rank + 1) * rows, height)].clone())

    try:
        params = [sharded(nn.Parameter(mine(one)), "a parameter that is tried") for one in values]
        shards = [[mine(gradient) for gradient in some] for some in gradients]
        stepped, left_of_shards = _stepped_at_once(optimizer, trial.group, params, shards)
        found = [one.full_tensor() for one in stepped if isinstance(one, DTensor)]
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    kind = type(optimizer).__name__
    tolerance = _ROUNDING_OF_MUON if isinstance(optimizer, Muon) else _ROUNDING
    triples = zip(found, whole, values, strict=True)
    if any((one - want).abs().max() > tolerance * (want - value).abs().max() for one, want, value in triples):
        raise OptimizerError("optimizer", f"{kind} steps sharded parameters differently", _FIX)
    if _on_any_rank(not _same_options(left, left_of_shards, rounded=True), placing, trial.values):
        raise _adapting(optimizer)
    return ""


def _adapting(optimizer: Optimizer) -> OptimizerError:
    kind = type(optimizer).__name__
    what = f"{kind} adapts itself to all elements, and sees only one rank's if parameters are sharded"
    return OptimizerError("optimizer", what, "choose stage=0, or an optimizer with a given rate, such as AdamW")


def _on_any_rank(flag: bool, placing: Placing, like: torch.Tensor) -> bool:
    """True if `flag` is set on any of the ranks that shard. Collective."""
    placements = [Partial("max"), *placing.placements[1:]]
    flags = DTensor.from_local(like.new_tensor([float(flag)]), placing.mesh, placements, run_check=False)
    return bool(flags.full_tensor().item())


def _warn_untried(optimizer: Optimizer, error: Exception) -> None:
    kind, problem = type(optimizer).__name__, str(error).partition("\n")[0] or type(error).__name__
    warnings.warn(
        f"zcompile: {kind} could not be tried on small tensors ({problem}), so it steps shards as they are. "
        "If it needs more of a parameter than each element, its results are wrong: " + _FIX,
        stacklevel=2,
    )


_ROUNDING = 0.02
"""Relative to the largest change: the difference allowed between steps of two parameters at once and of each alone, or
of DTensors and plain tensors."""
_ROUNDING_OF_MUON = 0.15
"""The same for torch's Muon, which multiplies matrices in bfloat16: steps of DTensors and plain tensors differ by
0.08."""
_MIXED = "needs whole parameters, and steps some that one rank keeps whole together with some that ranks divide"
_FIX = (
    "let one rank keep each of its parameters whole, zcompile.compile(..., whole=[names]), choose stage=0, or an "
    "optimizer that treats each element by itself, such as AdamW"
)
