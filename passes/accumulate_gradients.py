"""accumulate_gradients: accumulate gradients locally instead of reducing them, for a backward under `no_sync`.

    u0_reduce = all_reduce(u0, [g])
    u0_grads = wait(u0_reduce)          ->      u0_grads = accumulate(u0, [g])
    return [], [u0_grads]                       return [], [u0_grads]

Stages 0 and 1 keep full gradients anyway, so the micro-batches of a step communicate only once: the reductions of the
last backward add the accumulated gradients.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import Accumulate, Averaging, Reduce, wait_of
from zcompile.ir.program import Program
from zcompile.passes.capture_graphs import copy_out


def accumulate_gradients(program: Program) -> Program:
    """Return a program whose backward communicates no gradients."""
    program = program.copy()
    for reduction in program.nodes(Reduce):
        op = op_of(reduction, Reduce)
        chain = _chain(reduction)
        last = chain[-1]
        meta = Data(Accumulate(op.unit, op.params), Phase.BACKWARD, source=op.unit)
        with program.graph.inserting_before(reduction):
            sums = program.add(reduction.args, meta, f"{last.name}_held")
        last.replace_all_uses_with(sums)
        for node in reversed(chain):
            program.graph.erase_node(node)
    return copy_out(program)


def _chain(reduction: fx.Node) -> list[fx.Node]:
    """Return a reduction, its wait, and the reductions over other axes that follow, with their waits."""
    wait = wait_of(reduction)
    following = [user for user in wait.users if isinstance(data(user).op, Averaging)]
    return [reduction, wait, *(node for averaging in following for node in _chain(averaging))]
