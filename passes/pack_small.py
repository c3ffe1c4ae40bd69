"""pack_small: send the small parameters of a unit in one message.

A large parameter travels by itself, straight from and into contiguous memory. Biases and norms would spend a message's
latency on a few kilobytes each; packed, they cost one message and a copy. Small parameters of one dtype lie side by
side in a unit's shards, so packing copies only on the receiving side.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from zcompile.layout import SMALL_BYTES, Param, Unit
from zcompile.program import Program


def pack_small(program: Program, *, small: int = SMALL_BYTES) -> Program:
    """A program whose units send runs of parameters of at most `small` bytes as one message."""
    layout = program.layout
    return replace(program, layout=layout.with_units(tuple(_packed(unit, small) for unit in layout.units)))


def _packed(unit: Unit, limit: int) -> Unit:
    def kind(index: int) -> tuple[object, ...]:
        param: Param = unit.params[index]
        return param.dtype, param.compute_dtype, param.reduction_dtype, bool(param.shards), param.nbytes <= limit

    messages: list[tuple[int, ...]] = []
    for (*_, small), grouped in itertools.groupby(range(len(unit.params)), key=kind):
        run = tuple(grouped)
        messages += [run] if small else [(index,) for index in run]
    return replace(unit, messages=tuple(messages))
