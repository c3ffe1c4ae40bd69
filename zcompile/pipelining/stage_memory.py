"""What the units of a traced step would hold in a stage of a pipeline: for the choice of where stages begin."""

from __future__ import annotations

from torch import fx

from zcompile.ir.actions import ActionTable
from zcompile.ir.layout import Layout
from zcompile.ir.liveness import owner_of
from zcompile.ir.operation import Phase, data
from zcompile.ir.program import Program
from zcompile.passes.pipelining.cut_stages import each_unit_apart
from zcompile.pipelining.balance import StageMemory
from zcompile.pipelining.checkpoints import others_in_flight


def stage_memory(traced: Program, table: ActionTable, limit: int, *, by_unit: bool) -> StageMemory:
    """What stages would hold of a traced step's units, in order, where a rank's step may hold `limit` bytes.

    `by_unit`: each unit saves its input alone. A rank of several stages divides the limit among them.
    """
    units, assignment = each_unit_apart(traced)
    saved = [0] * len(units)
    if by_unit:
        for node, source, to in assignment.crossings:
            saved[to] += data(node).nbytes if source < to else 0
    else:
        for number, own in enumerate(assignment.own):
            forward = (node for node in own if data(node).phase is Phase.FORWARD)
            read_later = (node for node in forward if any(data(u).phase is Phase.BACKWARD for u in node.users))
            saved[number] = sum(data(node).nbytes for node in {owner_of(node) for node in read_later})
    in_flight = tuple(1 + others_in_flight(table, stage) for stage in range(table.stages))
    kept = tuple(_kept_bytes(traced.layout, unit) for unit in units)
    running = tuple(max(map(_running_bytes, own), default=0) for own in assignment.own)
    return StageMemory(in_flight, tuple(saved), kept, running, limit / (table.stages / len(table.rows)))


def _running_bytes(node: fx.Node) -> int:
    """Bytes of what an operation reads and gives."""
    return data(node).nbytes + sum(data(owner_of(one)).nbytes for one in node.all_input_nodes)


def _kept_bytes(layout: Layout, name: str) -> int:
    """Bytes of a unit's parameters and gradients that a step holds whole from action to action."""
    if not layout.has_unit(name):
        return 0
    unit, stage = layout.unit(name), layout.stage
    gathered = 0 if stage.parameters_sharded or not layout.must_gather(name) else layout.gathered_bytes(name)
    if stage.gradients_sharded:
        return gathered
    trained = (param for param in unit.params if param.trainable)
    return gathered + sum(param.numel * (param.sum_dtype or param.full_dtype).itemsize for param in trained)
