"""Divide a chain of units into stages of about equal compute time, within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Cost = Callable[[int, int, int], float]
"""The cost of units begin to end - 1 as a part: called as `cost(part, begin, end)`."""


@dataclass(frozen=True)
class StageMemory:
    """The memory of stages that depends on where the chain is cut.

    Attributes:
        in_flight: For each stage, the most micro-batches with saved activations at a time.
        saved: For each unit, bytes of saved activations per micro-batch.
        kept: For each unit, bytes of full parameters and gradients kept between actions.
        running: For each unit, peak bytes while one of its actions runs.
        limit: Bytes that a stage may hold.
    """

    in_flight: tuple[int, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    running: tuple[int, ...]
    limit: float


def balanced(work: Sequence[float], parts: int, memory: StageMemory | None = None) -> list[int]:
    """Cut a chain so that the largest part has the least work, among cuts within the memory limit.

    If no cut is within the limit, minimize the memory of the part that holds most. Returns the first units of all
    parts but the first.
    """
    longest = _sums(work)
    if memory is None:
        return _cut(len(work), parts, longest)[0]
    saved, kept = _sums(memory.saved), _sums(memory.kept)

    def held(part: int, begin: int, end: int) -> float:
        most = max(memory.running[begin:end], default=0)
        return memory.in_flight[part] * saved(part, begin, end) + kept(part, begin, end) + most

    def fitting(part: int, begin: int, end: int) -> float:
        return longest(part, begin, end) if held(part, begin, end) <= memory.limit else math.inf

    cuts, worst = _cut(len(work), parts, fitting)
    return cuts if worst < math.inf else _cut(len(work), parts, held)[0]


def _sums(costs: Sequence[float]) -> Cost:
    total = [0.0, *accumulate(costs)]
    return lambda _, begin, end: total[end] - total[begin]


def _cut(count: int, parts: int, cost: Cost) -> tuple[list[int], float]:
    """Cut `count` units so that the largest cost of a part is minimal; returns the cuts and that cost.

    Dynamic programming over the prefixes of the chain.
    """
    best: list[list[tuple[float, int]]] = [[(cost(0, 0, end), 0) for end in range(count + 1)]]
    for part in range(1, parts):
        row = [(math.inf, part)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min((max(best[-1][begin][0], cost(part, begin, end)), begin) for begin in range(part, end))
        best.append(row)
    cuts, end = list[int](), count
    for part in range(parts - 1, 0, -1):
        end = best[part][end][1]
        cuts.insert(0, end)
    return cuts, best[-1][count][0]
