"""Dropout: another mask on each rank, the same one in recomputation, and generators left as one device leaves them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.ranks import Ranks


class Dropped(nn.Module):
    """Gives its mask, and recomputes it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: nn.functional.dropout(y * self.weight, 0.5), x, use_reentrant=False)


def masks(rank: int, alike: bool, backend: str, breaks: bool) -> tuple[list[float], list[float], bool, float]:
    torch.manual_seed(0 if alike else 10 + rank)
    model = Dropped() if not breaks else nn.Sequential(Dropped(), Prints())
    compiled = zcompile.compile(model, backend=backend)
    first, second = compiled(torch.ones(64)), compiled(torch.ones(64))
    first.sum().backward()
    grad = next(compiled.parameters()).grad.full_tensor()
    every = [torch.empty(64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, first.detach())
    same_in_backward = torch.allclose(grad, torch.stack(every).mean(0))
    return first.tolist(), second.tolist(), same_in_backward, torch.rand(()).item()


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [True, False])
@quickly("backend", ["eager", "inductor"], ["eager"])
def test_ranks_seeded_alike_drop_differently(ranks: Ranks, backend: str, breaks: bool) -> None:
    (first, second, same, after), (other, _, other_same, other_after) = ranks.run(2, masks, True, backend, breaks)
    assert first != other, "another mask on each rank"
    assert first != second, "another mask in each call"
    assert same
    assert other_same
    assert after == other_after, "the user's own generators stay in step"


def plain(rank: int) -> bool:
    """Seeded by the user, masks are those that plain PyTorch draws."""
    torch.manual_seed(10 + rank)
    expected = nn.functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(10 + rank)
    compiled = zcompile.compile(Dropped(), backend="eager")
    torch.manual_seed(10 + rank)
    return torch.equal(compiled(torch.ones(64)), expected)


def test_ranks_seeded_apart_are_left_alone(ranks: Ranks) -> None:
    assert ranks.run(2, plain) == [True, True]


def frozen(rank: int, backend: str) -> bool:
    """Torch 2.13 refuses to trace a graph without a backward in which a user's checkpoint draws random numbers."""
    compiled = zcompile.compile(Dropped().requires_grad_(False), backend=backend)
    return 0 < int((compiled(torch.ones(64)) == 0).sum()) < 64


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_dropout_in_a_checkpoint_without_a_backward(ranks: Ranks, backend: str) -> None:
    assert ranks.run(1, frozen, backend) == [True]


class Block(nn.Module):
    """Draws before anything else of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + nn.functional.dropout(x, 0.5))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


def checkpointed(rank: int, stage: int) -> bool:
    plain = Blocks()
    compiled = zcompile.compile(copy.deepcopy(plain), stage=stage, backend="eager")
    for model in (plain, compiled):
        torch.manual_seed(5)
        model(torch.ones(3, 8)).backward()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    return all(torch.equal(one.grad, full(other.grad)) for one, other in pairs)


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("stage", [0, 3])
def test_blocks_that_draw_first_and_are_checkpointed_by_the_user(ranks: Ranks, stage: int) -> None:
    assert ranks.run(1, checkpointed, stage) == [True]


def untouched(rank: int) -> bool:
    torch.manual_seed(0)
    compiled = zcompile.compile(make("mlp"), backend="eager")
    before = torch.get_rng_state()
    compiled(*batch("mlp", rank, 0)).backward()
    return torch.equal(torch.get_rng_state(), before)


def test_a_model_that_draws_nothing_changes_no_generator(ranks: Ranks) -> None:
    assert ranks.run(2, untouched) == [True, True]
