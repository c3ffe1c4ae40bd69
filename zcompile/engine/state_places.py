"""Where shards and the optimizer's state of them are to be, by `offload_parameters=` and `offload_optimizer=`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from zcompile.engine.model_runtime import ModelRuntime
from zcompile.ir.layout import Layout
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.gradients.updates import States, Updater
from zcompile.runtime.offload.host_shards import HostShards, ShardFile
from zcompile.runtime.offload.optimizer_file import StateFile
from zcompile.runtime.offload.optimizer_host import HostState
from zcompile.runtime.shard_memory import ShardMemory
from zcompile.runtime.shards import shard_bytes
from zcompile.schedule.option_checks import check_place, offload_of
from zcompile.schedule.options import Options


def shard_memory(asked: Options, layout: Layout, device: torch.device, rank: int, agreement: Agreement) -> ShardMemory:
    """Where the shards of `rank`, of those that divide parameters, are to be. Collective.

    Raises:
        OptionError: it is no place for a model on `device`.
        StateError: on every rank: there is no room for them on one.
    """
    place = offload_of("offload_parameters", asked.offload_parameters)
    if place is None:
        return ShardMemory(device)
    check_place("offload_parameters", place, device)
    sizes = {unit.name: shard_bytes(unit, rank) for unit in layout.units}
    if not isinstance(place, Path):
        return agreement.attempt("the memory of parameters", lambda: HostShards(device, sizes))[0]
    return agreement.together("the file of parameters", str(place), lambda: ShardFile(place, sizes))


def optimizer_states(place: Path | Literal["cpu"], runtime: ModelRuntime, updater: Updater) -> States:
    """What keeps the state of this rank's optimizers. Collective.

    Raises:
        OptionError: it is no place for a model on its device.
        StateError: on every rank: there is no room for it on one.
    """
    device = runtime.communicator.device
    check_place("offload_optimizer", place, device)
    units = {name: list(shards.parameters.values()) for name, shards in runtime.shards.items()}
    if not isinstance(place, Path):
        return HostState(device, updater.optimizers, units, updater.slots)
    what = "the file of the optimizer's state"
    return runtime.everyone.together(
        what, str(place), lambda: StateFile(place, updater.optimizers, units, updater.slots)
    )
