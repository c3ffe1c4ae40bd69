"""Optimizer state by parameter name, for any stage and world; and whole, for a plain model's optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import Optimizer

from zcompile.errors import OptimizerError, StateError, nearest
from zcompile.runtime.groups import Communicator
from zcompile.runtime.tensors.owned import is_here, owner_of, part_of
from zcompile.runtime.tensors.placement import Placing, whole_of
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only

Slots = dict[str, dict[str, Any]]
"""Optimizer state by parameter name and slot, such as `exp_avg` or `step`."""

STEP_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options of how a step is computed, which loading does not change, because some stages do not support all."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state, split for a checkpoint.

    `tensors`: tensors, sharded as parameters are. `about`: the name of the optimizer, its groups, and values that are
    not tensors. `owned`: values that are not tensors, of parameters that this rank owns.
    """

    tensors: Slots
    about: dict[str, Any]
    owned: Slots


def split_state(optimizer: Optimizer, model: nn.Module) -> OptimizerState:
    """Split the state of an optimizer for saving.

    Raises:
        OptimizerError: it holds a parameter that is not in the model.
        StateError: its state of a sharded parameter has a plain tensor with dimensions.
    """
    names, params = ordered_names(optimizer, model), dict(model.named_parameters())
    state = optimizer.state_dict()
    tensors: Slots = {}
    values: Slots = {}
    owned: Slots = {}
    for index, slots in state["state"].items():
        name = names[index]
        is_owned = owner_of(params[name]) is not None
        if not is_kept(params[name]):
            continue
        for slot, value in slots.items():
            if isinstance(params[name], DTensor) and not is_owned:
                _check_divided(f"{name}.{slot}", value)
            if not isinstance(value, torch.Tensor):
                (owned if is_owned else values).setdefault(name, {})[slot] = value
                continue
            tensors.setdefault(name, {})[slot] = value
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return OptimizerState(tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "values": values}, owned)


def _check_divided(slot: str, value: Any) -> None:
    """Raise StateError for state of a sharded parameter if it is unknown how ranks divide that state."""
    within = "" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__} that "
    for one in tree_leaves(value):
        if isinstance(one, torch.Tensor) and one.dim() and (within or not isinstance(one, DTensor)):
            has = f"{within}has a tensor" if within else "is a plain tensor"
            problem = f"{has} of shape {list(one.shape)}, so it is unknown how ranks divide it"
            fix = "use an optimizer that makes its state by torch.zeros_like(parameter), and keeps it directly in "
            fix += "state[parameter], or keep the parameter whole: whole= or stage=0"
            raise StateError(slot, problem, fix)


def is_kept(param: torch.Tensor) -> bool:
    """True if this rank has optimizer state of `param`; of an owned parameter only its owner does."""
    return not isinstance(param, DTensor) or owner_of(param) is None or is_here(param)


def ordered_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Names of an optimizer's parameters, in state dict order. Raises OptimizerError for one not in the model."""
    known = {id(param): name for name, param in model.named_parameters()}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in known:
                subject, kind = f"parameter {place} of group {number}", type(optimizer).__name__
                fix = f"build it over the compiled model: {kind}(compiled.parameters(), ...)"
                raise OptimizerError(subject, f"{kind} holds it, but the compiled model does not", fix)
            names.append(known[id(param)])
    return names


def empty_slots(saved: Slots, optimizer: Optimizer, model: nn.Module) -> Slots:
    """Empty tensors to load `saved` into, as the optimizer would make them in this stage and world.

    Only shapes and dtypes of `saved` are used. Raises StateError for a parameter that the optimizer does not hold.
    """
    names, params = ordered_names(optimizer, model), dict(model.named_parameters())
    for name in saved:
        if name not in names:
            fix = f"build the optimizer over the same parameters ({nearest(name, names)})"
            raise StateError(name, "has optimizer state in the checkpoint, but is not in this optimizer", fix)
    scalars = _scalar_slots(saved)
    return {
        name: {slot: _empty(shape, None if slot in scalars else params[name]) for slot, shape in slots.items()}
        for name, slots in saved.items()
        if is_kept(params[name])
    }


