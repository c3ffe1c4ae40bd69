"""plan_memory: give long-lived buffers fixed offsets in memory that is kept from step to step.

    a_gather = all_gather(a)                    a_gather = all_gather(a, at=arena[0:4096])
    b_gather = all_gather(b)                    b_gather = all_gather(b, at=arena[4096:8192])
    a_full = wait(a_gather)                     a_full = wait(a_gather)
    y = region_0(a_full, x)             ->      y = region_0(a_full, x)
    release(a_full)                             y_stored = store(y, stack)
    c_gather = all_gather(c)                    release(a_full)
                                                c_gather = all_gather(c, at=arena[0:4096])

Allocations of regions then come from memory that no long-lived buffers fragment: the defragmentation of ZeRO-R
(Rajbhandari et al. 2020, section 6.3). Gathered parameters, and gradients that are copied to be sent, get ranges of
the arena, packed by lifetime; saved activations, whose sizes vary, are copied onto a stack.

Buffers that outlive the step get no range: kept full copies, units gathered ahead, and gradients, which users may hold.

On a GPU, stream order makes it safe to reuse a range. Whatever writes to it is work of the current stream, or a
collective that waits for that stream at launch; and a lifetime ends after the wait for its collective and the release
after the last region that reads it, all of them earlier in that stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zcompile.ir.arena_places import placeable
from zcompile.ir.operation import Data, data
from zcompile.ir.ops import AllGather, Arena, Reduce, Stack, Store
from zcompile.ir.packing import most_alive, pack
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import TensorType, human_bytes
from zcompile.passes.common.lines import copy_of
from zcompile.passes.common.move_saved import maker_of


def plan_memory(program: Program, *, activations: bool = False) -> Program:
    """Give gathers and reductions ranges in an arena; with `activations`, copy saved activations onto a stack."""
    program = program.copy()
    if activations and program.has_backward:
        _store(program)
    spans = placeable(program)
    if not spans:
        return program
    packing, bound = pack(list(spans.values())), most_alive(list(spans.values()))
    meta = Data(Arena(), type=TensorType.make(torch.uint8, (packing.size,)), view=True)
    arena = program.add_placeholder("arena", meta)
    for (node, span), offset in zip(spans.items(), packing.offsets, strict=True):
        op = data(node).op
        assert isinstance(op, (AllGather, Reduce)), "only gathers and reductions have ranges"
        program.respell(node, replace(op, at=(offset, offset + span.nbytes)), arena)
    alive = f"of which {human_bytes(bound)} are alive at once"
    note = f"arena: {human_bytes(packing.size)} for {len(spans)} places, {alive}"
    return replace(program, notes=(*program.notes, note))


def _store(program: Program) -> None:
    """Copy saved activations onto the stack and let all other readers read the copy, so that the original is freed."""
    values = [node for node in program.saved() if maker_of(program, node) is not None]
    if not values:
        return
    stack = program.add_placeholder("stack", Data(Stack()))
    for node in reversed(values):
        copied = copy_of(program, node, replace(data(node), op=Store(), storage=0), "stored", stack)
        for user in list(node.users):
            if user is not copied:
                user.replace_input_with(node, copied)
