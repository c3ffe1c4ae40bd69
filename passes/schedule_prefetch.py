"""schedule_prefetch: start gathers early, so that compute hides them.

With prefetch=1:

    u0_gather = all_gather(u0)                  u0_gather = all_gather(u0)
    u0_full = wait(u0_gather)                   u1_gather = all_gather(u1)
    h = region_0(u0_full, x)            ->      u0_full = wait(u0_gather)
    release(u0_full)                            h = region_0(u0_full, x)
    u1_gather = all_gather(u1)                  release(u0_full)
    u1_full = wait(u1_gather)                   u1_full = wait(u1_gather)
    y = region_0(u1_full, h)                    y = region_0(u1_full, h)

While a unit computes, the gathers of the next `prefetch` units are in flight. A gather never moves above the release
that makes room for it, nor from the backward into the forward.

Secondary shards are gathered once per step along the outer axis, whose links are the slowest, and all of them are held
at the turn anyway. So their gathers start at the beginning of the phase, in the order of their uses.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Call, GatherOutside, WaitGather, WaitSecondary
from zcompile.ir.program import Program


def schedule_prefetch(program: Program, *, prefetch: int = 2) -> Program:
    """Move each gather to where the use `prefetch` uses earlier begins."""
    program = program.copy()
    for phase in program.phases:
        uses = _first_uses(program, phase)
        # A unit kept full over the turn has no wait in the backward: its use begins at its first call.
        begins = [full if data(full).phase is phase else call for full, call in uses]
        for index, (full, _) in enumerate(uses):
            if data(full).phase is phase:
                for node in _started_for(full, phase):
                    begins[max(index - prefetch, 0)].prepend(node)
        if prefetch:
            _start_outside(program, phase)
    return program


def _started_for(full: fx.Node, phase: Phase) -> list[fx.Node]:
    """Return the gather of a unit, preceded by the wait for its secondary shards if this is their first use."""
    (gather,) = full.all_input_nodes
    secondary = [node for node in gather.all_input_nodes if isinstance(data(node).op, WaitSecondary)]
    first = [node for node in secondary if data(node).phase is phase and next(iter(node.users)) is gather]
    return [*first, gather]


def _start_outside(program: Program, phase: Phase) -> None:
    """Move the gathers of secondary shards to the start of `phase`, keeping their order."""
    others = (node for node in program.body(phase) if not isinstance(data(node).op, GatherOutside))
    start = next(others, None)
    for node in program.nodes(GatherOutside, phase=phase):
        assert start is not None, "every gather is waited for"
        start.prepend(node)


def _first_uses(program: Program, phase: Phase) -> list[tuple[fx.Node, fx.Node]]:
    """Return full parameters in the order in which calls of `phase` first read them, each with that call.

    Parameters of the same call are in the order of their waits: a gather must not move after its own wait.
    """
    uses: dict[fx.Node, fx.Node] = {}
    order = {full: index for index, full in enumerate(program.nodes(WaitGather))}
    for call in program.nodes(Call, phase=phase):
        for full in sorted(order.keys() & set(call.all_input_nodes), key=order.__getitem__):
            uses.setdefault(full, call)
    return list(uses.items())
