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
from zcompile.planning.divided import DividedPipeline, StageCost
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

    A rank begins when the stages that its first one waits for have run for a micro-batch. Where backwards are run as a
    whole, what it ends with is that of one of its stages, and those that wait for this follow.
    """
    table, stages, halved = divided.table, divided.stages, divided.table.divides_backward
    forward = [stage.seconds(ActionKind.FORWARD) for stage in stages]
    whole = [stage.seconds(ActionKind.BACKWARD) for stage in stages]
    before, behind = [0.0] * len(stages), [0.0] * len(stages)
    for number in range(len(stages)):
        sources = divided.senders[True][number]
        before[number] = max((before[source] + forward[source] for source in sources), default=0.0)
        to = () if halved else stages[number].back
        behind[number] = max((behind[stage] + whole[stage] for stage in to), default=0.0)
    result = 0.0
    for rank in range(len(table.rows)):
        own = table.stages_of(rank)
        busy = sum(forward[number] + _backward(stages[number], halved=halved) for number in own)
        beside = min(before[number] for number in own) + min(behind[number] for number in own)
        result = max(result, busy * table.microbatches + beside)
    return result


def _backward(stage: StageCost, *, halved: bool) -> float:
    """Seconds of a backward, whole or in halves, whichever is less where a schedule may do both."""
    whole = stage.seconds(ActionKind.BACKWARD)
    halves = stage.seconds(ActionKind.BACKWARD_INPUT) + stage.seconds(ActionKind.BACKWARD_WEIGHT)
    return min(whole, halves) if halved else whole
