"""The simulator: predicts the timeline of a step with the cost model.

There is a compute lane, on which lines run one after the other, and a lane for each group, on which its collectives run
in launch order. A line that waits for a collective ends when the collective has finished; if the processor itself moves
sent bytes (`Hardware.sending`), launching takes time on the compute lane. All ranks are assumed to run in lockstep, so
collectives start together. Collectives in the model's own code are part of its regions' time. Activations offloaded to
the host or a disk, and overhead of the host, are not simulated.

The ranks of a pipeline do different work and are simulated together: a message arrives at the receiving rank, so its
waits are the bubbles. Data-parallel ranks are still assumed to be alike.
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
"""Bytes that a fused AdamW moves per byte of parameters: it reads 4 tensors (with gradients) and writes 3 back."""

T = TypeVar("T")
Seconds = Callable[[Program, fx.Node, Hardware], float]
"""Returns the seconds of a line that computes or communicates."""
Message = tuple[int, int, str]
"""The sender's and the receiver's coordinate along the pipeline axis, and the message."""


def simulate_pipeline(
    programs: Sequence[Program], hardware: Hardware, seconds: Seconds = line_seconds
) -> list[Timeline]:
    """Return the timelines of the ranks along a pipeline axis, which all start at the same time.

    Args:
        programs: The program of each rank, in order; together they must not deadlock (`zcompile.proof.ranks`).
        hardware: The hardware that they run on.
        seconds: Returns the seconds of a line.
    """
    mail: dict[Message, float] = {}
    ranks = [_ProgramLanes(program, hardware, seconds, rank, mail) for rank, program in enumerate(programs)]
    lines = [[node for node in program.graph.nodes if node.op == "call_function"] for program in programs]
    take_turns(lines, lambda rank, line: ranks[rank].run(line))
    return [lanes.timeline(rank, len(programs)) for rank, lanes in enumerate(ranks)]


def take_turns(steps: Iterable[Sequence[T]], run: Callable[[int, T], bool]) -> None:
    """Run the steps of all ranks, each as soon as possible; `run` returns False if a step waits for another rank."""
    left = [list(reversed(row)) for row in steps]
    while any(left):
        before = sum(map(len, left))
        for rank, waiting in enumerate(left):
            while waiting and run(rank, waiting[-1]):
                waiting.pop()
        assert sum(map(len, left)) < before, "ranks whose communications fit together do not deadlock"


def idle_share(timelines: Sequence[Timeline]) -> float:
    """Return the share of all ranks' time in a step in which they neither compute nor update: bubbles and waits."""
    step = max(timeline.seconds for timeline in timelines)
    busy = sum(timeline.compute + timeline.optimizer for timeline in timelines)
    return 1 - busy / (step * len(timelines)) if step else 0.0


def simulate(program: Program, hardware: Hardware, *, steps: bool = False) -> Timeline:
    """Return the timeline of one run of the program, forward then backward.

    With `steps`, an optimizer step follows if the program trains and does not update parameters itself.
    """
    lanes = _ProgramLanes(program, hardware)
    for node in program.graph.nodes:
        if node.op == "call_function":
            lanes.run(node)
    if steps and program.has_backward and not program.nodes(Update):
        lanes.step()
    return lanes.timeline(0, program.layout.world)


def step_seconds(program: Program, hardware: Hardware) -> float:
    """Return the seconds from the first line of the forward to the last line of the backward."""
    return simulate(program, hardware).seconds


def update_seconds(nbytes: int, hardware: Hardware) -> float:
    """Return the seconds of an optimizer step for shards of `nbytes` bytes."""
    return UPDATE_BYTES * nbytes / hardware.memory_bandwidth


@dataclass(kw_only=True)
class Lanes:
    """The time of a rank: a compute lane, and a lane for each of its groups."""

    now: float = 0.0
    """When its next compute begins."""
    wires: dict[Hashable, float] = field(default_factory=dict)
    """When the last message of each group arrives."""

    def launch(self, group: Hashable, seconds: float) -> tuple[float, float]:
        """Launch a message now; return when it begins, after earlier messages of its group, and when it arrives."""
        start = max(self.now, self.wires.get(group, 0.0))
        self.wires[group] = start + seconds
        return start, start + seconds


@dataclass
class _ProgramLanes(Lanes):
    """The simulation of a program so far."""

    program: Program
    hardware: Hardware
    seconds: Seconds = line_seconds
    place: int = 0
    """The rank's coordinate along the pipeline axis."""
    mail: dict[Message, float] | None = None
    """Arrival times of messages sent so far between ranks; None to simulate one rank alone."""
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
        """Run a line; return False for a wait whose message another rank has not sent yet."""
        op = data(node).op
        unit: str = getattr(op, "unit", "")
        if isinstance(op, Receive):
            if self.mail is None:  # assume that the other rank sends at the same time
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
        """Add an optimizer step for all parameters."""
        seconds = self._update_seconds(self.program.layout.trainable.values())
        self._event(None, "optimizer", "", "", Spent.OPTIMIZER, seconds)

    def _update_seconds(self, params: Iterable[Param]) -> float:
        """Return the seconds of an optimizer step for this rank's shards of `params`."""
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
        """Add an event that starts now, unless it takes no time."""
        if seconds:
            phase, of = (str(data(node).phase), node.name) if node is not None else ("", "")
            end = self.now + seconds
            self.events.append(Event(operation, name, unit, phase, spent, self.now, end, seconds, is_line, of))
            self.now = end
