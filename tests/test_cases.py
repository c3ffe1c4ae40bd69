from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import diagonal, once_more, pairwise, quickly

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def pairs(cases: list[tuple[Any, ...]]) -> set[Any]:
    return {(i, j, case[i], case[j]) for case in cases for i in range(len(case)) for j in range(i)}


@given(SIZES, st.randoms())
def test_each_pair_that_some_case_has_is_in_one_that_is_chosen(sizes: list[int], random: Any) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    cases = random.sample(cases, random.randint(1, len(cases)))
    first = random.sample(range(len(cases)), random.randint(0, min(2, len(cases))))
    chosen = [*first, *pairwise(cases, first)]
    assert pairs([cases[at] for at in chosen]) == pairs(cases)
    assert len(chosen) == len(set(chosen)), "none is chosen twice"


@given(SIZES)
def test_a_product_takes_few_more_than_its_two_longest_axes(sizes: list[int]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    longest, second = sorted(sizes)[:-3:-1]
    assert longest * second <= len(pairwise(cases)) <= 2 * longest * second


@given(SIZES, st.randoms())
def test_each_value_is_in_one_that_is_chosen_beside_the_first(sizes: list[int], random: Any) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    first = random.sample(range(len(cases)), random.randint(0, min(3, len(cases))))
    chosen = once_more(cases, first)
    others = [case for at, case in enumerate(cases) if at not in first]
    assert {*enumerated(others)} == {*enumerated([cases[at] for at in chosen])}
    assert len(chosen) <= sum(sizes)
    assert not {*first}.intersection(chosen)


def enumerated(cases: list[tuple[Any, ...]]) -> list[tuple[int, Any]]:
    return [place for case in cases for place in enumerate(case)]


def marks(decorator: pytest.MarkDecorator) -> dict[str, list[Any]]:
    suites: dict[str, list[Any]] = {"quick": [], "slow": [], "nightly": []}
    for case in decorator.args[1]:
        suites[next((mark.name for mark in case.marks), "quick")].append(case.values)
    return suites


def test_a_product_is_divided_among_the_suites() -> None:
    product = marks(diagonal("a, b, c", [0, 1], [0, 1], [0, 1]))
    assert product["quick"] == [(0, 0, 0), (1, 1, 1)]
    assert product["slow"] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert product["nightly"] == [(0, 1, 1), (1, 0, 1), (1, 1, 0)]
    costly = marks(diagonal("a, b, c", [0, 1], [0, 1], [0, 1], pairs=False))
    assert costly["quick"] == product["quick"]
    assert costly["slow"] == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    chosen = marks(quickly("one", ["a", "b", "c"], ["b"], slow=["c"]))
    assert chosen == {"quick": [("b",)], "slow": [("c",)], "nightly": [("a",)]}
    assert marks(quickly("one", ["a", "b"], ["b"])) == {"quick": [("b",)], "slow": [("a",)], "nightly": []}


def test_values_need_no_hash_and_a_case_may_be_one_tuple() -> None:
    cases = [(kind, options) for kind in "ab" for options in ({"stage": 0}, {"stage": 3})]
    assert marks(quickly("kind, options", cases, cases[:1])) == {"quick": cases[:1], "slow": cases[1:], "nightly": []}
    product = list(itertools.product(*["ab"] * 4))
    suites = marks(quickly("case", product, product[:1]))
    assert len(suites["slow"]) < 8
    assert all(isinstance(*values, tuple) for values in suites["slow"])


def test_a_case_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not in list"):
        quickly("a", [1, 2], [3])
