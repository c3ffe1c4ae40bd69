"""Conversions of a sharded model to other dtypes, as by `model.to(torch.bfloat16)`, and copies of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zcompile.errors import ParameterError
from zcompile.ir.layout import Layout
from zcompile.model.sharding import Site, placeholder_of
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import ShardMemory, UnitShards
from zcompile.torch_internals.autograd import post_accumulate_hooks
from zcompile.torch_internals.modules import has_gradient_hooks


def kinds_made(
    module: nn.Module, convert_one: Callable[[torch.Tensor], torch.Tensor]
) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    """What `convert_one` gives for an empty tensor of each kind that `module` has."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    return {kind: convert_one(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}


def check_unhooked(sites: Iterable[Site]) -> None:
    """Raise ParameterError for a parameter with hooks, which its conversion would lose."""
    for site in sites:
        if has_gradient_hooks(site.shard) or post_accumulate_hooks(site.shard):
            problem = "has hooks on its gradient, which a conversion would lose"
            raise ParameterError(site.name, problem, "convert the model first, and register them then")


def convert(
    model: nn.Module,
    layout: Layout,
    shards: Mapping[str, UnitShards],
    sites: Iterable[Site],
    convert_one: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, UnitShards]:
    """Shards in the dtypes of `layout`, under the same parameters, and buffers as `convert_one` gives them."""
    made = {}
    for unit in layout.units:
        old = shards[unit.name]
        made[unit.name] = new = old.copied(unit, old.communicator, old.memory)
        new.take_place_of(old)
    for site in sites:
        empty, _ = placeholder_of(site.placeholder, layout.param(site.name).full_dtype, site.placeholder.device)
        site.placeholder.data = empty.data
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, convert_one(buffer))
    return made


def copy_model(
    model: nn.Module,
    layout: Layout,
    shards: Mapping[str, UnitShards],
    sites: Sequence[Site],
    communicator: Communicator,
    memory: ShardMemory,
    memo: dict[int, Any],
) -> tuple[nn.Module, dict[str, UnitShards], list[Site]]:
    """A copy of `model`, its shards by unit, and the places that hold them.

    `memo` is that of `copy.deepcopy`, which is to know of the new shards, too: an optimizer that is copied with the
    model steps these.
    """
    copies = {unit.name: shards[unit.name].copied(unit, communicator, memory) for unit in layout.units}
    new = {name: parameter for unit in copies.values() for name, parameter in unit.parameters.items()}
    memo |= {id(site.shard): new[site.name] for site in sites}
    copied = copy.deepcopy(model, memo)
    tied = {site.name: site.placeholder for site in sites}  # one for all places of a parameter
    made = {name: placeholder_of(one, one.dtype, communicator.device) for name, one in tied.items()}
    places = []
    for site in sites:
        placeholder, local = made[site.name]
        owner = memo[id(site.owner)]
        places.append(replace(site, owner=owner, shard=new[site.name], placeholder=placeholder, local=local))
    return copied, copies, places
