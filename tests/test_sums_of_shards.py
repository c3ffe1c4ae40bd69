"""Numbers that are read of shards: norms, sums and extremes of gradients and parameters, beside those of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.ranks import Ranks, on_ranks, on_threads

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
    "least norm": lambda t: t.norm(float("-inf")).item(),
    "of inverses": lambda t: torch.linalg.vector_norm(t, -1).item(),
    "number of others": lambda t: torch.linalg.vector_norm(t, 0).item(),
    "norms of columns": lambda t: t.norm(dim=0).sum().item(),
    "place": lambda t: t.argmax().item(),
    "places": lambda t: (t.argmin(0) + t.argmax(-1).max()).sum().item(),
    "of any": lambda t: (t > 0).any(0).sum().item(),
    "of all": lambda t: (t > 0).all(dim=-1).sum().item(),
    "distance": lambda t: nn.functional.mse_loss(t, t * 0.5).item(),
    "smooth distance": lambda t: nn.functional.smooth_l1_loss(t, t * 0.5).item(),
    "of a view": lambda t: t.view(t.shape).sum().item(),
    "transposed": lambda t: t.t().sum().item(),
    "transposed by name": lambda t: t.T.norm().item(),
    "of a column": lambda t: t[..., 0].sum().item(),
    "of a row": lambda t: t[0].sum().item(),
    "of rows but one": lambda t: t[1:].norm().item(),
    "of parts": lambda t: sum(part.sum().item() for part in (*t.chunk(2), *t.split(3))),
    "expanded": lambda t: t.expand(2, *t.shape).sum().item(),
    "one more": lambda t: t.unsqueeze(0).sum().item(),
    "of two norms": lambda t: (t.norm() + t.abs().norm()).item(),
    "of norms of a list": lambda t: torch.stack(torch._foreach_norm([t, 2 * t])).sum().item(),
    "total norm": lambda t: torch.nn.utils.get_total_norm([t, 2 * t]).item(),
    "of ones": lambda t: torch.ones_like(t).sum().item(),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "flat": lambda t: t.flatten().sum().item(),
    "reshaped": lambda t: t.reshape(-1).norm().item(),
    "row by row": lambda t: sum(row.sum().item() for row in t),
    "list": lambda t: t.tolist() if t.numel() > 1 else [[t.item()]],
    "median": lambda t: t.flatten().kthvalue(1).values.item(),
}
"""What torch can only do where rows are divided evenly, or not at all."""


@pytest.mark.slow
@quickly("world, stage", [(world, stage) for world in (2, 3) for stage in range(4)], [(2, 3)], pairs=False)
@on_threads()
def test_numbers_of_shards_are_those_of_all_ranks(rank: int, world: int, stage: int) -> list[str]:
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
            for number, function in REFUSED.items():
                try:
                    got = function(tensor)
                except zcompile.ParameterError as error:
                    got = function(whole) if "sharded" in str(error) else str(error)
                if isinstance(got, str) or not np.allclose(got, function(whole), atol=1e-5):
                    found.append(f"{name}, {kind}, {number}: {got}")
    return found


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


@on_ranks(2)
def test_writes_to_views_of_shards_are_made_or_refused(rank: int) -> list[str]:
    """Writes to views that plain tensors show, and shards do not."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 3))
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    wrong = []
    writes: dict[str, Callable[[Tensor], Any]] = {
        "row": lambda t: t[0].zero_(),
        "rows": lambda t: t[1:].mul_(2),
        "first rows": lambda t: t.narrow(0, 0, 1).add_(1),
        "parts": lambda t: [part.mul_(3) for part in t.chunk(2)],
        "drawn": lambda t: t[0].normal_(),
        "transposed": lambda t: t.t().mul_(2),
        "column": lambda t: t[..., 0].zero_(),
        "set": lambda t: t.__setitem__(0, 7.0),
        "set rows": lambda t: t.__setitem__(slice(1, None), 2.0),
        "set by numbers": lambda t: t.__setitem__(torch.tensor([0, 2]), 3.0),
        "set where": lambda t: t.__setitem__(t > 1, 1.0),
    }
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        for write, function in writes.items():
            try:
                torch.manual_seed(1)
                function(ours.data)
            except zcompile.ParameterError as error:
                if "copy, and the write is lost" not in str(error) and "that is sharded" not in str(error):
                    wrong.append(f"{name}, {write}: {error}")
                continue
            torch.manual_seed(1)
            function(theirs.data)
            if not torch.equal(ours.detach().full_tensor(), theirs.detach()):
                wrong.append(f"{name}, {write}")
    return wrong
