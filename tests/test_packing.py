"""Packing: places that are disjoint while they are needed, in little more than what is alive at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.ir.packing import ALIGNMENT, Interval, aligned, most_alive, pack

INTERVALS = st.lists(
    st.builds(
        lambda nbytes, start, length: Interval(nbytes, start, start + length),
        st.integers(1, 5000),
        st.integers(0, 40),
        st.integers(0, 20),
    ),
    max_size=25,
)


@pytest.mark.slow
@given(INTERVALS)
def test_no_two_alive_together_share_a_byte(intervals: list[Interval]) -> None:
    packing = pack(intervals)
    ends = [offset + i.nbytes for offset, i in zip(packing.offsets, intervals, strict=True)]
    for one, other in itertools.combinations(range(len(intervals)), 2):
        if intervals[one].meets(intervals[other]):
            assert ends[one] <= packing.offsets[other] or ends[other] <= packing.offsets[one]
    assert all(offset % ALIGNMENT == 0 for offset in packing.offsets)
    assert max(ends, default=0) <= packing.size <= sum(aligned(i.nbytes) for i in intervals)


@pytest.mark.slow
@given(INTERVALS)
def test_it_is_never_below_what_is_alive_and_always_the_same(intervals: list[Interval]) -> None:
    assert most_alive(intervals) <= pack(intervals).size
    assert pack(intervals) == pack(list(intervals))


@given(*[st.integers(1, 60)] * 3, st.integers(1, 30), st.integers(0, 4))
def test_units_one_behind_the_other_are_within_a_twentieth(
    first: int, block: int, last: int, count: int, prefetch: int
) -> None:
    """Gathers as a stage 3 program has them: each from `prefetch` uses earlier to its own, there and back."""
    sizes = [first, *[block] * count, last]
    kept, turn = sizes[-prefetch - 1 :], 2 * len(sizes)
    again = list(reversed(sizes[: -prefetch - 1]))
    there = [(size, 2 * (i - prefetch), 2 * i + 1) for i, size in enumerate(sizes[: -prefetch - 1])]
    over = [(size, 2 * (len(again) + i - prefetch), turn + 2 * (len(kept) - i) - 1) for i, size in enumerate(kept)]
    back = [(size, turn + 2 * i + 1, turn + 2 * (len(kept) + i) + 1) for i, size in enumerate(again)]
    found = [Interval(size * 2**20, max(start, 0), end) for size, start, end in (*there, *over, *back)]
    assert pack(found).size <= 1.05 * most_alive(found)
