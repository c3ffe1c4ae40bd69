"""A rank that waits for another says for whom and where; one that waits in vain names the rank that is to blame."""

from __future__ import annotations

import copy
import io
import linecache
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.ranks import AT_ONCE, Ranks, away, failed, on_ranks
from zcompile.runtime import stream_watch
from zcompile.runtime.stream_watch import StreamWatch
from zcompile.runtime.waits import Report, to_blame


@pytest.fixture
def started(ranks: Ranks) -> Ranks:
    """Ranks whose processes are there: short timeouts are for what they do, not for the import of torch."""
    ranks.run(3, idle, group=120)
    return ranks


def idle(rank: int) -> None:
    """Nothing."""


def trained(rank: int) -> Any:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    with torch.no_grad():
        compiled(*batch("gpt", rank, 0))
    return compiled


def stays_away(rank: int, culprit: int) -> tuple[str, str, float]:
    """The culprit does not take part; the first of the others to give up ends before the last one does."""
    compiled = trained(rank)
    if rank == culprit:
        return away()

    def evaluate() -> None:
        with torch.no_grad():
            compiled(*batch("gpt", rank, 1))

    return failed(evaluate)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "culprit"), [(2, 0), (3, 1)])
def test_a_rank_that_stays_away_is_named_with_the_line(started: Ranks, world: int, culprit: int) -> None:
    answers = started.run(world, stays_away, culprit, group=6)
    for rank, (kind, message, seconds) in enumerate(answers):
        if rank != culprit:
            assert kind == "GroupError"
            assert f"rank {culprit} never came" in message
            assert "of model 1, an evaluation" in message
            assert "line " in message
            assert " of forward " in message
            assert "= wait(" in message
            assert seconds < AT_ONCE


def warned(rank: int) -> tuple[list[str], float]:
    compiled = trained(rank)
    compiled(*batch("gpt", rank, 1)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(14)
        loss = compiled(*batch("gpt", rank, 1))
        loss.backward()
    return [str(warning.message) for warning in caught], float(loss.detach())


@pytest.mark.slow
def test_a_slow_rank_is_warned_of_after_ten_seconds_and_waited_for(ranks: Ranks) -> None:
    (mine, _), (theirs, _) = ranks.run(2, warned, group=60)
    waits = [message for message in mine if "has waited" in message]
    assert len(waits) == 1
    assert waits[0].startswith("zcompile: rank 0 has waited 10 s for rank 1, at line ")
    assert not [message for message in theirs if "has waited" in message]


def whole_state_of_one_rank(rank: int, what: str) -> tuple[str, str, float]:
    compiled = trained(rank)
    if rank == 1:
        return away()
    calls = {
        "full_state_dict": compiled.full_state_dict,
        "save_checkpoint": lambda: compiled.save_checkpoint("/nowhere"),
    }
    return failed(calls[what])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full_state_dict", "save_checkpoint"])
def test_a_state_that_one_rank_alone_asks_for(started: Ranks, what: str) -> None:
    (kind, message, seconds), _ = started.run(2, whole_state_of_one_rank, what, group=5)
    assert kind == "AgreementError"
    assert "rank 1 did not arrive within 5 s" in message
    assert seconds < AT_ONCE


def calls_alone(rank: int, what: str) -> tuple[str, str, float]:
    """All ranks but the second communicate by way of what users hold, which the second leaves out."""
    model = make("gpt")
    compiled = zcompile.compile(model, stage=3, backend="eager")
    compiled(*batch("gpt", rank, 0)).backward()
    if rank == 1:
        return away()
    weight = next(iter(compiled.parameters()))
    assert weight.grad is not None
    calls = {
        "clip": lambda: torch.nn.utils.clip_grad_norm_(compiled.parameters(), 0.1),
        "gradient": lambda: weight.grad.full_tensor(),
        "parameter": lambda: weight.full_tensor(),
        "norm": lambda: weight.detach().norm().item(),
    }
    return failed(calls[what])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "what", "line"),
    [
        (2, "clip", "clip_grad_norm_"),
        (3, "gradient", "weight.grad.full_tensor()"),
        (2, "parameter", "weight.full_tensor()"),
        (2, "norm", "norm().item()"),
    ],
)
def test_a_collective_of_torch_that_one_rank_leaves_out_names_it(
    started: Ranks, world: int, what: str, line: str
) -> None:
    answers = started.run(world, calls_alone, what, group=5)
    for kind, message, seconds in answers[:1] + answers[2:]:
        assert kind == "GroupError"
        assert "rank 1 never came" in message
        assert f"{__file__}, `" in message
        assert line in message.split("`")[1]
        assert seconds < AT_ONCE


@pytest.mark.slow
def test_a_long_collective_of_torch_is_warned_of(ranks: Ranks) -> None:
    (mine, _), (theirs, _) = ranks.run(2, clips_late, group=60)
    assert len(mine) == 1
    assert mine[0].startswith("zcompile: rank 0 has waited 10 s for rank 1, at ")
    assert "clip_grad_norm_(compiled.parameters(), 0.1)" in mine[0]
    assert not theirs


