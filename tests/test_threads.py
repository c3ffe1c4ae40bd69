"""Ranks that are threads: they compute what rank processes do, take turns, and end together."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zcompile
from tests import shared_steps, shared_traces
from tests import threads as threads_module
from tests.models import batch, fit, make
from tests.ranks import RankError, Ranks
from tests.shared_traces import Sharing
from tests.test_training import train, train_ddp
from tests.threads import Threads

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def collectives(rank: int) -> dict[str, Any]:
    """What each collective of torch's gives."""
    world = dist.get_world_size()
    mine = torch.arange(6.0) * 10 ** (rank + 1)
    found: dict[str, Any] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        dist.all_reduce(reduced := mine.clone(), op=op)
        found[f"all_reduce {op}"] = reduced
    dist.reduce(reduced := mine.clone(), 1)
    found["reduce"] = reduced if rank == 1 else None
    dist.broadcast(sent := mine.clone(), 1)
    found["broadcast"] = sent
    all_gather(gathered := torch.empty(6 * world), mine)
    found["all_gather_single"] = gathered
    dist.all_gather(rows := [torch.empty(6) for _ in range(world)], mine)
    found["all_gather"] = rows
    reduce_scatter(part := torch.empty(6 // world), mine)
    found["reduce_scatter"] = part
    dist.all_to_all_single(exchanged := torch.empty(6), mine)
    found["all_to_all_single"] = exchanged
    dist.gather(mine, into := [torch.empty(6) for _ in range(world)] if rank == 0 else None)
    found["gather"] = into
    dist.scatter(own := torch.empty(3), [*mine.view(2, 3)] if rank == 1 else None, src=1)
    found["scatter"] = own
    dist.all_gather_object(objects := [None] * world, {"of": rank})
    found["all_gather_object"] = objects
    mesh = init_device_mesh("cpu", (world,))
    rows_of = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    whole = DTensor.from_local(mine, mesh, [Replicate()])
    found["DTensor"] = rows_of.full_tensor(), (rows_of @ rows_of.T).full_tensor(), whole.to_local()
    return found


def messages(rank: int) -> list[float]:
    """What has arrived, of messages that are waited for in another order than they were sent in."""
    other, arrived = 1 - rank, [torch.empty(2) for _ in range(4)]
    works = [dist.irecv(one, other, tag=number % 2) for number, one in enumerate(arrived)]
    for number in (1, 0, 3, 2):
        dist.isend(sent := torch.full((2,), 10.0 * rank + number), other, tag=number % 2).wait()
        sent.zero_()
    for work in reversed(works):
        work.wait()
    return [one[0].item() for one in arrived]


@pytest.mark.parametrize("job", [collectives, messages])
def test_torchs_own_functions_give_what_they_give_in_processes(threads: Threads, ranks: Ranks, job: Any) -> None:
    torch.testing.assert_close(threads.run(2, job), ranks.run(2, job), rtol=0, atol=0)


def groups_of_a_mesh(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    sums = [torch.tensor(10.0**rank) for _ in range(2)]
    for one, name in zip(sums, ("outer", "inner"), strict=True):
        dist.all_reduce(one, group=mesh[name].get_group())
    return [one.item() for one in sums]


def test_groups_of_a_mesh_do_not_meet(threads: Threads) -> None:
    assert threads.run(4, groups_of_a_mesh) == [[101, 11], [1010, 11], [101, 1100], [1010, 1100]]


def random_numbers(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    drawn = [torch.rand(2)]
    dist.barrier()
    return [*drawn, torch.rand(2)]


def test_each_rank_draws_its_own_random_numbers(threads: Threads) -> None:
    before = torch.get_rng_state()
    for rank, drawn in enumerate(threads.run(3, random_numbers)):
        torch.manual_seed(rank)
        assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(2), torch.rand(2)]))
    torch.set_rng_state(before)


def failing(rank: int) -> None:
    if rank == 1:
        raise ValueError("on one rank")
    dist.barrier()


def stuck(rank: int) -> None:
    if rank == 1:
        dist.barrier()


@pytest.mark.parametrize(("job", "says"), [(failing, "ValueError: on one rank"), (stuck, "in stuck\n    dist.barrier")])
def test_a_rank_that_fails_or_waits_in_vain_ends_all(threads: Threads, job: Any, says: str) -> None:
    with mock.patch.object(threads_module, "HANGS", 0.5), pytest.raises(RankError) as raised:
        threads.run(3, job)
    assert says in str(raised.value)
    assert str(raised.value).startswith("rank 1:\n")
    assert not dist.is_initialized()


def on_and_on(rank: int) -> None:
    """Rank 0 has the test interrupted, as its timeout does, while both go on."""
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    while True:
        dist.barrier()


def test_ranks_end_with_a_test_that_is_interrupted(threads: Threads) -> None:
    def interrupt(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(TimeoutError):
            threads.run(2, on_and_on)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank") and thread.is_alive()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "gpt", "tied", "conv"])
def test_models_train_as_in_processes(threads: Threads, ranks: Ranks, kind: str) -> None:
    """Bit for bit, though steps are traced once for all ranks."""
    options: dict[str, Any] = {"stage": 3, "prefetch": 1, "backend": "eager"}
    by_threads = threads.run(2, trained, kind, options)
    assert by_threads == ranks.run(2, trained, kind, options)
    by_ddp = threads.run(2, train_ddp, kind, 2)
    for (values, *_), wanted in zip(by_threads, by_ddp, strict=True):
        assert values == {name: value.tolist() for name, value in wanted.items()}


def trained(rank: int, kind: str, options: dict[str, Any]) -> tuple[dict[str, Any], float, int]:
    values, loss, sent = train(rank, kind, 2, **options)
    return {name: value.tolist() for name, value in values.items()}, loss, sent


def count_traces(threads: Threads, *jobs: Any) -> int:
    with mock.patch.object(Sharing, "record", autospec=True, side_effect=Sharing.record) as record:
        for job in jobs:
            threads.run(2, *job)
    return record.call_count


@pytest.mark.slow
def test_a_step_is_traced_once_for_all_ranks_and_options(threads: Threads) -> None:
    shared_traces._TRACES.clear()
    jobs = [(trained, "mlp", {"stage": stage, "backend": "eager"}) for stage in (1, 3)]
    assert count_traces(threads, *jobs) == 1


SCALE = 2.0


class Reads(nn.Module):
    """Its code reads a constant of the file and an attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() * self.factor * SCALE


class ReadsMore(Reads):
    """And what may be written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * WHICH[0]


WHICH = [1.0]


def read(rank: int, kind: type[Reads], factor: float) -> float:
    torch.manual_seed(0)
    compiled = zcompile.compile(kind(factor), stage=3, backend="eager")
    result: float = compiled(torch.ones(2, 3)).item()
    return result


@pytest.mark.slow
def test_what_is_traced_follows_attributes_and_constants(threads: Threads) -> None:
    shared_traces._TRACES.clear()
    torch.manual_seed(0)
    wanted = Reads(1.0)(torch.ones(2, 3)).item()
    assert threads.run(2, read, Reads, 1.0) == [wanted] * 2
    assert threads.run(2, read, Reads, 3.0) == pytest.approx([3 * wanted] * 2)
    with mock.patch.dict(globals(), SCALE=4.0):
        assert threads.run(2, read, Reads, 1.0) == pytest.approx([2 * wanted] * 2)
    assert len(list(filter(None, shared_traces._TRACES.values()))) == 3


class Twice(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


Twice.__qualname__ = "Reads"  # as a class of another file


@pytest.mark.slow
def test_what_is_traced_follows_the_code(threads: Threads) -> None:
    (once, _), (twice, _) = (threads.run(2, read, kind, 1.0) for kind in (Reads, Twice))
    assert twice == 2 * once


def test_what_is_not_known_to_be_constant_is_traced_by_every_rank(threads: Threads) -> None:
    shared_traces._TRACES.clear()
    assert count_traces(threads, (read, ReadsMore, 1.0)) == 0


def hooked(rank: int) -> list[float]:
    model = make("mlp")
    model.layers[0].register_forward_hook(lambda _module, _given, result: 2 * result)
    compiled = zcompile.compile(model, stage=3, backend="eager")
    losses = fit(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), [batch("mlp", rank, 0)] * 2)
    return [loss.item() for loss in losses]


@pytest.mark.slow
def test_hooks_are_traced(threads: Threads) -> None:
    shared_traces._TRACES.clear()
    assert count_traces(threads, (hooked,)) == 0


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    return SCALE * model(x) / 4


def half(model: Any, x: torch.Tensor) -> torch.Tensor:
    return mean(model, x) / 2


def stepped(rank: int, loss: Any, pipelined: bool) -> float:
    """The loss of a step, alone or of a pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Reads(1.0))
    ways: dict[str, Any] = {"units": ["0", "2"], "backend": "eager"}
    if pipelined:
        ways["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    step = zcompile.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), **ways)
    return float(step(torch.ones(2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [False, True])
def test_what_is_traced_follows_the_loss(threads: Threads, pipelined: bool) -> None:
    shared_traces._TRACES.clear()
    shared_steps._TRACES.clear()
    with mock.patch.object(shared_steps, "trace_step", side_effect=shared_steps.trace_step) as traced:
        whole, again, less = (threads.run(2, stepped, loss, pipelined) for loss in (mean, mean, half))
        assert whole == again == [2 * one for one in less]
        with mock.patch.dict(globals(), SCALE=4.0):
            assert threads.run(2, stepped, mean, pipelined) == [4 * one for one in whole], "the model reads it, too"
    assert len([*filter(None, shared_traces._TRACES.values()), *shared_steps._TRACES.values()]) == 3
    assert traced.call_count == (3 if pipelined else 0)
