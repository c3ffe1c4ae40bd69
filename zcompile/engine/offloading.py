"""Creates the storage of shards, activations and optimizer state for `offload_parameters=` and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from zcompile.engine.tensor_parallel_group import TensorParallelGroup
from zcompile.ir.layout import Layout
from zcompile.ir.ops import Group, OffloadStore
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.gradients.updates import States, Updater
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.activation_storage import DeviceStorage, DiskStorage, HostStorage, ShardStorage
from zcompile.runtime.offload.host_shards import HostShards, ShardFile
from zcompile.runtime.offload.optimizer_states import HostState, StateFile
from zcompile.runtime.offloaded_activations import ActivationStorage, OffloadedActivations
from zcompile.runtime.shards import ShardMemory, shard_bytes
from zcompile.schedule.option_checks import check_place, offload_of
from zcompile.schedule.options import Options

Offloads = Mapping[OffloadStore | Group, OffloadedActivations]
"""By the operation of their placeholder in the program."""


def shard_memory(options: Options, layout: Layout, data: Communicator, agreement: Agreement) -> ShardMemory:
    """The memory for a rank's shards. Collective.

    Raises:
        OptionError: the given place does not suit a model on its device.
        StateError: on every rank: one rank has no room for them.
    """
    device, place = data.device, offload_of("offload_parameters", options.offload_parameters)
    if place is None:
        return ShardMemory(device)
    check_place("offload_parameters", place, device)
    sizes = {unit.name: shard_bytes(unit, data.dividing.rank) for unit in layout.units}
    if not isinstance(place, Path):
        return agreement.attempt("the memory of parameters", lambda: HostShards(device, sizes))[0]
    return agreement.together("the file of parameters", str(place), lambda: ShardFile(place, sizes))


def make_offloads(
    options: Options, data: Communicator, agreement: Agreement, tensor: TensorParallelGroup | None
) -> Offloads:
    """Storage for a model's activations; those partitioned over `tensor` are stored in shards. Collective.

    Raises:
        OptionError: "cpu" for a model on the CPU, or a disk for one on another device.
        StateError: on every rank: one rank cannot write to the folder.
    """
    away: ActivationStorage | None = None
    if (place := offload_of("offload_activations", options.offload_activations)) is not None:
        check_place("offload_activations", place, data.device)
        if isinstance(place, Path):
            away = agreement.together("the file of activations", str(place), lambda: DiskStorage(place))
        else:
            away = HostStorage(data.device)
    result: dict[OffloadStore | Group, OffloadedActivations] = {}
    if away is not None:
        result[OffloadStore()] = OffloadedActivations(away)
    if tensor is not None:
        result[Group(tensor.axis)] = OffloadedActivations(ShardStorage(tensor.communicator, away or DeviceStorage()))
    return result


def optimizer_states(
    place: Path | Literal["cpu"], units: Mapping[str, Sequence[nn.Parameter]], updater: Updater, agreement: Agreement
) -> States:
    """Storage for the state of this rank's optimizers; `agreement` is that of its ranks. Collective.

    `units`: the shards of the model, by unit.

    Raises:
        StateError: on every rank: one rank has no room for it.
    """
    device = agreement.communicator.device
    if not isinstance(place, Path):
        return HostState(device, updater.optimizers, units, updater.slots)
    what, given = "the file of the optimizer's state", (place, updater.optimizers, units, updater.slots)
    return agreement.together(what, str(place), lambda: StateFile(*given))
