"""The simulator: the timeline of a step as the cost model foretells it.

A lane of compute, where lines run one after the other, and one for each group, where collectives do, in the order of
their launch. A line that waits for a collective ends when that has arrived; where the processor itself moves what is
sent (`Hardware.sending`), launching it takes time of the first lane. Every rank is taken to do the same at the same
time, so collectives start together. Collectives of the model's own code are within its regions, and take their time.
Not simulated are activations that move to the host or to a disk, and the host's own overhead.

The ranks of a pipeline do different things, and are simulated together: what one sends arrives at the other, so bubbles
are where it waits. Ranks beside each other in data parallelism are still taken to be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from zcompile.cost.hardware import Hardware
from zcompile.cost.line_calls import line_of
from zcompile.cost.roofline import line_seconds
from zcompile.cost.timeline import Event, Sent, Spent, Timeline
from zcompile.ir.layout import Param
from zcompile.ir.operation import Role, Traffic, data, op_of
from zcompile.ir.ops import Call, Receive, Send, Update, WaitReceive
from zcompile.ir.printer import function_text
from zcompile.ir.program import Program

UPDATE_BYTES = 7
"""Numbers that a fused AdamW reads and writes for each element: value, gradient and two moments, and three of them."""

T = TypeVar("T")
Seconds = Callable[[Program, fx.Node, Hardware], float]
"""Of a line that computes or communicates."""
Message = tuple[int, int, str]
"""From which place along the pipeline axis to which one, and what."""


def simulate_pipeline(
    programs: Sequence[Program], hardware: Hardware, seconds: Seconds = line_seconds
) -> list[Timeline]:
    """The timelines of the ranks along a pipeline axis, all beginning at once.

    Args:
        programs: What each of them runs, in order; together they come to their end (`zcompile.proof.ranks`).
        hardware: What they run on.
        seconds: How long lines take.
    """
    mail: dict[Message, float] = {}
    ranks = [_ProgramLanes(program, hardware, seconds, place, mail) for place, program in enumerate(programs)]
    lines = [[node for node in program.graph.nodes if node.op == "call_function"] for program in programs]
    take_turns(lines, lambda rank, line: ranks[rank].run(line))
    return [lanes.timeline(place, len(programs)) for place, lanes in enumerate(ranks)]


def take_turns(steps: Iterable[Sequence[T]], run: Callable[[int, T], bool]) -> None:
    """Run what all ranks do, each step as soon as it can be; `run` gives False for one that waits for another rank."""
    left = [list(reversed(some)) for some in steps]
    while any(left):
        before = sum(map(len, left))
        for rank, waiting in enumerate(left):
            while waiting and run(rank, waiting[-1]):
                waiting.pop()
        assert sum(map(len, left)) < before, "ranks that fit together do not wait in a circle"


def idle_share(timelines: Sequence[Timeline]) -> float:
    """The share of all ranks' time in a step in which they neither compute nor update: bubbles, and waits."""
    step = max(timeline.seconds for timeline in timelines)
    busy = sum(timeline.compute + timeline.optimizer for timeline in timelines)
    return 1 - busy / (step * len(timelines)) if step else 0.0


def simulate(program: Program, hardware: Hardware, *, steps: bool = False) -> Timeline:
    """The timeline of one run of the program, forward and backward one after the other.

    With `steps`, an optimizer's step follows a program that trains and does not take it itself.
    """
    lanes = _ProgramLanes(program, hardware)
    for node in program.graph.nodes:
        if node.op == "call_function":
            lanes.run(node)
    if steps and program.has_backward and not program.nodes(Update):
        lanes.step()
    return lanes.timeline(0, program.layout.world)


def step_seconds(program: Program, hardware: Hardware) -> float:
    """Seconds from the first line of the forward to the last of the backward."""
    return simulate(program, hardware).seconds


def update_seconds(nbytes: int, hardware: Hardware) -> float:
    """Seconds of an optimizer's step for shards of so many bytes."""
    return UPDATE_BYTES * nbytes / hardware.memory_bandwidth


@dataclass(kw_only=True)
class Lanes:
    """The time of a rank: a lane of compute, and one for each group that it sends along."""

    now: float = 0.0
    """When what it computes next begins."""
    wires: dict[Hashable, float] = field(default_factory=dict)
    """When the last message of each group has arrived."""

    def launch(self, group: Hashable, seconds: float) -> tuple[float, float]:
        """When a message begins and arrives that is launched now: those of a group follow each other."""
        start = max(self.now, self.wires.get(group, 0.0))
        self.wires[group] = start + seconds
        return start, start + seconds


