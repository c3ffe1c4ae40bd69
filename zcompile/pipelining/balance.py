"""Cutting a chain of units into stages that take about as long, within a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Cost = Callable[[int, int, int], float]
"""Of a part by its number, and by its first unit and the one behind its last."""


@dataclass(frozen=True)
class StageMemory:
    """What stages hold, as far as it depends on where they are cut.

    Attributes:
        in_flight: By stage, the most micro-batches that it has saved something of.
        saved: By unit, bytes of what it saves of a micro-batch.
        kept: By unit, bytes that it has beside, of whole parameters and gradients.
        running: By unit, the most that an operation of it reads and gives.
        limit: Bytes that a stage may hold.
    """

    in_flight: tuple[int, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    running: tuple[int, ...]
    limit: float


def balanced(work: Sequence[float], parts: int, memory: StageMemory | None = None) -> list[int]:
    """Where to cut a chain, so that the part with most work has least, of those cuts that fit the memory.

    Where none does, the part that holds most holds least.
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
    """Where to cut so many units, so that the part that costs most costs least, and what it costs.

    By dynamic programming over the prefixes of the chain.
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
