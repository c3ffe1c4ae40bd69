"""Reductions of a unit's gradients: where they stand, what they are given, and their waits."""

from __future__ import annotations

from collections.abc import Sequence

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
    Send,
    Shards,
    Sum,
    SumAverages,
    WaitReduce,
    items_of,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items


def reduction_of(
    program: Program, unit: Unit, grads: Sequence[fx.Node | None] | fx.Node, group: fx.Node | None
) -> fx.Node:
    """Reduce gradients of `unit`, also over the ranks of `group`, at the graph's insertion point; returns the wait.

    `grads`: one for each of its parameters, or their sum over several micro-batches.
    """
    inside = averaged_inside(program, unit, grads, group)
    return inside if group is None else averaged_outside(program, unit, inside, group)


def averaged_inside(
    program: Program,
    unit: Unit,
    grads: Sequence[fx.Node | None] | fx.Node,
    group: fx.Node | None,
    prefix: str = "",
    *,
    added: bool = False,
) -> fx.Node:
    """Reduce gradients over the ranks that shard; `group`: those over which they are averaged then, if there are.

    `added`: see `WaitReduce`.
    """
    listed = grads if not isinstance(grads, fx.Node) else ()
    params = (
        op_of(grads, Sum).params
        if isinstance(grads, fx.Node)
        else tuple(param.name for param, grad in zip(unit.params, listed, strict=True) if grad is not None)
    )
    shards, phase = shards_of(program, unit), _phase_of(program)
    stem, scatter = f"{prefix}{shards.name}", program.layout.stage.optimizer_sharded
    meta = Data(Reduce(unit.name, params, scatter, unit.reduction_dtype), phase, source=unit.name)
    given = grads if isinstance(grads, fx.Node) else list(grads)
    started = program.add((shards, given), meta, f"{stem}_reduce")
    waits = Data(WaitReduce(unit.name, params, added), phase, source=unit.name)
    return program.add((started,), waits, f"{stem}_grads" if group is None else f"{stem}_shard_grads")


def averaged_outside(program: Program, unit: Unit, averages: fx.Node, group: fx.Node) -> fx.Node:
    """Reduce what has been reduced inside over the ranks of `group`."""
    params = data(averages).op.params  # type: ignore[attr-defined]
    shards, phase, layout = shards_of(program, unit), _phase_of(program), program.layout
    axis, dtypes = op_of(group, Group).axis, (unit.reduction_dtype, unit.outer_dtype)
    meta = Data(ReduceOutside(unit.name, params, axis, layout.has_secondary, *dtypes), phase, source=unit.name)
    averaged = program.add((shards, averages, group), meta, f"{shards.name}_average")
    waits = Data(WaitReduce(unit.name, params), phase, source=unit.name)
    return program.add((averaged,), waits, f"{shards.name}_grads")


def shards_of(program: Program, unit: Unit) -> fx.Node:
    """What stands for a unit."""
    (shards,) = [node for node in program.nodes(Shards) if op_of(node, Shards).unit == unit.name]
    return shards


def _phase_of(program: Program) -> Phase:
    """The phase that reductions are in."""
    return program.phases[-1]


def owned(program: Program, grad: fx.Node | None, unit: Unit) -> fx.Node | None:
    """`grad`, copied where another value may share its memory: a reduction works in place, and its result is kept."""
    if grad is None:
        return None
    results = program.results
    returned = [*results.outputs, *results.input_gradients, *results.gradient_nodes()].count(grad)
    others = [user for user in grad.users if not isinstance(data(user).op, Results)]
    made_here = grad.op != "placeholder" and data(grad).phase is not Phase.FORWARD
    if made_here and returned == 1 and not others and not data(grad).view and not _has_sibling_view(program, grad):
        return grad
    meta = Data(Copy(), _phase_of(program), data(grad).type, source=unit.name)
    return program.add((grad,), meta, f"{grad.name}_copy")


def _has_sibling_view(program: Program, grad: fx.Node) -> bool:
    """True if another result of the same call is a view of `grad`."""
    if not isinstance(data(grad).op, Item):
        return False
    return any(may_show(program, item, grad) for item in items_of(grad.all_input_nodes[0]))


def next_line(program: Program, last: fx.Node) -> fx.Node:
    """The line of the backward before which the reduction may stand: releases and earlier reductions are in front.

    What is released first does not stand beside the copies that a reduction makes.
    """
    phase = _phase_of(program)
    if data(last).phase is not phase or last.op == "placeholder":
        return next(n for n in program.nodes(phase=phase) if n.op != "placeholder")
    following = after_items(last).next
    while isinstance(data(following).op, (Copy, Send, Sum, SumAverages, Averaging, Release, WaitReduce)):
        following = following.next
    return following
