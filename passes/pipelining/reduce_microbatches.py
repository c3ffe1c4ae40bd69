"""reduce_microbatches: sum each unit's gradients over the micro-batches of a step, and average them over the ranks.

Stages 0 and 1, which keep full gradients, add them up, and communicate once a step:

    m0_ga = region_1(a, m0_dh)                       m0_ga = region_1(a, m0_dh)
    m1_ga = region_1(a, m1_dh)               ->      m1_ga = region_1(a, m1_dh)
    return ..., {"a.weight": [m0_ga, m1_ga]}         a_sum = add(a, [m0_ga], [m1_ga])
                                                     a_reduce = reduce_scatter(a, a_sum)
                                                     a_grads = wait(a_reduce)
                                                     return ..., [a_grads]

Stages 2 and 3 reduce the gradients of each micro-batch as they come, and add up what is left of them, a shard:

    m0_a_grads = wait(m0_a_reduce)
    m1_a_grads = wait(m1_a_reduce)
    a_grads = add(a, m0_a_grads, m1_a_grads)

Over replicas that sum is averaged once. Sums of full gradients are in the dtype in which these are averaged, which the
first line of a sum says: `add(a, [m0_ga], [m1_ga], dtype=torch.float32)`.

Either way they are added in the order of the micro-batches, so that bits do not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zcompile.ir.layout import Unit
from zcompile.ir.operation import Data, Phase, data
from zcompile.ir.ops import Sum, SumAverages
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.tensor_type import Dim, TensorType
from zcompile.passes.common.axis_groups import group_of
from zcompile.passes.common.reductions import (
    averaged_inside,
    averaged_outside,
    next_line,
    owned,
    reduction_of,
    shards_of,
)


def reduce_microbatches(program: Program) -> Program:
    """A step of several micro-batches that returns reduced gradients, by unit."""
    program = program.copy()
    gradients = program.results.gradient_lists()
    axis = program.layout.replicated
    group = group_of(program, axis) if axis and gradients else None
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    found = [(unit, _by_microbatch(unit, gradients, place)) for unit in program.layout.units]
    units = sorted((one for one in found if one[1]), key=lambda one: place[one[1][-1][1]])
    reduce = _each if program.layout.stage.gradients_sharded else _together
    reduced = [reduce(program, unit, rows, group) for unit, rows in units]
    results = program.results
    set_results(program.graph, outputs=results.outputs, input_gradients=results.input_gradients, reduced=reduced)
    return program


Row = tuple[list[fx.Node | None], fx.Node]
"""The gradients of a unit's parameters of one micro-batch, and the last line that they, and those before, need.

Behind those of all micro-batches come what other stages have computed of parameters that they read, too.
"""


def _by_microbatch(unit: Unit, gradients: dict[str, list[fx.Node]], place: dict[fx.Node, int]) -> list[Row]:
    lists = [gradients.get(param.name) for param in unit.params]
    count = max((len(one) for one in lists if one is not None), default=0)
    rows = [
        [one[number] if one is not None and number < len(one) else None for one in lists] for number in range(count)
    ]
    result: list[Row] = []
    for row in rows:
        # What another stage of this rank has computed may be there before this one's own last gradient.
        before = [last for _, last in result[-1:]]
        result.append((row, max((node for node in (*row, *before) if node is not None), key=place.__getitem__)))
    return result


def _together(program: Program, unit: Unit, rows: list[Row], group: fx.Node | None) -> fx.Node:
    """Add up the gradients, and reduce the sum."""
    shards, total = shards_of(program, unit), None
    params = tuple(param.name for param, grad in zip(unit.params, rows[0][0], strict=True) if grad is not None)
    previous: list[fx.Node | None] | fx.Node = []
    for number, (row, last) in enumerate(rows):
        with program.graph.inserting_before(next_line(program, last)):
            given = [owned(program, grad, unit) for grad in row] if number == 0 else row
            if number:
                dtype = _sum_dtype(unit, params) if number == 1 else None
                meta = Data(Sum(unit.name, params, dtype), Phase.STEP, _sum_type(unit, params, dtype), unit.name)
                total = program.add((shards, previous, given), meta, f"{shards.name}_sum")
            previous = given if total is None else total
    with program.graph.inserting_before(next_line(program, rows[-1][1])):
        return reduction_of(program, unit, previous, group)


def _sum_dtype(unit: Unit, params: Sequence[str]) -> torch.dtype | None:
    """In which the gradients of some parameters are summed, if not in their own."""
    return next((param.sum_dtype for param in unit.params if param.name in params and param.sum_dtype), None)


def _sum_type(unit: Unit, params: Sequence[str], dtype: torch.dtype | None) -> TensorType | None:
    """What a sum takes that is not in the memory of the first gradients: those of its dtype, one behind the other."""
    if dtype is None:
        return None
    numel = sum(param.numel for param in unit.params if param.name in params and param.sum_dtype is dtype)
    return TensorType(dtype, (Dim(numel),))


def _each(program: Program, unit: Unit, rows: list[Row], group: fx.Node | None) -> fx.Node:
    """Reduce the gradients of each micro-batch, and add up the averages; over replicas, of all of them together."""
    shards, total = shards_of(program, unit), None
    added = program.layout.away and group is None and len(rows) > 1
    for number, (row, last) in enumerate(rows):
        with program.graph.inserting_before(next_line(program, last)):
            prefix, own = f"m{number}_" if len(rows) > 1 else "", [owned(program, grad, unit) for grad in row]
            waited = averaged_inside(program, unit, own, group, prefix, added=added)
            if total is None:
                total = waited
                continue
            params = data(total).op.params  # type: ignore[attr-defined]
            meta = Data(SumAverages(unit.name, params), Phase.STEP, source=unit.name)
            total = program.add((shards, total, waited), meta, f"{shards.name}_{'grads' if group is None else 'sum'}")
    assert total is not None, "a unit has gradients"
    if group is None:
        return total
    with program.graph.inserting_before(next_line(program, rows[-1][1])):
        return averaged_outside(program, unit, total, group)
