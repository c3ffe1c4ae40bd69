"""What a step takes on the ranks of a pipeline, for any division, schedule and layout, from what its units take.

The program of a rank is not made: its actions are run one by one, with the seconds and bytes that the units take, and
messages, gathers and reductions where the program would have them. Programs are run by `zcompile.cost.simulator`.
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
    """What one rank along the pipeline axis takes in a step."""

    busy: float
    """Seconds in which it computes or updates."""


@dataclass(frozen=True)
class PipelineForecast:
    """What a step takes: seconds, and what each rank along the pipeline axis does and holds."""

    seconds: float
    ranks: tuple[RankForecast, ...]

    @property
    def nbytes(self) -> int:
        """Of the rank that holds most."""
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
    clocks, ranks = _clocks_of(divided), []
    for rank, clock in enumerate(clocks):
        parameters, optimizer = _kept(divided, rank)
        held = most_held(divided, rank)
        ranks.append(RankForecast(parameters=parameters, optimizer=optimizer, held=held, busy=clock.busy))
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


# -- when ranks do what -----------------------------------------------------------------------------------------------


@dataclass
class _Clock(Lanes):
    """One rank's time."""

    gathers: list[float]
    """Seconds of its gathers, in the order in which it computes with what they give; the first one last."""
    busy: float = 0.0
    gathered: deque[float] = field(default_factory=deque)
    """When gathers arrive that have been launched."""
    reduced: list[tuple[float, float]] = field(default_factory=list)
    """When reductions have arrived, and how long the updates take."""

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def gather(self, ahead: int) -> None:
        """Wait for the next gather, those of so many units behind it launched before."""
        self.launch_gathers(1 + ahead)
        self.now = max(self.now, self.gathered.popleft())

    def launch_gathers(self, most: int) -> None:
        """Launch gathers, so that so many are on their way or have arrived."""
        while self.gathers and len(self.gathered) < most:
            self.gathered.append(self.launch(_DATA, self.gathers.pop())[1])


_DATA = -1
"""The group of gathers and reductions; that of messages to another rank along the pipeline axis is its place."""


def _clocks_of(divided: DividedPipeline) -> list[_Clock]:
    """Those of all ranks at the end of a step."""
    table = divided.table
    gathers = map(divided.gathers_of, range(len(table.rows)))
    clocks = [_Clock([layout.gather for layout in reversed(some)]) for some in gathers]
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
    """A step of all ranks."""

    divided: DividedPipeline
    clocks: list[_Clock]
    arrived: dict[tuple[bool, int, int, int], float] = field(default_factory=dict)
    """When messages arrive: whether in the forward, from which stage to which one, and of which micro-batch."""

    def run(self, rank: int, action: Action) -> bool:
        """Run an action if all is there that it waits for."""
        begin, clock = self._ready(action), self.clocks[rank]
        if begin is None:
            return False
        clock.now = max(clock.now, begin)
        self._compute(action, clock)
        self._send(action, rank, clock)
        return True

    def _ready(self, action: Action) -> float | None:
        """When all is there that an action waits for; None if some of it has not been sent yet."""
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
        """Send what an action gives to other stages."""
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
