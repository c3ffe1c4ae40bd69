"""Chooses a schedule: how far ahead gathers start, which units stay full, and the budget for recomputation.

Training, inspection and planning all use it, so that a program that is only inspected is the one that would run.
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
"""Share of a step that a deeper prefetch must save to be worth its memory."""
LEAST_PACKED = 4 * 1024
MARGIN = 0.9
"""Share of the free memory that checkpoint="auto" uses: the rest is for temporaries of operations and fragmentation."""

Share = Callable[[str, str], list[str]]
"""Called with a subject and this rank's text; returns the texts of all ranks, in rank order. Collective."""


@dataclass(frozen=True)
class Request:
    """How a program is to be compiled."""

    options: Options
    schedule: Schedule
    """The schedule before any choice that depends on the traced program."""
    keeps: bool = True
    """False for a part of a model, whose units are not kept full over the turn."""
    updates: bool = False
    """True for a train step."""
    free: int | None = None
    """Bytes that checkpoint="auto" and chunk="auto" may use."""

    def pipeline(self, schedule: Schedule | None = None) -> Pipeline:
        """Return the passes, for `schedule` in place of `self.schedule` if given."""
        return self.options.pipeline(schedule or self.schedule, keeps=self.keeps, free=self.free, updates=self.updates)

    def chooses(self, traced: Program) -> bool:
        """Return True if the schedule depends on `traced`, which then trains the whole model."""
        return self.options.chooses and self.keeps and traced.has_backward


def decide(
    traced: Program,
    request: Request,
    hardware: Callable[[], Hardware],
    share: Share | None = None,
    journal: Journal | None = None,
) -> Schedule:
    """Choose the schedule of a program. Collective.

    Ranks may have batches of different sizes, but must have the same communications. So prefetch is the first rank's
    choice (with a memory limit, the least of all ranks), and units are kept full only if they fit on every rank.

    Args:
        traced: The program before any pass.
        request: How it is to be compiled.
        hardware: Returns the hardware profile; called only for prefetch="auto".
        share: Exchanges texts between ranks; None for a single rank.
        journal: Records the passes before one that fails.

    Raises:
        OptionError: the step exceeds the memory limit on some rank; raised on every rank.
        ProgramError, PipelineError: a pass failed.
    """
    try:
        return _decided(traced, request, hardware, share)
    except (PipelineError, ProgramError):
        if journal is not None:
            request.pipeline().verified(traced, journal)  # fails again, and fills the journal
        raise


def _decided(
    traced: Program, request: Request, hardware: Callable[[], Hardware], share: Share | None = None
) -> Schedule:
    options, schedule = request.options, request.schedule
    limit, exchange = options.limit, share or (lambda _, text: [text])
    if not request.chooses(traced):
        return schedule
    if options.prefetch == "auto":
        schedule = choose(traced, request.pipeline, hardware(), limit)
        texts = exchange("the schedule of gathers", json.dumps([schedule.prefetch, schedule.small, schedule.bucket]))
        choices = [json.loads(text) for text in texts]
        # A deeper prefetch may exceed the limit on the rank that chose a smaller one.
        prefetch = min(prefetch for prefetch, *_ in choices) if limit else choices[0][0]
        schedule = Schedule(prefetch, *choices[0][1:])
    if limit is None:
        return schedule
    shared = exchange("the memory limit", json.dumps(fit(traced, request.pipeline, schedule, limit)))
    result = [json.loads(text) for text in shared]
    check_fits(max(least for least, _ in result), limit)
    first, *others = [units for _, units in result]
    return replace(schedule, kept=tuple(unit for unit in first if all(unit in other for other in others)))


def choose(
    traced: Program, pipeline: Callable[[Schedule], Pipeline], hardware: Hardware, memory_limit: int | None = None
) -> Schedule:
    """Return the smallest prefetch whose simulated step is within WORTH of the fastest.

    A parameter is packed if copying it out of a message costs less than a message's latency. Depths that exceed
    `memory_limit` are excluded, except 0.
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
    """Return the least bytes that the step takes, and the units that can be kept full within the limit."""
    program = Verified.traced(traced).after(pipeline(replace(schedule, kept=())).passes).program
    return peak_bytes(program), choose_kept_units(program, memory_limit)


def checkpoint_budget(options: Options, layout: Layout, free: Callable[[], float]) -> int | None:
    """Return the bytes that "auto" may use of `checkpoint=` or `chunk=`: of the `free` ones, without two moments.

    The moments of an optimizer may not be allocated yet. Ranks may get different results: what is computed again, or
    in chunks, is local to a rank.
    """
    if "auto" not in (options.checkpoint, options.chunk):
        return None
    moments = 0 if layout.away else model_state(layout).moments  # the optimizer's state is where the shards are
    return max(int(MARGIN * min(free() - moments, sys.maxsize)), 1)