@dataclass
class _ProgramLanes(Lanes):
    """What has been simulated of a program so far."""

    program: Program
    hardware: Hardware
    seconds: Seconds = line_seconds
    place: int = 0
    """Along the pipeline axis."""
    mail: dict[Message, float] | None = None
    """When what ranks send each other arrives, as far as it is known; None for one rank alone."""
    events: list[Event] = field(default_factory=list)
    messages: list[Sent] = field(default_factory=list)
    _arrival: dict[fx.Node, float] = field(default_factory=dict)
    _regions: dict[str, float] = field(default_factory=dict)

    def timeline(self, rank: int, world: int) -> Timeline:
        return Timeline(
            number=0,
            rank=rank,
            world=world,
            trains=self.program.has_backward,
            captures=False,
            device=False,
            began=0.0,
            seconds=self.now,
            events=self.events,
            messages=self.messages,
            predicted=True,
        )

    def _message(self, received: fx.Node) -> Message:
        op = op_of(received, Receive)
        return op.source, self.place, op.message

    def run(self, node: fx.Node) -> bool:
        """Run a line, but for the wait for what another rank has not sent yet; gives whether it has."""
        op = data(node).op
        unit: str = getattr(op, "unit", "")
        if isinstance(op, Receive):
            if self.mail is None:  # the other rank is taken to send at once
                self._arrival[node] = self.now + self.seconds(self.program, node, self.hardware)
        elif isinstance(op, WaitReceive) and self.mail is not None:
            (received,) = node.all_input_nodes
            if (message := self._message(received)) not in self.mail:
                return False
            self._arrival[received] = self.mail[message]
            self._wait(node, unit)
        elif traffic := self.program.traffic(node):
            self._launch(node, unit, traffic)
        elif op.role is Role.WAIT:
            self._wait(node, unit)
        elif isinstance(op, Call):
            if op.region not in self._regions:
                self._regions[op.region] = self.seconds(self.program, node, self.hardware)
            self._add(node, Spent.COMPUTE, self._regions[op.region])
        elif isinstance(op, Update):
            params = map(self.program.layout.param, op.params)
            self._add(node, Spent.OPTIMIZER, self._update_seconds(params))
        return True

    def step(self) -> None:
        """An optimizer's step for all parameters."""
        seconds = self._update_seconds(self.program.layout.trainable.values())
        self._event(None, "optimizer", "", "", Spent.OPTIMIZER, seconds)

    def _update_seconds(self, params: Iterable[Param]) -> float:
        """Of an optimizer's step for this rank's shards of `params`: all of them, where they are not sharded."""
        nbytes = sum((param.shard_numel if param.shards else param.numel) * param.dtype.itemsize for param in params)
        return update_seconds(nbytes, self.hardware)

    def _launch(self, node: fx.Node, unit: str, traffic: Traffic) -> None:
        nbytes = traffic.sent
        group = "" if traffic.axis is self.program.layout.sharded else traffic.axis.name
        op = data(node).op
        if isinstance(op, Send):
            group = f"{op.axis} to {op.to}"
        self._event(node, "send", node.name, unit, Spent.EXPOSED, nbytes * self.hardware.sending)
        start, end = self.launch(group, self.seconds(self.program, node, self.hardware))
        self._arrival[node] = end
        if isinstance(op, Send) and self.mail is not None:
            self.mail[self.place, op.to, op.message] = end
        if nbytes:
            self.messages.append(Sent(function_text(node.target), unit, nbytes, start, end, node.name, group))

    def _wait(self, node: fx.Node, unit: str) -> None:
        left = self._arrival.get(node.all_input_nodes[0], self.now) - self.now
        self._event(node, "wait", node.name, unit, Spent.EXPOSED, max(left, 0.0))

    def _add(self, node: fx.Node, spent: Spent, seconds: float) -> None:
        line = line_of(self.program, node)
        self._event(node, line.operation, line.name, line.unit, spent, seconds, is_line=True)

    def _event(
        self, node: fx.Node | None, operation: str, name: str, unit: str, spent: Spent, seconds: float, *,
        is_line: bool = False,
    ) -> None:  # fmt: skip
        """What takes this long from now on; nothing for what takes no time."""
        if seconds:
            phase, of = (str(data(node).phase), node.name) if node is not None else ("", "")
            end = self.now + seconds
            self.events.append(Event(operation, name, unit, phase, spent, self.now, end, seconds, is_line, of))
            self.now = end
