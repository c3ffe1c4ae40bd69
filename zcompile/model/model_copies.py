"""Copies of a sharded model: the module tree as it was before its methods were intercepted, over shards of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from zcompile.ir.layout import Layout
from zcompile.model.sharding import Site, placeholder_of
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shard_memory import ShardMemory
from zcompile.runtime.shards import UnitShards


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
