"""Where the activations of a model go while they wait for the backward, by its options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zcompile.engine.tensor_parallel_group import TensorParallelGroup
from zcompile.ir.ops import Group, OffloadStore
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.activation_storage import DeviceStorage, DiskStorage, HostStorage, ShardStorage
from zcompile.runtime.offloaded_activations import ActivationStorage, OffloadedActivations
from zcompile.schedule.option_checks import check_place, offload_of
from zcompile.schedule.options import Options

Offloads = Mapping[OffloadStore | Group, OffloadedActivations]
"""By the operation of the program's placeholder for each."""


def make_offloads(
    options: Options, communicator: Communicator, agreement: Agreement, tensor: TensorParallelGroup | None
) -> Offloads:
    """Where activations of a model are offloaded to; what is partitioned over `tensor` goes away in shards. Collective.

    Raises:
        OptionError: "cpu" for a model on the CPU, or a disk for one that is elsewhere.
        StateError: on every rank: the folder cannot be written on one.
    """
    away = _storage(options.offload_activations, communicator, agreement)
    result: dict[OffloadStore | Group, OffloadedActivations] = {}
    if away is not None:
        result[OffloadStore()] = OffloadedActivations(away)
    if tensor is not None:
        result[Group(tensor.axis)] = OffloadedActivations(ShardStorage(tensor.communicator, away or DeviceStorage()))
    return result


def _storage(asked: str | None, communicator: Communicator, agreement: Agreement) -> ActivationStorage | None:
    place = offload_of("offload_activations", asked)
    if place is None:
        return None
    check_place("offload_activations", place, communicator.device)
    if not isinstance(place, Path):
        return HostStorage(communicator.device)
    return agreement.together("the file of activations", str(place), lambda: DiskStorage(place))
