"""shard="auto": measure the links along both dimensions of a mesh, and choose with all ranks what the two divide."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from zcompile.engine.calibration import measure
from zcompile.ir.layout import Hybrid, Layout
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.device import free_bytes
from zcompile.runtime.groups import Communicator, repeats_outside
from zcompile.schedule.option_checks import FLAT
from zcompile.schedule.options import Options
from zcompile.schedule.shard_choice import ShardChoice, as_told, choose, estimate, room_in


def choose_shard(
    asked: Options,
    communicator: Communicator,
    layout_of: Callable[[str], Layout],
    *,
    whole: bool = False,
    held: int = 0,
    model_parallel: Communicator | None = None,
    everyone: Communicator | None = None,
) -> ShardChoice:
    """What all ranks choose for a mesh of two dimensions. Collective.

    Args:
        asked: Options with shard="auto".
        communicator: The data-parallel ranks, along both dimensions.
        layout_of: Gives the layout for a setting of `shard=`.
        whole: True if some parameters have owners.
        held: Bytes of the device that the model takes now, and does not once it is sharded.
        model_parallel: The ranks that have the other parts of the model, if it is divided.
        everyone: All ranks that have a part of the model, by default the data-parallel ones.

    Raises:
        AgreementError: ranks have asked for other options, or have another mesh or model.
    """
    agreement = Agreement(communicator)
    lines = [str(asked), *layout_of(Hybrid.HSDP).lines]
    agreement.reach("the model", lines)  # where ranks without a choice to make come first; they do not measure
    hardware = measure(communicator, asked.dtype or torch.float32, model_parallel)
    away = asked.offload_parameters is not None
    divides = not whole and repeats_outside(communicator.mesh)
    estimates = [
        estimate(shard, replace(layout_of(shard), away=away), hardware) for shard in _candidates(asked, divides=divides)
    ]
    told = json.dumps(as_told(estimates, room_in(free_bytes(communicator.device) + held, asked.limit)))
    shared = (agreement if everyone is None else Agreement(everyone)).share('the choice of shard="auto"', told)
    return choose([json.loads(text) for text in shared])


def _candidates(asked: Options, *, divides: bool) -> Iterator[str]:
    """The settings of `shard=` that the other options allow. `divides`: both dimensions may divide a parameter."""
    if asked.outer_dtype is None and asked.outer_gather_dtype is None:
        yield FLAT
    if asked.outer_gather_dtype is None or not divides:
        yield Hybrid.HSDP
    if divides:
        yield from (Hybrid.HFSDP, Hybrid.HPZ)
