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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
    ranks = [_Lanes(program, hardware, seconds, place, mail) for place, program in enumerate(programs)]
    left = [[node for node in program.graph.nodes if node.op == "call_function"][::-1] for program in programs]
    while any(left):
        before = sum(map(len, left))
        for lanes, lines in zip(ranks, left, strict=True):
            while lines and lanes.may_run(lines[-1]):
                lanes.run(lines.pop())
        assert sum(map(len, left)) < before, "ranks whose programs fit together do not wait in a circle"
    return [lanes.timeline(place, len(programs)) for place, lanes in enumerate(ranks)]


def idle_share(timelines: Sequence[Timeline]) -> float:
    """The share of all ranks' time in a step in which they neither compute nor update: bubbles, and waits."""
    step = max(timeline.seconds for timeline in timelines)
    busy = sum(timeline.compute + timeline.optimizer for timeline in timelines)
    return 1 - busy / (step * len(timelines)) if step else 0.0


def simulate(program: Program, hardware: Hardware, *, steps: bool = False) -> Timeline:
    """The timeline of one run of the program, forward and backward one after the other.

    With `steps`, an optimizer's step follows a program that trains and does not take it itself.
    """
    lanes = _Lanes(program, hardware)
    for node in program.graph.nodes:
        if node.op == "call_function":
            lanes.run(node)
    if steps and program.has_backward and not program.nodes(Update):
        lanes.step()
    return lanes.timeline(0, program.layout.world)


def step_seconds(program: Program, hardware: Hardware) -> float:
    """Seconds from the first line of the forward to the last of the backward."""
    return simulate(program, hardware).seconds


@dataclass
class _Lanes:
    """What has been simulated so far."""

    program: Program
    hardware: Hardware
    seconds: Seconds = line_seconds
    place: int = 0
    """Along the pipeline axis."""
    mail: dict[Message, float] | None = None
    """When what ranks send each other arrives, as far as it is known; None for one rank alone."""
    now: float = 0.0
    """When the next line begins."""
    wires: dict[str, float] = field(default_factory=dict)
    """When the last collective of each group has arrived."""
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

    def may_run(self, node: fx.Node) -> bool:
        """False for the wait for what another rank has not sent yet."""
        received = node.all_input_nodes[0] if isinstance(data(node).op, WaitReceive) else None
        return received is None or self.mail is None or self._message(received) in self.mail

    def _message(self, received: fx.Node) -> Message:
        op = op_of(received, Receive)
        return op.source, self.place, op.message

    def run(self, node: fx.Node) -> None:
        op = data(node).op
        unit: str = getattr(op, "unit", "")
        if isinstance(op, Receive):
            if self.mail is None:  # the other rank is taken to send at once
                self._arrival[node] = self.now + self.seconds(self.program, node, self.hardware)
        elif isinstance(op, WaitReceive) and self.mail is not None:
            (received,) = node.all_input_nodes
            self._arrival[received] = self.mail[self._message(received)]
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

    def step(self) -> None:
        """An optimizer's step for all parameters."""
        seconds = self._update_seconds(self.program.layout.trainable.values())
        self._event(None, "optimizer", "", "", Spent.OPTIMIZER, seconds)

    def _update_seconds(self, params: Iterable[Param]) -> float:
        """Of an optimizer's step for this rank's shards of `params`: all of them, where they are not sharded."""
        nbytes = sum((param.shard_numel if param.shards else param.numel) * param.dtype.itemsize for param in params)
        return UPDATE_BYTES * nbytes / self.hardware.memory_bandwidth

    def _launch(self, node: fx.Node, unit: str, traffic: Traffic) -> None:
        nbytes = traffic.sent
        group = "" if traffic.axis is self.program.layout.sharded else traffic.axis.name
        op = data(node).op
        if isinstance(op, Send):
            group = f"{op.axis} to {op.to}"
        self._event(node, "send", node.name, unit, Spent.EXPOSED, nbytes * self.hardware.sending)
        start = max(self.now, self.wires.get(group, 0.0))
        end = self.wires[group] = self._arrival[node] = start + self.seconds(self.program, node, self.hardware)
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
