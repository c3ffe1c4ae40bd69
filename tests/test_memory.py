"""Memory and bytes, measured on two ranks: what is alive when, and what the collectives really sent."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import zcompile
from tests.cases import quickly
from tests.models import GPT, batch
from tests.ranks import Ranks, on_ranks
from zcompile.cost.memory import model_state
from zcompile.ir.tensor_type import human_bytes
from zcompile.runtime import executor, loader
from zcompile.torch_internals.pytree import tree_leaves

WORLD = 2


class Probe:
    """Counts the storages of full parameters that are alive, at every operation of a program."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def see(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.settled())

    def settled(self) -> int:
        """What is alive once gloo's thread, which may lose the processor right after it is done, has let go."""
        found = self.alive()
        for _ in range(10):
            time.sleep(0.001)
            found = min(found, self.alive())
        return found

    def alive(self) -> int:
        return sum(nbytes for reference, nbytes in self.seen.values() if not reference.expired())

    def operations(self) -> dict[str, Any]:
        def gather(*args: Any, **kwargs: Any) -> Any:
            started = executor.all_gather(*args, **kwargs)
            self.see(*(arrived for _, arrived, _ in started.arrivals))
            return started

        def wait(started: Any) -> Any:
            found = started.wait()
            if isinstance(found, executor.Full):
                self.see(*found.tensors)
            return found

        return {**loader.OPERATIONS, "all_gather": gather, "wait": wait}


def bytes_of(tensors: Any) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=3, width=64)


def measure_full(rank: int, prefetch: int) -> dict[str, int]:
    probe = Probe()
    ordinary, loader.OPERATIONS = loader.OPERATIONS, probe.operations()
    try:
        compiled = zcompile.compile(model(), prefetch=prefetch, backend="eager")
        optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
        for step in range(2):
            loss = compiled(*batch("gpt", rank, step))
            between = probe.settled()
            loss.backward()
            optimizer.step()
            after = probe.settled()
            gradients = bytes_of(local(p.grad) for p in compiled.parameters())
            optimizer.zero_grad()
        with torch.no_grad():
            compiled(*batch("gpt", rank, 0))
        states = (s for state in optimizer.state.values() for k, s in state.items() if k != "step")
        sizes = [compiled.layout.gathered_bytes(unit.name) for unit in compiled.layout.units]
        return {
            "peak": probe.peak,
            "expected peak": max(sum(window) for window in windows(sizes, prefetch + 1)),
            "between": between,
            "last units": sum(sizes[-prefetch - 1 :]),
            "after": after,
            "after inference": probe.settled(),
            "parameters": bytes_of(local(p) for p in compiled.parameters()),
            "gradients": gradients,
            "optimizer": bytes_of(map(local, states)),
            "psi": sum(p.nbytes for p in compiled.layout.params),
        }
    finally:
        loader.OPERATIONS = ordinary


def windows(sizes: list[int], width: int) -> itertools.chain[list[int]]:
    starts = range(max(1, len(sizes) - width + 1))
    return itertools.chain(sizes[start : start + width] for start in starts)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_stage_3_holds_a_share_and_gathers_a_few_units(ranks: Ranks, prefetch: int) -> None:
    for found in ranks.run(WORLD, measure_full, prefetch):
        assert found["peak"] == found["expected peak"]
        assert found["between"] <= found["last units"]  # kept over the turn, not gathered twice
        assert found["after"] == found["after inference"] == 0
        assert found["parameters"] == found["gradients"] == found["psi"] // WORLD
        assert found["optimizer"] == 2 * found["psi"] // WORLD


class Wire:
    """Counts the bytes that leave this rank where messages and collectives are launched."""

    def __init__(self) -> None:
        self.sent = 0.0

    def counted(self, launch: Any, share: float) -> Any:
        """`launch`, which sends `share` of the bytes of the tensor that it is given."""

        def call(*args: Any, **kwargs: Any) -> Any:
            (tensor,) = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            # Numbers are what ranks tell each other of their runs.
            self.sent += tensor.nbytes * share if tensor.is_floating_point() else 0
            return launch(*args, **kwargs)

        return call


def psi(compiled: zcompile.CompiledModule) -> int:
    return sum(param.nbytes for param in compiled.layout.params)


