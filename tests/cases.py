"""Which of many cases the quick run takes; `make test-all` takes all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def diagonal(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parameters `names`, the product of `axes`: each value of each axis once in the quick run, the rest is slow."""
    values = [list(axis) for axis in axes]
    length = max(map(len, values))
    quick = [tuple(axis[index % len(axis)] for axis in values) for index in range(length)]
    return quickly(names, list(itertools.product(*map(dict.fromkeys, values))), quick)


def quickly(names: str, cases: Sequence[Any], quick: Sequence[Any]) -> pytest.MarkDecorator:
    """Parameters `names`, each of `cases`: those in `quick` in the quick run, the rest is slow.

    Raises:
        ValueError: one of `quick` is no case.
    """
    for case in quick:
        cases.index(case)
    several = "," in names
    params = [
        pytest.param(*(case if several else (case,)), marks=[] if case in quick else pytest.mark.slow) for case in cases
    ]
    return pytest.mark.parametrize(names, params)