def clips_late(rank: int) -> tuple[list[str], float]:
    compiled = trained(rank)
    compiled(*batch("gpt", rank, 1)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(11)
        norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
    return [str(warning.message) for warning in caught if "waited" in str(warning.message)], float(norm)


@pytest.mark.slow
@on_ranks(2)
def test_an_error_of_an_operation_on_gradients_is_left_as_it_is(rank: int) -> None:
    compiled = trained(rank)
    compiled(*batch("gpt", rank, 1)).backward()
    for parameter in compiled.parameters():
        parameter.grad *= float("inf")
    clip = torch.nn.utils.clip_grad_norm_
    kind, message, _ = failed(lambda: clip(compiled.parameters(), 1.0, error_if_nonfinite=True))
    assert kind == "RuntimeError"
    assert "rank" not in message


@pytest.mark.slow
@on_ranks(2)
def test_gradients_and_parameters_are_saved_as_plain_dtensors(rank: int) -> None:
    compiled = trained(rank)
    compiled(*batch("gpt", rank, 1)).backward()
    gradients = [param.grad for param in compiled.parameters()]
    held = [*compiled.parameters(), *gradients, *copy.deepcopy(gradients)]
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    back = torch.load(file)
    pairs = zip(back, held, strict=True)
    assert all(type(one) is DTensor and torch.equal(one.to_local(), kept.to_local()) for one, kept in pairs)


def test_who_is_to_blame() -> None:
    waiting = {0: Report([1]), 1: Report([2])}
    assert to_blame([1], waiting, 3) == [2], "the end of the chain"
    assert to_blame([0, 2], {0: Report([2])}, 1) == [2], "who waits for nobody"
    assert to_blame([1], {}, 0) == [1]
    assert to_blame([1], {1: Report([0])}, 0) == [1], "each waits for the other"
    assert to_blame([1], {1: Report([2]), 2: Report([1])}, 0) == [1, 2]


SUMMED = [(2, 1), (3, 5), (2, 3_000_001), (3, 4_500_000), (4, 9_000)]


@quickly("world, numel", SUMMED, [(3, 5), (2, 3_000_001)])
@on_ranks()
def test_an_all_reduce_sums_in_the_order_of_ranks(rank: int, world: int, numel: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from zcompile.runtime.groups import Communicator

    communicator = Communicator(init_device_mesh("cpu", (world,)), torch.device("cpu"))
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    mine = values[rank].clone()
    communicator.collectives.all_reduce(mine).wait()
    wanted = values[0].clone()
    for other in values[1:]:
        wanted += other
    flags = communicator.any_rank(torch.tensor([rank, -rank]))
    dist.barrier()
    assert torch.equal(mine, wanted / world)
    assert flags.tolist() == [world - 1, 0]


def has_no_program(rank: int) -> tuple[str, str, float]:
    def fails(program: zcompile.Program) -> zcompile.Program:
        if rank == 0:
            raise ValueError("this batch has none")
        return program

    compiled = zcompile.compile(make("gpt"), backend="eager", passes={"mine": zcompile.Pass("mine", fails)})
    return failed(lambda: compiled(*batch("gpt", rank, 0)))


@pytest.mark.slow
def test_a_rank_without_a_program_is_told_of_at_once(ranks: Ranks) -> None:
    (kind, _, _), *others = ranks.run(3, has_no_program, group=60)
    assert kind == "PipelineError"
    for other, message, seconds in others:
        assert other == "AgreementError"
        assert "rank 0 failed there: PipelineError: mine: raised ValueError: this batch has none" in message
        assert seconds < AT_ONCE


# -- a GPU ------------------------------------------------------------------------------------------------------------


class Event:
    """At a point that a stream comes past when `done` says so."""

    def __init__(self) -> None:
        self.done, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


def test_a_gpu_that_comes_no_further_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    monkeypatch.setattr(stream_watch, "event_here", lambda *_: events.append(Event()) or events[-1])
    file, text = "<zcompile backward>", "\nu1 = wait(u1_gather)"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    watch = StreamWatch(SimpleNamespace(rank=2, run="run 3, backward"), torch.device("cpu"), 600)  # type: ignore[arg-type]
    for _ in range(3):
        exec(compile(text, file, "exec"), {"wait": lambda _: watch.passed(), "u1_gather": None})
    events[0].done = True
    told = (
        r"the GPU of rank 2 has been stuck at line 2 of backward, `u1 = wait\(u1_gather\)` \(run 3, backward\) for 11 s"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look(100)
        watch.look(109)
        with pytest.raises(RuntimeWarning, match=told):
            watch.look(111)
        watch.look(300)  # once, until the end is near
        with pytest.raises(
            RuntimeWarning, match=r"for 541 s.*600 s after the launch the watchdog of NCCL ends the process"
        ):
            watch.look(641)
        events[1].done = True
        watch.look(700)
        watch.look(705)
        events[2].done = True
        watch.look(900)
        watch.look(1000)


def test_what_the_gpu_has_come_past_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Event] = []
    monkeypatch.setattr(stream_watch, "event_here", lambda _, event: event or made.append(Event()) or made[-1])
    watch = StreamWatch(SimpleNamespace(rank=0, run=""), torch.device("cpu"), 600)  # type: ignore[arg-type]
    for number in range(3):
        watch.passed()
        made[0].done, made[0].asked = True, 0
        watch.look(number)
        watch.look(number)
        assert made[0].asked == 1
    assert len(made) == 1, "an event is used again"


def test_only_the_last_waits_of_a_gpu_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_watch, "event_here", lambda _, event: event or Event())
    watch = StreamWatch(SimpleNamespace(rank=0, run=""), torch.device("cpu"), 600)  # type: ignore[arg-type]
    for _ in range(2 * stream_watch.KEPT + 1):
        watch.passed()
    assert len(watch._passed) == stream_watch.KEPT
    assert max(wait.number for wait in watch._passed) == 2 * stream_watch.KEPT