def merge_ranks(parts: Sequence[Mapping[str, Any]], elsewhere: Collection[str]) -> dict[str, Any]:
    """Merge `about` of ranks that have different parameters, without the parameters that are `elsewhere`."""
    first = parts[0]
    groups = [
        {**group, "params": [n for part in parts for n in part["groups"][number]["params"] if n not in elsewhere]}
        for number, group in enumerate(first["groups"])
    ]
    values = {name: slots for part in parts for name, slots in part["values"].items() if name not in elsewhere}
    return {**first, "groups": groups, "values": values}


def assemble_state(tensors: Slots, about: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """A state dict that `optimizer.load_state_dict` accepts. Raises StateError if the checkpoint does not fit."""
    kind, saved = type(optimizer).__name__, about["optimizer"]
    if kind != saved:
        raise StateError("optimizer", f"is {kind}, the checkpoint has the state of {saved}", f"load it into {saved}")
    names, params = ordered_names(optimizer, model), dict(model.named_parameters())
    _compare_groups(about["groups"], optimizer, names)
    indices = {name: index for index, name in enumerate(names)}
    state = {
        indices[name]: {**tensors.get(name, {}), **about["values"].get(name, {})}
        for name in names
        if is_kept(params[name]) and (name in tensors or name in about["values"])
    }
    return {"state": state, "param_groups": with_own_options(about["groups"], optimizer)}


def with_own_options(groups: list[dict[str, Any]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Saved groups with the optimizer's own parameter indices and `STEP_OPTIONS`."""
    return [
        {**then, **{key: now[key] for key in STEP_OPTIONS if key in now}, "params": now["params"]}
        for then, now in zip(groups, optimizer.state_dict()["param_groups"], strict=True)
    ]


def _compare_groups(saved: list[dict[str, Any]], optimizer: Optimizer, names: list[str]) -> None:
    fix = "build the optimizer with the groups that it had when it was saved"
    if len(saved) != len(optimizer.param_groups):
        problem = f"has {len(optimizer.param_groups)} parameter groups, the checkpoint's has {len(saved)}"
        raise StateError("optimizer", problem, fix)
    remaining = iter(names)
    current = [[next(remaining) for _ in group["params"]] for group in optimizer.param_groups]
    for number, (then, now) in enumerate(zip(saved, current, strict=True)):
        for name in [*then["params"], *now]:
            if name not in then["params"] or name not in now:
                where = "only in the checkpoint's" if name in then["params"] else "not in the checkpoint's"
                raise StateError(name, f"is {where} group {number} of the optimizer", fix)


def _scalar_slots(saved: Slots) -> set[str]:
    """Slots that are 0-d for every parameter, such as `step`, and so are not DTensors in any stage.

    A moment is not among them, even if it is 0-d for a 0-d parameter.
    """
    shapes: dict[str, set[bool]] = {}
    for slots in saved.values():
        for slot, value in slots.items():
            shapes.setdefault(slot, set()).add(value.shape == ())
    return {slot for slot, scalar in shapes.items() if scalar == {True}}


def _empty(value: torch.Tensor, param: torch.Tensor | None) -> torch.Tensor:
    """An uninitialised tensor; for a sharded parameter a DTensor, sharded if it has its shape, else replicated."""
    if not isinstance(param, DTensor):
        return torch.empty(value.shape, dtype=value.dtype, device=None if param is None else param.device)
    like = value.shape == tuple(param.shape)
    if not like and owner_of(param) is not None:
        return torch.empty(value.shape, dtype=value.dtype, device=param.device)
    local = torch.empty(local_tensor(param).shape if like else value.shape, dtype=value.dtype, device=param.device)
    if like:
        return Placing.of(param).place(local)
    return Placing(param.device_mesh, (Replicate(),) * param.device_mesh.ndim, torch.Size(value.shape)).place(local)


# -- whole state ------------------------------------------------------------------------------------------------------


StateNames = dict[str, list[str]]
"""The optimizer slots that a rank has, by parameter name."""


def slot_names(optimizer: Optimizer, model: nn.Module) -> StateNames:
    """The slots that this rank has. Raises StateError if ranks have different parameters."""
    for name, param in model.named_parameters():
        if param.is_meta:
            fix = "use save_checkpoint(folder, optimizer)"
            raise StateError(name, "is on another pipeline stage, and so is its optimizer state", fix)
    apart = split_state(optimizer, model)
    kept: StateNames = {}
    for slots in (apart.tensors, apart.about["values"], apart.owned):
        for name, values in slots.items():
            kept.setdefault(name, []).extend(values)
    return kept


def check_same_slots(slots_of_ranks: Sequence[StateNames], model: nn.Module) -> None:
    """Raise StateError if ranks have different slots of a sharded parameter: their gathers would not match."""
    owned = {name for name, param in model.named_parameters() if owner_of(param) is not None}
    first, *others = [[(name, slots) for name, slots in kept.items() if name not in owned] for kept in slots_of_ranks]
    for rank, found in enumerate(others, 1):
        if found != first:
            name = next(name for one, other in zip_longest(found, first) if one != other for name, _ in (one or other,))
            fix = "step the same optimizer, with the same groups, on every rank"
            raise StateError(name, f"has different optimizer state on rank {rank} and on rank 0", fix)


@torch.no_grad()
def whole_state(
    optimizer: Optimizer,
    model: nn.Module,
    slots_of_ranks: Sequence[StateNames],
    communicator: Communicator,
    rank0_only: bool,
) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole plain tensors on the CPU. Collective, slot by slot.

    `slots_of_ranks`: the results of `slot_names` on all ranks. `rank0_only`: return an empty dict on all other ranks.
    """
    state = optimizer.state_dict()
    keeps = communicator.rank == 0 or not rank0_only
    whole: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(ordered_names(optimizer, model)):
        home = next((rank for rank, kept in enumerate(slots_of_ranks) if name in kept), None)
        if home is None:
            continue
        own = state["state"].get(index, {})
        for slot in slots_of_ranks[home][name]:
            with communicator.waits.explained(f"the gather of {name}.{slot}"):
                value = _whole(own.get(slot), slots_of_ranks, name, home, communicator)
            if keeps:
                whole.setdefault(index, {})[slot] = value
    return {"state": whole, "param_groups": state["param_groups"]} if keeps else {}


def _whole(value: Any, slots_of_ranks: Sequence[StateNames], name: str, home: int, communicator: Communicator) -> Any:
    """One whole slot on every rank: gathered if sharded, or broadcast from the owner, or already the same."""
    if not all(name in kept for kept in slots_of_ranks):
        box = [_on_host(value) if communicator.rank == home else None]
        dist.broadcast_object_list(box, group=communicator.group, group_src=home)
        return box[0]
    if isinstance(value, DTensor) and owner_of(value) is None:
        value = whole_of(value, communicator.device)
    return _on_host(value)


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU copy of this rank's part of a tensor."""
    return local_tensor(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _on_host(value: Any) -> Any:
    return tree_map_only(torch.Tensor, copy_on_host, value)


@torch.no_grad()
def parts_of_whole(state: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """This rank's part of a whole state, for `optimizer.load_state_dict`. Raises StateError if it does not fit."""
    _compare(state, optimizer)
    names = ordered_names(optimizer, model)
    given = {names[index]: slots for index, slots in state["state"].items()}
    tensors = {
        name: {slot: value for slot, value in slots.items() if isinstance(value, torch.Tensor)}
        for name, slots in given.items()
    }
    for name, slot, value in ((name, slot, value) for name, slots in tensors.items() for slot, value in slots.items()):
        if isinstance(value, DTensor):
            fix = "give plain tensors, as of full_optimizer_state_dict, or use optimizer.load_state_dict"
            raise StateError(f"{name}.{slot}", "is a DTensor, not a whole plain tensor", fix)
    parts: dict[int, dict[str, Any]] = {}
    for name, targets in empty_slots(tensors, optimizer, model).items():
        slots = {
            slot: _filled(targets[slot], value) if slot in targets else value for slot, value in given[name].items()
        }
        parts[names.index(name)] = slots
    return {"state": parts, "param_groups": with_own_options(state["param_groups"], optimizer)}


def _filled(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(target, DTensor):
        local_tensor(target).copy_(part_of(value, target))
    else:
        target.copy_(value)
    return target


def _compare(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    subject = "the optimizer's state dict"
    if missing := {"state", "param_groups"}.difference(state):
        raise StateError(subject, f"has no {min(missing)!r}", "give a result of optimizer.state_dict()")
    sizes = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        problem = f"has groups of {sizes} parameters, and the optimizer of {own}"
        raise StateError(subject, problem, "build the optimizer with the groups that it had when it was saved")
    unknown = [index for index in state["state"] if index not in range(sum(own))]
    if unknown:
        problem = f"has state of parameter {unknown[0]!r}, and the optimizer has {sum(own)} parameters"
        raise StateError(subject, problem, "give a result of optimizer.state_dict()")
