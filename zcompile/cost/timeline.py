"""The timeline of a step: where its time went, as figures, as text and as a trace.

Records are nested spans: the call of the model contains runs of programs, a run contains lines, and a line contains the
sending of a message or the wait for it. Each moment of the step belongs to the innermost span around it, which
determines how the time counts:

    compute     in a region
    exposed     waiting for a collective, or sending its data if the host itself does that
    optimizer   in an optimizer's step, also if a program updates unit by unit
    overhead    in other lines of a program, in a call outside programs, delivering gradients
    idle        in no span: the loss's own backward, the data loader, the rest of the training loop

These five add up to the time of the step. A line begins where the one before it has ended.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.table import Table

from zcompile.cost.text_console import TextConsole
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
    """One span of a step; times are seconds since the step began."""

    operation: str
    """The region, the function that a line calls, or another kind of span: call, forward, backward, send, wait, ..."""
    name: str
    """The name of a line's result, or of the program that runs."""
    unit: str
    phase: str
    spent: Spent
    start: float
    end: float
    own: float
    """Seconds that no event within this one covers."""
    is_line: bool = False
    node: str = ""
    """The node of the program that the span belongs to, if known."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of a step, from its launch to its end; concurrent ones overlap."""

    operation: str
    unit: str
    nbytes: int
    """Bytes that this rank sent."""
    start: float
    end: float
    node: str = ""
    """The node of the program that launches it, if known."""
    group: str = ""
    """The name of its axis, or "" for the sharding axis."""


@dataclass(frozen=True)
class Timeline:
    """One step of one rank; all times are in seconds."""

    number: int
    """The number of the step, from 0."""
    rank: int
    world: int
    trains: bool
    """False for a call without gradients."""
    captures: bool
    """True if programs were traced and compiled in this step, which counts as time of the call, outside programs."""
    device: bool
    """True for times of the CUDA stream, False for the host's."""
    began: float
    """When the step began, by `time.perf_counter`; ranks of one machine share that clock."""
    seconds: float
    events: Sequence[Event]
    """In order; each event is within an earlier one or follows it."""
    messages: Sequence[Sent] | None
    """None if their end times are unknown, as on CUDA."""
    predicted: bool = False
    """True for a simulated timeline."""

    @classmethod
    def of(cls, step: StepRecord, rank: int, world: int) -> Timeline:
        """Return the timeline of a recorded step. Synchronizes with the device if its times were recorded."""
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
        """Return the seconds that count as `on`, optionally of one phase or unit only."""
        if on is Spent.IDLE:
            return self.seconds - sum(event.own for event in self.events)
        wanted = (e for e in self.events if e.spent is on)
        return sum(e.own for e in wanted if phase in (None, e.phase) and unit in (None, e.unit))

    @property
    def compute(self) -> float:
        """Seconds in regions, and in code of the model that runs as plain Python."""
        return self.spent(Spent.COMPUTE)

    @property
    def exposed(self) -> float:
        """Seconds blocked on communication: waiting for it, or sending by the host."""
        return self.spent(Spent.EXPOSED)

    @property
    def optimizer(self) -> float:
        """Seconds in optimizer steps."""
        return self.spent(Spent.OPTIMIZER)

    @property
    def overhead(self) -> float:
        """Seconds of the host in other lines, around programs, and in the delivery of gradients."""
        return self.spent(Spent.OVERHEAD)

    @property
    def idle(self) -> float:
        """Seconds outside all recorded spans."""
        return self.spent(Spent.IDLE)

    @property
    def hidden(self) -> float | None:
        """Seconds with communication in flight but not exposed; None if unknown."""
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
        """Seconds of overhead in programs, per line."""
        inside = sum(e.own for e in self.events if e.spent is Spent.OVERHEAD and e.phase)
        return inside / len(self.lines) if self.lines else 0.0

    @property
    def overheads(self) -> dict[str, float]:
        """Seconds of overhead by operation, largest first."""
        result: dict[str, float] = defaultdict(float)
        for event in self.events:
            if event.spent is Spent.OVERHEAD:
                result[event.operation] += event.own
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @property
    def nbytes(self) -> int | None:
        """Bytes that this rank sent; None if messages are unknown."""
        return None if self.messages is None else sum(message.nbytes for message in self.messages)

    # -- reports --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        console = TextConsole(110)
        kind = "training step" if self.trains else "call without gradients"
        clock = "predicted" if self.predicted else f"times of the {'CUDA stream' if self.device else 'host'}"
        console.print(f"{kind} {self.number}, rank {self.rank} of {self.world}: {_ms(self.seconds)} ms ({clock})")
        if self.captures:
            console.print("Programs were traced and compiled in it, within the call of the model.")
        for table in (self._summary(), self._units(), self._overheads(), self._slowest()):
            console.print(table)
        return console.text

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
        """Write a trace for ui.perfetto.dev or chrome://tracing: one process per rank, one lane per kind of event.

        Ranks of one machine share a clock, so the `traceEvents` of their files can be merged.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        target.write_text(json.dumps({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"}))
        return target

    def flights(self) -> dict[str, list[Sent]]:
        """Return collectives by lane: one lane per group, and more for concurrent collectives of a group."""
        result: dict[str, list[Sent]] = {}
        for message in self.messages or ():
            name = f"communication, {message.group}" if message.group else "communication"
            names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
            lane = next(lane for lane in names if lane not in result or result[lane][-1].end <= message.start)
            result.setdefault(lane, []).append(message)
        return result

    def trace_events(self, process: int | None = None, name: str | None = None) -> list[dict[str, Any]]:
        """Return what `save` writes, in Chrome's trace format: complete events (`ph` X) in microseconds.

        `process`: the process id, by default the rank. `name`: the name of the process.
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
    "forward": "forward programs, around lines",
    "backward": "backward programs, around lines",
    "delivery": "delivery of gradients",
}


class _Clock:
    """Seconds since the step began: on the stream if it was recorded throughout, else on the host."""

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
    """Yield all spans of `step`, unordered, without `own` seconds."""

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
    ends = [Moment(host, device) for host, device in zip(run.stamps, events, strict=True)]
    for line, (start, end) in zip(run.lines, itertools.pairwise([run.start, *ends]), strict=True):
        yield line, start, end


def _nested(events: Iterable[Event]) -> Iterator[Event]:
    """Yield `events` in order, with `own` seconds; events within a line or a run inherit its phase and unit."""
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
    """Return the union of spans of time as disjoint spans, in order."""
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
