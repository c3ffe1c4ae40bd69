"""sink_waits: delay the waits for reductions, so that compute hides them.

    a_reduce = reduce_scatter(a, [ga])          a_reduce = reduce_scatter(a, [ga])
    a_grads = wait(a_reduce)            ->      gb = region_1(...)
    gb = region_1(...)                          a_grads = wait(a_reduce)
    b_reduce = reduce_scatter(b, [gb])          b_reduce = reduce_scatter(b, [gb])

At most `depth` reductions are in flight: the full gradients that they read stay alive until the wait, so waiting for
all reductions at the end would hold every full gradient. Stage 0 keeps full gradients anyway and waits at the end,
unless each gradient is consumed when it arrives (`consumed`).

Averages over replicas start right after the wait for the reduction. Only shards are held meanwhile, so they are waited
for at the end, or, if gradients are consumed, before the start of the average `depth` later.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Averaging, Reduce, Results, SumAverages, wait_of
from zcompile.ir.program import Program


def sink_waits(program: Program, *, depth: int = 1, consumed: bool = False) -> Program:
    """Move the wait for each reduction to just before the reduction `depth` later starts, or to the end."""
    program = program.copy()
    (end,) = program.nodes(Results)
    for axis in program.layout.averaged:
        along = [node for node in program.nodes(Averaging) if op_of(node, Averaging).over(program.layout) is axis]
        for index, reduction in enumerate(along):
            bounded = consumed or (isinstance(op := data(reduction).op, Reduce) and op.scatter)
            anchor = _later(along, index + depth, end) if bounded else end
            wait = wait_of(reduction)
            for node in (wait, *_replicas_of(wait), *_sums_with(wait)):
                anchor.prepend(node)
    return program


def _later(reductions: Sequence[fx.Node], index: int, end: fx.Node) -> fx.Node:
    return reductions[index] if index < len(reductions) else end


def _sums_with(wait: fx.Node) -> list[fx.Node]:
    """Return the lines that add these averages to those of earlier micro-batches, and that average the last sum."""
    sums = [user for user in wait.users if isinstance(data(user).op, SumAverages) and user.args[2] is wait]
    return [node for total in sums for node in (total, *_replicas_of(total))]


def _replicas_of(averages: fx.Node) -> list[fx.Node]:
    """Return the lines that start averaging `averages` over replicas."""
    return [user for user in averages.users if isinstance(data(user).op, Averaging)]
