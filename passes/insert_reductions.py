"""insert_reductions: average each unit's gradients over the ranks as soon as the last of them is computed.

    g = region_1(u0_full, dy)           ->      g = region_1(u0_full, dy)
    return [], {"u0.weight": g}                 u0_reduce = reduce_scatter(u0, [g])
                                                u0_grads = wait(u0_reduce)
                                                return [], [u0_grads]

Stages 1 to 3 use reduce_scatter: each rank gets the gradient of its shard. Stage 0 uses all_reduce. Where the ranks
along another axis have the same shards (HSDP; MiCS, Zhang et al. 2022), gradients are averaged over that axis, too:

    u0_reduce = reduce_scatter(u0, [g])
    u0_shard_grads = wait(u0_reduce)
    u0_average = all_reduce(u0, u0_shard_grads, replicate)
    u0_grads = wait(u0_average)

Where that axis divides the shards further (HFSDP, hpZ), each of its ranks gets its part: `reduce_scatter(u0,
u0_shard_grads, replicate)`.
"""

from __future__ import annotations

from zcompile.ir.program import Program
from zcompile.passes.common.lines import reduce_gradients


def insert_reductions(program: Program) -> Program:
    """Return a program that returns reduced gradients, by unit."""
    program = program.copy()
    reduce_gradients(program, {name: [gradient] for name, gradient in program.results.gradients.items()})
    return program
