"""The pool of rank processes: what becomes of it where a rank fails."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import quickly
from tests.ranks import RankError, Ranks, Worker


def process(rank: int) -> int:
    """Of a rank that meets the other in a group of a mesh."""
    ranks = torch.tensor(rank)
    dist.all_reduce(ranks, group=init_device_mesh("cpu", (2,)).get_group())
    assert ranks == 1
    return os.getpid()


def fails(rank: int, how: str) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # one more than the other has made
        return
    if how == "dies":
        os._exit(3)
    if how == "hangs":
        time.sleep(1000)
    raise ValueError("failed")


SAID = {
    "dies": r"^rank 1:\nthe process died",
    "hangs": r"^rank 1:\nno answer(.|\n)*line \d+ in fails",
    "raises": r"^rank 1:\nTraceback(.|\n)*ValueError: failed",
}


@pytest.mark.slow
@quickly("how", list(SAID), ["hangs"], slow=())
def test_a_rank_that_fails_is_replaced_alone(ranks: Ranks, how: str) -> None:
    before = ranks.run(2, process)
    with pytest.raises(RankError, match=SAID[how]):
        ranks.run(2, fails, how, timeout=20)
    after = ranks.run(2, process)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.slow
def test_what_ranks_would_answer_after_a_test_has_ended_is_nobodys_answer(ranks: Ranks) -> None:
    before = ranks.run(2, process)
    with (
        mock.patch.object(Worker, "answer", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt) as interrupted,
    ):
        ranks.run(2, fails, "hangs")
    assert "rank 1:\n" in interrupted.value.__notes__[0]
    assert not set(before) & set(ranks.run(2, process))
