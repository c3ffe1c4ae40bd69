"""Which messages between pipeline stages share a group, where each is a stream of its own."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from zcompile.runtime.stage_links import Route


def test_in_a_lane_each_rank_has_one_other_end_and_one_direction() -> None:
    for size in range(2, 18):
        places: dict[tuple[bool, int, bool], Counter[int]] = {}
        for sender, receiver in permutations(range(size), 2):
            places.setdefault(Route(sender, receiver).lane, Counter()).update((sender, receiver))
        assert all(count == 1 for lane in places.values() for count in lane.values()), size


def test_neighbours_that_are_two_take_one_lane_each_way() -> None:
    assert Route(0, 1).lane != Route(1, 0).lane
    assert len({Route(place, place + 1).lane for place in range(8)}) == 2
