"""The decision of a schedule: how far ahead gathers start, what stays full, what may be computed again.

Training, inspection and planning come here, so that a program which is only looked at is the one that would run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.cost.roofline import bucket_for
from zcompile.cost.simulator import step_seconds
from zcompile.errors import PipelineError, ProgramError
from zcompile.ir.layout import Layout
from zcompile.ir.program import Program
from zcompile.passes.keep_within import check_fits, choose_kept_units
from zcompile.schedule.default_pipeline import Schedule
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal, Pipeline, Trait, Verified

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
WORTH = 0.005
"""Each further unit costs memory: it must save this share of a step."""
LEAST_PACKED = 4 * 1024
MARGIN = 0.9
"""Share of the free memory that checkpoint="auto" fills: operations take some while they run, allocators waste some."""

Share = Callable[[str, str], list[str]]
"""Called with what is told and a text of this rank's; gives the texts of all ranks, in their order. Collective."""


@dataclass(frozen=True)
class Request:
    """What a program is to be compiled with."""

    options: Options
    schedule: Schedule
    """Before anything is chosen by what is traced."""
    keeps: bool = True
    """False of a part of a model, whose units are not kept full over the turn."""
    updates: bool = False
    """True for a train step."""
    free: int | None = None
    """Bytes that checkpoint="auto" may use."""

    def pipeline(self, schedule: Schedule | None = None) -> Pipeline:
        """The passes, with another schedule if one is given."""
        return self.options.pipeline(schedule or self.schedule, keeps=self.keeps, free=self.free, updates=self.updates)

    def chooses(self, traced: Program) -> bool:
        """True if the schedule is chosen by `traced`: it trains the whole model."""
        return self.options.chooses and self.keeps and traced.has_backward


def decide(
    traced: Program,
    request: Request,
    hardware: Callable[[], Hardware],
    share: Share | None = None,
    journal: Journal | None = None,
) -> Schedule:
    """The schedule of a program. Collective.

    Ranks may have batches of different sizes, and must have the same communications: how far ahead to gather is the
    first rank's choice, and kept is what fits on every rank.

    Args:
        traced: The program before any pass.
        request: What it is to be compiled with.
        hardware: Gives what prefetch="auto" counts with; called only for that.
        share: How ranks tell each other; None for one rank alone.
        journal: What tells, where a pass fails, what those before it did.

    Raises:
        OptionError: on every rank: on one, the step takes more than the memory limit.
        ProgramError, PipelineError: a pass went wrong.
    """
    try:
        return _decided(traced, request, hardware, share)
    except (PipelineError, ProgramError):
        if journal is not None:
            request.pipeline().verified(traced, journal)  # it fails again
        raise


def _decided(
    traced: Program, request: Request, hardware: Callable[[], Hardware], share: Share | None = None
) -> Schedule:
    options, schedule = request.options, request.schedule
    limit, tell = options.limit, share or (lambda _, text: [text])
    if not request.chooses(traced):
        return schedule
    if options.prefetch == "auto":
        schedule = choose(traced, request.pipeline, hardware(), limit)
        told = tell("the schedule of gathers", json.dumps([schedule.prefetch, schedule.small, schedule.bucket]))
        choices = [json.loads(text) for text in told]
        # A deeper one may be beyond the limit on the rank that chose a lesser one.
        prefetch = min(prefetch for prefetch, *_ in choices) if limit else choices[0][0]
        schedule = Schedule(prefetch, *choices[0][1:])
    if limit is None:
        return schedule
    shared = tell("the memory limit", json.dumps(fit(traced, request.pipeline, schedule, limit)))
    result = [json.loads(text) for text in shared]
    check_fits(max(least for least, _ in result), limit)
    first, *others = [units for _, units in result]
    return replace(schedule, kept=tuple(unit for unit in first if all(unit in other for other in others)))


def choose(
    traced: Program, pipeline: Callable[[Schedule], Pipeline], hardware: Hardware, memory_limit: int | None = None
) -> Schedule:
    """The least prefetch whose simulated step is as short as that of any, but for what is not worth the memory.

    A parameter is packed while copying it out of a message costs less than a message's latency. A depth beyond
    `memory_limit` is no choice, but for 0.
    """
    stride = traced.layout.sharded.stride
    small = max(LEAST_PACKED, int(hardware.slowest(stride).latency * hardware.memory_bandwidth / 2))
    bucket = bucket_for(hardware, stride)
    common = Verified.traced(traced).after(pipeline(Schedule(DEPTHS[0], small, bucket)).until(Trait.SCHEDULES)[0])
    seconds = {}
    for depth in DEPTHS:
        program = common.after(pipeline(Schedule(depth, small, bucket)).until(Trait.SCHEDULES)[1]).program
        if depth == 0 or memory_limit is None or peak_bytes(program) <= memory_limit:
            seconds[depth] = step_seconds(program, hardware)
    enough = min(seconds.values()) * (1 + WORTH)
    return Schedule(next(depth for depth in seconds if seconds[depth] <= enough), small, bucket)


def fit(
    traced: Program, pipeline: Callable[[Schedule], Pipeline], schedule: Schedule, memory_limit: int
) -> tuple[int, tuple[str, ...]]:
    """The bytes that the step takes at least, and the units that may be kept full within the limit."""
    program = Verified.traced(traced).after(pipeline(replace(schedule, kept=())).passes).program
    return peak_bytes(program), choose_kept_units(program, memory_limit)


def checkpoint_budget(options: Options, layout: Layout, free: Callable[[], float]) -> int | None:
    """What checkpoint="auto" may use of the `free` bytes beside the shards: without two moments of an optimizer.

    Those may be still to come. Ranks may find different figures: what a rank computes again is no concern of others.
    """
    if options.checkpoint != "auto":
        return None
    moments = 0 if layout.away else model_state(layout).moments  # the optimizer's state is where the shards are
    return max(int(MARGIN * min(free() - moments, sys.maxsize)), 1)
