"""Liveness: the last line that needs the memory of each value, and which values share memory."""

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
    """Map each computed value to the last line that needs its memory, counting views of it and messages in flight."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    alone = program.layout.sharded.size == 1
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(program.graph.nodes):
        needs = [node, *(end for user in node.users for end in _needed(program, node, user, last, alone=alone))]
        if isinstance(data(node).op, Item):
            siblings = (item for item in node.all_input_nodes[0].users if item in last)
            needs += [last[item] for item in siblings if may_show(program, item, node)]
        op = data(node).op
        if isinstance(op, GatherOutside) and op.keep:
            needs += program.nodes(Results)
        last[node] = max(needs, key=position.__getitem__)
    return {node: end for node, end in last.items() if _has_own_memory(node)}


def _needed(
    program: ProgramGraph, node: fx.Node, user: fx.Node, last: dict[fx.Node, fx.Node], *, alone: bool
) -> list[fx.Node]:
    """Return the lines until which `user` needs the memory of `node`: itself, and those that need what shows it."""
    if isinstance(op := data(user).op, Call) and op.region in program.regions:
        return [user, *(last[view] for view in _views_of(program.regions[op.region], user, node))]
    return [last[user] if _carries(node, user, alone) else user]


def _views_of(region: Region, call: fx.Node, argument: fx.Node) -> list[fx.Node]:
    """Return the results of a call that are views of one of its arguments."""
    results = [call, *call.users] if data(call).view else [user for user in call.users if data(user).view]
    if region.rows is not None or not results:
        return []
    taken = zip(region.graph.find_nodes(op="placeholder"), region.takes, strict=True)
    shown = {placeholder for placeholder, (index, _) in taken if call.args[1 + index] is argument}
    outputs = {view: region.outputs[op.index if isinstance(op := data(view).op, Item) else 0] for view in results}
    return [view for view, output in outputs.items() if isinstance(output, fx.Node) and owner_of(output) in shown]


def _has_own_memory(node: fx.Node) -> bool:
    """Return True for a value with memory of its own that is freed with it; the stack is kept."""
    return node.op == "call_function" and data(node).nbytes > 0 and not isinstance(data(node).op, Store)


def _carries(node: fx.Node, user: fx.Node, alone: bool) -> bool:
    """Return True if the result of `user`, no region, may use the memory of `node`."""
    match data(user).op:
        case Averaging():
            return True  # read until the wait
        case Sum(dtype=dtype) if dtype is not None:
            return node not in _added(user) and getattr(data(node).type, "dtype", dtype) is dtype
        case Sum() | SumAverages():
            return node not in _added(user)  # the sum is in the memory of the first summand
        case GatherInside():
            return True  # sent until the wait
        case WaitReduce():
            reduction = data(node).op
            if isinstance(reduction, ReduceOutside):
                return not reduction.scatter
            return alone or not (isinstance(reduction, Reduce) and reduction.scatter)  # an all_reduce averages in place
        case _:
            return data(user).view


def _added(summed: fx.Node) -> list[fx.Node]:
    """Return the summands that a line adds to the first one; it is the last line that needs them."""
    added = summed.args[2]
    return [added] if isinstance(added, fx.Node) else [value for value in added if isinstance(value, fx.Node)]  # type: ignore[union-attr]


def may_show(program: ProgramGraph, view: object, value: fx.Node) -> bool:
    """Return True if `view` may alias `value`: as a view of it, or as another result of the same call."""
    if not isinstance(view, fx.Node) or not data(view).view:
        return False
    (source,) = view.all_input_nodes if isinstance(data(view).op, Item) else (None,)
    if source is None or source not in value.all_input_nodes:
        return value in view.all_input_nodes
    if not isinstance(data(source).op, Call):
        return True
    outputs = program.regions[op_of(source, Call).region].outputs
    first, second = (owner_of(outputs[op_of(node, Item).index]) for node in (view, value))
    return first is second


def memory_of_result(region: Region, index: int) -> tuple[bool, int]:
    """Return whether a result shares memory with an argument or an earlier result, and the bytes that it keeps alive.

    The bytes are 0 if it shares memory, or keeps only its own elements alive.
    """
    if region.rows is not None:
        return False, 0
    value, owner = region.outputs[index], owner_of(region.outputs[index])
    view = isinstance(data(owner).op, Input) or any(owner_of(earlier) is owner for earlier in region.outputs[:index])
    kept, shown = data(owner).nbytes, data(value).type
    return view, kept if not view and shown and kept != shown.nbytes else 0


def owner_of(node: fx.Node) -> fx.Node:
    """Return the value of a region that owns the memory of `node`."""
    while data(node).view:
        node = node.all_input_nodes[0]
    return node
