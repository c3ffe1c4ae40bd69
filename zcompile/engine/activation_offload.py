"""Where the activations of a model go while they wait for the backward, by its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zcompile.engine.tensor_parallel_group import ModelPeers
from zcompile.ir.ops import Away, Peers
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.activation_keepers import DiskKeeper, HostKeeper
from zcompile.runtime.offload.activation_shards import MemoryKeeper, PartKeeper
from zcompile.runtime.stash import Keeper, Stash
from zcompile.schedule.option_checks import check_place, offload_of
from zcompile.schedule.options import Options

Stashes = Mapping[type[Any], Stash]
"""By the kind of the program's placeholder for each, `Away` or `Peers`."""


def make_stashes(
    options: Options, communicator: Communicator, agreement: Agreement, peers: ModelPeers | None
) -> Stashes:
    """The stashes of a model; what is partitioned over `peers` goes away in parts. Collective.

    Raises:
        OptionError: "cpu" for a model on the CPU, or a disk for one that is elsewhere.
        StateError: on every rank: the folder cannot be written on one.
    """
    away = _keeper(options.offload_activations, communicator, agreement)
    found: dict[type[Any], Stash] = {} if away is None else {Away: Stash(away)}
    if peers is not None:
        found[Peers] = Stash(PartKeeper(peers.communicator, away or MemoryKeeper()))
    return found


def _keeper(asked: str | None, communicator: Communicator, agreement: Agreement) -> Keeper | None:
    place = offload_of("offload_activations", asked)
    if place is None:
        return None
    check_place("offload_activations", place, communicator.device)
    if not isinstance(place, Path):
        return HostKeeper(communicator.device)
    return agreement.together("the file of activations", str(place), lambda: DiskKeeper(place))
