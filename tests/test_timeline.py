"""The timeline of a step: events that match the program's lines, figures that add up, a trace that can be opened."""

from __future__ import annotations

import ast
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import batch, fit, make
from tests.ranks import Ranks, on_threads
from zcompile.cost.timeline import Spent, Timeline
from zcompile.runtime.loader import load
from zcompile.runtime.recorder import MOST_RUNS, Line, Recorder, Track


def calls_in(text: str) -> list[str]:
    """The names of the functions that a printed program calls, in order."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call.func.id for call in sorted(calls, key=lambda call: call.lineno) if isinstance(call.func, ast.Name)]


def complaints(timeline: Timeline) -> list[str]:
    """What is wrong with the figures and the order of events."""
    parts = [timeline.compute, timeline.exposed, timeline.optimizer, timeline.overhead, timeline.idle]
    found = []
    if sum(parts) != pytest.approx(timeline.seconds, rel=1e-9):
        found.append(f"{parts} do not add up to {timeline.seconds}")
    if min(parts) < -1e-9:
        found.append(f"{parts} are not all positive")
    found += [f"{event} is not within the step" for event in timeline.events
              if not 0 <= event.start <= event.end <= timeline.seconds + 1e-9]  # fmt: skip
    found += [f"{event} owns less than nothing" for event in timeline.events if event.own < -1e-9]
    lines = timeline.lines
    found += [f"{a} overlaps {b}" for a, b in itertools.pairwise(lines) if b.start < a.end]
    return found


def crossing(events: list[dict[str, float]]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Neighbours in one lane of a trace that overlap without one being within the other."""
    lanes: dict[float, list[dict[str, float]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        lanes.setdefault(event["tid"], []).append(event)
    return [
        (a, b)
        for lane in lanes.values()
        for a, b in itertools.pairwise(lane)
        if b["ts"] < a["ts"] + a["dur"] - 1 < b["ts"] + b["dur"] - 2
    ]


def train(compiled: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, kind: str = "gpt") -> None:
    fit(compiled, optimizer, (batch(kind, rank, step) for step in range(steps)))


def recorded(rank: int, stage: int, folder: str) -> dict[str, object]:
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    train(compiled, optimizer, rank, 2)
    before = compiled.traffic.bytes
    train(compiled, optimizer, rank, 1)
    timeline = compiled.timeline
    called = [event.operation for event in timeline.lines]
    sending = {event.unit for event in timeline.events if event.operation == "send" and event.spent is Spent.EXPOSED}
    wanted = [name for program in compiled.programs for name in calls_in(str(program))]
    sent = compiled.traffic.bytes - before
    trace = timeline.save(Path(folder) / f"{stage}_{rank}.json")
    return {
        "lines": called == wanted,
        "complaints": complaints(timeline),
        "bytes": timeline.nbytes == sent,
        "messages": {message.operation for message in timeline.messages or ()},
        "units": {message.unit for message in timeline.messages or ()} == {u.name for u in compiled.layout.units},
        "sending": sending == {u.name for u in compiled.layout.units},
        "spent": all(timeline.spent(on) > 0 for on in Spent),
        "steps": [one.number for one in compiled.timelines],
        "page": all(unit.name in str(timeline) for unit in compiled.layout.units),
        "trace": str(trace),
    }


@pytest.mark.slow
@quickly("stage", range(4), [3])
def test_a_step_shows_the_lines_of_its_programs(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    operations = {0: {"all_reduce"}, 1: {"all_gather", "reduce_scatter"}}
    for rank, found in enumerate(ranks.run(2, recorded, stage, str(tmp_path))):
        trace = json.loads(Path(str(found.pop("trace"))).read_text())["traceEvents"]
        assert found == {
            "lines": True, "complaints": [], "bytes": True, "messages": operations[min(stage, 1)], "units": True,
            "sending": True, "spent": True, "steps": [0, 1, 2], "page": True,
        }  # fmt: skip
        assert all({"ph", "ts", "dur", "pid", "tid", "name"} <= event.keys() for event in trace if event["ph"] != "M")
        assert {event["pid"] for event in trace} == {rank}
        named = {event["tid"] for event in trace if event["name"] == "thread_name"}
        spans = [event for event in trace if event["ph"] == "X"]
        assert {event["tid"] for event in spans} == named
        assert all(event["dur"] >= 0 for event in spans)
        assert crossing(spans) == []


@pytest.mark.slow
def test_nothing_is_read_before_a_step_has_ended() -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    assert compiled.timelines == []
    compiled(*batch("mlp", 0, 0)).backward()
    with pytest.raises(zcompile.TimelineError, match="no step has ended"):
        _ = compiled.timeline
    with pytest.raises(zcompile.OptionError, match="the model is on cpu"):
        compiled.record_timeline(device=True)


def test_micro_batches_are_one_step_and_evaluations_their_own() -> None:
    compiled = zcompile.compile(make("mlp"), stage=1, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(2):
        with compiled.no_sync():
            compiled(*batch("mlp", 0, 2 * step)).backward()
        with torch.no_grad():
            compiled(*batch("mlp", 0, 9))  # before the optimizer's step it belongs to the training step
        compiled(*batch("mlp", 0, 2 * step + 1)).backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                compiled(*batch("mlp", 0, 9))
    assert [timeline.trains for timeline in compiled.timelines] == [False, True, False, False]
    step = compiled.timelines[1]
    assert complaints(step) == []
    programs = [event.operation for event in step.events if event.operation in ("forward", "backward")]
    assert programs == ["forward", "backward", "forward", "forward", "backward"]
    assert [event.operation for event in step.events].count("optimizer") == 1
    assert "accumulate" in {event.operation for event in step.lines}
    assert complaints(compiled.timeline) == []
    assert compiled.timeline.optimizer == 0


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.weight
        print(end="")
        return self.second(x).sum()


@pytest.mark.slow
@on_threads(2)
def test_a_split_model(rank: int) -> list[str]:
    warnings.simplefilter("ignore")
    compiled = zcompile.compile(Broken(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(2):
        compiled(torch.ones(2, 6)).backward()
        optimizer.step()
    timeline = compiled.timeline
    programs = [event.name for event in timeline.events if event.operation in ("forward", "backward")]
    found = complaints(timeline)
    found += [] if len(programs) == 4 and len(set(programs)) == 2 else [f"programs {programs}"]
    found += [] if "compute, plain Python" in str(timeline) else [str(timeline)]
    traced = [event for event in timeline.trace_events() if event["ph"] == "X"]
    found += [] if timeline.nbytes and crossing(traced) == [] else ["messages"]
    return found


def test_through_torch_compile() -> None:
    model = make("mlp")
    backend = zcompile.backend(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(torch.compile(model, backend=backend), optimizer, 0, 3, "mlp")
    assert complaints(backend.timeline) == []
    assert backend.timeline.number == 2
    assert backend.timeline.optimizer > 0


def test_an_optimizer_that_calls_the_model_is_in_the_steps_that_it_makes() -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compiled(*batch("mlp", 0, 0))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    first, second = compiled.timelines
    assert complaints(first) + complaints(second) == []
    assert first.optimizer > 0 < second.optimizer
    assert [event.operation for event in second.events if event.operation in ("optimizer", "backward")] == [
        "optimizer",
        "backward",
    ]


class Event:
    """A CUDA event of a device whose clock runs twice as fast as the host's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.ready = False

    def record(self, stream: object) -> None:
        self.moment = 2e3 * time.perf_counter()

    def synchronize(self) -> None:
        self.ready = True

    def elapsed_time(self, other: Event) -> float:
        assert other.ready, "read before the stream came to it"
        return other.moment - self.moment


def test_the_device_is_recorded_from_the_next_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiled = zcompile.compile(make("mlp"), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    train(compiled, optimizer, 0, 1, "mlp")
    compiled._engine.runtime.recorder.device = torch.device("cuda")
    train(compiled, optimizer, 0, 2, "mlp")
    compiled.record_timeline(device=False)
    train(compiled, optimizer, 0, 1, "mlp")
    assert [timeline.device for timeline in compiled.timelines] == [False, True, True, False]
    assert [complaints(timeline) for timeline in compiled.timelines] == [[], [], [], []]
    step, after = compiled.timelines[1:3]
    assert step.seconds == pytest.approx(2 * (after.began - step.began), rel=0.05)
    assert len(step.lines) == len(after.lines) == len(compiled.timeline.lines)
    assert (step.messages, step.hidden, step.nbytes) == (None, None, None)
    assert "times of the CUDA stream" in str(step)


def program_of(recorder: Recorder, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loaded program of one line, which calls `function` with the box."""
    track = Track(recorder, "forward", "0", [Line("f", "y", "a")])
    return load(
        "def forward(box):\n    y = f(box)\n    return y\n",
        "forward",
        {},
        "<one line>",
        track,
        operations={"f": function},
    )


def test_memory_is_bounded_whatever_the_loop_does() -> None:
    recorder = Recorder()
    program = program_of(recorder, lambda x: x)
    for step in range(10 * MOST_RUNS):
        recorder.begin_call(step // (2 * MOST_RUNS), trains=True)
        program([])
        recorder.end_call(split=False)
    assert [len(step.runs) for step in recorder.steps] == [MOST_RUNS] * 4
    assert all(len(run.stamps) == 1 for step in recorder.steps for run in step.runs)


def test_a_program_that_fails_leaves_nothing_to_the_next() -> None:
    recorder = Recorder()
    program = program_of(recorder, lambda x: 1 / x)
    recorder.begin_call(0, trains=True)
    with pytest.raises(ZeroDivisionError):
        program(0)
    assert program(2) == 0.5
    (run,) = recorder.ended(1)[0].runs
    (end,) = run.stamps
    assert run.start.host < end < run.end.host
