"""gather_ahead: start the first gathers of the next step as soon as their units are updated.

    update(a, a_grads)                          update(a, a_grads)
    c_grads = wait(c_reduce)            ->      gather_ahead(a)
    update(c, c_grads)                          c_grads = wait(c_reduce)
                                                update(c, c_grads)

The units are those that the forward gathers before its first region, where no compute could hide the gathers. They are
full from then until the next forward, which takes over the gathers already started. A gather is not started ahead if
that would raise the peak memory of parameters and their gradients. Activations are not counted: ranks may have batches
of unequal sizes, and must make the same choice. A kept full copy of a unit that is never updated needs no gather ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import AllGather, Call, GatherAhead, Reduce, Release, Update, WaitReduce
from zcompile.ir.program import Program


def gather_ahead(program: Program) -> Program:
    """Return a program that starts the gathers that its forward begins with at the end of the preceding step."""
    layout = program.layout
    if layout.sharded.size == 1 or not layout.stage.optimizer_sharded or not program.nodes(Update):
        return program
    if layout.has_secondary:
        return program  # the forward then begins with gathers along the outer axis, which are never started ahead
    peak = parameter_peak(program)
    updated = {op_of(node, Update).unit for node in program.nodes(Update)}
    for gather in _first_gathers(program):
        op = op_of(gather, AllGather)
        ahead = _started(program, gather.name)
        if parameter_peak(ahead) <= peak and (op.unit in updated or not op.keep):
            program = ahead
    return program


def parameter_peak(program: Program) -> int:
    """Return the peak bytes of full parameters, gradients in flight, and reduced gradients in a step."""
    live = most = 0
    for node in program.graph.nodes:
        op = data(node).op
        if isinstance(op, (AllGather, GatherAhead, Release, Update)):
            live += program.memory(node)
        elif isinstance(op, Reduce):
            live += program.memory(node) + _full_bytes(program, op.params)
        elif isinstance(op, WaitReduce) and isinstance(data(node.all_input_nodes[0]).op, Reduce):
            live -= _full_bytes(program, op.params)
        most = max(most, live)
    return most


def _full_bytes(program: Program, params: Sequence[str]) -> int:
    parameters = (program.layout.param(name) for name in params)
    return sum(param.numel * param.full_dtype.itemsize for param in parameters)


def _first_gathers(program: Program) -> list[fx.Node]:
    """Return each unit's first gather before the first region; a unit that is used twice may have two there."""
    result: dict[str, fx.Node] = {}
    for node in program.nodes(AllGather, Call, phase=Phase.FORWARD):
        if isinstance(data(node).op, Call):
            break
        result.setdefault(op_of(node, AllGather).unit, node)
    return list(result.values())


def _started(program: Program, gather: str) -> Program:
    """Return `program` with the unit of `gather` gathered again after its update, or after the last one if frozen."""
    program = program.copy()
    first = program.node(gather)
    op, (shards,) = op_of(first, AllGather), first.all_input_nodes
    updates = program.nodes(Update)
    # A frozen unit could be gathered at any time; at the end nothing else needs the memory.
    own = [node for node in updates if op_of(node, Update).unit == op.unit]
    with program.graph.inserting_after((own or updates)[-1]):
        meta = Data(GatherAhead(op.unit, op.keep, op.dtype), Phase.BACKWARD, source=op.unit)
        program.add((shards,), meta, f"{shards.name}_ahead")
    return program