@quickly("stage", range(4), [3])
@on_ranks(WORLD)
def test_collectives_send_exactly_the_stages_volume(rank: int, stage: int) -> None:
    """What three training steps really sent, beside Ψ and what was kept."""
    import torch.distributed as dist

    wire = Wire()
    gloo = dist.ProcessGroupGloo
    ordinary = gloo.send, dist.all_reduce
    compiled = zcompile.compile(model(), stage=stage, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(*batch("gpt", rank, 0)).backward()
    optimizer.step()
    before = compiled.traffic.bytes
    try:
        gloo.send = wire.counted(ordinary[0], 1)
        dist.all_reduce = wire.counted(ordinary[1], 2 * (WORLD - 1) / WORLD)
        for step in range(3):
            compiled(*batch("gpt", rank, step)).backward()
            optimizer.step()
    finally:
        gloo.send, dist.all_reduce = ordinary
    step_program = compiled._engine.runtime.steps[0].program
    kept = sum(unit.nbytes for unit in compiled.layout.units[-3:]) if stage == 3 else 0  # prefetch + 1
    unread = compiled.layout.units[0].nbytes if stage == 3 else 0  # no backward of an embedding reads its weights
    found = {
        "counted": wire.sent,
        "metered": compiled.traffic.bytes - before,
        "declared": 3 * step_program.volume(),
        "expected": 3 * (compiled.layout.stage.volume * psi(compiled) - kept - unread) * (WORLD - 1) / WORLD,
    }
    assert found["counted"] == found["metered"] == found["declared"] == found["expected"]


@pytest.mark.slow
@quickly("stage", [1, 2], [2])
@on_ranks(WORLD)
def test_stages_1_and_2_gather_only_after_a_step(rank: int, stage: int) -> None:
    compiled = zcompile.compile(model(), stage=stage, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    sent = []
    for step in range(4):
        before = compiled.traffic.bytes
        with torch.no_grad():
            compiled(*batch("gpt", rank, step))
        sent.append(compiled.traffic.bytes - before)
        if step == 1:
            compiled(*batch("gpt", rank, step)).backward()
            optimizer.step()
    full = psi(compiled)
    assert sent == [full // 2, 0, full // 2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(WORLD)
def test_kept_copies_are_gathered_anew_into_the_same_memory(rank: int, stage: int) -> None:
    """Where kept full copies lie before and after a step, and how many there are once a program runs no more."""
    torch.manual_seed(0)
    compiled = zcompile.compile(GPT(layers=2, width=128), stage=stage, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    places = []
    for step in range(2):
        compiled(*batch("gpt", rank, step)).backward()
        shards = compiled._engine.runtime.shards.values()
        places.append([t.data_ptr() for held in shards for full in held.kept.values() for t in full.arrived.values()])
        optimizer.step()
    compiled._engine.runtime.freshness.drop_stale_copies()
    stale = sum(len(held.kept) for held in shards)
    compiled._engine.runtime.freshness.step()
    compiled._engine.runtime.freshness.drop_stale_copies()
    assert places[0] == places[1] != []
    assert stale > 0
    assert sum(len(held.kept) for held in shards) == 0  # renewed by no gather since: freed


@pytest.mark.slow
@quickly("stage", range(4), [3])
@on_ranks(WORLD)
def test_the_model_state_is_what_explain_says_and_the_formula_allows(rank: int, stage: int) -> None:
    """Bytes of parameters, copies, gradients and moments that are there."""
    compiled = zcompile.compile(model(), stage=stage, dtype=torch.bfloat16, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    compiled(*batch("gpt", rank, 0)).backward()
    optimizer.step()
    moments = [s for state in optimizer.state.values() for name, s in state.items() if name != "step"]
    gradients = [p.grad for p in compiled.parameters() if p.grad is not None]
    kept = [full for shards in compiled._engine.runtime.shards.values() for full in shards.kept.values()]
    copies = [tensor for full in kept for tensor in full.tensors if tensor is not None]
    found = bytes_of(map(local, (*compiled.parameters(), *gradients, *moments, *copies)))
    state = model_state(compiled.layout)
    assert f"two moments (Adam): {human_bytes(state.nbytes)}" in compiled.explain()
    assert found == pytest.approx(state.nbytes, rel=0.01)
    if stage == 3:
        assert found <= 1.01 * 16 * sum(p.numel for p in compiled.layout.params) / WORLD
