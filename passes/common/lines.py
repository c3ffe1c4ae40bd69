"""Lines that several passes look up or insert: shards, groups of ranks, copies, and reductions with their waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zcompile.ir.axis import Axis
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
    called,
    items_of,
)
from zcompile.ir.program import Program
from zcompile.ir.program_graph import after_items, set_results
from zcompile.ir.spelling import identifier
from zcompile.ir.tensor_type import Dim, TensorType


def shards_of(program: Program, unit: Unit) -> fx.Node:
    """Return the placeholder for the shards of a unit."""
    (shards,) = [node for node in program.nodes(Shards) if op_of(node, Shards).unit == unit.name]
    return shards


def group_of(program: Program, axis: Axis) -> fx.Node:
    """Return the placeholder for the ranks along `axis`, adding it if there is none."""
    found = next((node for node in program.nodes(Group) if op_of(node, Group).axis == axis.name), None)
    return found or program.add_placeholder(identifier(axis.name), Data(Group(axis.name)))


def copy_of(program: Program, value: fx.Node, meta: Data, suffix: str, *extra: fx.Node) -> fx.Node:
    """Insert a copy of `value` right after the line that computes it; `extra`: further arguments of the copy."""
    with program.graph.inserting_after(after_items(called(value))):
        copied = program.add((value, *extra), meta, f"{value.name}_{suffix}")
    copied.meta["val"] = value.meta.get("val")
    return copied


# -- reductions -------------------------------------------------------------------------------------------------------

Row = tuple[list[fx.Node | None], fx.Node]
"""A unit's gradients of one micro-batch, and the last line that computes them or those of an earlier row.

After the rows of all micro-batches come rows of gradients that other stages computed of shared parameters.
"""


def reduce_gradients(program: Program, gradients: Mapping[str, Sequence[fx.Node]]) -> None:
    """Reduce the `gradients` of each parameter, one per micro-batch, and let `program` return them, by unit."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    units = [(unit, _by_microbatch(unit, gradients, position)) for unit in program.layout.units]
    units = sorted(((unit, rows) for unit, rows in units if rows), key=lambda entry: position[entry[1][-1][1]])
    reduce = _each if program.layout.stage.gradients_sharded else _together
    reduced = [reduce(program, unit, rows) for unit, rows in units]
    results = program.results
    set_results(program.graph, outputs=results.outputs, input_gradients=results.input_gradients, reduced=reduced)


def _by_microbatch(unit: Unit, gradients: Mapping[str, Sequence[fx.Node]], position: dict[fx.Node, int]) -> list[Row]:
    lists = [gradients.get(param.name) for param in unit.params]
    count = max((len(grads) for grads in lists if grads is not None), default=0)
    rows = [[grads[number] if grads and number < len(grads) else None for grads in lists] for number in range(count)]
    result: list[Row] = []
    for row in rows:
        # Gradients that another stage of this rank computed may come before this stage's own last gradient.
        before = [last for _, last in result[-1:]]
        result.append((row, max((node for node in (*row, *before) if node is not None), key=position.__getitem__)))
    return result


def _together(program: Program, unit: Unit, rows: list[Row]) -> fx.Node:
    shards, total = shards_of(program, unit), None
    params = tuple(param.name for param, grad in zip(unit.params, rows[0][0], strict=True) if grad is not None)
    previous: list[fx.Node | None] | fx.Node = []
    for number, (row, last) in enumerate(rows):
        with program.graph.inserting_before(_next_line(program, last)):
            given = [_owned(program, grad, unit) for grad in row] if number == 0 else row
            if number:
                dtype = _sum_dtype(unit, params) if number == 1 else None
                meta = Data(Sum(unit.name, params, dtype), Phase.STEP, _sum_type(unit, params, dtype), unit.name)
                total = program.add((shards, previous, given), meta, f"{shards.name}_sum")
            previous = given if total is None else total
    with program.graph.inserting_before(_next_line(program, rows[-1][1])):
        return _averaged_outside(program, unit, _averaged_inside(program, unit, previous))


