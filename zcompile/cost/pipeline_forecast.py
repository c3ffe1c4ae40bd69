"""Forecasts a step on the ranks of a pipeline, for any division, schedule and layout, from the costs of its units.

Programs of ranks are not built: actions are simulated one by one, with the seconds and bytes of the units, and with
messages, gathers and reductions where the programs would have them. See `zcompile.cost.simulator` for programs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from zcompile.cost.divided import WEIGHTS, DividedPipeline, StageCost, may_gather
from zcompile.cost.held_bytes import most_held
from zcompile.cost.memory import RankMemory
from zcompile.cost.simulator import Lanes, take_turns
from zcompile.ir.actions import Action, ActionKind


@dataclass(frozen=True, kw_only=True)
class RankForecast(RankMemory):
    """Forecast of one rank along the pipeline axis."""

    busy: float
    """Seconds in which it computes or runs the optimizer."""


@dataclass(frozen=True)
class PipelineForecast:
    """Forecast of a step: its seconds, and each rank along the pipeline axis."""

    seconds: float
    ranks: tuple[RankForecast, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the rank that holds most."""
        return self.fullest.nbytes

    @property
    def fullest(self) -> RankForecast:
        """The rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.nbytes)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which they neither compute nor update."""
        busy = sum(rank.busy for rank in self.ranks)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0


def forecast(divided: DividedPipeline) -> PipelineForecast:
    """Return the forecast of a step."""
    clocks, ranks = _clocks_of(divided), []
    for rank, clock in enumerate(clocks):
        parameters, optimizer = _kept(divided, rank)
        held = most_held(divided, rank)
        ranks.append(RankForecast(parameters=parameters, optimizer=optimizer, held=held, busy=clock.busy))
    return PipelineForecast(max(clock.now for clock in clocks), tuple(ranks))


def peak_bytes(divided: DividedPipeline, limit: float = math.inf) -> int:
    """Return the bytes of the rank that holds most, or of the first rank that exceeds the limit."""
    most = 0
    for rank in range(len(divided.table.rows)):
        kept = sum(_kept(divided, rank))
        most = max(most, kept + sum(most_held(divided, rank, limit - kept).values()))
        if most > limit:
            break
    return most


def _kept(divided: DividedPipeline, rank: int) -> tuple[int, int]:
    """Return the bytes of a rank's shards, and of their moments."""
    layouts = divided.layouts_of(rank)
    return sum(layout.shards for layout in layouts), sum(layout.moments for layout in layouts)


def state_bytes(divided: DividedPipeline) -> int:
    """Return a lower bound of the fullest rank's bytes: shards, moments, kept full parameters, and gradients."""
    zero = divided.setting.stage
    full, gradients = not zero.parameters_sharded, not zero.gradients_sharded
    held = [0] * len(divided.table.rows)
    for number, stage in enumerate(divided.stages):
        for layout in stage.layouts:
            kept = layout.full * full + (layout.gradients if gradients else layout.averages)
            held[divided.table.rank_of(number)] += layout.shards + layout.moments + kept
    return max(held)


def least_seconds(divided: DividedPipeline) -> float:
    """Return a lower bound of a step's seconds: a rank's compute, and other ranks' compute before and after it.

    A rank begins after the stages that its first stage waits for have run one micro-batch. If backwards are not
    divided, it ends with the backward of one of its stages, and the stages that wait for this follow.
    """
    table, stages, halved = divided.table, divided.stages, divided.table.divides_backward
    forward = [stage.seconds(ActionKind.FORWARD) for stage in stages]
    whole = [stage.seconds(ActionKind.BACKWARD) for stage in stages]
    before, after = [0.0] * len(stages), [0.0] * len(stages)
    for number in range(len(stages)):
        sources = divided.senders[True][number]
        before[number] = max((before[source] + forward[source] for source in sources), default=0.0)
        to = () if halved else stages[number].back
        after[number] = max((after[stage] + whole[stage] for stage in to), default=0.0)
    result = 0.0
    for rank in range(len(table.rows)):
        own = table.stages_of(rank)
        busy = sum(forward[number] + _backward(stages[number], halved=halved) for number in own)
        others = min(before[number] for number in own) + min(after[number] for number in own)
        result = max(result, busy * table.microbatches + others)
    return result


def _backward(stage: StageCost, *, halved: bool) -> float:
    """Return the seconds of a backward; if the schedule may divide it, of whichever is faster, whole or divided."""
    whole = stage.seconds(ActionKind.BACKWARD)
    halves = stage.seconds(ActionKind.BACKWARD_INPUT) + stage.seconds(ActionKind.BACKWARD_WEIGHT)
    return min(whole, halves) if halved else whole


