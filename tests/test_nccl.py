"""Several ranks on one GPU, over NCCL (`tests.ranks`): numbers beside DistributedDataParallel's, pipelines, errors.

The ways to train are those of the simulated device, which finds what their streams do not order; here is what they
compute on a real one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.compare import full
from tests.models import GPT, batch, make, update
from tests.ranks import AT_ONCE, RankError, Ranks
from tests.simulated.scenarios import SCENARIOS, Scenario, begin, loop

pytestmark = pytest.mark.gpu
EPS = 1e-3
"""Of AdamW: its default makes whole steps of gradients that are rounding alone."""
STEPS = 3
State = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    """Ranks whose groups know their device, so that torch makes communicators with the groups."""
    pool = Ranks(4, on="bound gpu")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def lazy() -> Iterator[Ranks]:
    """Ranks whose groups learn of the device, and make communicators, with the first message."""
    pool = Ranks(4, on="gpu")
    yield pool
    pool.close()


def far(ours: State, theirs: State) -> float:
    """The largest difference."""
    assert set(ours) == set(theirs)
    return max(float((ours[name].cpu() - value.cpu()).abs().max()) for name, value in theirs.items())


# -- data parallelism --------------------------------------------------------------------------------------------------


def data_parallel(rank: int, way: Scenario) -> dict[str, torch.Tensor]:
    """The state that a loop around DistributedDataParallel ends with."""
    kind = "gpt" if way.model == "large" else way.model
    model = DistributedDataParallel(make(kind).cuda(), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    scaler = torch.amp.GradScaler("cuda", enabled=way.scales)
    dtype = way.options.get("dtype")
    for step in range(STEPS):
        given = way.batch(step, rank // way.tensor)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            if way.accumulates:
                with model.no_sync():
                    model(*given).backward()
            loss = model(*given)
        scaler.scale(loss).backward()
        if way.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return dict(model.module.state_dict())


def beside(rank: int, way: Scenario) -> float:
    """How far the state is from that of DistributedDataParallel."""
    model, once, _ = begin(way, eps=EPS)
    for step in range(STEPS):
        once(way.batch(step, rank // way.tensor))
    compiled: Any = model
    return far(compiled.full_state_dict(rank0_only=False), data_parallel(rank, way))


def is_near(way: Scenario) -> float:
    """How far two computations of the same may be apart: bits, roundings, roundings of 16 bits."""
    if way.options.get("dtype") is not None:
        return 2e-3
    rounds = way.world > 2 or not way.options.keys().isdisjoint(("backend", "offload_parameters"))
    return 1e-6 if rounds else 0.0


TWO = (
    *("stage 0", "stage 1", "stage 2", "stage 3", "stage 3, prefetch 0", "stage 3, prefetch 4", "stage 2, pieces"),
    *("stage 3, odd sizes", "stage 3, arenas, checkpoint", "stage 3, activations, arenas", "stage 2, parameters"),
    *("stage 3, parameters, arenas", "stage 1, accumulating", "stage 3, accumulating", "stage 3, evaluating"),
    *("stage 3, side stream", "stage 3, alternating", "stage 3, memory limit", "stage 3, clipping"),
    *("train step, stage 2", "train step, stage 3", "train step, stage 3, clipping"),
    *("train step, stage 3, optimizer", "stage 1, bf16", "stage 3, float16, scaling"),
    *("owners, stage 2", "owners, stage 3", "owners, accumulating, clipping"),
    *("stage 1, graphs, accumulating", "stage 3, graphs", "train step, stage 3, graphs"),
    *("train step, stage 1, one graph, clipping", "train step, stage 3, one graph"),
)
FOUR = (
    *("stage 1", "stage 3", "hybrid, stage 2", "hybrid, stage 3", "hpz, stage 3", "hfsdp, stage 2", "hfsdp, stage 3"),
    *("hybrid, accumulation, clipped", "hfsdp, float16, scaling", "hpz, graphs", "owners, hybrid"),
    *("hybrid, train step", "tensor parallel, stage 3", "tensor parallel, train step"),
)
BY_INDUCTOR = {
    "stage 3, inductor": loop(3, backend="inductor"),
    "stage 3, bf16, inductor": loop(3, backend="inductor", dtype=torch.bfloat16),
    "stage 1, inductor, graphs": loop(1, backend="inductor", cuda_graphs=True),
}
WAYS = {name: replace(SCENARIOS[name], world=2) for name in TWO}
WAYS |= {name: replace(way, world=2) for name, way in BY_INDUCTOR.items()}
WAYS |= {f"{name}, four": replace(SCENARIOS[name], world=4) for name in FOUR}


@pytest.mark.parametrize("name", WAYS)
def test_training_is_that_of_distributed_data_parallel(name: str, request: pytest.FixtureRequest) -> None:
    way = WAYS[name]
    # Meshes of bound ranks split their groups: the second time in a process torch 2.11 ends in a segmentation fault.
    ranks: Ranks = request.getfixturevalue("gpu" if way.world == 2 else "lazy")
    found = ranks.run(way.world, beside, way, timeout=90)
    assert max(found) <= is_near(way)


def is_fsdp2(rank: int, stage: int) -> float:
    """How far a loop around FSDP2 is away."""
    way = replace(SCENARIOS["stage 3"], options={"stage": stage})
    model, once, _ = begin(way, eps=EPS)
    theirs: Any = make("gpt").cuda()
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, eps=EPS)
    for step in range(STEPS):
        once(way.batch(step, rank))
        theirs(*way.batch(step, rank)).backward()
        update(optimizer)
    return far(
        {name: full(parameter) for name, parameter in model.named_parameters()},
        {name: full(parameter) for name, parameter in theirs.named_parameters()},
    )


@pytest.mark.parametrize("world", [2, 4])
def test_training_is_that_of_fsdp2(lazy: Ranks, world: int) -> None:
    assert max(lazy.run(world, is_fsdp2, 3, timeout=90)) <= (0.0 if world == 2 else 1e-6)


def trained(rank: int, world: int, stage: int) -> tuple[Any, torch.optim.Optimizer]:
    model = make("mlp").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    compiled = zcompile.compile(model, stage=stage, optimizer=optimizer, backend="eager")
    for step in range(2):
        compiled(*(tensor.cuda() for tensor in batch("mlp", rank, step))).backward()
        update(optimizer)
    return compiled, optimizer


def saves(rank: int, folder: str) -> State:
    compiled, optimizer = trained(rank, 2, 3)
    compiled.save_checkpoint(folder, optimizer)
    state: State = compiled.full_state_dict(rank0_only=False)
    return state


def loads(rank: int, folder: str) -> State:
    compiled, optimizer = trained(rank + 7, 4, 2)
    compiled.load_checkpoint(folder, optimizer)
    state: State = compiled.full_state_dict(rank0_only=False)
    return state


def test_a_checkpoint_of_two_ranks_is_loaded_on_four(gpu: Ranks, tmp_path: Path) -> None:
    saved = gpu.run(2, saves, str(tmp_path / "checkpoint"))
    for loaded in gpu.run(4, loads, str(tmp_path / "checkpoint")):
        assert far(loaded, saved[0]) == 0


def seen_whole(rank: int) -> float:
    compiled, _ = trained(rank, 2, 3)
    with compiled.unsharded():
        seen = {name: parameter.detach().clone() for name, parameter in compiled.named_parameters()}
    return far(seen, compiled.full_state_dict(rank0_only=False))


def test_parameters_are_whole_inside_unsharded(lazy: Ranks) -> None:
    assert lazy.run(2, seen_whole) == [0, 0]


# -- pipelines ---------------------------------------------------------------------------------------------------------


def pipelined(rank: int, shape: tuple[int, int], options: Mapping[str, Any]) -> float:
    """How far a pipeline's state is from that of DistributedDataParallel, whose ranks have the same micro-batches."""
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp"))
    column = mesh["dp"].get_local_rank()
    batches = [[tensor.cuda() for tensor in batch("gpt", column, step, 8)] for step in range(STEPS)]
    states = []
    for is_plain in (False, True):
        torch.manual_seed(0)
        model = GPT(layers=8, width=16, heads=2).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
        if is_plain:
            called = DistributedDataParallel(model, device_ids=[0])
            for given in batches:
                called(*given).backward()
                update(optimizer)
            states.append(dict(model.state_dict()))
            continue
        step = zcompile.train_step(model, None, optimizer, mesh=mesh, microbatches=8, backend="eager", **options)
        for given in batches:
            step(*given)
        states.append(step.full_state_dict(rank0_only=False))
    return far(*states)


SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
SHAPES = ((2, 1), (4, 1), (2, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains(lazy: Ranks, schedule: str, shape: tuple[int, int]) -> None:
    options = {"schedule": schedule, "stage": SCHEDULES.index(schedule) % 4}
    assert max(lazy.run(shape[0] * shape[1], pipelined, shape, options, timeout=40)) < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pipelines_train_where_communicators_come_with_groups(gpu: Ranks, shape: tuple[int, int]) -> None:
    gpu.close()  # as above
    options = {"schedule": "interleaved1f1b", "stage": 2}
    assert max(gpu.run(shape[0] * shape[1], pipelined, shape, options, timeout=60)) < 1e-5


# -- errors ------------------------------------------------------------------------------------------------------------


def tell(rank: int, folder: str, call: Callable[[], object]) -> None:
    """Write what a call raises to a file, and end the process: it would wait for good for the ends of its groups."""
    try:
        call()
    except zcompile.ZcompileError as error:
        (Path(folder) / f"rank {rank}").write_text(type(error).__name__)
    os._exit(0)


def goes_astray(rank: int, folder: str) -> None:
    compiled, _ = trained(rank, 2, 3)
    given = [tensor.cuda() for tensor in batch("mlp", rank, 9)]
    tell(rank, folder, compiled.full_state_dict if rank else lambda: compiled(*given).backward())


def outlives(rank: int, folder: str) -> None:
    compiled, _ = trained(rank, 2, 3)
    given = [tensor.cuda() for tensor in batch("mlp", rank, 9)]
    torch.cuda.synchronize()  # what a rank has launched before it is gone was received
    if rank:
        os._exit(3)
    tell(rank, folder, lambda: compiled(*given).backward())


@pytest.mark.parametrize(("function", "told"), [(goes_astray, ["AgreementError"] * 2), (outlives, ["GroupError"])])
def test_ranks_are_told(function: Callable[[int, str], None], told: list[str], tmp_path: Path) -> None:
    began, pool = time.monotonic(), Ranks(2, on="bound gpu")
    with pytest.raises(RankError, match="the process died"):
        pool.run(2, function, str(tmp_path), timeout=90, group=20)
    pool.close()
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == told
    assert time.monotonic() - began < 2 * AT_ONCE
