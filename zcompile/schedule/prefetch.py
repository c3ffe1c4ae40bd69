"""The schedule of gathers: how far ahead they start, what travels packed, what is kept full; and its choice.

`prefetch="auto"` lets the cost model choose, `memory_limit=` keeps as many units full as fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.memory import peak_bytes
from zcompile.cost.roofline import bucket_for
from zcompile.cost.simulator import step_seconds
from zcompile.ir.layout import SMALL_BYTES
from zcompile.ir.program import Program
from zcompile.passes.keep_within import choose_kept_units
from zcompile.schedule.pipeline import Pipeline, Trait, Verified

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
WORTH = 0.005
"""Each further unit costs memory: it must save this share of a step."""
LEAST_PACKED = 4 * 1024


@dataclass(frozen=True)
class Schedule:
    """How far ahead gathers start, what travels packed, and what is kept full."""

    prefetch: int = 2
    """Units gathered ahead."""
    small: int = SMALL_BYTES
    """Bytes up to which a parameter travels packed with its neighbours."""
    bucket: int = bucket_for(CPU)
    """Bytes of a packed message, and of what is copied at a time to be sent."""
    kept: tuple[str, ...] = ()
    """Units kept full from the forward to the backward because the memory limit allows it."""


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