# -- simulation -------------------------------------------------------------------------------------------------------


@dataclass
class _Clock(Lanes):
    """The time of one rank."""

    gathers: list[float]
    """Seconds of gathers that are not launched yet, in reverse order of their use."""
    busy: float = 0.0
    gathered: deque[float] = field(default_factory=deque)
    """Arrival times of launched gathers."""
    reduced: list[tuple[float, float]] = field(default_factory=list)
    """Arrival times of reductions, and seconds of the updates that follow."""

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def gather(self, ahead: int) -> None:
        """Launch the gathers of the next `ahead` units, and wait for the next gather."""
        self.launch_gathers(1 + ahead)
        self.now = max(self.now, self.gathered.popleft())

    def launch_gathers(self, most: int) -> None:
        """Launch gathers until `most` are in flight or have arrived unused."""
        while self.gathers and len(self.gathered) < most:
            self.gathered.append(self.launch(_DATA, self.gathers.pop())[1])


_DATA = -1
"""The group of gathers and reductions; messages along the pipeline axis use the receiving rank as their group."""


def _clocks_of(divided: DividedPipeline) -> list[_Clock]:
    """Simulate a step and return the clocks of all ranks."""
    table = divided.table
    gathers = map(divided.gathers_of, range(len(table.rows)))
    clocks = [_Clock([layout.gather for layout in reversed(layouts)]) for layouts in gathers]
    for clock in clocks:
        clock.launch_gathers(divided.setting.prefetch)
    simulation = _Simulation(divided, clocks)
    take_turns(table.rows, simulation.run)
    for clock in clocks:
        for arrival, seconds in clock.reduced:
            clock.now = max(clock.now, arrival)
            clock.compute(seconds)
    return clocks


@dataclass(frozen=True)
class _Simulation:
    """The simulation of a step on all ranks."""

    divided: DividedPipeline
    clocks: list[_Clock]
    arrived: dict[tuple[bool, int, int, int], float] = field(default_factory=dict)
    """Arrival times of messages, by (in the forward, sending stage, receiving stage, micro-batch)."""

    def run(self, rank: int, action: Action) -> bool:
        """Run an action if all messages that it waits for were sent; return whether it ran."""
        begin, clock = self._ready(action), self.clocks[rank]
        if begin is None:
            return False
        clock.now = max(clock.now, begin)
        self._compute(action, clock)
        self._send(action, rank, clock)
        return True

    def _ready(self, action: Action) -> float | None:
        """Return when all messages of an action have arrived; None if one has not been sent yet."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return 0.0
        forward, latest = action.kind is ActionKind.FORWARD, 0.0
        for source in self.divided.senders[forward][action.stage]:
            arrival = self.arrived.get((forward, source, action.stage, action.microbatch))
            if arrival is None:
                return None
            latest = max(latest, arrival)
        return latest

    def _compute(self, action: Action, clock: _Clock) -> None:
        """Run the units of an action, with their gathers and reductions."""
        stage, zero = self.divided.stages[action.stage], self.divided.setting.stage
        last = action.microbatch == self.divided.table.microbatches - 1
        reduces = action.kind in WEIGHTS and (zero.gradients_sharded or last)
        if not reduces and not may_gather(action, zero):
            clock.compute(stage.seconds(action.kind))
            return
        for unit, layout, gathered in stage.in_order(action, zero):
            if gathered:
                clock.gather(self.divided.setting.prefetch)
            clock.compute(stage.part(unit, action.kind).seconds)
            if reduces:
                clock.reduced.append((clock.launch(_DATA, layout.reduce)[1], layout.update if last else 0.0))

    def _send(self, action: Action, rank: int, clock: _Clock) -> None:
        """Send the results of an action to other stages."""
        stage, setting = self.divided.stages[action.stage], self.divided.setting
        forward = action.kind is ActionKind.FORWARD
        sent = stage.ahead if forward else stage.back if action.sends_back else {}
        for to, nbytes in sent.items():
            home, arrival = self.divided.table.rank_of(to), clock.now
            if home != rank:
                clock.now += nbytes * setting.hardware.sending
                seconds = setting.hardware.message_seconds(nbytes, setting.pipeline)
                _, arrival = clock.launch(home, seconds)
            self.arrived[forward, action.stage, to, action.microbatch] = arrival
