"""Packing: places in one arena for values that live for a while each, so that none alive together share a byte.

This is dynamic storage allocation: NP-hard, and never below the most bytes alive at once. The chains that programs
are made of, each unit alive with the next few, fit into that or a little more if every value is put at the lower or the
upper end of a gap: which, a search with backtracking finds. Where that takes too long, greedy orders are tried
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Bytes at whose multiples a place begins: what kernels and collectives like best."""
_SLACKS = (1, 1.02, 1.05)
"""Sizes of the arena that are searched for, over the most bytes alive at once."""
_STEPS = 20_000
"""Places that one search tries before it gives up."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that are needed from line `start` to line `end`, both included."""

    nbytes: int
    start: int
    end: int

    def meets(self, other: Interval) -> bool:
        """True if both are alive at some line."""
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each interval begins, in their order, and the bytes of the arena that they take together."""

    offsets: tuple[int, ...]
    size: int


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next place may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_alive(intervals: Sequence[Interval]) -> int:
    """The most bytes alive at one line: no arena is smaller."""
    starts = [Interval(0, interval.start, interval.start) for interval in intervals]
    return max((sum(i.nbytes for i in intervals if i.meets(start)) for start in starts), default=0)


def pack(intervals: Sequence[Interval]) -> Packing:
    """Places for `intervals`, at aligned offsets; the same ones whenever it is asked."""
    values = _Values(intervals)
    bound = aligned(most_alive(intervals))
    for slack in _SLACKS:
        if (found := values.search(aligned(int(bound * slack)))) is not None:
            return found
    return min((values.greedy(order) for order in values.orders()), key=lambda packing: packing.size)


class _Values:
    """Intervals by number, with their aligned sizes and those that are alive with each."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals = intervals
        self.sizes = [aligned(interval.nbytes) for interval in intervals]
        numbers = range(len(intervals))
        self.near = [[i for i in numbers if i != n and intervals[i].meets(intervals[n])] for n in numbers]

    def orders(self) -> list[list[int]]:
        """By beginning, by size, by length."""
        numbers, found = range(len(self.intervals)), self.intervals
        return [
            sorted(numbers, key=lambda n: found[n].start),
            sorted(numbers, key=lambda n: -found[n].nbytes),
            sorted(numbers, key=lambda n: found[n].start - found[n].end),
        ]

    def search(self, size: int) -> Packing | None:
        """A packing of at most `size` bytes, if one is found: values in the order in which they come to life."""
        order, _, _ = self.orders()
        offsets: dict[int, int] = {}
        choices: list[Iterator[int]] = []
        for _ in range(_STEPS):
            if len(offsets) == len(order):
                return self._packing(offsets)
            number = order[len(offsets)]
            if len(choices) == len(offsets):
                choices.append(self._choices(number, offsets, size))
            offset = next(choices[-1], None)
            if offset is not None:
                offsets[number] = offset
                continue
            choices.pop()
            if not offsets:
                return None
            offsets.popitem()
        return None

    def greedy(self, order: Sequence[int]) -> Packing:
        """One value after the other at the lower end of the smallest gap in which it fits."""
        offsets: dict[int, int] = {}
        for number in order:
            offsets[number] = next(self._choices(number, offsets, sum(self.sizes)))
        return self._packing(offsets)

    def _choices(self, number: int, offsets: dict[int, int], size: int) -> Iterator[int]:
        """Where a value may begin between those alive with it, smallest gap first; what is above all of them, last."""
        taken = sorted((offsets[i], offsets[i] + self.sizes[i]) for i in self.near[number] if i in offsets)
        mine, end, gaps = self.sizes[number], 0, []
        for start, stop in (*taken, (size, size)):
            if start - end >= mine:
                gaps.append((start == size, start - end, end))
            end = max(end, stop)
        for _, room, begin in sorted(gaps):
            yield begin
            if room > mine:
                yield begin + room - mine

    def _packing(self, offsets: dict[int, int]) -> Packing:
        ends = (offset + self.sizes[number] for number, offset in offsets.items())
        return Packing(tuple(offsets[number] for number in range(len(offsets))), max(ends, default=0))
