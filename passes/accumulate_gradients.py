"""accumulate_gradients: hold gradients back instead of reducing them, for a backward under `no_sync`.

    u0_reduce = all_reduce(u0, [g])
    u0_grads = wait(u0_reduce)          ->      u0_grads = accumulate(u0, [g])
    return [], [u0_grads]                       return [], [u0_grads]

Stages 0 and 1 keep full gradients anyway: so the micro-batches of a step communicate once, in the last backward, whose
reductions add what was held back.
"""

from __future__ import annotations

from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import Accumulate, Reduce, WaitReduce
from zcompile.ir.program import Program
from zcompile.passes.capture_graphs import copy_out


def accumulate_gradients(program: Program) -> Program:
    """A program whose backward communicates no gradients."""
    program = program.copy()
    for reduction in program.nodes(Reduce):
        op = op_of(reduction, Reduce)
        (wait,) = [user for user in reduction.users if isinstance(data(user).op, WaitReduce)]
        meta = Data(Accumulate(op.unit, op.params), Phase.BACKWARD, source=op.unit)
        with program.graph.inserting_before(reduction):
            name = wait.name
            sums = program.add(reduction.args, meta, f"{name}_held")
        wait.replace_all_uses_with(sums)
        program.graph.erase_node(wait)
        program.graph.erase_node(reduction)
    return copy_out(program)
