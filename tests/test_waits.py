"""A rank that waits for another says for whom and where; one that waits in vain names the rank that is to blame."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from zcompile.runtime.waits import Report, to_blame


@pytest.fixture
def started(ranks: Ranks) -> Ranks:
    """Ranks whose processes are there: short timeouts are for what they do, not for the import of torch."""
    ranks.run(3, idle, group=120)
    return ranks


def idle(rank: int) -> None:
    """Nothing."""


def failed(call: Any) -> tuple[str, str, float]:
    started = time.perf_counter()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - started
    return "", "", time.perf_counter() - started


def trained(rank: int) -> Any:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    with torch.no_grad():
        compiled(*batch("gpt", rank, 0))
    return compiled


def stays_away(rank: int, culprit: int, seconds: float) -> tuple[str, str, float]:
    """The culprit does not take part; the first of the others to give up ends before the last one does."""
    compiled = trained(rank)
    if rank == culprit:
        time.sleep(seconds)
        return "", "", 0.0

    def evaluate() -> None:
        with torch.no_grad():
            compiled(*batch("gpt", rank, 1))

    return failed(evaluate)


@pytest.mark.parametrize(("world", "culprit"), [(2, 0), (3, 1)])
def test_a_rank_that_stays_away_is_named_with_the_line(started: Ranks, world: int, culprit: int) -> None:
    answers = started.run(world, stays_away, culprit, 14.0, group=6)
    for rank, (kind, message, seconds) in enumerate(answers):
        if rank != culprit:
            assert kind == "GroupError"
            assert f"rank {culprit} never came" in message
            assert "of model 1, an evaluation" in message
            assert "line " in message
            assert " of forward " in message
            assert "= wait(" in message
            assert seconds < 16


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
        time.sleep(12)
        return "", "", 0.0
    calls = {
        "full_state_dict": compiled.full_state_dict,
        "save_checkpoint": lambda: compiled.save_checkpoint("/nowhere"),
    }
    return failed(calls[what])


@pytest.mark.parametrize("what", ["full_state_dict", "save_checkpoint"])
def test_a_state_that_one_rank_alone_asks_for(started: Ranks, what: str) -> None:
    (kind, message, seconds), _ = started.run(2, whole_state_of_one_rank, what, group=5)
    assert kind == "AgreementError"
    assert "rank 1 did not get here within 5 s" in message
    assert seconds < 15


def test_who_is_to_blame() -> None:
    waiting = {0: Report([1]), 1: Report([2])}
    assert to_blame([1], waiting, 3) == [2], "the end of the chain"
    assert to_blame([0, 2], {0: Report([2])}, 1) == [2], "who waits for nobody"
    assert to_blame([1], {}, 0) == [1]
    assert to_blame([1], {1: Report([0])}, 0) == [1], "each waits for the other"
    assert to_blame([1], {1: Report([2]), 2: Report([1])}, 0) == [1, 2]


def exchange(rank: int, world: int, numel: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    from zcompile.runtime.groups import Communicator

    communicator = Communicator(init_device_mesh("cpu", (world,)), torch.device("cpu"))
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(other)) for other in range(world)]
    mine = values[rank].clone()
    communicator.all_reduce(mine).wait()
    wanted = values[0].clone()
    for other in values[1:]:
        wanted += other
    flags = communicator.any_rank(torch.tensor([rank, -rank]))
    dist.barrier()
    return torch.equal(mine, wanted / world) and flags.tolist() == [world - 1, 0]


@pytest.mark.parametrize(("world", "numel"), [(2, 1), (3, 5), (2, 3_000_001), (3, 4_500_000), (4, 9_000)])
def test_an_all_reduce_sums_in_the_order_of_ranks(ranks: Ranks, world: int, numel: int) -> None:
    assert all(ranks.run(world, exchange, world, numel))
