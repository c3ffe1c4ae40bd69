"""insert_reductions: average each unit's gradients over the ranks as soon as the last of them is there.

    g = region_1(u0_full, dy)           ->      g = region_1(u0_full, dy)
    return [], {"u0.weight": g}                 u0_reduce = reduce_scatter(u0, [g])
                                                u0_grads = wait(u0_reduce)
                                                return [], [u0_grads]

Stages 1 to 3 scatter: each rank gets the gradient of its shard. Stage 0 reduces to all. Where ranks of another axis
have the same shards (HSDP; MiCS, Zhang et al. 2022), these are averaged over that axis, too:

    u0_reduce = reduce_scatter(u0, [g])
    u0_shard_grads = wait(u0_reduce)
    u0_average = all_reduce(u0, u0_shard_grads, replicate)
    u0_grads = wait(u0_average)

Where that axis divides them further (HFSDP, hpZ), its ranks get their parts: `reduce_scatter(u0, u0_shard_grads,
replicate)`.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.layout import Unit
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.passes.common.axis_groups import group_of
from zcompile.passes.common.reductions import next_line, owned, reduction_of


def insert_reductions(program: Program) -> Program:
    """A program that returns reduced gradients, by unit."""
    program = program.copy()
    results = program.results
    gradients = results.gradients
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    ready = {
        unit.name: max((position[gradients[p.name]] for p in unit.params if p.name in gradients), default=-1)
        for unit in program.layout.units
    }
    nodes = list(program.graph.nodes)
    units = sorted((u for u in program.layout.units if ready[u.name] >= 0), key=lambda unit: ready[unit.name])
    axis = program.layout.replicated
    group = group_of(program, axis) if axis and units else None
    reduced = [_reduce(program, unit, gradients, nodes[ready[unit.name]], group) for unit in units]
    set_results(program.graph, outputs=results.outputs, input_gradients=results.input_gradients, reduced=reduced)
    return program


def _reduce(
    program: Program, unit: Unit, gradients: dict[str, fx.Node], last: fx.Node, group: fx.Node | None
) -> fx.Node:
    """Reduce the gradients of `unit` once `last` of them is there, also over the ranks of `group`; returns the wait."""
    with program.graph.inserting_before(next_line(program, last)):
        grads = [owned(program, gradients.get(param.name), unit) for param in unit.params]
        return reduction_of(program, unit, grads, group)
