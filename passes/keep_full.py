"""keep_full: keep units full from the forward to the backward where a second gather would gain nothing.

With prefetch=1:

    release(b_full)                                 c_full = wait(c_gather)
    c_full = wait(c_gather)                         yc = region_0(c_full, yb)
    yc = region_0(c_full, yb)                       return [yc], [b_full, c_full, x, ya, yb]
    return [yc], [c_full, x, ya, yb]
                                            ->
    b_gather_1 = all_gather(b)                      db, gc = region_1(c_full, dy, yb)
    db, gc = region_1(c_full, dy, yb)               release(c_full)
    release(c_full)                                 da, gb = region_1(b_full, db, ya)
    b_full_1 = wait(b_gather_1)                     release(b_full)
    da, gb = region_1(b_full_1, db, ya)
    release(b_full_1)

The backward reads units in reverse order, so units that the forward reads last would be gathered again at once. The
last `prefetch` + 1 units are kept: that holds no more full units than prefetching does, and saves their second gathers.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Call, Release, WaitGather
from zcompile.ir.program import Program


def keep_full(program: Program, *, prefetch: int = 2) -> Program:
    """Return a program whose backward reads its first `prefetch` + 1 units from the forward's last gathers."""
    program = program.copy()
    ending = _in_order(program, Phase.FORWARD)[::-1][: prefetch + 1]
    for again in _in_order(program, Phase.BACKWARD)[: prefetch + 1]:
        if data(again).phase is Phase.FORWARD:
            continue  # kept already
        unit = op_of(again, WaitGather).unit
        full = next((full for full in ending if op_of(full, WaitGather).unit == unit), None)
        if full is None or any(data(user).phase is Phase.BACKWARD for user in full.users):
            # The unit would be held from an earlier use, or is kept for another one already: too long.
            break
        keep(program, full, again)
    return program


def _in_order(program: Program, phase: Phase) -> list[fx.Node]:
    """Return full parameters in the order in which `phase` last (forward) or first (backward) reads them."""
    uses: dict[fx.Node, None] = {}
    for call in program.nodes(Call, phase=phase):
        for argument in call.all_input_nodes:
            if isinstance(data(argument).op, WaitGather):
                if phase is Phase.FORWARD:
                    uses.pop(argument, None)
                uses.setdefault(argument)
    return list(uses)


def keep(program: Program, full: fx.Node, again: fx.Node) -> None:
    """Let the readers of `again` read `full`, gathered earlier, and erase the gather of `again`."""
    program.graph.erase_node(release_of(full))
    gather = again.all_input_nodes[0]
    again.replace_all_uses_with(full)
    program.graph.erase_node(again)
    program.graph.erase_node(gather)


def release_of(full: fx.Node) -> fx.Node:
    """Return the line that releases the full parameters `full`."""
    (release,) = [user for user in full.users if isinstance(data(user).op, Release)]
    return release
