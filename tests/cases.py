"""Which of many cases each suite takes: the quick one a few, the slow one all pairs of values, the nightly the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def diagonal(names: str, *axes: Iterable[Any], pairs: bool = True) -> pytest.MarkDecorator:
    """Parameters `names`, the product of `axes`: each value once in the quick run, all pairs of values in the slow."""
    values = [list(axis) for axis in axes]
    length = max(map(len, values))
    quick = [tuple(axis[index % len(axis)] for axis in values) for index in range(length)]
    return quickly(names, list(itertools.product(*map(distinct, values))), quick, pairs=pairs)


def quickly(
    names: str, cases: Sequence[Any], quick: Sequence[Any], slow: Sequence[Any] | None = None, *, pairs: bool = True
) -> pytest.MarkDecorator:
    """Parameters `names`, each of `cases`: those in `quick` in the quick run, those in `slow` in the slow one; the rest
    is nightly.

    slow: without it, as many as it takes beside `quick` that each pair of values which some case has is tried.
    pairs: False where a case takes long: the slow run tries each value once more than the quick one, with others.

    Raises:
        ValueError: one of `quick` or `slow` is no case.
    """
    several = "," in names
    first = [cases.index(case) for case in quick]
    rows = [tuple(case) if several or isinstance(case, tuple) else (case,) for case in cases]
    if slow is not None:
        second = [cases.index(case) for case in slow]
    else:
        second = pairwise(rows, first) if pairs else once_more(rows, first)
    params = [
        pytest.param(
            *(case if several else (case,)),
            marks=[] if at in first else pytest.mark.slow if at in second else pytest.mark.nightly,
        )
        for at, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, params)


def pairwise(cases: Sequence[tuple[Any, ...]], first: Iterable[int] = ()) -> list[int]:
    """Which of `cases` to add to `first` so that each pair of values which some case has is in one of them.

    Greedy: the case with the most pairs that are still missing comes next, the earlier one of two alike.
    """
    numbered = list(zip(*(numbers(column) for column in zip(*cases, strict=True)), strict=True))
    pairs = [frozenset(pairs_of(case)) for case in numbered]
    missing = frozenset[Any]().union(*pairs).difference(*(pairs[at] for at in first))
    added = list[int]()
    while missing:
        at = max(range(len(cases)), key=lambda at: len(pairs[at] & missing))
        added.append(at)
        missing -= pairs[at]
    return added


def once_more(cases: Sequence[tuple[Any, ...]], first: Iterable[int] = ()) -> list[int]:
    """Which of `cases` beside `first` have each value that one of them has, and in the main pairs that are new."""
    left = [at for at in pairwise(cases, first) if at not in first]
    left += [at for at in range(len(cases)) if at not in {*first, *left}]
    numbered = list(zip(*(numbers(column) for column in zip(*cases, strict=True)), strict=True))
    seen, added = set[tuple[int, int]](), list[int]()
    for at in left:
        if not seen.issuperset(enumerate(numbered[at])):
            seen.update(enumerate(numbered[at]))
            added.append(at)
    return added


def distinct(column: Sequence[Any]) -> list[Any]:
    """Its values, each once."""
    return [value for at, value in enumerate(column) if column.index(value) == at]


def numbers(column: Sequence[Any]) -> list[int]:
    """The place of the first equal value, for each: values need no hash."""
    return [column.index(value) for value in column]


def pairs_of(case: tuple[int, ...]) -> Iterator[Any]:
    """Two values and their axes; of a case that has one value, that."""
    return itertools.combinations(enumerate(case), min(2, len(case)))
