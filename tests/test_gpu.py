"""A world of one on a CUDA device: streams, NCCL and float16 for real, where the CPU tests have several ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.compare import full
from tests.models import batch, make, update
from tests.test_fragments import make as make_broken
from zcompile.torch_internals.dtensor import local_tensor

pytestmark = pytest.mark.gpu
EPS = 1e-3
"""Of AdamW, where kernels differ by rounding: its default makes whole steps of gradients that are rounding alone."""


@pytest.fixture(autouse=True)
def own_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(ours: torch.Tensor, theirs: torch.Tensor, backend: str) -> None:
    """Bit for bit but for Inductor's kernels: each model has its own, chosen by what is fastest when tried out."""
    tolerances = {"rtol": 0.0, "atol": 0.0} if backend == "eager" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **tolerances)


def on_gpu(kind: str) -> nn.Module:
    return make(kind).cuda()


def gpu_batch(kind: str, step: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cuda() for tensor in batch(kind, 0, step))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_is_that_of_plain_pytorch(backend: str, stage: int) -> None:
    reference = on_gpu("gpt")
    compiled = zcompile.compile(copy.deepcopy(reference), stage=stage, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (compiled, reference)]
    for step in range(4):
        for model, optimizer in zip((compiled, reference), optimizers, strict=True):
            model(*gpu_batch("gpt", step)).backward()
            update(optimizer)
    for ours, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_follows_autocast(dtype: torch.dtype) -> None:
    reference = on_gpu("gpt")
    compiled = zcompile.compile(copy.deepcopy(reference), dtype=dtype)
    curves = []
    for model, theirs in ((compiled, False), (reference, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        losses = []
        for step in range(60):
            with torch.autocast("cuda", dtype=dtype, enabled=theirs):
                loss = model(*gpu_batch("gpt", step % 10))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses).view(-1, 10).mean(1))
    assert float(((curves[0] - curves[1]).abs() / curves[1]).max()) < 0.02


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_cuda_graphs_give_the_same_numbers(stage: int, backend: str) -> None:
    """Losses are kept to the end; in every other step two forwards come before their backwards."""
    found = []
    for graphs in (False, True):
        compiled = zcompile.compile(on_gpu("gpt"), stage=stage, backend=backend, cuda_graphs=graphs)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3, eps=EPS, fused=True)
        kept = []
        for step in range(8):
            losses = [compiled(*gpu_batch("gpt", step + 10 * number)) for number in range(1 + step % 2)]
            for loss in losses:
                loss.backward()
            update(optimizer)
            kept += losses
        found.append([*kept, *(full(param).detach() for param in compiled.parameters())])
    for ours, theirs in zip(*found, strict=True):
        agree(ours, theirs, backend)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(("stage", "how"), [(0, "fused"), (1, "capturable"), (3, "capturable"), (3, "fused")])
