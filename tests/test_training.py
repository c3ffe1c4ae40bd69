"""The whole: training through zcompile equals DistributedDataParallel, bit for bit where the design promises bits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import quickly
from tests.models import batch, fit, make
from tests.ranks import Ranks, on_threads
from tests.threads import Threads
from zcompile import Pass
from zcompile.facts import UNITS_ASSIGNED
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Reduce
from zcompile.passes.defer_weights import defer_weights

STEPS = 5
Values = dict[str, torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For comparisons up to rounding: AdamW blows a gradient that is zero but for rounding up to a full step."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_ddp(rank: int, kind: str, steps: int, make_optimizer: MakeOptimizer = adamw) -> Values:
    model = make(kind)
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp.parameters())
    fit(ddp, optimizer, (batch(kind, rank, step) for step in range(steps)))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    rank: int, kind: str, steps: int, make_optimizer: MakeOptimizer = adamw, **options: object
) -> tuple[Values, float, int]:
    # Other values on other ranks: rank 0's must win.
    compiled = zcompile.compile(make(kind, seed=rank), **options)  # type: ignore[arg-type]
    optimizer = make_optimizer(compiled.parameters())
    losses = fit(compiled, optimizer, (batch(kind, rank, step) for step in range(steps)))
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in compiled.named_parameters()}
    return {name: p.detach().clone() for name, p in full.items()}, losses[-1].item(), compiled.traffic.bytes


ALL = [(stage, prefetch) for stage in range(4) for prefetch in range(3)]
FEW = [(1, 2), (3, 1)]


def sweep(rank: int, kind: str, backend: str, sweep_of: list[tuple[int, int]]) -> list[str]:
    """Stages, and prefetches of stage 3, against DDP (eager) or stage 0 (Inductor); names of what differs."""
    want = train_ddp(rank, kind, STEPS) if backend == "eager" else train(rank, kind, STEPS, stage=0, backend=backend)[0]
    differing = []
    for stage, prefetch in sweep_of:
        got, _, _ = train(rank, kind, STEPS, stage=stage, prefetch=prefetch, backend=backend)
        assert list(got) == list(want)
        differing += [f"stage {stage} prefetch {prefetch} {n}" for n in want if not torch.equal(got[n], want[n])]
    return differing


EAGER = {"gpt": [(0, 2), (1, 2), (3, 1)], "mlp": [(2, 0), (3, 2)], "conv": [(0, 1), (3, 0)]}
"""Every stage, and all prefetches of stage 3, which bounds what is full."""


@quickly("kind", list(EAGER), ["mlp", "conv"])
def test_two_ranks_equal_ddp_bit_for_bit(ranks: Ranks, kind: str) -> None:
    assert ranks.run(2, sweep, kind, "eager", EAGER[kind]) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt", "mlp", "conv"])
def test_two_ranks_equal_ddp_with_every_prefetch(ranks: Ranks, kind: str) -> None:
    assert ranks.run(2, sweep, kind, "eager", ALL) == [[], []]


DEFER = Pass("defer_weights", partial(defer_weights, large=1), (UNITS_ASSIGNED,))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_threads(2)
def test_weights_that_are_computed_last_train_as_ddp(rank: int, stage: int) -> None:
    want = train_ddp(rank, "gpt", STEPS)
    got, _, _ = train(rank, "gpt", STEPS, stage=stage, backend="eager", passes={"defer_weights": DEFER})
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager", passes={"defer_weights": DEFER})
    compiled(*batch("gpt", rank, 0)).backward()
    reductions = compiled._engine.runtime.steps[0].program.nodes(Reduce)
    last = op_of(reductions[-1], Reduce).unit
    assert last.endswith("0"), "the first block's weights come after the embedding's"
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.slow
@quickly(
    "kind, world",
    list(itertools.product(["gpt", "mlp", "conv"], [1, 3, 4])),
    [("mlp", 3)],
    slow=[("conv", 4), ("gpt", 1)],
)
@on_threads()
def test_other_worlds_agree_to_rounding(rank: int, kind: str, world: int) -> None:
    want = train_ddp(rank, kind, 3, sgd)
    worst = 0.0
    for stage in range(4):
        got, _, _ = train(rank, kind, 3, sgd, stage=stage, backend="eager")
        worst = max(worst, *(float((got[n] - want[n]).abs().max()) for n in want))
    assert worst < 2e-6


class Shift(nn.Module):
    """A parameter's gradient that is also an input's: a reduction in place would change both."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + self.shift).sum()


@pytest.mark.parametrize("stage", [0, 3])
@on_threads(2)
def test_the_gradient_of_an_input_is_this_ranks_own(rank: int, stage: int) -> None:
    compiled = zcompile.compile(Shift(), stage=stage, backend="eager")
    x = torch.full((4, 3), float(rank), requires_grad=True)
    compiled(x).backward()
    assert torch.equal(x.grad, torch.cos(x.detach()))


class Summed(nn.Module):
    """Parameters whose gradients are one number, expanded to their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.table = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.row.sum() * self.table.sum()).sum()


def summed_twice(rank: int, world: int, stage: int, bucket: int | None, held: bool) -> bool:
    """Two backwards into one gradient, which is written to in place, beside autograd's; the first one `held` back."""
    compiled, plain = zcompile.compile(Summed(), stage=stage, bucket=bucket, backend="eager"), Summed()
    for number in range(2):
        with compiled.no_sync() if held and not number else contextlib.nullcontext():
            compiled(torch.tensor(float(rank))).backward()
        plain(torch.tensor((world - 1) / 2)).backward()
    got = (p.grad.mul_(2) for p in compiled.parameters())
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in got]
    return all(torch.equal(a, 2 * b.grad) for a, b in zip(full, plain.parameters(), strict=True))


@pytest.mark.slow
@quickly("stage, world", [*itertools.product(range(4), [1, 2])], [(0, 2), (3, 2)], pairs=False)
def test_a_gradient_that_is_one_number_expanded(threads: Threads, world: int, stage: int) -> None:
    for bucket, held in ((None, False), (16, False), (None, True)):
        assert threads.run(world, summed_twice, world, stage, bucket, held) == [True] * world


@pytest.mark.slow
@on_threads(2)
def test_training_after_inference_mode_uses_what_it_kept(rank: int) -> None:
    compiled = zcompile.compile(make("gpt"), stage=1, backend="eager")
    with torch.inference_mode():
        compiled(*batch("gpt", rank, 0))
    compiled(*batch("gpt", rank, 0)).backward()
    assert all(p.grad is not None for p in compiled.parameters())


@pytest.mark.slow
@quickly(
    "kind, sweep_of", [*itertools.product(["gpt", "conv", "mlp"], [FEW, ALL])], [("mlp", FEW)], slow=[("conv", FEW)]
)
def test_inductor_stages_equal_stage_0_bit_for_bit(ranks: Ranks, kind: str, sweep_of: list[tuple[int, int]]) -> None:
    assert ranks.run(2, sweep, kind, "inductor", sweep_of, timeout=600) == [[], []]