def _sum_dtype(unit: Unit, params: Sequence[str]) -> torch.dtype | None:
    """Return the dtype in which gradients of `params` are summed; None if that is their own dtype."""
    return next((param.sum_dtype for param in unit.params if param.name in params and param.sum_dtype), None)


def _sum_type(unit: Unit, params: Sequence[str], dtype: torch.dtype | None) -> TensorType | None:
    """Return the type of the 1-D buffer for sums in `dtype`; None if they reuse the memory of the first gradients."""
    if dtype is None:
        return None
    numel = sum(param.numel for param in unit.params if param.name in params and param.sum_dtype is dtype)
    return TensorType(dtype, (Dim(numel),))


def _each(program: Program, unit: Unit, rows: list[Row]) -> fx.Node:
    """Reduce the gradients of each micro-batch and add up the averages; average only their sum over replicas."""
    shards, total, outside = shards_of(program, unit), None, program.layout.outside
    added = program.layout.away and not outside and len(rows) > 1
    for number, (row, last) in enumerate(rows):
        with program.graph.inserting_before(_next_line(program, last)):
            prefix, own = f"m{number}_" if len(rows) > 1 else "", [_owned(program, grad, unit) for grad in row]
            waited = _averaged_inside(program, unit, own, prefix, added=added)
            if total is None:
                total = waited
                continue
            params = data(total).op.params  # type: ignore[attr-defined]
            meta = Data(SumAverages(unit.name, params), Phase.STEP, source=unit.name)
            total = program.add((shards, total, waited), meta, f"{shards.name}_{'sum' if outside else 'grads'}")
    assert total is not None, "a unit has gradients"
    with program.graph.inserting_before(_next_line(program, rows[-1][1])):
        return _averaged_outside(program, unit, total)


def _averaged_inside(
    program: Program,
    unit: Unit,
    grads: Sequence[fx.Node | None] | fx.Node,
    prefix: str = "",
    *,
    added: bool = False,
) -> fx.Node:
    """Reduce gradients over the sharding ranks. `added`: see `WaitReduce`."""
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
    return program.add((started,), waits, f"{stem}_shard_grads" if program.layout.outside else f"{stem}_grads")


def _averaged_outside(program: Program, unit: Unit, averages: fx.Node) -> fx.Node:
    """Average gradients that were reduced inside over the ranks of each outer axis in turn, if there are any."""
    params = data(averages).op.params  # type: ignore[attr-defined]
    shards, phase, layout = shards_of(program, unit), _phase_of(program), program.layout
    dtypes = unit.reduction_dtype, unit.outer_dtype
    for axis in layout.outside:
        meta = Data(ReduceOutside(unit.name, params, axis.name, layout.has_secondary, *dtypes), phase, source=unit.name)
        averaged = program.add((shards, averages, group_of(program, axis)), meta, f"{shards.name}_average")
        waits = Data(WaitReduce(unit.name, params), phase, source=unit.name)
        averages = program.add((averaged,), waits, f"{shards.name}_grads")
    return averages


def _phase_of(program: Program) -> Phase:
    return program.phases[-1]


def _owned(program: Program, grad: fx.Node | None, unit: Unit) -> fx.Node | None:
    """Return `grad`, or a copy if another value may share its memory: reductions work in place and keep the result."""
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
    """Return True if another result of the same call may alias `grad`."""
    if not isinstance(data(grad).op, Item):
        return False
    return any(may_show(program, item, grad) for item in items_of(grad.all_input_nodes[0]))


def _next_line(program: Program, last: fx.Node) -> fx.Node:
    """Return the line before which to insert a reduction: after `last`, and the releases and reductions that follow it.

    Releasing memory first lowers the peak, as the reduction may make copies.
    """
    phase = _phase_of(program)
    if data(last).phase is not phase or last.op == "placeholder":
        return next(n for n in program.nodes(phase=phase) if n.op != "placeholder")
    following = after_items(last).next
    while isinstance(data(following).op, (Copy, Send, Sum, SumAverages, Averaging, Release, WaitReduce)):
        following = following.next
    return following
