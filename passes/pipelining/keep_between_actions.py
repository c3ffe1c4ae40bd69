"""keep_between_actions: keep units full from one action of a pipeline to a later one, as far as a memory limit allows.

    # 0F0                                             # 0F0
    m0_a_out = region_0(a_full, m0_x)                 m0_a_out = region_0(a_full, m0_x)
    release(a_full)
    # 0F1                                      ->     # 0F1
    a_gather_1 = all_gather(a)
    a_full_1 = wait(a_gather_1)
    m1_a_out = region_0(a_full_1, m1_x)               m1_a_out = region_0(a_full, m1_x)
    release(a_full_1)                                 release(a_full)

Each gather that is saved costs the unit's full bytes from the preceding release to that gather. The gathers that cost
them for the fewest lines are saved first; where keeping a unit does not fit, it is gathered again.
"""

from __future__ import annotations

import itertools

from torch import fx

from zcompile.cost.memory import peak_bytes
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather, WaitGather
from zcompile.ir.program import Program
from zcompile.passes.keep_full import keep
from zcompile.passes.keep_within import check_fits, that_fit


def keep_between_actions(program: Program, *, memory_limit: int) -> Program:
    """Return a step that keeps units full within `memory_limit` bytes, as `zcompile.cost.memory` counts them.

    Raises:
        OptionError: the step exceeds the limit already.
    """
    check_fits(peak_bytes(program), memory_limit)
    program = program.copy()
    pairs = (pair for gathered in _by_unit(program) for pair in itertools.pairwise(gathered))
    again_full = ((again.name, full, again) for full, again in pairs)
    fitting = set(that_fit(program, again_full, memory_limit, shortest_first=True))
    for gathered in _by_unit(program):
        full = gathered[0]
        for again in gathered[1:]:
            if again.name in fitting:
                keep(program, full, again)
            else:
                full = again
    return program


def _by_unit(program: Program) -> list[list[fx.Node]]:
    """Return, for each unit, its full parameters in the order in which they are gathered."""
    result: dict[str, list[fx.Node]] = {}
    for full in program.nodes(WaitGather):
        (gather,) = full.all_input_nodes
        if not op_of(gather, AllGather).keep:
            result.setdefault(op_of(full, WaitGather).unit, []).append(full)
    return list(result.values())
