"""Secondary shards of a unit as one run of bytes: where each of its messages lies in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zcompile.ir.packing import aligned


def message_places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The bytes [start, stop) of messages of so many bytes; each begins where kernels and collectives like it."""
    ends = list(itertools.accumulate(map(aligned, sizes), initial=0))
    return [(start, start + size) for start, size in zip(ends, sizes, strict=False)]


def secondary_bytes(sizes: Sequence[int]) -> int:
    """Bytes of all of them together."""
    return sum(map(aligned, sizes))
