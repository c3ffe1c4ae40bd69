"""Bytes of messages: of what is sent in fewer bits, in bfloat16 or in int8 with a scale for each block, and of buffers.

Of averages ranks average parts, each its own, and send each other the averages, both in few bits; two ranks exchange
all at once. Of a parameter each rank sends its shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from zcompile.ir.packing import aligned

BLOCK = 256
"""Elements that share a scale, a float32: 1.6% more bytes. Small, so that one large element costs few others."""
WIRE_DTYPES = (torch.bfloat16, torch.int8)


def part_numel(numel: int, ranks: int) -> int:
    """Elements that a rank averages of `numel`, padding included; of two ranks each averages all."""
    return padded_to_blocks(numel if ranks == 2 else -(-numel // ranks))


def padded_to_blocks(numel: int) -> int:
    """`numel`, rounded up to whole blocks."""
    return -(-numel // BLOCK) * BLOCK


def wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Bytes of `numel` elements, of which int8 has whole blocks."""
    scales = numel // BLOCK * torch.float32.itemsize if wire is torch.int8 else 0
    return numel * wire.itemsize + scales


def shard_wire_bytes(numel: int, wire: torch.dtype) -> int:
    """Bytes of a shard of `numel` elements, of which int8 has whole blocks for each parameter."""
    return wire_bytes(padded_to_blocks(numel) if wire is torch.int8 else numel, wire)


def average_payload(numel: int, ranks: int, wire: torch.dtype) -> int:
    """What an average of `numel` elements moves over `ranks` ranks, of which a rank sends (ranks-1)/ranks, in bytes."""
    parts = 1 if ranks == 2 else ranks
    return 2 * parts * wire_bytes(part_numel(numel, ranks), wire)


def message_places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The bytes [start, stop) of messages of so many bytes; each begins where kernels and collectives like it."""
    ends = list(itertools.accumulate(map(aligned, sizes), initial=0))
    return [(start, start + size) for start, size in zip(ends, sizes, strict=False)]


def secondary_bytes(sizes: Sequence[int]) -> int:
    """Bytes of all of them together."""
    return sum(map(aligned, sizes))
