"""Packing: offsets in one arena for buffers with known lifetimes, so that no two live buffers overlap.

This is dynamic storage allocation: NP-hard, with the peak of live bytes as a lower bound. In programs, each unit is
live together with the next few, and the bound or a little more suffices if every buffer is put at the lower or the
upper end of a gap; a search with backtracking decides which. If that takes too long, greedy orders are tried
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 256
"""Alignment of offsets, in bytes: fastest for kernels and collectives."""
_SLACKS = (1, 1.02, 1.05)
"""Sizes of the arena that are tried, relative to the peak of live bytes."""
_STEPS = 20_000
"""Steps after which a search gives up."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`nbytes` that are live from line `start` to line `end`, both included."""

    nbytes: int
    start: int
    end: int

    def meets(self, other: Interval) -> bool:
        """Return True if both are live at some line."""
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True, slots=True)
class Packing:
    """The offset of each interval, in order, and the size of the arena, in bytes."""

    offsets: tuple[int, ...]
    size: int


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def most_alive(intervals: Sequence[Interval]) -> int:
    """Return the peak of live bytes over all lines, a lower bound for the arena."""
    starts = [Interval(0, interval.start, interval.start) for interval in intervals]
    return max((sum(i.nbytes for i in intervals if i.meets(start)) for start in starts), default=0)


def pack(intervals: Sequence[Interval]) -> Packing:
    """Return aligned offsets for `intervals`; deterministic."""
    values = _Values(intervals)
    bound = aligned(most_alive(intervals))
    for slack in _SLACKS:
        if (found := values.search(aligned(int(bound * slack)))) is not None:
            return found
    return min((values.greedy(order) for order in values.orders()), key=lambda packing: packing.size)


class _Values:
    """Intervals by number, with their aligned sizes and, for each, the intervals that it meets."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals = intervals
        self.sizes = [aligned(interval.nbytes) for interval in intervals]
        numbers = range(len(intervals))
        self.near = [[i for i in numbers if i != n and intervals[i].meets(intervals[n])] for n in numbers]

    def orders(self) -> list[list[int]]:
        """Return the numbers by start, by decreasing size, and by decreasing lifetime."""
        numbers, intervals = range(len(self.intervals)), self.intervals
        return [
            sorted(numbers, key=lambda n: intervals[n].start),
            sorted(numbers, key=lambda n: -intervals[n].nbytes),
            sorted(numbers, key=lambda n: intervals[n].start - intervals[n].end),
        ]

    def search(self, size: int) -> Packing | None:
        """Search for a packing of at most `size` bytes, placing intervals by start; None if none is found."""
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
        """Place each interval in turn at the lower end of the smallest gap in which it fits."""
        offsets: dict[int, int] = {}
        for number in order:
            offsets[number] = next(self._choices(number, offsets, sum(self.sizes)))
        return self._packing(offsets)

    def _choices(self, number: int, offsets: dict[int, int], size: int) -> Iterator[int]:
        """Yield offsets for an interval between those that it meets, smallest gap first, above all of them last."""
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
