"""shard="auto": measure the links along both dimensions of a mesh, and choose with all ranks what the two divide."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from zcompile.engine.calibration import measure
from zcompile.errors import OptionError
from zcompile.ir.layout import Hybrid, Layout
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.device import free_bytes
from zcompile.runtime.groups import Communicator, repeats_outside
from zcompile.schedule.option_checks import FLAT
from zcompile.schedule.options import Options
from zcompile.schedule.shard_choice import ShardChoice, as_message, choose, estimate, room_in


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
        OptionError: no layout goes with the other options.
        AgreementError: ranks have asked for other options, or have another mesh or model.
    """
    divides = not whole and repeats_outside(communicator.mesh)
    candidates = _candidates(asked, divides=divides)
    lines = [str(asked), *layout_of(candidates[-1]).lines]  # may raise an error: before others wait for this rank
    agreement = Agreement(communicator)
    agreement.reach("the model", lines)  # where ranks without a choice to make come first; they do not measure
    hardware = measure(communicator, asked.dtype or torch.float32, model_parallel)
    away = asked.offload_parameters is not None
    estimates = [estimate(shard, replace(layout_of(shard), away=away), hardware) for shard in candidates]
    told = json.dumps(as_message(estimates, room_in(free_bytes(communicator.device) + held, asked.limit)))
    shared = (agreement if everyone is None else Agreement(everyone)).share('the choice of shard="auto"', told)
    return choose([json.loads(text) for text in shared])


def _candidates(asked: Options, *, divides: bool) -> Sequence[str]:
    """The settings of `shard=` that the other options allow. `divides`: both dimensions may divide a parameter.

    Raises:
        OptionError: there are none.
    """
    if asked.outer_gather_dtype is not None and not divides:
        problem = 'is for what "hfsdp" and "hpz" gather, between which shard="auto" cannot choose here'
        fix = 'leave it out; or give no whole=, and a mesh whose first dimension is "replicate"'
        raise OptionError("outer_gather_dtype", problem, fix)
    flat = [FLAT] if asked.outer_dtype is None and asked.outer_gather_dtype is None else []
    repeated = [Hybrid.HSDP] if asked.outer_gather_dtype is None else []
    return [*flat, *repeated, *([Hybrid.HFSDP, Hybrid.HPZ] if divides else [])]
