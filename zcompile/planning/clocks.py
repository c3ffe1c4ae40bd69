"""When the ranks of a pipeline do what: their actions, run with the seconds that units and messages take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from zcompile.ir.actions import Action, ActionKind
from zcompile.planning.divided import WEIGHTS, DividedPipeline, may_gather


@dataclass
class Clock:
    """One rank's time."""

    gathers: list[float]
    """Seconds of its gathers, in the order in which it computes with what they give; the first one last."""
    now: float = 0.0
    busy: float = 0.0
    wire: float = 0.0
    """When the last gather or reduction of this rank has arrived."""
    sends: dict[int, float] = field(default_factory=dict)
    """When the last message to each other rank has."""
    gathered: deque[float] = field(default_factory=deque)
    """When gathers arrive that have been launched."""
    reduced: list[tuple[float, float]] = field(default_factory=list)
    """When reductions have arrived, and how long the updates take."""

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def collective(self, seconds: float) -> float:
        """When a collective arrives that is launched now."""
        self.wire = max(self.wire, self.now) + seconds
        return self.wire

    def gather(self, ahead: int) -> None:
        """Wait for the next gather, those of so many units behind it launched before."""
        self.launch(1 + ahead)
        self.now = max(self.now, self.gathered.popleft())

    def launch(self, most: int) -> None:
        """Launch gathers, so that so many are on their way or have arrived."""
        while self.gathers and len(self.gathered) < most:
            self.gathered.append(self.collective(self.gathers.pop()))


Arrivals = dict[tuple[bool, int, int, int], float]
"""When messages arrive: whether in the forward, from which stage to which one, and of which micro-batch."""


def clocks_of(divided: DividedPipeline) -> list[Clock]:
    """Those of all ranks at the end of a step."""
    return _Simulation(divided).clocks()


@dataclass(frozen=True)
class _Simulation:
    """A step of all ranks."""

    divided: DividedPipeline
    arrived: Arrivals = field(default_factory=dict)

    def clocks(self) -> list[Clock]:
        """Run the actions of all ranks, each as soon as it can be."""
        depth = self.divided.setting.prefetch
        gathers = map(self.divided.gathers_of, range(len(self.divided.table.rows)))
        clocks = [Clock([layout.gather for layout in reversed(some)]) for some in gathers]
        left = [list(reversed(row)) for row in self.divided.table.rows]
        for clock in clocks:
            clock.launch(depth)
        while any(left):
            before = sum(map(len, left))
            for rank, (clock, actions) in enumerate(zip(clocks, left, strict=True)):
                while actions and (begin := self._ready(actions[-1])) is not None:
                    clock.now = max(clock.now, begin)
                    self._compute(actions[-1], clock)
                    self._send(actions.pop(), rank, clock)
            assert sum(map(len, left)) < before, "a table that can run does not wait in a circle"
        for clock in clocks:
            for arrival, seconds in clock.reduced:
                clock.now = max(clock.now, arrival)
                clock.compute(seconds)
        return clocks

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

    def _compute(self, action: Action, clock: Clock) -> None:
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
                clock.reduced.append((clock.collective(layout.reduce), layout.update if last else 0.0))

    def _send(self, action: Action, rank: int, clock: Clock) -> None:
        """Send what an action gives to other stages."""
        stage, forward, hardware = (
            self.divided.stages[action.stage],
            action.kind is ActionKind.FORWARD,
            self.divided.setting.hardware,
        )
        sent = stage.ahead if forward else stage.back if action.sends_back else {}
        for to, nbytes in sent.items():
            home, arrival = self.divided.table.rank_of(to), clock.now
            if home != rank:
                clock.now += nbytes * hardware.sending
                begin = max(clock.now, clock.sends.get(home, 0.0))
                arrival = clock.sends[home] = begin + hardware.message_seconds(nbytes, self.divided.setting.pipeline)
            self.arrived[forward, action.stage, to, action.microbatch] = arrival
