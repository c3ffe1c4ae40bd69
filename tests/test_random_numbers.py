"""Random numbers: another mask of dropout on each rank; draws over shards, and the generators, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import quickly
from tests.compare import full
from tests.models import batch, make
from tests.ranks import Ranks, on_ranks, on_threads
from tests.threads import Threads
from zcompile.runtime.tensors.owned import owner_of


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
def test_ranks_seeded_alike_drop_differently(threads: Threads, backend: str, breaks: bool) -> None:
    (first, second, same, after), (other, _, other_same, other_after) = threads.run(2, masks, True, backend, breaks)
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


@quickly("backend", ["eager", "inductor"], ["eager"])
@on_threads(1)
def test_dropout_in_a_checkpoint_without_a_backward(rank: int, backend: str) -> None:
    """Torch 2.13 refuses to trace a graph without a backward in which a user's checkpoint draws random numbers."""
    compiled = zcompile.compile(Dropped().requires_grad_(False), backend=backend)
    assert 0 < int((compiled(torch.ones(64)) == 0).sum()) < 64


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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_threads(1)
def test_blocks_that_draw_first_and_are_checkpointed_by_the_user(rank: int, stage: int) -> None:
    plain = Blocks()
    compiled = zcompile.compile(copy.deepcopy(plain), stage=stage, backend="eager")
    for model in (plain, compiled):
        torch.manual_seed(5)
        model(torch.ones(3, 8)).backward()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    assert all(torch.equal(one.grad, full(other.grad)) for one, other in pairs)


@pytest.mark.slow
@on_threads(2)
def test_a_model_that_draws_nothing_changes_no_generator(rank: int) -> None:
    torch.manual_seed(0)
    compiled = zcompile.compile(make("mlp"), backend="eager")
    before = torch.get_rng_state()
    compiled(*batch("mlp", rank, 0)).backward()
    assert torch.equal(torch.get_rng_state(), before)


# -- writes to shards -------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "normal_": lambda p: p.data.normal_(1, 2),
    "uniform_": lambda p: p.detach().uniform_(-1, 1),
    "bernoulli_": lambda p: p.data.bernoulli_(0.3),
    "exponential_": lambda p: p.data.exponential_(),
    "random_": lambda p: p.data.random_(0, 9),
    "of a generator": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(3)),
    "init.normal_": nn.init.normal_,
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=2.0),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p) if p.ndim > 1 else nn.init.uniform_(p),
    "init.kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=2.0) if p.ndim > 1 else nn.init.ones_(p),
    "init.sparse_": lambda p: nn.init.sparse_(p, 0.3) if p.ndim == 2 else nn.init.zeros_(p),
    "init.eye_": lambda p: nn.init.eye_(p) if p.ndim == 2 else nn.init.zeros_(p),
    "init.dirac_": lambda p: nn.init.dirac_(p) if p.ndim == 3 else nn.init.zeros_(p),
    "randn_like": lambda p: p.data.copy_(torch.randn_like(p)),
    "rand_like": lambda p: p.data.add_(torch.rand_like(p.data)),
    "randint_like": lambda p: p.data.copy_(torch.randint_like(p, 0, 7)),
    "empty_like": lambda p: p.data.copy_(torch.empty_like(p).normal_()),
    "dropout": lambda p: p.data.copy_(nn.functional.dropout(p.data, 0.5)),
    "in place": lambda p: nn.functional.dropout(p.data, 0.5, inplace=True),
    "normal": lambda p: p.data.copy_(torch.normal(p.data, 1.0)),
    "bernoulli": lambda p: p.data.copy_(torch.bernoulli(p.data.sigmoid())),
    "multinomial": lambda p: (
        p.data.fill_(torch.multinomial(p.data.abs().view(-1) + 0.1, 1).item()) if p.ndim < 2 else p
    ),
    "gradient noise": lambda p: p.data.copy_(p.grad.zero_().add_(torch.randn_like(p.grad))),  # type: ignore[union-attr]
}


class Various(nn.Module):
    """Parameters that two ranks divide evenly and unevenly, of fewer rows than ranks, of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one = nn.Linear(8, 5), nn.Linear(5, 1)
        self.convolution, self.scale = nn.Conv1d(5, 4, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.one(x) * self.scale + self.convolution(x[..., None].expand(-1, -1, 3)).sum()


@quickly(
    "world, options", [(2, {}), (3, {}), (2, {"stage": 1}), (2, {"whole": ["linear.weight"]})], [(3, {})], pairs=False
)
@pytest.mark.slow
@on_threads()
def test_random_writes_to_shards_are_those_to_the_whole(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    """The writes that give other numbers than plain PyTorch with the same seed, or leave its generator elsewhere."""
    torch.manual_seed(0)
    plain = Various()
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager", **options)
    for model in (plain, compiled):
        model(torch.ones(2, 8)).sum().backward()
    wrong = []
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        for write, function in WRITES.items() if owner_of(ours) is None else list(WRITES.items())[:7]:
            states = []
            for param in (ours, theirs):
                torch.manual_seed(7)
                function(param)
                states.append(torch.get_rng_state())
            if not torch.equal(full(ours.detach()), theirs.detach()) or not torch.equal(*states):
                wrong.append(f"{name}, {write}")
            nn.init.ones_(ours), nn.init.ones_(theirs)
    return wrong


@on_ranks(2)
def test_modules_that_are_reset_have_the_values_of_plain_ones(rank: int) -> None:
    plain = Various()
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    for model in (plain, compiled):
        torch.manual_seed(7)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                module.reset_parameters()
    same = [torch.equal(full(p), q) for p, q in zip(compiled.parameters(), plain.parameters(), strict=True)]
    assert same == [True] * 7


def of_replicas(rank: int) -> list[list[float]]:
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    compiled = zcompile.compile(nn.Linear(4, 2), mesh=mesh, backend="eager")
    nn.init.normal_(compiled.weight)
    noise = torch.randn_like(compiled.bias)
    return [compiled.weight.to_local().tolist(), noise.to_local().tolist()]


def test_replicas_that_are_seeded_apart_draw_alike(ranks: Ranks) -> None:
    first, second = ranks.run(2, of_replicas)
    assert first == second


def refused(rank: int) -> str:
    compiled = zcompile.compile(nn.Linear(4, 2), backend="eager")
    with pytest.raises(zcompile.ParameterError, match="t_ needs all of a tensor") as error:
        nn.init.orthogonal_(compiled.weight)
    with pytest.raises(RuntimeError, match="leaf"):
        compiled.weight.normal_()
    with pytest.raises(zcompile.ParameterError, match="weight: dropout reads this parameter outside of a program"):
        nn.functional.dropout(compiled.weight)
    return str(error.value)


def test_draws_that_need_more_than_rows_are_refused(ranks: Ranks) -> None:
    assert all("full_tensor" in text for text in ranks.run(2, refused))