def test_a_step_as_one_graph_gives_the_same_numbers(stage: int, how: str, backend: str) -> None:
    """The learning rate is a power of two: in the graph it is a float32 number."""
    found = []
    for graphs in (False, "step"):
        model = on_gpu("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-10, eps=EPS, **{how: True})
        clip = 0.5 if stage == 1 else None
        options: dict[str, Any] = {"stage": stage, "backend": backend, "cuda_graphs": graphs}
        whole = zcompile.train_step(model, None, optimizer, clip_grad_norm=clip, **options)
        kept = []
        for step in range(8):
            optimizer.param_groups[0]["lr"] = 2 ** -(9 + step // 2)
            kept.append(whole(*gpu_batch("gpt", step)))
        found.append([*kept, *(full(param).detach() for param in whole.model.parameters())])
        dist.destroy_process_group()
    for ours, theirs in zip(*found, strict=True):
        agree(ours, theirs, backend)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_broken_graphs_and_micro_batches(stage: int) -> None:
    reference = make_broken("Own").cuda()
    compiled = zcompile.compile(copy.deepcopy(reference), stage=stage, backend="eager")
    for step in range(3):
        x = torch.randn(4, 6, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        with compiled.no_sync():
            compiled(x).square().mean().backward()
        compiled(2 * x).square().mean().backward()
        for one in (x, 2 * x):
            reference(one).square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_forward_on_a_side_stream() -> None:
    """Delivery runs on the stream that calls backward: it must wait for the gradients of the other one."""
    reference = on_gpu("gpt")
    compiled = zcompile.compile(copy.deepcopy(reference), backend="eager")
    stream = torch.cuda.Stream()
    for step in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = compiled(*gpu_batch("gpt", step))
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        reference(*gpu_batch("gpt", step)).backward()
    for ours, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5)


def test_through_torch_compile() -> None:
    reference = on_gpu("mlp")
    model = copy.deepcopy(reference)
    called = torch.compile(model, backend=zcompile.backend(stage=3))
    called(*gpu_batch("mlp", 0)).backward()
    reference(*gpu_batch("mlp", 0)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5)


def test_memory_after_a_step_is_that_of_the_shards() -> None:
    # cuBLAS keeps tens of MiB for each thread that multiplies, more than this model is large.
    on_gpu("gpt")(*gpu_batch("gpt", 0)).backward()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    compiled = zcompile.compile(on_gpu("gpt"), backend="eager")
    psi = sum(param.nbytes for param in compiled.layout.params)
    compiled(*gpu_batch("gpt", 0)).backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2.6 * psi, "parameters and gradients once, nothing full kept"


def test_a_timeline_of_the_stream() -> None:
    compiled = zcompile.compile(on_gpu("gpt"), backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled.record_timeline(device=True)
    for step in range(3):
        compiled(*gpu_batch("gpt", step)).backward()
        optimizer.step()
    timeline = compiled.timeline
    parts = [timeline.compute, timeline.exposed, timeline.optimizer, timeline.overhead, timeline.idle]
    assert timeline.device
    assert sum(parts) == pytest.approx(timeline.seconds, rel=1e-6)
    assert timeline.compute > 0 < timeline.optimizer
    assert min(parts) > -1e-4, "the device's clock counts half microseconds"


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"fused": True}, "eager"),
        ({"foreach": True}, "eager"),
        ({"capturable": True}, "eager"),
        ({"fused": True}, "inductor"),
    ],
    ids=str,
)
def test_a_train_step_is_the_loop(options: dict[str, bool], backend: str, stage: int) -> None:
    model, other = on_gpu("gpt"), on_gpu("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, **options)
    step = zcompile.train_step(model, None, optimizer, stage=stage, backend=backend)
    compiled = zcompile.compile(other, stage=stage, backend=backend)
    loop = torch.optim.AdamW(compiled.parameters(), lr=1e-2, eps=EPS, **options)
    for number in range(3):
        loss = compiled(*gpu_batch("gpt", number))
        loss.backward()
        update(loop)
        agree(step(*gpu_batch("gpt", number)), loss, backend)
    for ours, theirs in zip(step.model.parameters(), compiled.parameters(), strict=True):
        agree(full(ours), full(theirs), backend)


@pytest.mark.parametrize(
    ("options", "backend"),
    [({"fused": True}, "eager"), ({"foreach": True}, "eager"), ({"fused": True}, "inductor")],
    ids=str,
)
def test_a_state_on_the_host_gives_the_same_numbers(options: dict[str, bool], backend: str) -> None:
    found = []
    for place in (None, "cpu"):
        model = on_gpu("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, **options)
        step = zcompile.train_step(model, None, optimizer, offload_optimizer=place, backend=backend)
        for number in range(4):
            step(*gpu_batch("gpt", number))
        moments = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].dim()]
        assert all(local_tensor(moment).is_cuda is (place is None) for moment in moments)
        found.append([full(param) for param in step.model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        agree(ours, theirs, backend)


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 2}, {"stage": 3, "dtype": torch.bfloat16}], ids=str)
def test_shards_on_the_host_give_the_same_numbers_but_for_the_optimizer(options: dict[str, object]) -> None:
    found = []
    for place in (None, "cpu"):
        model = on_gpu("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        compiled = zcompile.compile(model, optimizer=optimizer, offload_parameters=place, **options)  # type: ignore[arg-type]
        for number in range(4):
            compiled(*gpu_batch("gpt", number)).backward()
            nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            update(optimizer)
        shards = [local_tensor(param) for param in compiled.parameters() if param.dim()]
        assert all(shard.is_cuda if place is None else shard.is_pinned() for shard in shards)
        found.append([value.cpu() for value in compiled.full_state_dict().values()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_train_step_with_shards_on_the_host() -> None:
    losses = []
    for place in (None, "cpu"):
        model = on_gpu("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = zcompile.train_step(model, None, optimizer, offload_parameters=place)
        losses.append([step(*gpu_batch("gpt", number)).item() for number in range(6)])
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "eager"), ({"checkpoint": "unit"}, "eager"), ({"arenas": True}, "eager"), ({}, "inductor")],
    ids=str,
)
def test_activations_on_the_host_give_the_same_numbers(options: dict[str, Any], backend: str) -> None:
    found = []
    for place in (None, "cpu"):
        compiled = zcompile.compile(on_gpu("gpt"), offload_activations=place, backend=backend, **options)
        for number in range(2):
            loss = compiled(*gpu_batch("gpt", number))
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([full(param.grad) for param in compiled.parameters() if param.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        agree(ours, theirs, backend)


@contextmanager
def host_waits_are_errors() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def steps_without_waits(rank: int, world: int, way: str, store: str) -> None:
    """Train as one of `world` ranks with a GPU each; once all is compiled, no step may wait for the device."""
    torch.cuda.set_device(rank)
    if world > 1:  # a world of one makes its own group
        device = torch.device("cuda", rank)
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device)
    model = on_gpu("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if way == "loop":
        compiled = zcompile.compile(model, optimizer=optimizer, stage=3)
    else:
        step = zcompile.train_step(model, None, optimizer, stage=3)
    batches = [gpu_batch("gpt", number) for number in range(6)]

    def train(given: tuple[torch.Tensor, ...]) -> None:
        if way == "train_step":
            step(*given)
            return
        compiled(*given).backward()
        update(optimizer)

    for given in batches[:4]:
        train(given)
    torch.cuda.synchronize()
    with host_waits_are_errors():
        for given in batches[4:]:
            train(given)


@pytest.mark.parametrize("world", sorted({1, max(1, torch.cuda.device_count())}))
@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_no_step_makes_the_host_wait(way: str, world: int, tmp_path: Path) -> None:
    if world == 1:
        steps_without_waits(0, world, way, "")
    else:
        torch.multiprocessing.spawn(steps_without_waits, (world, way, str(tmp_path / "store")), nprocs=world)


def test_a_wait_of_the_host_would_be_noticed() -> None:
    x = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"), host_waits_are_errors():
        x.item()
    assert torch.cuda.get_sync_debug_mode() == 0


class Recomputing(nn.Module):
    """The user's own checkpoint computes its dropout again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.inner(x).relu(), 0.5)

        return checkpoint(inner, x, use_reentrant=False).sum()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_checkpoint_of_the_users_draws_the_same_numbers_again(backend: str) -> None:
    compiled = zcompile.compile(Recomputing().cuda(), backend=backend)
    x = torch.ones(4, 16, device="cuda", requires_grad=True)
    loss = compiled(x)
    loss.backward()
    bias = full(next(p.grad for name, p in compiled.named_parameters() if name.endswith("bias")))
    kept = bias / 2  # how many of the four rows kept each column, and were positive
    assert torch.equal(kept, kept.round())
    assert ((loss == 0) == (kept.sum() == 0)).all()
