"""The recorder: when each line of a program, each message and each step of an optimizer began and ended.

It is always on, so all that happens while a step runs is that moments are appended to arrays, two for a line. What they
mean is worked out when somebody reads them (`zcompile.cost.timeline`). Moments are seconds of `time.perf_counter`.
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
"""How many steps are kept once they have ended."""
MOST_RUNS = 512
"""A step in which programs run more often than this is cut: memory is bounded, whatever the training loop does."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program that calls something."""

    operation: str
    """The name of the function that it calls."""
    name: str
    """Of the value that it gives, or of the region."""
    unit: str
    is_region: bool = False
    node: str = ""
    """The node of the program that it is a line of."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on the host and, while the device is recorded too, in the current stream."""

    host: float
    device: torch.Event | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Something with a beginning and an end that is no line of a program."""

    name: str
    start: Moment
    end: Moment


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A program that has run: its lines, and when each of them began and ended."""

    phase: str
    program: str
    lines: Sequence[Line]
    start: Moment
    end: Moment
    stamps: array[float]
    """Beginning and end of each line, in order."""
    events: Sequence[torch.Event]
    """The same in the stream; empty unless the device is recorded."""


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A collective, from its launch until it was waited for."""

    operation: str
    unit: str
    nbytes: int
    """Bytes that this rank sent."""
    launched: float
    ended: float | None
    """None where the host cannot tell, as on CUDA."""
    waited: Span
    group: str = ""
    """The axis that it went over, if that is not the one that shards."""


@dataclass
class StepRecord:
    """What one step has left."""

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
    """None while it goes on."""


class Recorder:
    """What one model's steps leave, the last few of them.

    A step begins with the first call of the model after its parameters have changed, and lasts until the next one does:
    so it holds all micro-batches of an accumulation, the optimizer, and what the training loop does besides. A call
    without gradients that comes between two such steps is a step of its own.
    """

    def __init__(self) -> None:
        self.enabled = True
        """False: programs that are loaded from then on leave nothing."""
        self.device: torch.device | None = None
        """From the next step on, events are recorded in the current stream of this device beside the host's clock."""
        self.steps: deque[StepRecord] = deque(maxlen=KEPT)
        self._device: torch.device | None = None
        self._step = StepRecord(0, 0, self.now())
        self._call = self._step.start
        self._optimizer: Moment | None = None

    def now(self) -> Moment:
        """This moment. Nothing is waited for: an event is recorded when the stream comes to it."""
        return Moment(perf_counter(), self.event())

    def event(self) -> torch.Event | None:
        """An event in the current stream, while the device is recorded.

        It orders nothing: no stream waits for it, and it is not looked at before somebody reads the step. In a stream
        that is captured into a CUDA graph an event would become a part of the graph, so there is none.
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
        """Steps that have ended, oldest first, the one that goes on included if nothing of it is to come."""
        step = self._step
        whole = step.runs and (version != step.version or not step.trains)
        return [*self.steps, step][-KEPT:] if whole else list(self.steps)

    def _begin_step(self, version: int) -> None:
        now, last = self.now(), self._step
        if self._optimizer is not None:  # its step calls the model, by a closure
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
        """It has ended its step."""
        if self._optimizer is not None:
            self._step.spans.append(Span("optimizer", self._optimizer, self.now()))
        self._optimizer = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the beginning and the end of something that is no line of a program."""
        start = self.now()
        yield
        self._step.spans.append(Span(name, start, self.now()))

    def land(self, work: AsyncWork, operation: str, unit: str, sent: int, group: str = "") -> None:
        """Wait for a message of which this rank has `sent` so many bytes, and note it; `group`: as noted."""
        start = self.now()
        work.wait()
        waited = Span("wait", start, self.now())
        self._step.messages.append(RecordedMessage(operation, unit, sent, work.started, work.ended, waited, group))

    def add_run(self, run: RecordedRun) -> None:
        """Note a program that has run."""
        if len(self._step.runs) >= MOST_RUNS:
            self._begin_step(self._step.version)
        self._step.runs.append(run)


class Track:
    """What one loaded program leaves while it runs."""

    def __init__(self, recorder: Recorder, phase: str, program: str, lines: Sequence[Line]) -> None:
        self.recorder, self.phase, self.program, self.lines = recorder, phase, program, lines
        self._stamps: array[float] = array("d")
        self._events: list[torch.Event] = []
        self._is_shown = False
        """True while the device is recorded, or a profiler of torch's runs, to which lines are told by name."""

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a program is to call it. This runs for every line: it costs a third of a microsecond."""
        stamp, now = self._stamps.extend, perf_counter

        def line(*args: Any, **kwargs: Any) -> Any:
            if self._is_shown:
                return self._shown(function, args, kwargs)
            start = now()
            result = function(*args, **kwargs)
            stamp((start, now()))
            return result

        return line

    def _shown(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, line = self.recorder.now(), self.lines[len(self._stamps) // 2]
        with _range(f"zcompile.{line.operation} {line.unit}".rstrip()):
            result = function(*args, **kwargs)
        for moment in (before, self.recorder.now()):
            self._stamps.append(moment.host)
            if moment.device is not None:
                self._events.append(moment.device)
        return result

    def run(self, function: Callable[[list[Any]], Any], box: list[Any]) -> Any:
        """Call the loaded program, whose lines are timed; one that raises leaves nothing."""
        del self._stamps[:]
        self._events = []
        self._is_shown = self.recorder._device is not None or profiler_runs()
        start = self.recorder.now()
        with _range(f"zcompile.{self.phase} {self.program}"):
            result = function(box)
        end = self.recorder.now()
        run = RecordedRun(self.phase, self.program, self.lines, start, end, self._stamps[:], self._events)
        self.recorder.add_run(run)
        return result


def _range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of that name in the profile of torch's profiler, while one runs."""
    return record_function(name) if profiler_runs() else contextlib.nullcontext()
