"""Gradient accumulation: `no_sync` communicates once where full gradients are kept, and sums are those of one batch."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import quickly
from tests.compare import gradients
from tests.models import batch, make, update
from tests.ranks import on_threads
from tests.test_fragments import make as make_broken
from tests.threads import Threads
from zcompile import OptionError

MICRO = 3


def accumulate(
    model: nn.Module, wrapped: nn.Module, kind: str, rank: int, step: int, *, full: bool | None = None
) -> None:
    """A step of three micro-batches, the last of which synchronises."""
    options = {} if full is None else {"full_gradients": full}
    for micro in range(MICRO - 1):
        with wrapped.no_sync(**options):
            (wrapped(*batch(kind, rank, 10 * step + micro)) / MICRO).backward()
    (wrapped(*batch(kind, rank, 10 * step + MICRO - 1)) / MICRO).backward()


def against_ddp(rank: int, kind: str, stage: int, full: bool = False, **options: object) -> list[str]:
    model = make(kind)
    compiled = zcompile.compile(copy.deepcopy(model), stage=stage, backend="eager", **options)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(model)
    ours = torch.optim.SGD(compiled.parameters(), lr=0.1)
    theirs = torch.optim.SGD(ddp.parameters(), lr=0.1)
    differing = []
    for step in range(2):
        accumulate(model, ddp, kind, rank, step)
        before = compiled.traffic.payload
        accumulate(model, compiled, kind, rank, step, full=full)
        sent = compiled.traffic.payload - before
        psi = sum(param.padded_bytes for param in compiled.layout.params)
        if stage == 0:
            assert sent == 2 * psi, "one all_reduce for the three micro-batches"
        got, want = gradients(compiled), gradients(model)
        exact = full or stage < 2  # stages 2 and 3 average each micro-batch: other roundings
        for name, grad in want.items():
            same = torch.equal(got[name], grad) if exact else torch.allclose(got[name], grad, rtol=1e-5, atol=1e-7)
            differing += [] if same else [f"step {step} {name}"]
        update(ours, theirs)
    return differing


@quickly("stage, kind", [*product(range(4), ["mlp", "gpt"])], [(0, "mlp"), (1, "mlp"), (3, "mlp")], pairs=False)
def test_micro_batches_sum_as_under_ddp(threads: Threads, kind: str, stage: int) -> None:
    assert threads.run(2, against_ddp, kind, stage) == [[], []]


@quickly("stage, kind, prefetch", [*product([2, 3], ["mlp", "gpt"], [0, 1, 2])], [(2, "mlp", 2), (3, "mlp", 0)])
@on_threads(2)
def test_full_gradients_are_kept_in_every_stage(rank: int, kind: str, stage: int, prefetch: int) -> list[str]:
    return against_ddp(rank, kind, stage, full=True, prefetch=prefetch)


@pytest.mark.slow
@quickly("shard", ["hsdp", "hfsdp", "hpz"], ["hfsdp"])
@on_threads(4)
def test_full_gradients_are_kept_over_two_axes(rank: int, shard: str) -> None:
    """Against the same micro-batches reduced one by one."""
    found = []
    for full in (True, False):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        compiled = zcompile.compile(make("mlp"), stage=3, backend="eager", mesh=mesh, shard=shard)
        accumulate(compiled, compiled, "mlp", rank, 0, full=full)
        found.append(gradients(compiled))
    assert all(torch.allclose(grad, found[1][name], rtol=1e-5, atol=1e-7) for name, grad in found[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@on_threads(2)
def test_full_gradients_are_reduced_once(rank: int, stage: int) -> None:
    """Bytes that three micro-batches send, with gradients kept full and with each reduced."""
    sent = []
    for full in (True, False):
        compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager")
        accumulate(compiled, compiled, "gpt", rank, 0)
        before = compiled.traffic.payload
        accumulate(compiled, compiled, "gpt", rank, 1, full=full)
        sent.append(compiled.traffic.payload - before)
    psi = sum(param.padded_bytes for param in compiled.layout.params if param.shards)
    assert [(sent[1] - sent[0]) // psi, sent[0] < sent[1]] == [MICRO - 1, True]


def broken(rank: int, stage: int) -> bool:
    """A model whose graph breaks, with parameters that only plain Python reads."""
    warnings.simplefilter("ignore")
    x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2)]
    kept, plain = (zcompile.compile(make_broken("Own"), stage=stage, backend="eager") for _ in range(2))
    with kept.no_sync():
        kept(x[0]).sum().backward()
    kept(x[1]).sum().backward()
    for part in x:
        plain(part).sum().backward()
    got, want = gradients(kept), gradients(plain)
    return all((a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-5)) for a, b in
               ((got[name], want[name]) for name in want))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_what_plain_python_reads_accumulates_too(threads: Threads, stage: int) -> None:
    assert threads.run(2, broken, stage) == [True, True]


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return (self.a if which == "a" else self.b)(x).sum()


@pytest.mark.parametrize("stage", [0, 1])
@on_threads(2)
def test_the_last_micro_batch_reduces_what_it_does_not_reach(rank: int, stage: int) -> None:
    """The last micro-batch does not reach what an earlier one did: its gradient is reduced all the same."""
    compiled = zcompile.compile(Switch(), stage=stage, backend="eager")
    x = torch.full((2, 3), float(rank + 1))
    with compiled.no_sync():
        compiled(x, "a").backward()
    compiled(x, "b").backward()
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    largest = [float(grad.abs().max()) for grad in gradients(compiled).values() if grad is not None]
    assert largest == [3.0, 2.0, 3.0, 2.0]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_on_gradients_held_back_is_refused_and_changes_nothing(stage: int) -> None:
    compiled = zcompile.compile(make("mlp"), stage=stage, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in compiled.state_dict().items()}
    left_open = compiled.no_sync()
    left_open.__enter__()
    compiled(*batch("mlp", 0, 0)).backward()
    with pytest.raises(zcompile.OptimizerError, match=r"layers\.0\.bias: its gradient was held back by no_sync"):
        optimizer.step()
    for name, value in compiled.state_dict().items():
        assert torch.equal(value, before[name])
    left_open.__exit__(None, None, None)
    compiled(*batch("mlp", 0, 1)).backward()
    optimizer.step()


def test_full_gradients_beside_shards_on_the_host_are_refused(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("mlp"), stage=3, backend="eager", offload_parameters=f"disk:{tmp_path}")
    with (
        pytest.raises(OptionError, match="full_gradients: keeps gradients on the device"),
        compiled.no_sync(full_gradients=True),
    ):
        pass


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_dropped_by_zero_grad_stay_dropped(stage: int) -> None:
    compiled, reference = zcompile.compile(make("mlp"), stage=stage, backend="eager"), make("mlp")
    with compiled.no_sync():
        compiled(*batch("mlp", 0, 0)).backward()
    compiled.zero_grad()
    for model in (compiled, reference):
        model(*batch("mlp", 0, 1)).backward()
    got, want = gradients(compiled), gradients(reference)
    assert all(torch.allclose(got[name], want[name]) for name in want)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_averaged_before_no_sync_are_kept(stage: int) -> None:
    compiled, reference = zcompile.compile(make("mlp"), stage=stage, backend="eager"), make("mlp")
    compiled(*batch("mlp", 0, 0)).backward()
    with compiled.no_sync():
        compiled(*batch("mlp", 0, 1)).backward()
    compiled(*batch("mlp", 0, 2)).backward()
    for step in range(3):
        reference(*batch("mlp", 0, step)).backward()
    got, want = gradients(compiled), gradients(reference)
    assert all(torch.allclose(got[name], want[name], rtol=1e-5) for name in want)


@on_threads(2)
def test_ranks_may_hold_back_unequal_numbers_and_keep_nothing_afterwards(rank: int) -> None:
    """Ranks hold back another number of micro-batches, of several programs: nothing communicates until the last one."""
    compiled = zcompile.compile(Switch(), stage=0, backend="eager")
    x = torch.ones(2, 3)
    for which in ("a", "b"):
        compiled(x, which).backward()
    with compiled.no_sync():
        for _ in range(rank + 1):
            compiled(x, "a").backward()
        with torch.no_grad():
            compiled(x, "b" if rank else "a")
    compiled(x, "a").backward()
    assert sum(len(shards._held) for shards in compiled._engine.runtime.shards.values()) == 0


class Fails(torch.autograd.Function):
    """Fails in the backward when told to."""

    broken = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Fails.broken:
            raise ValueError("in the backward")
        return grad


def test_what_was_held_back_survives_a_backward_that_fails() -> None:
    compiled, reference = zcompile.compile(make("mlp"), stage=1, backend="eager"), make("mlp")
    x, y = batch("mlp", 0, 0)
    with compiled.no_sync():
        compiled(x, y).backward()
    x.requires_grad_()
    Fails.broken = True
    with pytest.raises(ValueError, match="in the backward"):
        compiled(Fails.apply(x), y).backward()
    Fails.broken = False
    compiled(x.detach(), y).backward()
    for _ in range(2):
        reference(x.detach(), y).backward()
    got, want = gradients(compiled), gradients(reference)
    assert all(torch.allclose(got[name], want[name], rtol=1e-5) for name in want)


def test_a_program_that_holds_back_is_shown() -> None:
    compiled = zcompile.compile(make("mlp"), stage=1, backend="eager")
    with compiled.no_sync():
        compiled(*batch("mlp", 0, 0)).backward()
    assert "accumulate(layers_0, layers_0_full_grads)" in str(compiled.programs[2])
    assert "reduce" not in str(compiled.programs[2])
