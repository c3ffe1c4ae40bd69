"""reduce_microbatches: sum each unit's gradients over the micro-batches of a step, and average them over the ranks.

Stages 0 and 1, which keep full gradients, add them up and communicate once per step:

    m0_ga = region_1(a, m0_dh)                       m0_ga = region_1(a, m0_dh)
    m1_ga = region_1(a, m1_dh)               ->      m1_ga = region_1(a, m1_dh)
    return ..., {"a.weight": [m0_ga, m1_ga]}         a_sum = add(a, [m0_ga], [m1_ga])
                                                     a_reduce = reduce_scatter(a, a_sum)
                                                     a_grads = wait(a_reduce)
                                                     return ..., [a_grads]

Stages 2 and 3 reduce the gradients of each micro-batch as they are computed, and add up the resulting shards:

    m0_a_grads = wait(m0_a_reduce)
    m1_a_grads = wait(m1_a_reduce)
    a_grads = add(a, m0_a_grads, m1_a_grads)

That sum is averaged over replicas once. Full gradients are summed in the dtype in which they are averaged; the first
line of a sum names it if it is another dtype: `add(a, [m0_ga], [m1_ga], dtype=torch.float32)`.

Either way, gradients are added in the order of the micro-batches, so that bits do not depend on the schedule.
"""

from __future__ import annotations

from zcompile.ir.program import Program
from zcompile.passes.common.lines import reduce_gradients


def reduce_microbatches(program: Program) -> Program:
    """Return a step of several micro-batches that returns reduced gradients, by unit."""
    program = program.copy()
    reduce_gradients(program, program.results.gradient_lists())
    return program
