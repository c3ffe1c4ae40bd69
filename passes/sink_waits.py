"""sink_waits: wait for a reduction late, so that compute hides it.

    a_reduce = reduce_scatter(a, [ga])          a_reduce = reduce_scatter(a, [ga])
    a_grads = wait(a_reduce)            ->      gb = region_1(...)
    gb = region_1(...)                          a_grads = wait(a_reduce)
    b_reduce = reduce_scatter(b, [gb])          b_reduce = reduce_scatter(b, [gb])

At most `depth` reductions are in flight: the full gradients that they read stay alive until the wait, and waiting for
all of them at the end would hold every full gradient. Stage 0 keeps full gradients anyway and waits at the end, unless
they are used up (`consumed`) as they arrive.

What is averaged over replicas, too, starts on its way there as soon as it has been waited for. No more than shards is
held meanwhile, so that is waited for at the end, or where it is consumed, `depth` such messages later.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Averaging, Reduce, Results, SumAverages, wait_of
from zcompile.ir.program import Program


def sink_waits(program: Program, *, depth: int = 1, consumed: bool = False) -> Program:
    """Move the wait of each reduction before the start of the one `depth` later, or to the end."""
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
    """What adds these averages, of a further micro-batch, to earlier ones, and what the last sum is averaged by."""
    sums = [user for user in wait.users if isinstance(data(user).op, SumAverages) and user.args[2] is wait]
    return [node for one in sums for node in (one, *_replicas_of(one))]


def _replicas_of(averages: fx.Node) -> list[fx.Node]:
    """What starts averaging averages over replicas."""
    return [user for user in averages.users if isinstance(data(user).op, Averaging)]
