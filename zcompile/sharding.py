"""Sharding a model: every parameter replaced by its shard in the module tree, and the full one freed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zcompile.layout import Layout
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards

Retired = dict[int, tuple[nn.Parameter, str]]
"""Parameters from before `compile`, with their names, by identity."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the module tree that holds a parameter; a tied parameter has several."""

    owner: nn.Module
    key: str
    name: str
    shard: nn.Parameter
    husk: nn.Parameter
    """What stands here while a call runs: the full parameter's shape without memory, for the tracer to see."""


def shard_model(
    model: nn.Module, layout: Layout, communicator: Communicator
) -> tuple[dict[str, UnitShards], list[Site], Retired]:
    """Replace every parameter of `model` by its shard, with rank 0's values, and free the full one. Collective.

    Returns the shards by unit, the places in the module tree, and the parameters that were replaced.
    """
    originals = dict(model.named_parameters())
    device = next(iter(originals.values())).device
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, registered in module._parameters.items():
            if registered is not None:
                places.setdefault(id(registered), []).append((module, key))
    shards: dict[str, UnitShards] = {}
    sites: list[Site] = []
    retired: Retired = {}
    with torch.no_grad():
        for unit in layout.units:
            shards[unit.name] = held = UnitShards(unit, communicator, device)
            for param in unit.params:
                old = originals[param.name]
                plain = not layout.stage.optimizer_sharded
                shard = held.adopt_plain(param, old) if plain else held.adopt(param, old)
                husk = shard if plain and not param.compute_dtype else husk_of(old, param.full_dtype)
                for owner, key in places[id(old)]:
                    owner._parameters[key] = shard
                    sites.append(Site(owner, key, param.name, shard, husk))
                if not plain:
                    retired[id(old)] = (old, param.name)
                    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        for buffer in model.buffers():
            communicator.broadcast(buffer)
    return shards, sites, retired


def husk_of(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the same shape, contiguous as gathered ones are, whose memory is freed at once."""
    empty = torch.empty(param.shape, dtype=dtype, device=param.device)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, requires_grad=param.requires_grad)
