"""Owners: which rank keeps which of the parameters that are not divided, for optimizers that need whole matrices.

What a rank owns it updates, so that owners are chosen by what an update costs: that of Muon, Shampoo and SOAP is a
product of matrices of a parameter's shape (Jordan et al., "Muon", 2024; Gupta et al., "Shampoo", ICML 2018).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence


def cost_of(shape: Sequence[int]) -> int:
    """Multiplications of a product of a matrix of `shape` with its transpose; of what has two dimensions or more."""
    height, width = (shape[0] if shape else 1), math.prod(shape[1:])
    return height * width * min(height, width)


def choose_owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """A rank for each name: the longest first, to the one that has the least. Every rank chooses the same.

    The largest load is at most 4/3 of the least possible (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, owner = heapq.heappop(loads)
        owners[name] = owner
        heapq.heappush(loads, (load + costs[name], owner))
    return {name: owners[name] for name in costs}
