"""The timeline of a step: where its time went, as figures, as a page of text and as a trace.

Everything that was recorded is a span: the call of the model, in it a program's run, in that its lines, in a line the
sending of a message or the wait for it. Each moment of the step belongs to the innermost span around it, which says
what it was spent on:

    compute     in a region
    exposed     sending what a collective sends, as far as the host itself does that, and waiting for one
    optimizer   in an optimizer's step, also where a program takes it unit by unit
    overhead    in other lines of a program, between them, in a call outside of programs, delivering gradients
    idle        in none of them: the loss's own backward, the data loader, whatever the loop does

So these five add up to the step.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zcompile.ir.operation import Phase
from zcompile.ir.tensor_type import human_bytes
from zcompile.runtime.recorder import Line, Moment, RecordedRun, StepRecord


class Spent(StrEnum):
    """What a moment of a step is spent on."""

    COMPUTE = "compute"
    EXPOSED = "exposed"
    OPTIMIZER = "optimizer"
    OVERHEAD = "overhead"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Event:
    """One span of a step; moments are seconds since the step began."""

    operation: str
    """The region, the function that a line calls, or what else this is: call, forward, backward, send, wait, ..."""
    name: str
    """Of the value that a line gives; of the program, for its run."""
    unit: str
    phase: str
    spent: Spent
    start: float
    end: float
    own: float
    """Seconds that no event within this one covers."""
    is_line: bool = False
    node: str = ""
    """The node of the program, where it is a line of one, or what such a line waits for."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of a step, from its launch to its end; those that run at the same time overlap."""

    operation: str
    unit: str
    nbytes: int
    """Bytes that this rank sent."""
    start: float
    end: float
    node: str = ""
    """The node of the program that launches it, where that is known."""
    group: str = ""
    """The axis that it goes over; empty for the one that shards."""


