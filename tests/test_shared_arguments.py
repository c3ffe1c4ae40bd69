"""Arguments that overlap with one that the forward writes to: right as in the first call, and refused otherwise."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcompile


class Writes(nn.Module):
    """Writes to its first argument, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return self.last(self.first(a) + b) + sum(one.sum() for one in rest), b * 2


Way = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
WAYS: dict[str, Way] = {
    "apart": lambda v: (v[:2].clone(), v[2:].clone()),
    "rows": lambda v: (v[:2], v[2:]),
    "shifted": lambda v: (v[:2], v[1:3]),
    "alike": lambda v: (v[:2], v[:2].view(2, 8)),
}


def compiled_by(how: str) -> Any:
    torch.manual_seed(0)
    torch.compiler.reset()
    if how == "plain":
        return Writes()
    if how == "compile":
        return zcompile.compile(Writes(), backend="eager")
    return torch.compile(Writes(), backend=zcompile.backend(backend="eager"))


def called(model: Any, way: Way, seed: int = 0) -> list[list[float]]:
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    results = model(*way(given))
    results[0].sum().backward()
    return [one.flatten().tolist() for one in (*results, given)]


@pytest.mark.parametrize("how", ["compile", "backend"])
def test_what_is_written_to_may_overlap_in_one_way(how: str) -> None:
    for first, other in itertools.permutations(WAYS, 2):
        plain, model = compiled_by("plain"), compiled_by(how)
        assert called(model, WAYS[first]) == called(plain, WAYS[first])
        if {first, other} == {"apart", "rows"}:  # neither overlaps
            assert called(model, WAYS[other], 1) == called(plain, WAYS[other], 1)
            continue
        sentence = "overlaps with a otherwise than in the first call, and the forward writes there"
        with pytest.raises(zcompile.CaptureError, match=re.escape(sentence)):
            called(model, WAYS[other], 1)
        assert called(model, WAYS[first], 1) == called(plain, WAYS[first], 1)


def beside(start: int, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return v[:2].clone(), v[2:].clone(), v[start : start + 2], v[:2]


def test_what_nobody_writes_to_may_overlap_in_any_way() -> None:
    plain, model = compiled_by("plain"), compiled_by("compile")
    for start in range(3):
        way = functools.partial(beside, start)
        assert called(model, way, start) == called(plain, way, start)
