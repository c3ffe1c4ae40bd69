"""The whole state of an optimizer of shards, as the plain model's optimizer would have it, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.errors import StateError
from zcompile.runtime.groups import Communicator
from zcompile.runtime.tensors.owned import owner_of, part_of
from zcompile.runtime.tensors.placement import whole_of
from zcompile.state.optimizer_state import SlotShape, empty_slots, ordered_names, split_state, with_own_ways
from zcompile.torch_internals.dtensor import local_tensor
from zcompile.torch_internals.pytree import tree_map_only

StateNames = dict[str, list[str]]
"""By a parameter's name, what a rank keeps of it."""


def kept_of(optimizer: Optimizer, model: nn.Module) -> StateNames:
    """What this rank has, for the others to know.

    Raises:
        StateError: other ranks have parameters that are not on this one, or state lies in no known way.
    """
    for name, param in model.named_parameters():
        if param.is_meta:
            fix = "save it by save_checkpoint(folder, optimizer)"
            raise StateError(name, "is on another pipeline stage, and so is what its optimizer keeps", fix)
    apart = split_state(optimizer, model)
    kept: StateNames = {}
    for slots in (apart.tensors, apart.about["values"], apart.owned):
        for name, values in slots.items():
            kept.setdefault(name, []).extend(values)
    return kept


def check_alike(everyones: Sequence[StateNames], model: nn.Module) -> None:
    """Raise StateError where ranks keep other state of what all of them have a part of: its gathers would not meet."""
    owned = {name for name, param in model.named_parameters() if owner_of(param) is not None}
    first, *others = [[(name, slots) for name, slots in kept.items() if name not in owned] for kept in everyones]
    for rank, found in enumerate(others, 1):
        if found != first:
            name = next(name for one, other in zip_longest(found, first) if one != other for name, _ in (one or other,))
            fix = "step the same optimizer, with the same groups, on every rank"
            raise StateError(name, f"has other state in the optimizer of rank {rank} than in rank 0's", fix)


@torch.no_grad()
def whole_state(
    optimizer: Optimizer,
    model: nn.Module,
    everyones: Sequence[StateNames],
    communicator: Communicator,
    rank0_only: bool,
) -> dict[str, Any]:
    """`optimizer.state_dict()` with plain tensors on the CPU in the place of shards. Collective, slot by slot.

    Args:
        optimizer: One over parameters of the model.
        model: The module tree that holds the shards.
        everyones: `kept_of` every rank.
        communicator: The mesh that they are shards on.
        rank0_only: Give nothing to other ranks than the first.
    """
    state = optimizer.state_dict()
    keeps = communicator.rank == 0 or not rank0_only
    whole: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(ordered_names(optimizer, model)):
        home = next((rank for rank, kept in enumerate(everyones) if name in kept), None)
        if home is None:
            continue
        own = state["state"].get(index, {})
        for slot in everyones[home][name]:
            with communicator.waits.explained(f"the gather of {name}.{slot}"):
                value = _whole(own.get(slot), everyones, name, home, communicator)
            if keeps:
                whole.setdefault(index, {})[slot] = value
    return {"state": whole, "param_groups": state["param_groups"]} if keeps else {}


def _whole(value: Any, everyones: Sequence[StateNames], name: str, home: int, communicator: Communicator) -> Any:
    """One slot on every rank: divided, or the same on all, or on its owner alone."""
    if not all(name in kept for kept in everyones):
        box = [_on_host(value) if communicator.rank == home else None]
        dist.broadcast_object_list(box, group=communicator.group, group_src=home)
        return box[0]
    if isinstance(value, DTensor) and owner_of(value) is None:
        value = whole_of(value, communicator.device)
    return _on_host(value)


def _on_host(value: Any) -> Any:
    """What an owner has, or all have, its tensors copied to the CPU."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return local_tensor(tensor).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, copied, value)


@torch.no_grad()
def parts_of_whole(state: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """This rank's part of a whole state, for `optimizer.load_state_dict`, which then does not fail.

    Raises:
        StateError: groups, or what is kept of a parameter, do not fit.
    """
    _compare(state, optimizer)
    names = ordered_names(optimizer, model)
    given = {names[index]: slots for index, slots in state["state"].items()}
    shapes = {
        name: {
            slot: _shape(f"{name}.{slot}", value) for slot, value in slots.items() if isinstance(value, torch.Tensor)
        }
        for name, slots in given.items()
    }
    parts: dict[int, dict[str, Any]] = {}
    for name, targets in empty_slots(shapes, optimizer, model).items():
        slots = {
            slot: _filled(targets[slot], value) if slot in targets else value for slot, value in given[name].items()
        }
        parts[names.index(name)] = slots
    return {"state": parts, "param_groups": with_own_ways(state["param_groups"], optimizer)}


def _shape(subject: str, value: torch.Tensor) -> SlotShape:
    if isinstance(value, DTensor):
        fix = "give plain tensors: compiled.full_optimizer_state_dict(optimizer), or load it by load_state_dict"
        raise StateError(subject, "is a DTensor, and not whole", fix)
    return SlotShape(tuple(value.shape), value.dtype)


def _filled(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(target, DTensor):
        local_tensor(target).copy_(part_of(value, target))
    else:
        target.copy_(value)
    return target


def _compare(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    subject = "the optimizer's state dict"
    if missing := {"state", "param_groups"}.difference(state):
        raise StateError(subject, f"has no {min(missing)!r}", "give what optimizer.state_dict() gave")
    sizes = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        problem = f"has groups of {sizes} parameters, and the optimizer of {own}"
        raise StateError(subject, problem, "build the optimizer with the groups that it had when it was saved")
    unknown = [index for index in state["state"] if index not in range(sum(own))]
    if unknown:
        problem = f"has state of parameter {unknown[0]!r}, and the optimizer has {sum(own)} parameters"
        raise StateError(subject, problem, "give what optimizer.state_dict() gave")
