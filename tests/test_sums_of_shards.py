"""Numbers that are read of shards: norms, sums and extremes of gradients and parameters, beside those of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.ranks import Ranks

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm().item(),
    "maximum norm": lambda t: torch.linalg.vector_norm(t, float("inf")).item(),
    "sum": lambda t: float(t.sum()),
    "of squares": lambda t: (t**2).sum().item(),
    "of products": lambda t: (t * t).sum().item(),
    "steps": lambda t: t.pow(2).sum().sqrt().item(),
    "mean": lambda t: t.abs().mean().tolist(),
    "largest": lambda t: t.max().item(),
    "smallest": lambda t: t.min().item(),
    "deviation": lambda t: t.std().item(),
    "count": lambda t: int(torch.count_nonzero(t)),
    "any": lambda t: bool(torch.isnan(t).any()),
    "text": lambda t: float(f"{t.norm():.6f}"),
    "moved": lambda t: t.norm().cpu().item(),
    "converted": lambda t: t.double().norm().float().item(),
    "numpy": lambda t: float(t.norm().numpy()),
    "of one element": lambda t: t.sum().view(1).item(),
    "of rows": lambda t: (t.max(-1).values if t.ndim > 1 else t).sum().item(),
    "of rows by name": lambda t: (t.amax(dim=-1) if t.ndim > 1 else t).sum().item(),
    "of columns": lambda t: t.amax(0).sum().item(),
    "norms of rows": lambda t: (t.norm(dim=-1) if t.ndim > 1 else t).sum().item(),
    "of a list": lambda t: float(torch._foreach_max([t])[0]),
    "within a tensor": lambda t: torch.tensor([t.norm(), 1.0])[0].item(),
    "array": lambda t: float(np.asarray(t.norm())),
    "nonzero": lambda t: torch.is_nonzero((t == t.max()).any()),
    "of a copy": lambda t: t.detach().clone().norm().item(),
    "relative": lambda t: (t / t.norm()).sum().item(),
}


def read(rank: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
    compiled = zcompile.compile(copy.deepcopy(plain), stage=stage, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    compiled(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    optimizer.step()
    found = []
    for (name, param), before in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        copied = param.detach().clone()
        with torch.no_grad():
            copied += 1.0
        kinds = {"gradient": param.grad, "parameter": param.detach(), "change": copied - param.detach() * 0.5}
        for kind, tensor in kinds.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert not torch.equal(whole, before)
            for number, function in NUMBERS.items():
                got, want = function(tensor), function(whole)
                if not abs(got - want) <= 1e-5 * max(1.0, abs(want)):
                    found.append(f"{name}, {kind}, {number}: {got} in place of {want}")
    return found


@quickly("world, stage", [(world, stage) for world in (2, 3) for stage in range(4)], [(2, 3), (3, 1)])
def test_numbers_of_shards_are_those_of_all_ranks(ranks: Ranks, world: int, stage: int) -> None:
    assert ranks.run(world, read, stage) == [[]] * world


def formatted(rank: int) -> tuple[str, float, bool]:
    torch.manual_seed(0)
    compiled = zcompile.compile(nn.Linear(7, 5), backend="eager")
    compiled(torch.ones(2, 7)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
    if rank:
        return "", 0.0, True  # what has been summed is read without the others
    return f"{norm:.3f}", norm.item(), bool(norm > 1.0)


def test_one_rank_may_print_a_clipped_norm(ranks: Ranks) -> None:
    text, number, _ = ranks.run(2, formatted)[0]
    assert (text, round(number, 3)) == ("12.649", 12.649)
