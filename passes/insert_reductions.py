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
from zcompile.ir.liveness import may_show
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import (
    Averaging,
    Copy,
    Group,
    Item,
    Reduce,
    ReduceOutside,
    Release,
    Results,
    Shards,
    WaitReduce,
    items_of,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items, set_results
from zcompile.passes.common.axis_groups import group_of


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
    params = tuple(param.name for param in unit.params if param.name in gradients)
    scatter = program.layout.stage.optimizer_sharded
    (shards,) = [node for node in program.nodes(Shards) if op_of(node, Shards).unit == unit.name]
    with program.graph.inserting_before(_next_line(program, last)):
        grads = [_owned(program, gradients.get(param.name), unit) for param in unit.params]
        dtype = unit.reduction_dtype
        meta = Data(Reduce(unit.name, params, scatter, dtype), Phase.BACKWARD, source=unit.name)
        started = program.add((shards, grads), meta, f"{shards.name}_reduce")
        waits = Data(WaitReduce(unit.name, params), Phase.BACKWARD, source=unit.name)
        if group is None:
            return program.add((started,), waits, f"{shards.name}_grads")
        waited = program.add((started,), waits, f"{shards.name}_shard_grads")
        axis, scatter = op_of(group, Group).axis, program.layout.has_secondary
        outside = ReduceOutside(unit.name, params, axis, scatter, dtype, unit.outer_dtype)
        meta = Data(outside, Phase.BACKWARD, source=unit.name)
        averaged = program.add((shards, waited, group), meta, f"{shards.name}_average")
        return program.add((averaged,), waits, f"{shards.name}_grads")


def _owned(program: Program, grad: fx.Node | None, unit: Unit) -> fx.Node | None:
    """`grad`, copied where another value may share its memory: a reduction works in place, and its result is kept."""
    if grad is None:
        return None
    results = program.results
    returned = [*results.outputs, *results.input_gradients, *results.gradients.values()].count(grad)
    others = [user for user in grad.users if not isinstance(data(user).op, Results)]
    made_here = grad.op != "placeholder" and data(grad).phase is Phase.BACKWARD
    if made_here and returned == 1 and not others and not data(grad).view and not _is_shown_beside_it(program, grad):
        return grad
    meta = Data(Copy(), Phase.BACKWARD, data(grad).type, source=unit.name)
    return program.add((grad,), meta, f"{grad.name}_copy")


def _is_shown_beside_it(program: Program, grad: fx.Node) -> bool:
    """True if another result of the same call is a view of `grad`."""
    if not isinstance(data(grad).op, Item):
        return False
    return any(may_show(program, item, grad) for item in items_of(grad.all_input_nodes[0]))


def _next_line(program: Program, last: fx.Node) -> fx.Node:
    """The line of the backward before which the reduction may stand: releases and earlier reductions are in front.

    What is released first does not stand beside the copies that a reduction makes.
    """
    if data(last).phase is Phase.FORWARD or last.op == "placeholder":
        return next(n for n in program.nodes(phase=Phase.BACKWARD) if n.op != "placeholder")
    following = after_items(last).next
    while isinstance(data(following).op, (Copy, Averaging, Release, WaitReduce)):
        following = following.next
    return following