@dataclass(frozen=True)
class Timeline:
    """One step of one rank, all in seconds."""

    number: int
    """Of the step, from 0."""
    rank: int
    world: int
    trains: bool
    """False for a call without gradients."""
    captures: bool
    """True if programs were traced and compiled in this step: that is time of the call, around its programs."""
    device: bool
    """True for times of the CUDA stream, False for the host's."""
    began: float
    """When the step began, by `time.perf_counter`; ranks of one machine share that clock."""
    seconds: float
    events: Sequence[Event]
    """In order; each lies within an earlier one or follows it."""
    messages: Sequence[Sent] | None
    """None where it is not known when they ended: on CUDA."""
    predicted: bool = False
    """True for what the simulator foretells."""

    @classmethod
    def of(cls, step: StepRecord, rank: int, world: int) -> Timeline:
        """What `step` tells. Where the device was recorded, this waits for the device."""
        clock = _Clock(step)
        measured = [(m, m.ended) for m in step.messages]
        messages = [
            Sent(m.operation, m.unit, m.nbytes, m.launched - step.start.host, ended - step.start.host, group=m.group)
            for m, ended in measured
            if ended is not None
        ]
        events = list(_nested(_events(step, clock)))
        return cls(
            number=step.number,
            rank=rank,
            world=world,
            trains=step.trains,
            captures=step.captures,
            device=clock.device,
            began=step.start.host,
            seconds=clock.end,
            events=events,
            messages=None if clock.device or len(messages) < len(measured) else sorted(messages, key=lambda m: m.start),
        )

    # -- figures --------------------------------------------------------------------------------------------------

    def spent(self, on: Spent, *, phase: str | None = None, unit: str | None = None) -> float:
        """Seconds spent on something, in one phase or for one unit if asked."""
        if on is Spent.IDLE:
            return self.seconds - sum(event.own for event in self.events)
        wanted = (e for e in self.events if e.spent is on)
        return sum(e.own for e in wanted if phase in (None, e.phase) and unit in (None, e.unit))

    @property
    def compute(self) -> float:
        """In regions, and in code of the model that runs as plain Python."""
        return self.spent(Spent.COMPUTE)

    @property
    def exposed(self) -> float:
        """Standing for communication: to wait for it, or for the host to send."""
        return self.spent(Spent.EXPOSED)

    @property
    def optimizer(self) -> float:
        """In steps of optimizers."""
        return self.spent(Spent.OPTIMIZER)

    @property
    def overhead(self) -> float:
        """Of the host: in lines that neither compute nor communicate, between lines, around programs, in delivery."""
        return self.spent(Spent.OVERHEAD)

    @property
    def idle(self) -> float:
        """In nothing that is known here."""
        return self.spent(Spent.IDLE)

    @property
    def hidden(self) -> float | None:
        """With communication in flight, and not standing for it; None where it is not known."""
        if self.messages is None:
            return None
        flying = _union((message.start, message.end) for message in self.messages)
        waits = _union((e.start, e.end) for e in self.events if e.spent is Spent.EXPOSED)
        return _length(flying) - sum(max(0.0, min(a, c) - max(b, d)) for b, a in flying for d, c in waits)

    @property
    def lines(self) -> Sequence[Event]:
        """The lines of programs, in order."""
        return [event for event in self.events if event.is_line]

    @property
    def overhead_per_line(self) -> float:
        """Seconds of overhead in programs for each of their lines."""
        inside = sum(e.own for e in self.events if e.spent is Spent.OVERHEAD and e.phase)
        return inside / len(self.lines) if self.lines else 0.0

    @property
    def overheads(self) -> dict[str, float]:
        """Seconds of overhead by what they were spent in, most first."""
        result: dict[str, float] = defaultdict(float)
        for event in self.events:
            if event.spent is Spent.OVERHEAD:
                result[event.operation] += event.own
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @property
    def nbytes(self) -> int | None:
        """Bytes that this rank sent; None where messages are not known."""
        return None if self.messages is None else sum(message.nbytes for message in self.messages)

    # -- for people -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110)
        kind = "training step" if self.trains else "call without gradients"
        clock = "predicted" if self.predicted else f"times of the {'CUDA stream' if self.device else 'host'}"
        console.print(f"{kind} {self.number}, rank {self.rank} of {self.world}: {_ms(self.seconds)} ms ({clock})")
        if self.captures:
            console.print("Programs were traced and compiled in it, within the call of the model.")
        for table in (self._summary(), self._units(), self._overheads(), self._slowest()):
            console.print(table)
        return out.getvalue()

    def _summary(self) -> Table:
        table = Table("spent on", "ms", "share", title="the step", title_justify="left")
        for phase in (*Phase, ""):
            if seconds := self.spent(Spent.COMPUTE, phase=phase):
                _row(table, f"compute, {phase or 'plain Python'}", seconds, self.seconds)
        _row(table, "exposed communication", self.exposed, self.seconds)
        _row(table, "optimizer", self.optimizer, self.seconds)
        _row(table, "host overhead", self.overhead, self.seconds)
        _row(table, "idle", self.idle, self.seconds)
        table.add_section()
        if self.hidden is not None:
            _row(table, "hidden communication", self.hidden, self.seconds)
        table.add_row(f"host overhead of each of {len(self.lines)} lines", f"{self.overhead_per_line * 1e6:.1f} µs", "")
        return table

    def _units(self) -> Table:
        ran = {event.phase for event in self.events}
        shown = [phase for phase in Phase if phase in ran] or [Phase.FORWARD, Phase.BACKWARD]
        table = Table("unit", *(f"{phase} ms" for phase in shown), "exposed ms", "overhead ms", "sent")
        for unit in dict.fromkeys(event.unit for event in self.events if event.unit):
            phases = [_ms(self.spent(Spent.COMPUTE, phase=phase, unit=unit)) for phase in shown]
            others = [_ms(self.spent(on, unit=unit)) for on in (Spent.EXPOSED, Spent.OVERHEAD)]
            sent = sum(m.nbytes for m in self.messages or () if m.unit == unit)
            table.add_row(unit, *phases, *others, human_bytes(sent) if sent else "")
        return table

    def _overheads(self) -> Table:
        table = Table("host overhead in", "times", "ms", "µs each")
        counts = Counter(event.operation for event in self.events if event.spent is Spent.OVERHEAD)
        for operation, seconds in self.overheads.items():
            each = f"{seconds / counts[operation] * 1e6:.1f}"
            table.add_row(_WHERE.get(operation, operation), str(counts[operation]), _ms(seconds), each)
        return table

    def _slowest(self) -> Table:
        table = Table("slowest lines", "phase", "unit", "ms", "share")
        for line in sorted(self.lines, key=lambda line: -line.seconds)[:8]:
            text = line.operation if line.name == line.operation else f"{line.operation}: {line.name}"
            table.add_row(text, line.phase, line.unit, _ms(line.seconds), f"{line.seconds / self.seconds:.1%}")
        return table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing open: a process for the rank, a lane for each kind.

        Ranks of one machine share the clock: the `traceEvents` of their files may be put into one.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        target.write_text(json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"}))
        return target

    def flights(self) -> dict[str, list[Sent]]:
        """Collectives by lane: each group has its own, and what flies at the same time within one has further ones."""
        result: dict[str, list[Sent]] = {}
        for message in self.messages or ():
            name = f"communication, {message.group}" if message.group else "communication"
            names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
            lane = next(lane for lane in names if lane not in result or result[lane][-1].end <= message.start)
            result.setdefault(lane, []).append(message)
        return result

    def trace_events(self, process: int | None = None, name: str | None = None) -> list[dict[str, Any]]:
        """What `save` writes, in Chrome's trace format: complete events (`ph` X) in microseconds.

        `process`: its number, by default the rank. `name`: what it is called.
        """
        lanes = ["step and programs", "compute", "sends and waits", "optimizer"]
        result = [self._traced(0, f"step {self.number}", 0.0, self.seconds, {"trains": self.trains})]
        for event in self.events:
            lane = _LANES.get(event.spent, 0)
            details = {"name": event.name, "unit": event.unit, "phase": event.phase, "own_us": event.own * 1e6}
            result.append(self._traced(lane, event.operation, event.start, event.end, details))
        flights = self.flights()
        for number, messages in enumerate(flights.values(), len(lanes)):
            for message in messages:
                details = {"unit": message.unit, "bytes": message.nbytes}
                what = f"{message.operation} {message.unit}".strip()
                result.append(self._traced(number, what, message.start, message.end, details))
        lanes += list(flights)
        names = [
            ("process_name", 0, name or f"rank {self.rank}"),
            *(("thread_name", i, n) for i, n in enumerate(lanes)),
        ]
        about = [{"ph": "M", "tid": i, "name": k, "args": {"name": n}} for k, i, n in names]
        return [{**event, "pid": self.rank if process is None else process} for event in (*about, *result)]

    def _traced(self, lane: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        ts, dur = (self.began + start) * 1e6, (end - start) * 1e6
        return {"ph": "X", "tid": lane, "name": name, "ts": ts, "dur": dur, "args": args}


_LANES = {Spent.COMPUTE: 1, Spent.EXPOSED: 2, Spent.OPTIMIZER: 3}
_SPENT = {"update": Spent.OPTIMIZER}
_WHERE = {
    "call": "calls of the model, around its programs",
    "forward": "forward programs, between lines",
    "backward": "backward programs, between lines",
    "delivery": "delivery of gradients",
}


class _Clock:
    """Seconds since the step began: of the stream if it was recorded all along, else of the host."""

    def __init__(self, step: StepRecord) -> None:
        self.start = step.start
        self.device = step.start.device is not None
        ends = [span.end for span in step.spans] + [run.end for run in step.runs]
        self.end = self.at(step.end or max(ends, key=lambda moment: moment.host, default=step.start))

    def at(self, moment: Moment) -> float:
        if self.start.device is None or moment.device is None:  # none is recorded while a CUDA graph is captured
            return moment.host - self.start.host
        moment.device.synchronize()
        milliseconds: float = self.start.device.elapsed_time(moment.device)
        return milliseconds / 1e3


def _events(step: StepRecord, clock: _Clock) -> Iterator[Event]:
    """All spans of `step`, in no order, without their own seconds."""

    def event(start: Moment, end: Moment, spent: Spent, operation: str, phase: str = "", name: str = "") -> Event:
        begins = max(clock.at(start), 0.0)
        return Event(operation, name, "", phase, spent, begins, max(clock.at(end), begins), 0.0)

    kinds = {"optimizer": Spent.OPTIMIZER, "send": Spent.EXPOSED, "wait": Spent.EXPOSED}
    if step.split:
        kinds["call"] = Spent.COMPUTE  # the model's own code around programs
    for span in step.spans:
        yield event(span.start, span.end, kinds.get(span.name, Spent.OVERHEAD), span.name)
    for message in step.messages:
        wait = event(message.waited.start, message.waited.end, Spent.EXPOSED, "wait", name=message.operation)
        yield replace(wait, unit=message.unit)
    for run in step.runs:
        yield event(run.start, run.end, Spent.OVERHEAD, run.phase, run.phase, run.program)
        for line, start, end in _lines(run):
            spent = Spent.COMPUTE if line.is_region else _SPENT.get(line.operation, Spent.OVERHEAD)
            timed = event(start, end, spent, line.operation, run.phase, line.name)
            yield replace(timed, unit=line.unit, is_line=True, node=line.node)


def _lines(run: RecordedRun) -> Iterator[tuple[Line, Moment, Moment]]:
    events = run.events if len(run.events) == len(run.stamps) else [None] * len(run.stamps)
    moments = [Moment(host, device) for host, device in zip(run.stamps, events, strict=True)]
    yield from zip(run.lines, moments[::2], moments[1::2], strict=True)


def _nested(events: Iterable[Event]) -> Iterator[Event]:
    """`events` in order, each with its own seconds; one within a line or a run is of its phase and unit."""
    result = sorted(events, key=lambda event: (event.start, -event.end))
    own = [event.seconds for event in result]
    around: list[int] = []
    for index, event in enumerate(result):
        while around and result[around[-1]].end <= event.start:
            around.pop()
        if around:
            outer = result[around[-1]]
            own[around[-1]] -= min(event.end, outer.end) - event.start
            result[index] = replace(event, phase=event.phase or outer.phase, unit=event.unit or outer.unit)
        around.append(index)
    return (replace(event, own=seconds) for event, seconds in zip(result, own, strict=True))


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without what they share, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _row(table: Table, name: str, seconds: float, whole: float) -> None:
    table.add_row(name, _ms(seconds), f"{seconds / whole:.1%}")
