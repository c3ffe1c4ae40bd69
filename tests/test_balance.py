"""Where chains are cut: against all cuts there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.pipelines import mesh_of
from tests.ranks import Ranks
from zcompile import OptionError, train_step
from zcompile.cost.memory import peak_bytes
from zcompile.pipelining.balance import StageMemory, balanced

NUMBERS = st.lists(st.integers(0, 20), min_size=3, max_size=8)


def all_cuts(count: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, count), parts - 1):
        yield list(itertools.pairwise((0, *cuts, count)))


def bounds(cuts: list[int], count: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *cuts, count)))


@given(NUMBERS, st.integers(1, 3))
def test_the_part_with_most_work_has_least(work: list[int], parts: int) -> None:
    found = bounds(balanced(work, parts), len(work))
    assert len(found) == parts
    most = min(max(sum(work[a:b]) for a, b in parted) for parted in all_cuts(len(work), parts))
    assert max(sum(work[a:b]) for a, b in found) == most


@settings(max_examples=100)
@given(st.data(), st.integers(3, 7), st.integers(1, 3), st.integers(0, 120))
def test_of_the_cuts_that_fit_it_is_the_fastest_and_else_the_smallest(
    drawn: st.DataObject, count: int, parts: int, limit: int
) -> None:
    rows = [drawn.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)) for _ in range(4)]
    work, saved, kept, running = rows
    in_flight = drawn.draw(st.lists(st.integers(1, 4), min_size=parts, max_size=parts))

    def held(parted: list[tuple[int, int]]) -> int:
        stages = zip(in_flight, parted, strict=True)
        return max(times * sum(saved[a:b]) + sum(kept[a:b]) + max(running[a:b]) for times, (a, b) in stages)

    def longest(parted: list[tuple[int, int]]) -> int:
        return max(sum(work[a:b]) for a, b in parted)

    memory = StageMemory(tuple(in_flight), tuple(saved), tuple(kept), tuple(running), limit)
    found, every = bounds(balanced(work, parts, memory), count), list(all_cuts(count, parts))
    fitting = [parted for parted in every if held(parted) <= limit]
    if fitting:
        assert held(found) <= limit
        assert longest(found) == min(map(longest, fitting))
    else:
        assert held(found) == min(map(held, every))


class Narrowing(nn.Module):
    """Blocks that save less and less of a batch, and compute as much."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(2**size) for size in (9, 8, 7, 6, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.scale = width, nn.Parameter(torch.ones(16))
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.unsqueeze(1).expand(-1, self.width, -1) * self.scale
        result: torch.Tensor = self.mix(torch.tanh(wide).mean(1))
        with torch.no_grad():  # work that saves nothing, and is the same in all blocks
            square = x.new_ones(384, 384)
            for _ in range(4):
                square = square @ square
        return result + square.mean()


def cut_within(rank: int, limit: int | None) -> tuple[int, int] | str:
    """How many blocks a rank has, and what its step holds."""
    model = Narrowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {"mesh": mesh_of(2, 1), "microbatches": 4, "units": ["blocks.*"], "backend": "eager", "stage": 1}
    step = train_step(model, None, optimizer, memory_limit=limit, **made)
    try:
        step.prepare(torch.randn(32, 16))
    except OptionError as error:
        return str(error)
    return sum(not block.scale.is_meta for block in model.blocks), peak_bytes(step.program)


@pytest.mark.slow
def test_stages_are_cut_elsewhere_where_the_memory_wants_it(ranks: Ranks) -> None:
    (blocks, peak), _ = ranks.run(2, cut_within, None)
    (fewer, less), (more, _) = ranks.run(2, cut_within, int(0.95 * peak))
    assert fewer < blocks
    assert fewer + more == 6
    assert less <= 0.95 * peak
    assert all("memory_limit: " in found for found in ranks.run(2, cut_within, peak // 10))


@pytest.mark.parametrize("limit", [None, 0])
def test_a_unit_for_each_stage_is_the_only_cut(limit: int | None) -> None:
    memory = None if limit is None else StageMemory((1, 1, 1), (5, 5, 5), (1, 1, 1), (0, 0, 0), limit)
    assert balanced([1, 2, 3], 3, memory) == [1, 2]
