"""Local steps: an optimizer steps this rank's parts as plain tensors where DTensor has no rule for what it does.

That is right for an optimizer that treats each element by itself, which a trial on small tensors tells: rows that are
stepped apart get the bits of rows that are stepped together. Others are tried on small DTensors beside plain ones.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
from torch.optim.optimizer import Optimizer

from zcompile._torch import local_tensor, no_step_hooks, unhooked_step
from zcompile.errors import OptimizerError
from zcompile.runtime.parameter import sharded
from zcompile.runtime.placing import Placing

_AS_THEY_ARE = (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD)
"""Optimizers that are known to step DTensors right, unless a fused kernel has no rule."""
_FUSED_WITHOUT_RULE = (Adagrad, SGD)
_ROWS, _COLUMNS, _RATE = 7, 4, 0.01
_TOLERANCE = 0.15
"""Of the largest change, between a step of DTensors and one of plain tensors: Muon's, in bfloat16, are 0.08 apart."""


def sharing(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    """An object that shares all attributes of `optimizer` but these, and its hooks, which are for whole steps."""
    made = object.__new__(type(optimizer))
    made.__dict__ = {**optimizer.__dict__, **no_step_hooks(), **attributes}
    return made


class LocalSteps:
    """Which optimizers step local tensors, found out at the first step of each."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def wanted(self, optimizer: Optimizer) -> bool:
        """True if `optimizer` is to step local tensors. Collective at its first step, where it is tried on DTensors.

        Raises:
            OptimizerError: on every rank: it cannot step parameters that are sharded, or would step them otherwise.
        """
        if optimizer not in self._found:
            self._found[optimizer] = _decided(optimizer)
        return self._found[optimizer]


class LocalStep:
    """One step of `optimizer` on local tensors: `optimizer` in it shares its state, and has `groups` of them."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self._real, self._groups = optimizer, groups
        self._locals: list[tuple[torch.Tensor, torch.Tensor]] = []
        local = [{**group, "params": [self._local(param) for param in group["params"]]} for group in groups]
        state: dict[Any, Any] = defaultdict(dict)
        state |= {key: value for key, value in optimizer.state.items() if not isinstance(key, DTensor)}
        state |= {
            mine: {key: _plain(value) for key, value in optimizer.state[param].items()}
            for param, mine in self._locals
            if param in optimizer.state
        }
        self.optimizer = sharing(optimizer, param_groups=local, state=state)

    def _local(self, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return param
        made = nn.Parameter(local_tensor(param), requires_grad=param.requires_grad)
        self._locals.append((param, made))
        made.grad = None if param.grad is None else local_tensor(param.grad)
        return made

    def refresh(self) -> None:
        """Take over the gradients that a closure has brought."""
        for param, mine in self._locals:
            mine.grad = None if param.grad is None else local_tensor(param.grad)

    def finish(self) -> None:
        """Hand over what the step has left: state as DTensors that follow their parameters, groups, attributes."""
        state = self.optimizer.state
        for param, mine in self._locals:
            if mine in state:
                before = self._real.state.get(param, {})
                kept = {key: _sharded(param, key, value, before.get(key)) for key, value in state[mine].items()}
                self._real.state[param] = kept
        local = {mine for _, mine in self._locals}
        self._real.state.update({key: value for key, value in state.items() if key not in local})
        for group, stepped in zip(self._groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        own = {"state", "param_groups", *no_step_hooks()}
        self._real.__dict__.update({key: value for key, value in self.optimizer.__dict__.items() if key not in own})


def _plain(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _sharded(param: torch.Tensor, key: str, value: Any, before: Any) -> Any:
    """State as it stands beside a parameter that is sharded."""
    if isinstance(before, DTensor) and local_tensor(before) is value:
        return before
    follows = isinstance(value, torch.Tensor) and value.shape == local_tensor(param).shape and key != "step"
    if not follows or not isinstance(param, DTensor):
        return value
    return Placing(param.device_mesh, tuple(param.placements), param.shape).place(value)


# -- trials -----------------------------------------------------------------------------------------------------------


def _decided(optimizer: Optimizer) -> bool:
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if not params:
        return False
    if isinstance(optimizer, LBFGS):
        _check_flattened(optimizer, params)
        return False
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) in _AS_THEY_ARE and not (fused and type(optimizer) in _FUSED_WITHOUT_RULE):
        return False
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in everything]
    devices = [params[0].device] if params[0].device.type == "cuda" else []
    try:
        for param in everything:  # an optimizer within this one is not to step meanwhile
            param.grad = None
        with torch.random.fork_rng(devices):
            return all(_elementwise(optimizer, group) for group in optimizer.param_groups)
    finally:
        for param, gradient in zip(everything, gradients, strict=True):
            param.grad = gradient


def _check_flattened(optimizer: Optimizer, params: Sequence[DTensor]) -> None:
    """L-BFGS puts all parameters end to end, which DTensor does for those that divide evenly."""
    for param in params:
        name, ranks = getattr(param, "zcompile_name", "a parameter"), param.device_mesh.size()
        if any(placement.is_shard() for placement in param.placements) and param.shape[0] % ranks:
            found = f"{type(optimizer).__name__} flattens it, and {ranks} ranks do not divide its {param.shape[0]} rows"
            raise OptimizerError(name, found, "choose stage=0, which keeps parameters whole, or another optimizer")


def _elementwise(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """True if rows stepped apart get the bits of rows stepped together; False if it steps DTensors right.

    So it does, too, if it cannot be tried on plain tensors, as one that only stands for another optimizer.
    """
    params = [param for param in group["params"] if isinstance(param, DTensor) and param.ndim]
    if not params:
        return True
    found = True
    for ndim in sorted({param.ndim for param in params}):
        shape = (_ROWS, *[_COLUMNS] * min(ndim - 1, 3))
        count = torch.arange(torch.Size(shape).numel(), device=params[0].device)
        values = (1.0 + count * count).sin().view(shape).to(params[0].dtype)  # rows that do not depend on each other
        try:
            whole = [_stepped(optimizer, group, [values], scale)[0] for scale in (1.0, 1e3)]
            parts = [_apart(optimizer, group, values, scale) for scale in (1.0, 1e3)]
        except Exception:  # what it needs is not known here
            return False
        if all(torch.equal(one, values) for one in whole):
            return False
        if not all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True)):
            _check_on_shards(optimizer, group, values, whole[0], params[0])
            found = False
    return found


def _apart(optimizer: Optimizer, group: dict[str, Any], values: torch.Tensor, scale: float) -> torch.Tensor:
    gradient = _gradient(values, scale)
    pieces = zip(values.split(_ROWS // 2 + 1), gradient.split(_ROWS // 2 + 1), strict=True)
    return torch.cat([_stepped(optimizer, group, [piece], 1.0, [grad])[0] for piece, grad in pieces])


def _gradient(values: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (5 * values.flip(0) + values).cos()


def _stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    scale: float,
    gradients: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Parameters of these values after three steps."""
    params = [value if isinstance(value, nn.Parameter) else nn.Parameter(value.clone()) for value in values]
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    if "lr" in options:  # a schedule may begin with none
        rate = options["lr"]
        options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    tried = sharing(optimizer, state=defaultdict(dict), param_groups=[{**options, "params": params}])
    given = gradients or [_gradient(value.detach(), scale) for value in values]
    for sign in (1, 1, -1):
        for param, gradient in zip(params, given, strict=True):
            param.grad = gradient * sign
        unhooked_step(tried)
    return [param.detach() for param in params]


def _check_on_shards(
    optimizer: Optimizer, group: dict[str, Any], values: torch.Tensor, whole: torch.Tensor, like: DTensor
) -> None:
    """Compare steps of a DTensor, which communicate, with those of a plain tensor.

    Raises:
        OptimizerError: they fail, or differ.
    """
    kind, mesh = type(optimizer).__name__, like.device_mesh
    fix = "choose stage=0, which keeps parameters whole, or an optimizer that treats each element by itself, as AdamW"
    ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    placing = Placing(mesh, (Shard(0), *[Replicate()] * (mesh.ndim - 1)), values.shape)
    rows = -(-_ROWS // ranks)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[min(rank * rows, _ROWS) : min((rank + 1) * rows, _ROWS)].clone()

    try:
        param = sharded(nn.Parameter(placing.place(mine(values))), "a parameter that is tried")
        (stepped,) = _stepped(optimizer, group, [param], 1.0, [placing.place(mine(_gradient(values, 1.0)))])
        assert isinstance(stepped, DTensor), "a DTensor was stepped"
        found = stepped.full_tensor()
    except Exception as error:
        what = f"{kind} cannot step parameters that are sharded: {str(error).splitlines()[0]}"
        raise OptimizerError("optimizer", what, fix) from None
    if (found - whole).abs().max() > _TOLERANCE * (whole - values).abs().max():
        raise OptimizerError("optimizer", f"{kind} steps otherwise where parameters are sharded", fix)
