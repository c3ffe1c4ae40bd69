"""Liveness: the last line that needs a value's memory, and which values show one memory."""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import (
    Averaging,
    Call,
    GatherInside,
    GatherOutside,
    Input,
    Item,
    Reduce,
    ReduceOutside,
    Results,
    Store,
    Sum,
    SumAverages,
    WaitReduce,
)
from zcompile.ir.program_graph import ProgramGraph
from zcompile.ir.region import Region


def last_needs(program: ProgramGraph) -> dict[fx.Node, fx.Node]:
    """The last line that needs the memory of each value that a line makes, views of it and messages included."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    alone = program.layout.sharded.size == 1
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(program.graph.nodes):
        needs = [node, *(last[user] if _carries(node, user, alone) else user for user in node.users)]
        if isinstance(data(node).op, Item):
            beside = (item for item in node.all_input_nodes[0].users if item in last)
            needs += [last[item] for item in beside if may_show(program, item, node)]
        op = data(node).op
        if isinstance(op, GatherOutside) and op.keep:
            needs += program.nodes(Results)
        last[node] = max(needs, key=position.__getitem__)
    return {node: end for node, end in last.items() if _has_own_memory(node)}


def _has_own_memory(node: fx.Node) -> bool:
    """True for a value with memory of its own that is there while the value is; the stack always is."""
    return node.op == "call_function" and data(node).nbytes > 0 and not isinstance(data(node).op, Store)


def _carries(node: fx.Node, user: fx.Node, alone: bool) -> bool:
    """True if `user` gives on the memory of `node`, or may: which argument a region's view shows is not known."""
    match data(user).op:
        case Averaging():
            return True  # its result arrives when it has been waited for
        case Sum(dtype=dtype) if dtype is not None:
            return node not in _added(user) and getattr(data(node).type, "dtype", dtype) is dtype
        case Sum() | SumAverages():
            return node not in _added(user)  # what it adds to is where the sum is
        case GatherInside():
            return True  # it is being sent
        case WaitReduce():
            reduction = data(node).op
            if isinstance(reduction, ReduceOutside):
                return not reduction.scatter
            return alone or not (isinstance(reduction, Reduce) and reduction.scatter)  # an all_reduce averages in place
        case Call():
            return data(user).view or any(data(item).view for item in user.users)
        case _:
            return data(user).view


def _added(summed: fx.Node) -> list[fx.Node]:
    """What is added in a line of a sum, which that line needs last."""
    added = summed.args[2]
    return [added] if isinstance(added, fx.Node) else [one for one in added if isinstance(one, fx.Node)]  # type: ignore[union-attr]


def may_show(program: ProgramGraph, view: object, value: fx.Node) -> bool:
    """True if `view` may show the memory of `value`: as a view of it, or as another result of the same call."""
    if not isinstance(view, fx.Node) or not data(view).view:
        return False
    (source,) = view.all_input_nodes if isinstance(data(view).op, Item) else (None,)
    if source is None or source not in value.all_input_nodes:
        return value in view.all_input_nodes
    if not isinstance(data(source).op, Call):
        return True
    outputs = program.regions[op_of(source, Call).region].outputs
    one, other = (owner_of(outputs[op_of(node, Item).index]) for node in (view, value))
    return one is other


def memory_of_result(region: Region, index: int) -> tuple[bool, int]:
    """Of a result: whether it shares the memory of an argument or an earlier result; the bytes that it keeps beside."""
    value, owner = region.outputs[index], owner_of(region.outputs[index])
    view = isinstance(data(owner).op, Input) or any(owner_of(earlier) is owner for earlier in region.outputs[:index])
    kept, shown = data(owner).nbytes, data(value).type
    return view, kept if not view and shown and kept != shown.nbytes else 0


def owner_of(node: fx.Node) -> fx.Node:
    """The value of a region whose memory `node` shows."""
    while data(node).view:
        node = node.all_input_nodes[0]
    return node
