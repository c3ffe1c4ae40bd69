"""Local steps: an optimizer steps this rank's parts as plain tensors where it treats each element by itself.

torch's own mostly do, and on DTensors each of their operations costs a dispatch. An optimizer that is not known is
tried on small DTensors beside plain ones. If it cannot step them, local tensors are right if it treats elements alone:
pieces that are stepped apart get the values of the whole. A parameter with an owner is stepped there as a plain tensor
by any optimizer; on the other ranks the optimizer does not see it.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from zcompile._torch import innermost_hooks, local_tensor, no_step_hooks, no_torch_function, unhooked_step
from zcompile.errors import OptimizerError, ParameterError
from zcompile.runtime.device import is_gpu
from zcompile.runtime.tensors.owned import is_here, owner_of
from zcompile.runtime.tensors.parameter import sharded
from zcompile.runtime.tensors.placement import Placing, part_of

_ELEMENTWISE = (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD)
"""Optimizers that are known to treat elements alone; a class derived from one of them may not."""
_ROWS, _COLUMNS, _RATE, _STEPS = 7, 4, 0.01, 12
_TOLERANCE = 0.15
"""Of the largest change, between a step of DTensors and one of plain tensors: Muon's, in bfloat16, are 0.08 apart."""


def sharing(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """An object that shares all attributes of `optimizer` but these, and its hooks, which are for whole steps."""
    made = object.__new__(type(optimizer))
    made.__dict__ = {**optimizer.__dict__, **no_step_hooks(), **attributes}
    return made


def first_state(optimizer: Optimizer, group: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """State of the parameters in `group` before any step: none, but for torch 2.11's Adagrad, which is made with it."""
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    if isinstance(optimizer, Adagrad):
        options = {name: group[name] for name in ("initial_accumulator_value", "fused")}
        state |= Adagrad(group["params"], **options).state
    return state


class LocalSteps:
    """Which optimizers step local tensors, found out at the first step of each."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._locals = WeakTensorKeyDictionary()
        """What stands for each parameter, always the same: optimizers may keep state of their own by it."""

    def wanted(self, optimizer: Optimizer) -> bool:
        """True if `optimizer` is to step local tensors, be it only for those parameters that have an owner.

        Collective at its first step, where it is tried on DTensors.

        Raises:
            OptimizerError: on every rank: it cannot step parameters that are sharded, or would step them otherwise.
        """
        return self._steps_rows(optimizer) or any(owner_of(p) is not None for p in _parameters_of(optimizer))

    def _steps_rows(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._found:
            self._found[optimizer] = _decided(optimizer)
        return self._found[optimizer]

    def begin(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], *, whole: bool = True) -> LocalStep:
        """A step of `optimizer` on local tensors, for the parameters in `groups`: `whole` if these are all that it has.

        Of such a step every group has a parameter: where other ranks own all of them one that nobody reads, as many
        optimizers look at their first.
        """
        with no_torch_function():  # a parameter's own costs more than what it is asked for
            return LocalStep(optimizer, groups, self._locals, rows=self._steps_rows(optimizer), whole=whole)


class LocalStep:
    """One step of `optimizer` on local tensors: `optimizer` in it shares its state, and has `groups` of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[dict[str, Any]],
        known: MutableMapping[torch.Tensor, nn.Parameter],
        *,
        rows: bool,
        whole: bool,
    ) -> None:
        """`known`: what has stood for parameters in steps before. `rows`: also of those whose rows are divided."""
        self._real, self._groups, self._known, self._rows = optimizer, groups, known, rows
        self._locals: list[tuple[torch.Tensor, torch.Tensor]] = []
        here = [[param for param in group["params"] if owner_of(param) is None or is_here(param)] for group in groups]
        local = [{**group, "params": [self._local(p) for p in some]} for group, some in zip(groups, here, strict=True)]
        self.is_idle = not any(group["params"] for group in local)
        """True where other ranks own all parameters of the step."""
        self._unread: set[int] = set()
        for group, mine in zip(groups, local, strict=True):
            if whole and group["params"] and not mine["params"]:
                mine["params"] = [unread := _stand_in(group["params"][0])]
                self._unread.add(id(unread))
        state: dict[Any, Any] = defaultdict(dict)
        stepped = {id(param) for param, _ in self._locals}
        state |= {key: value for key, value in optimizer.state.items() if id(key) not in stepped}
        state |= {
            mine: {key: _plain(value) for key, value in optimizer.state[param].items()}
            for param, mine in self._locals
            if param in optimizer.state
        }
        self.optimizer = sharing(optimizer, param_groups=local, state=state)

    def _local(self, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor) or not (self._rows or owner_of(param) is not None):
            return param
        if param not in self._known:
            self._known[param] = nn.Parameter(local_tensor(param), requires_grad=param.requires_grad)
        made = self._known[param].requires_grad_(param.requires_grad)
        made.data = local_tensor(param)  # whatever a step before has put there
        vars(made).update(vars(param))  # marks that the optimizer reads
        self._locals.append((param, made))
        made.grad = _local_gradient(param)
        return made

    def refresh(self) -> None:
        """Take over the gradients that a closure has brought."""
        with no_torch_function():
            for param, mine in self._locals:
                mine.grad = _local_gradient(param)

    def finish(self) -> None:
        """Hand over what the step has left: state as DTensors that follow their parameters, groups, attributes."""
        with no_torch_function():
            self._hand_over_state(self.optimizer.state)
        for group, stepped in zip(self._groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        own = {"state", "param_groups", *no_step_hooks()}
        self._real.__dict__.update({key: value for key, value in self.optimizer.__dict__.items() if key not in own})

    def _hand_over_state(self, state: MutableMapping[Any, Any]) -> None:
        for param, mine in self._locals:
            if mine.data_ptr() != (held := local_tensor(param)).data_ptr():
                held.copy_(mine.detach())  # the step has put another tensor into `.data`
            mine.grad = None  # it would outlive the parameter's, which is dropped before the next step
            if mine in state:
                before = self._real.state.get(param, {})
                kept = {key: _sharded(param, key, value, before.get(key)) for key, value in state[mine].items()}
                self._real.state[param] = kept
        local = {id(mine) for _, mine in self._locals} | self._unread
        self._real.state.update({key: value for key, value in state.items() if id(key) not in local})


def _stand_in(like: torch.Tensor) -> nn.Parameter:
    """A small parameter with a gradient, as those that optimizers are tried on."""
    made = nn.Parameter(_values((_ROWS, *[_COLUMNS] * (like.ndim - 1)), like))
    made.grad = made.detach().cos()
    return made


def _local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient; collective where the user has given it other placements than its parameter's.

    Raises:
        ParameterError: it is a plain tensor, the parameter a DTensor.
    """
    grad = param.grad
    if grad is None or not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        name = getattr(param, "zcompile_name", "a parameter")
        fix = "change the gradient in place, or compute it by operations on it, which give a DTensor"
        raise ParameterError(name, "is a DTensor, and its `.grad` was set to a plain tensor", fix)
    if owner_of(param) is not None and owner_of(grad) is None:  # every rank has it, or rows of it
        return part_of(grad.full_tensor(), param)
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_tensor(grad)


class HookedStep:
    """The next `optimizer.step()`, on local tensors, between the hooks of the optimizer's own.

    These see and change the optimizer that they are registered on: what they do before the step is in it, and what they
    do after it stays. To be removed once the step is over.
    """

    def __init__(self, optimizer: Optimizer, steps: LocalSteps) -> None:
        self._steps = steps
        self._local: LocalStep | None = None
        self._handles = innermost_hooks(optimizer, self._begin, self._finish)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if args[0] is not optimizer:  # it holds parameters of two models, and the other's step is this one
            return None
        self._local = self._steps.begin(optimizer, optimizer.param_groups)
        return (self._local.optimizer, *args[1:]), kwargs

    def refresh(self) -> None:
        """Take over the gradients that a closure has brought."""
        if self._local is not None:
            self._local.refresh()

    def _finish(self, *_: object) -> None:
        if self._local is not None:
            self._local.finish()

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()


def _plain(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _sharded(param: torch.Tensor, key: str, value: Any, before: Any) -> Any:
    """State as it stands beside a parameter that is sharded."""
    if isinstance(before, DTensor) and local_tensor(before) is value:
        return before
    follows = isinstance(value, torch.Tensor) and value.shape == local_tensor(param).shape and key != "step"
    if not follows or not isinstance(param, DTensor):
        return value
    return Placing.of(param).place(value)


# -- trials -----------------------------------------------------------------------------------------------------------


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _decided(optimizer: Optimizer) -> bool:
    params = [param for param in _parameters_of(optimizer) if isinstance(param, DTensor)]
    if isinstance(optimizer, LBFGS):
        _check_flattened(optimizer, params)
        return False
    if not params or type(optimizer) in _ELEMENTWISE:
        return bool(params)
    everything = list(_parameters_of(optimizer))
    gradients = [param.grad for param in everything]
    devices = [params[0].device] if is_gpu(params[0].device) else []
    try:
        for param in everything:  # an optimizer within this one is not to step meanwhile
            param.grad = None
        with torch.random.fork_rng(devices):
            for group in optimizer.param_groups:
                if owned := [param for param in group["params"] if owner_of(param) is not None]:
                    _check_alone(optimizer, group, owned[0])
            return _fails_on_shards(optimizer)
    finally:
        for param, gradient in zip(everything, gradients, strict=True):
            param.grad = gradient


def _fails_on_shards(optimizer: Optimizer) -> bool:
    """False if it steps DTensors right; True if it cannot, or also has plain ones, and treats elements alone.

    Raises:
        OptimizerError: it steps them otherwise than plain tensors, or cannot, and needs more than the element.
    """
    trials = [trial for group in optimizer.param_groups for trial in _trials(group)]
    failures = [failure for trial in trials if (failure := _failure_on_shards(optimizer, trial))]
    mixed = bool(trials) and any(owner_of(param) is not None for param in _parameters_of(optimizer))
    if not failures and not mixed:
        return False
    if not all(_elementwise(optimizer, trial) for trial in trials):
        what = f"cannot step parameters that are sharded: {failures[0]}" if failures else _MIXED
        raise OptimizerError("optimizer", f"{type(optimizer).__name__} {what}", _FIX)
    return True


def _check_alone(optimizer: Optimizer, group: dict[str, Any], owned: torch.Tensor) -> None:
    """Compare two parameters like `owned` stepped at once with each stepped by an optimizer that has no other.

    Raises:
        OptimizerError: they differ, or what the steps leave in their group does.
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
    except Exception:  # what it needs is not known here
        return
    # Of those that multiply matrices of one shape together, in bfloat16, the last bits differ.
    equal = all(
        (whole - alone).abs().max() <= _ROUNDING * (whole - value).abs().max()
        for value, whole, ((alone,), _) in zip(values, together, apart, strict=True)
    )
    if not equal or any(not _same_options(options, own) for _, own in apart):
        what = f"{type(optimizer).__name__} steps a parameter otherwise beside others, and no rank has all of them"
        fix = "choose stage=0, or an optimizer that treats each parameter by itself, as Muon, Shampoo or SOAP"
        raise OptimizerError("optimizer", what, fix)


def _same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True for equal options of a group."""
    pairs = ((one.get(key), other.get(key)) for key in {**one, **other})
    return all(bool(torch.as_tensor(a == b).all()) for a, b in pairs)


def _check_flattened(optimizer: Optimizer, params: Sequence[DTensor]) -> None:
    """L-BFGS puts all parameters end to end, which DTensor does for those that divide evenly."""
    for param in params:
        if owner_of(param) is not None:
            problem = f"{type(optimizer).__name__} flattens it with all others, and one rank keeps it whole"
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
        """For each of several steps, each of other size and direction; elements do not follow from each other."""
        first = scale * (5 * self.values.flip(0) + self.values).cos()
        steps = (first, first * (1 + 9 * (first > 0)), first / -8)
        return [steps[number % 3] for number in range(_STEPS)]


def _trials(group: dict[str, Any]) -> Iterator[_Trial]:
    params = [p for p in group["params"] if isinstance(p, DTensor) and p.ndim and owner_of(p) is None]
    for ndim in sorted({param.ndim for param in params}):
        # Rows on every rank: what an optimizer does of none it would do on one rank alone.
        shape = (max(_ROWS, 2 * params[0].device_mesh.size(0) - 1), *[_COLUMNS] * min(ndim - 1, 3))
        yield _Trial(group, _values(shape, params[0]), params[0])


def _values(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Values of which no row follows from the others."""
    count = torch.arange(torch.Size(shape).numel(), device=like.device)
    return (1.0 + count * count).sin().view(shape).to(like.dtype)


def _elementwise(optimizer: Optimizer, trial: _Trial) -> bool:
    """True if pieces stepped apart, along each dimension, get the values of the whole.

    Not always its bits: kernels round otherwise at the end of a tensor than within it.
    """
    rounding = 16 * torch.finfo(trial.values.dtype).eps
    try:
        for scale in (1.0, 1e3):
            gradients = trial.gradients(scale)
            whole = _stepped(optimizer, trial.group, trial.values, gradients)
            for dim in range(trial.values.ndim):
                apart = _apart(optimizer, trial, gradients, dim)
                if not torch.allclose(whole, apart, rtol=rounding, atol=rounding):
                    return False
    except Exception:  # what it needs is not known here
        return False
    return True


def _apart(optimizer: Optimizer, trial: _Trial, gradients: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    width = trial.values.shape[dim] // 2 + 1
    pieces = zip(trial.values.split(width, dim), *(gradient.split(width, dim) for gradient in gradients), strict=True)
    return torch.cat([_stepped(optimizer, trial.group, piece, grads) for piece, *grads in pieces], dim)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], value: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A parameter of this value after a step with each of these gradients."""
    (param,), _ = _stepped_at_once(optimizer, group, [value], [gradients])
    return param


def _stepped_at_once(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Parameters of these values after a step with each of their gradients, and the options of their group then."""
    params = [value if isinstance(value, nn.Parameter) else nn.Parameter(value.clone()) for value in values]
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    if "lr" in options:  # a schedule may begin with none
        rate = options["lr"]
        options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
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
    """Why it cannot step a DTensor, which communicates; empty if it can, and where it cannot be tried at all.

    Raises:
        OptimizerError: it steps one otherwise than a plain tensor.
    """
    values, gradients, mesh = trial.values, trial.gradients(1.0), trial.like.device_mesh
    try:
        whole = _stepped(optimizer, trial.group, values, gradients)
    except Exception:  # what it needs is not known here
        return ""
    ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    placing = Placing(mesh, (Shard(0), *[Replicate()] * (mesh.ndim - 1)), values.shape)
    rows = -(-len(values) // ranks)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return placing.place(tensor[min(rank * rows, len(values)) : min((rank + 1) * rows, len(values))].clone())

    try:
        param = sharded(nn.Parameter(mine(values)), "a parameter that is tried")
        stepped = _stepped(optimizer, trial.group, param, [mine(gradient) for gradient in gradients])
        assert isinstance(stepped, DTensor), "a DTensor was stepped"
        found = stepped.full_tensor()
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if (found - whole).abs().max() > _TOLERANCE * (whole - values).abs().max():
        kind = type(optimizer).__name__
        raise OptimizerError("optimizer", f"{kind} steps otherwise where parameters are sharded", _FIX)
    return ""


_ROUNDING = 0.02
"""Of the largest change, between steps of two parameters at once and of each alone."""
_MIXED = "steps parameters that one rank keeps whole beside ones of which each rank has rows, and needs whole ones"
_FIX = (
    "let one rank keep each of its parameters whole, zcompile.compile(..., whole=[names]), choose stage=0, or an "
    "optimizer that treats each element by itself, as AdamW"
)
