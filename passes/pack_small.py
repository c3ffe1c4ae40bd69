"""pack_small: send the small parameters of a unit in one message.

A large parameter travels by itself, straight from and into contiguous memory. Biases and norms would spend a message's
latency on a few kilobytes each; packed, they cost one message and a copy. Small parameters of one dtype lie side by
side in a unit's shards, so packing copies only on the receiving side.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from zcompile.layout import Param, Unit
from zcompile.program import Program


def pack_small(program: Program) -> Program:
    """A program whose units send runs of small parameters as one message."""
    layout = program.layout
    return replace(program, layout=layout.with_units(tuple(map(_packed, layout.units))))


def _packed(unit: Unit) -> Unit:
    def kind(index: int) -> tuple[object, ...]:
        param: Param = unit.params[index]
        return param.dtype, param.compute_dtype, param.reduction_dtype, bool(param.shards), param.is_small

    messages: list[tuple[int, ...]] = []
    for (*_, small), grouped in itertools.groupby(range(len(unit.params)), key=kind):
        run = tuple(grouped)
        messages += [run] if small else [(index,) for index in run]
    return replace(unit, messages=tuple(messages))
