"""prefetch="auto": how far ahead to gather and what to pack, chosen by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zcompile.cost import Hardware
from zcompile.layout import SMALL_BYTES
from zcompile.pipeline import Pass, Pipeline
from zcompile.program import Program
from zcompile.simulator import step_seconds

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
WORTH = 0.005
"""Each further unit costs memory: it must save this share of a step."""
LEAST_PACKED = 4 * 1024
_SCHEDULING = ("keep_full", "schedule_prefetch", "sink_waits")
"""From the first of these passes on, programs of different depths differ."""


@dataclass(frozen=True)
class Schedule:
    """What `prefetch="auto"` chooses: units gathered ahead, and the bytes up to which a parameter travels packed."""

    prefetch: int = 2
    small: int = SMALL_BYTES


def choose(traced: Program, pipeline: Callable[[Schedule], Pipeline], hardware: Hardware) -> Schedule:
    """The least prefetch whose simulated step is as short as that of any, but for what is not worth the memory.

    A parameter is packed while copying it out of a message costs less than a message's latency.
    """
    small = max(LEAST_PACKED, int(hardware.latency * hardware.memory_bandwidth / 2))
    common, _ = _split(pipeline(Schedule(DEPTHS[0], small)))
    for step in common:
        traced = step(traced)
    seconds = {}
    for depth in DEPTHS:
        program = traced
        for step in _split(pipeline(Schedule(depth, small)))[1]:
            program = step(program)
        seconds[depth] = step_seconds(program, hardware)
    enough = min(seconds.values()) * (1 + WORTH)
    return Schedule(next(depth for depth in DEPTHS if seconds[depth] <= enough), small)


def _split(pipeline: Pipeline) -> tuple[list[Pass], list[Pass]]:
    """The passes before the first that schedules, and the rest."""
    first = next((i for i, name in enumerate(pipeline.names) if name in _SCHEDULING), len(pipeline.passes))
    return list(pipeline.passes[:first]), list(pipeline.passes[first:])
