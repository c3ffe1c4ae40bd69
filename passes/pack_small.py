"""pack_small: send the small parameters of a unit in one message.

A large parameter is sent by itself, directly from and into contiguous memory. Biases and norms would each cost the
latency of a message for a few kilobytes; packed, they cost one message and a copy. Small parameters of the same dtype
are adjacent in a unit's shards, so packing copies only on the receiving side. A message holds at most one bucket.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from zcompile.ir.layout import SMALL_BYTES, Param, Unit
from zcompile.ir.program import Program


def pack_small(program: Program, *, small: int = SMALL_BYTES, bucket: int | None = None) -> Program:
    """Return a program whose units pack parameters of at most `small` bytes into messages of at most `bucket` bytes."""
    layout = program.layout
    most = math.inf if bucket is None else bucket
    return replace(program, layout=layout.with_units(tuple(_packed(unit, small, most) for unit in layout.units)))


def _packed(unit: Unit, limit: int, bucket: float) -> Unit:
    def kind(index: int) -> tuple[object, ...]:
        param: Param = unit.params[index]
        layout = bool(param.shards), param.owner, param.outer_gather_dtype
        return param.dtype, param.compute_dtype, param.reduction_dtype, *layout, param.nbytes <= limit

    messages: list[tuple[int, ...]] = []
    for (*_, small), grouped in itertools.groupby(range(len(unit.params)), key=kind):
        run = tuple(grouped)
        messages += _within(unit, run, bucket) if small else [(index,) for index in run]
    return replace(unit, messages=tuple(messages))


def _within(unit: Unit, run: tuple[int, ...], bucket: float) -> Iterator[tuple[int, ...]]:
    """Split `run` into parts of at most `bucket` bytes, counted as gathered or reduced, or of a single parameter."""
    part: list[int] = []
    taken = 0
    for index in run:
        param = unit.params[index]
        nbytes = param.padded_numel * max(param.full_dtype.itemsize, param.reduce_dtype.itemsize)
        if part and taken + nbytes > bucket:
            yield tuple(part)
            part, taken = [], 0
        part.append(index)
        taken += nbytes
    yield tuple(part)
