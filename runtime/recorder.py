"""The recorder: when each line of a program, each message and each optimizer step began and ended.

It is always on, so a running step only appends times to arrays, one for each line. They are interpreted when they are
read (`zcompile.cost.timeline`). Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from zcompile.runtime.async_work import AsyncWork
from zcompile.runtime.device import event_here
from zcompile.torch_internals.autograd import profiler_runs

KEPT = 4
"""Number of finished steps that are kept."""
Loaded = Callable[[list[Any]], Any]
MOST_RUNS = 512
"""A step with more program runs than this is cut, to bound memory whatever the training loop does."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program that calls something."""

    operation: str
    """The name of the function that it calls."""
    name: str
    """The name of its result, or of the region."""
    unit: str
    is_region: bool = False
    node: str = ""
    """The program's node for the line."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on the host and, if the device is recorded, on the current stream."""

    host: float
    device: torch.Event | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """An interval that is not a line of a program."""

    name: str
    start: Moment
    end: Moment


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A finished run of a program: its lines, and when each of them began and ended."""

    phase: str
    program: str
    lines: Sequence[Line]
    start: Moment
    end: Moment
    stamps: array[float]
    """The end of each line, in order; the next line begins there."""
    events: Sequence[torch.Event]
    """The same on the stream; empty unless the device is recorded."""


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A collective, from its launch until it was waited for."""

    operation: str
    unit: str
    nbytes: int
    """Bytes that this rank sent."""
    launched: float
    ended: float | None
    """None if the host cannot tell, as on CUDA."""
    waited: Span
    group: str = ""
    """The axis of its group, if that is not the one that shards."""


@dataclass
class StepRecord:
    """The record of one step."""

    number: int
    version: int
    start: Moment
    trains: bool = True
    """False for a call without gradients that is no part of a training step."""
    split: bool = False
    """True if code of the model ran as plain Python between programs."""
    captures: bool = False
    """True if programs were traced and compiled in it."""
    calls: int = 0
    runs: list[RecordedRun] = field(default_factory=list)
    messages: list[RecordedMessage] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    end: Moment | None = None
    """None while the step is running."""


class Recorder:
    """Records the last few steps of one model.

    A step begins with the first call of the model after its parameters have changed, and lasts until the next step
    begins: it includes all micro-batches of an accumulation, the optimizer, and the rest of the training loop. A call
    without gradients between two such steps is a step of its own.
    """

    def __init__(self) -> None:
        self.enabled = True
        """If False, programs that are loaded from then on are not recorded."""
        self.device: torch.device | None = None
        """From the next step on, events are also recorded on the current stream of this device."""
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self._device: torch.device | None = None
        self._step = StepRecord(0, 0, self.now())
        self._call = self._step.start
        self._optimizer: Moment | None = None

    def now(self) -> Moment:
        """The current time. Does not wait: an event is recorded when the stream reaches it."""
        return Moment(perf_counter(), self.event())

    def event(self) -> torch.Event | None:
        """An event on the current stream, while the device is recorded.

        It orders nothing: no stream waits for it, and it is queried only when the step is read. None while the stream
        is captured into a CUDA graph, which the event would become a part of.
        """
        return None if self._device is None else event_here(self._device, timed=True)

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin_call(self, version: int, *, trains: bool) -> None:
        """The model is called, with parameters of this `version`."""
        step = self._step
        if not step.runs or version != step.version or not step.trains:
            self._begin_step(version)
        self._step.trains &= trains or self._step.calls > 0
        self._step.calls += 1
        self._call = self.now()

    def end_call(self, *, split: bool) -> None:
        """The model has returned; `split`: some of its code runs as plain Python."""
        self._step.split |= split
        self._step.spans.append(Span("call", self._call, self.now()))

    def captured(self) -> None:
        """A program was traced and compiled."""
        self._step.captures = True

    def ended(self, version: int) -> list[StepRecord]:
        """Finished steps, oldest first, including the current one if nothing of it is still to come."""
        step = self._step
        whole = step.runs and (version != step.version or not step.trains)
        return [*self.steps, step][-KEPT:] if whole else list(self.steps)

    def _begin_step(self, version: int) -> None:
        now, last = self.now(), self._step
        if self._optimizer is not None:  # it calls the model in a closure
            last.spans.append(Span("optimizer", self._optimizer, now))
            self._optimizer = now
        if last.runs:
            last.end = now
            self.steps.append(last)
        if self._device != self.device:
            self._device = self.device
            now = self.now()
        self._step = StepRecord(last.number + bool(last.runs), version, now)

    # -- what happens in a step -----------------------------------------------------------------------------------

    def begin_optimizer(self, start: Moment) -> None:
        """An optimizer of the model's parameters has begun its step."""
        self._optimizer = start

    def end_optimizer(self) -> None:
        """The optimizer has ended its step."""
        if self._optimizer is not None:
            self._step.spans.append(Span("optimizer", self._optimizer, self.now()))
        self._optimizer = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record an interval that is not a line of a program."""
        start = self.now()
        yield
        self._step.spans.append(Span(name, start, self.now()))

    def land(self, work: AsyncWork, operation: str, unit: str, sent: int, group: str = "") -> None:
        """Wait for a message and record it. `sent`: bytes sent by this rank; `group`: see `RecordedMessage`."""
        start = self.now()
        work.wait()
        waited = Span("wait", start, self.now())
        self._step.messages.append(RecordedMessage(operation, unit, sent, work.started, work.ended, waited, group))

    def add_run(self, run: RecordedRun) -> None:
        """Record a finished run of a program."""
        if len(self._step.runs) >= MOST_RUNS:
            self._begin_step(self._step.version)
        self._step.runs.append(run)


class Track:
    """Records the lines of one loaded program while it runs."""

    def __init__(self, recorder: Recorder, phase: str, program: str, lines: Sequence[Line]) -> None:
        self.recorder, self.phase, self.program, self.lines = recorder, phase, program, lines
        self.stamps: array[float] = array("d")
        """Appended to by the program that runs, after each line."""
        self._events: list[torch.Event] = []

    def shown(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a range in torch's profile, and with an event on the stream if the device is recorded."""

        def called(*args: Any, **kwargs: Any) -> Any:
            line = self.lines[len(self.stamps)]
            with _range(f"zcompile.{line.operation} {line.unit}".rstrip()):
                result = function(*args, **kwargs)
            if (event := self.recorder.event()) is not None:
                self._events.append(event)
            return result

        return called

    def run(self, plain: Loaded, shown: Callable[[], Loaded], box: list[Any]) -> Any:
        """Call a loaded program and record its lines; a run that raises is not recorded.

        `shown` gives the same program over functions that are `shown`, for a recorded device or torch's profiler.
        """
        del self.stamps[:]
        self._events = []
        program = shown() if self.recorder._device is not None or profiler_runs() else plain
        start = self.recorder.now()
        with _range(f"zcompile.{self.phase} {self.program}"):
            result = program(box)
        end = self.recorder.now()
        run = RecordedRun(self.phase, self.program, self.lines, start, end, self.stamps[:], self._events)
        self.recorder.add_run(run)
        return result


def _range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of that name in torch's profile, while its profiler runs."""
    return record_function(name) if profiler_runs() else contextlib.nullcontext()
