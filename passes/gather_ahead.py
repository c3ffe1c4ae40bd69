"""gather_ahead: start the next step's first gathers as soon as their units are updated.

    update(a, a_grads)                          update(a, a_grads)
    c_grads = wait(c_reduce)            ->      gather_ahead(a)
    update(c, c_grads)                          c_grads = wait(c_reduce)
                                                update(c, c_grads)

The units are those that the forward gathers before its first region: nothing there could hide them. They are full from
then to the next forward, which takes what has been started. A gather stays where it is if it would raise the peak of
what parameters and their gradients take; activations are left out of it, since ranks may have batches of unequal sizes
and must gather alike. So does a kept copy of what is never updated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.ops import AllGather, Call, GatherAhead, Reduce, Release, Update, WaitReduce
from zcompile.ir.program import Program


def gather_ahead(program: Program) -> Program:
    """A program at whose end the gathers are on their way that its forward begins with."""
    layout = program.layout
    if layout.sharded.size == 1 or not layout.stage.optimizer_sharded or not program.nodes(Update):
        return program
    if layout.has_secondary:
        return program  # a forward begins with gathers outside then, which are not started ahead
    peak = parameter_peak(program)
    updated = {op_of(node, Update).unit for node in program.nodes(Update)}
    for gather in _first_gathers(program):
        op = op_of(gather, AllGather)
        ahead = _started(program, gather.name)
        if parameter_peak(ahead) <= peak and (op.unit in updated or not op.keep):
            program = ahead
    return program


def parameter_peak(program: Program) -> int:
    """The most bytes of full parameters, and of gradients on their way and reduced, that a step holds at once."""
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
    found = (program.layout.param(name) for name in params)
    return sum(param.numel * param.full_dtype.itemsize for param in found)


def _first_gathers(program: Program) -> list[fx.Node]:
    """Of each unit the first gather before the first region: one that is used again may have two there."""
    result: dict[str, fx.Node] = {}
    for node in program.nodes(AllGather, Call, phase=Phase.FORWARD):
        if isinstance(data(node).op, Call):
            break
        result.setdefault(op_of(node, AllGather).unit, node)
    return list(result.values())


def _started(program: Program, gather: str) -> Program:
    """`program` with what `gather` brings gathered once more, at its end, as soon as that may be."""
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
