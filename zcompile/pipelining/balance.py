"""Cutting a chain of units into stages that take about as long."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(work: Sequence[float], parts: int) -> list[int]:
    """Where to cut a chain, so that the part with most work has least; by dynamic programming over its prefixes."""
    total = [0.0]
    for one in work:
        total.append(total[-1] + one)
    best: list[list[tuple[float, int]]] = [[(total[end], 0) for end in range(len(work) + 1)]]
    for part in range(1, parts):
        row = [(float("inf"), 0)] * (len(work) + 1)
        for end in range(part + 1, len(work) + 1):
            row[end] = min((max(best[-1][begin][0], total[end] - total[begin]), begin) for begin in range(part, end))
        best.append(row)
    cuts, end = list[int](), len(work)
    for part in range(parts - 1, 0, -1):
        end = best[part][end][1]
        cuts.insert(0, end)
    return cuts
