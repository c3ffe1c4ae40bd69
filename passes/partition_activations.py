"""partition_activations: shard the saved activations that all tensor-parallel ranks have alike.

    ya = region_0(a, x)     # =f32[8, 4]        ya = region_0(a, x)                 # =f32[8, 4]
    yb = region_0(b, ya)    # =f32[8, 4]        ya_offloaded = offload(ya, tp)          # i64[]@64
    ...                                         yb = region_0(b, ya)
    return [yb], [x, ya]                        ...
                                       ->       return [yb], [x, ya_offloaded]

    db, gc = region_1(c, dy, yb)                ya_fetch = fetch(ya_offloaded, tp)
    da, gb = region_1(b, db, ya)                db, gc = region_1(c, dy, yb)
                                                ya_again = wait(ya_fetch)
                                                da, gb = region_1(b, db, ya_again)

Shards are gathered `ahead` regions before the region that reads the value (Rajbhandari et al. 2020, "ZeRO", section
6.1: P_a, and P_a+cpu where shards are offloaded as well). Values not known to be the same on all ranks stay whole.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.errors import OptionError
from zcompile.ir.operation import data
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.passes.common.lines import group_of
from zcompile.passes.common.move_saved import LEAST, movable, move


def partition_activations(
    program: Program, *, ahead: int = 1, least: int = LEAST, moved: bool = False, whole: bool = True
) -> Program:
    """Return a program that shards replicated saved activations of at least `least` bytes over tensor-parallel ranks.

    `moved`: shards are offloaded from device memory, too. `whole`: False for a part of a model, which may save nothing.

    Raises:
        OptionError: `whole`, and no saved activation is known to be the same on all ranks.
    """
    program = program.copy()
    saved = movable(program, least, ahead)
    partitioned = [value for value in saved if data(value.node).replicated]
    if not partitioned:
        if whole and program.has_backward:
            why = f"has no effect: nothing of {human_bytes(least)} that is saved is known to be the same on all ranks"
            raise OptionError("partition_activations", why, "leave it out")
        return program
    axis = program.layout.tensor
    assert axis is not None, "values are marked as replicated over an axis"
    group = group_of(program, axis)
    shards = [_shard_bytes(value.node, axis.size) for value in partitioned]
    for value, nbytes in zip(partitioned[::-1], shards[::-1], strict=True):
        move(program, value, group, kept=0 if moved else nbytes)
    total, kept = (sum(value.nbytes for value in values) for values in (saved, partitioned))
    note = f"partitioned activations: {len(shards)}, {human_bytes(kept)} as shards of {human_bytes(sum(shards))}"
    return replace(program, notes=(*program.notes, f"{note}; {human_bytes(total - kept)} stay whole"))


def _shard_bytes(node: fx.Node, ranks: int) -> int:
    """Return the bytes of the largest shard, a multiple of the element size."""
    meta = data(node)
    assert meta.type is not None, "a saved activation is a tensor"
    size = meta.type.dtype.itemsize
    return -(-meta.nbytes // (size * ranks)) * size
