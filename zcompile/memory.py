"""Memory: the bytes that a step holds at each line of its program, predicted.

Counted are values between regions and within them, full parameters and reduced gradients: what a step takes beside the
shards and the optimizer's state. Not counted are what single operations take while they run, and, on gloo with more
than two ranks, the parts of others' gradients that have arrived and wait to be summed.

Sizes that vary between calls count as in the call that was traced.
"""

from __future__ import annotations

from torch import fx

from zcompile.fusion import is_stored
from zcompile.ops import Call, Item, Reduce, Results, WaitReduce, data, op_of
from zcompile.program import Program, Region


def live_bytes(program: Program) -> dict[fx.Node, int]:
    """The most bytes alive while each line of the step runs, in order; where values are views, an upper bound."""
    ends = _last_needs(program)
    dead: dict[fx.Node, int] = {}
    for node, end in ends.items():
        dead[end] = dead.get(end, 0) + data(node).nbytes
    within = {name: region_bytes(region) for name, region in program.regions.items()}
    live, found = 0, {}
    for node in program.graph.nodes:
        op = data(node).op
        if node.op == "call_function" and not isinstance(op, Item):
            gained = program.memory(node)
            found[node] = live + (max(gained, within[op.region]) if isinstance(op, Call) else gained)
            live += gained
        live -= dead.get(node, 0)
    return found


def region_bytes(region: Region) -> int:
    """The most bytes that a region holds while it runs, its results included, its arguments not."""
    nodes = list(region.graph.nodes)
    last = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[_owner(source)] = len(nodes) if isinstance(data(node).op, Results) else index
    live = most = 0
    ending: dict[int, int] = {}
    for index, node in enumerate(nodes):
        held = data(node)
        if node.op == "call_function" and held.nbytes and (not region.fuses or is_stored(node)):
            live += held.nbytes
            ending[last[node]] = ending.get(last[node], 0) + held.nbytes
        most = max(most, live)
        live -= ending.get(index, 0)
    return most


def _owner(node: fx.Node) -> fx.Node:
    """The value of a region whose memory `node` shows."""
    while data(node).view:
        node = node.all_input_nodes[0]
    return node


def peak_bytes(program: Program) -> int:
    """The most bytes that a step holds beside the shards and the optimizer's state."""
    return max(live_bytes(program).values(), default=0)


def _last_needs(program: Program) -> dict[fx.Node, fx.Node]:
    """The last line that needs the memory of each value that a line makes."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    alone = program.layout.world == 1
    last: dict[fx.Node, fx.Node] = {}
    for node in reversed(program.graph.nodes):
        needs = [node, *(last[user] if _carries(node, user, alone) else user for user in node.users)]
        if isinstance(data(node).op, Item):
            needs += [last[item] for item in node.all_input_nodes[0].users if data(item).view and item in last]
        last[node] = max(needs, key=position.__getitem__)
    return {node: end for node, end in last.items() if node.op == "call_function" and data(node).nbytes}


def _carries(node: fx.Node, user: fx.Node, alone: bool) -> bool:
    """True if `user` gives on the memory of `node`, or may: which argument a region's view shows is not known."""
    match data(user).op:
        case Reduce():
            return True  # its result arrives when it has been waited for
        case WaitReduce():
            return alone or not op_of(node, Reduce).scatter  # an all_reduce averages in place
        case Call():
            return data(user).view or any(data(item).view for item in user.users)
        case _:
            return data(user).view
