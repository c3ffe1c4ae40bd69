"""insert_updates: run the optimizer on each unit's gradients as soon as they are reduced, and free them.

    b_grads = wait(b_reduce)                    b_grads = wait(b_reduce)
    a_reduce = reduce_scatter(a, [ga])  ->      a_reduce = reduce_scatter(a, [ga])
    a_grads = wait(a_reduce)                    update(b, b_grads)
    return [], [b_grads, a_grads]               a_grads = wait(a_reduce)
                                                update(a, a_grads)
                                                return [], []

So a rank holds the gradients of only the units in flight, not of the whole model (Lv et al., "Full Parameter
Fine-tuning for Large Language Models with Limited Resources", 2023, section 3.1, does so without shards). A unit is
updated after the last line that reads it: with tied parameters, its gradients may be complete before that.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Data, data
from zcompile.ir.ops import AVERAGES, Averaging, Copy, Update, WaitReduce
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items, reads_of, set_results
from zcompile.passes.common.lines import shards_of


def insert_updates(program: Program) -> Program:
    """Return a program that updates parameters and returns no gradients of them."""
    program = program.copy()
    results = program.results
    for waited in results.reduced:
        op = data(waited).op
        assert isinstance(op, AVERAGES), "gradients are reduced"
        meta = Data(Update(op.unit, op.params), program.phases[-1], source=op.unit)
        shards = shards_of(program, program.layout.unit(op.unit))
        with program.graph.inserting_after(_last(program, [waited, *reads_of(shards)])):
            program.add((shards, waited), meta, f"{shards.name}_update")
    set_results(program.graph, outputs=results.outputs, input_gradients=results.input_gradients)
    return program


def _last(program: Program, lines: list[fx.Node]) -> fx.Node:
    """Return the last of `lines`, or the reduction that starts right after it, to be in flight during the update."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    last = after_items(max(lines, key=position.__getitem__))
    following = last.next
    while isinstance(data(following).op, (Copy, WaitReduce)):
        following = following.next
    return following if isinstance(data(following).op, Averaging) else last
