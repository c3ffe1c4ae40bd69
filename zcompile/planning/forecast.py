"""What a step takes on the ranks of a pipeline, for any division, schedule and layout, from what its units take.

The program of a rank is not made: its actions are run one by one, with the seconds and bytes that the units take, and
messages, gathers and reductions where the program would have them. Programs are run by `zcompile.cost.simulator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from zcompile.cost.memory import MemoryKind
from zcompile.ir.actions import ActionKind
from zcompile.planning.clocks import clocks_of
from zcompile.planning.divided import DividedPipeline
from zcompile.planning.held_bytes import most_held


@dataclass(frozen=True)
class RankForecast:
    """What one rank along the pipeline axis takes in a step.

    Attributes:
        parameters: Bytes of its shards.
        optimizer: Bytes of two moments (Adam).
        held: What is there beside them at the peak.
        busy: Seconds in which it computes or updates.
    """

    parameters: int
    optimizer: int
    held: Mapping[MemoryKind, int]
    busy: float

    @property
    def nbytes(self) -> int:
        """The peak, everything included."""
        return self.parameters + self.optimizer + sum(self.held.values())


@dataclass(frozen=True)
class PipelineForecast:
    """What a step takes: seconds, and what each rank along the pipeline axis does and holds."""

    seconds: float
    ranks: tuple[RankForecast, ...]

    @property
    def nbytes(self) -> int:
        """Of that rank."""
        return self.fullest.nbytes

    @property
    def fullest(self) -> RankForecast:
        """The rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.nbytes)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they neither compute nor update."""
        busy = sum(rank.busy for rank in self.ranks)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0


def forecast(divided: DividedPipeline) -> PipelineForecast:
    """What a step takes."""
    clocks = clocks_of(divided)
    ranks = []
    for rank, clock in enumerate(clocks):
        kept = _kept(divided, rank)
        ranks.append(RankForecast(*kept, most_held(divided, rank), clock.busy))
    return PipelineForecast(max(clock.now for clock in clocks), tuple(ranks))


def peak_bytes(divided: DividedPipeline, limit: float = math.inf) -> int:
    """The bytes of the rank that holds most, or of the first one that holds more than the limit."""
    most = 0
    for rank in range(len(divided.table.rows)):
        kept = sum(_kept(divided, rank))
        most = max(most, kept + sum(most_held(divided, rank, limit - kept).values()))
        if most > limit:
            break
    return most


def _kept(divided: DividedPipeline, rank: int) -> tuple[int, int]:
    """Bytes of a rank's shards, and of their moments."""
    layouts = divided.layouts_of(rank)
    return sum(one.shards for one in layouts), sum(one.moments for one in layouts)


def state_bytes(divided: DividedPipeline) -> int:
    """What the fullest rank holds at least: shards, moments, and what is full of parameters and gradients."""
    zero = divided.setting.stage
    full, gradients = not zero.parameters_sharded, not zero.gradients_sharded
    held = [0] * len(divided.table.rows)
    for number, stage in enumerate(divided.stages):
        for one in stage.layouts:
            beside = one.full * full + (one.gradients if gradients else one.averages)
            held[divided.table.rank_of(number)] += one.shards + one.moments + beside
    return max(held)


def least_seconds(divided: DividedPipeline) -> float:
    """What a step takes at least: what a rank computes, and what others do before that and behind it.

    A rank begins when the stages before its first one have run for a micro-batch. Where backwards are run as a whole,
    what it ends with is that of its first stage, and those of earlier stages follow.
    """
    table = divided.table
    busy, beside, passed = [0.0] * len(table.rows), dict[int, float](), 0.0
    for number, stage in enumerate(divided.stages):
        rank, forward, whole = table.rank_of(number), *map(stage.seconds, (ActionKind.FORWARD, ActionKind.BACKWARD))
        halves = sum(map(stage.seconds, (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)))
        beside.setdefault(rank, passed)
        busy[rank] += forward + (min(whole, halves) if table.divides_backward else whole)
        passed += forward + (0.0 if table.divides_backward else whole)
    return max(seconds * table.microbatches + beside[rank] for rank, seconds in enumerate(busy))
