"""sink_waits: wait for a reduction late, so that compute hides it.

    a_reduce = reduce_scatter(a, [ga])          a_reduce = reduce_scatter(a, [ga])
    a_grads = wait(a_reduce)            ->      gb = region_1(...)
    gb = region_1(...)                          a_grads = wait(a_reduce)
    b_reduce = reduce_scatter(b, [gb])          b_reduce = reduce_scatter(b, [gb])

At most `depth` reductions are in flight: the full gradients that they read stay alive until the wait, and waiting for
all of them at the end would hold every full gradient. Stage 0 keeps full gradients anyway and waits at the end, unless
they are used up (`consumed`) as they arrive.
"""

from __future__ import annotations

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Reduce, Results, WaitReduce
from zcompile.ir.program import Program


def sink_waits(program: Program, *, depth: int = 1, consumed: bool = False) -> Program:
    """Move the wait of each reduction before the start of the one `depth` later, or to the end."""
    program = program.copy()
    reductions = program.nodes(Reduce)
    (end,) = program.nodes(Results)
    for index, reduction in enumerate(reductions):
        later = index + depth
        bounded = later < len(reductions) and (consumed or op_of(reduction, Reduce).scatter)
        anchor = reductions[later] if bounded else end
        (wait,) = [user for user in reduction.users if isinstance(data(user).op, WaitReduce)]
        anchor.prepend(wait)
    return program
