"""schedule_prefetch: start gathers ahead, so that compute hides them.

With prefetch=1:

    u0_gather = all_gather(u0)                  u0_gather = all_gather(u0)
    u0_full = wait(u0_gather)                   u1_gather = all_gather(u1)
    h = region_0(u0_full, x)            ->      u0_full = wait(u0_gather)
    release(u0_full)                            h = region_0(u0_full, x)
    u1_gather = all_gather(u1)                  release(u0_full)
    u1_full = wait(u1_gather)                   u1_full = wait(u1_gather)
    y = region_0(u1_full, h)                    y = region_0(u1_full, h)

While a unit computes, the gathers of the next `prefetch` units are in flight; a gather never moves above the release
that makes room for it, nor from the backward into the forward.

Secondary shards come along the outer axis, whose links are the slowest, once a step, and all of them are there at the
turn anyway: their gathers start at once, in the order of their uses.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Call, GatherOutside, WaitGather, WaitSecondary
from zcompile.ir.program import Program


def schedule_prefetch(program: Program, *, prefetch: int = 2) -> Program:
    """Move each gather to where the unit `prefetch` uses earlier begins."""
    program = program.copy()
    for phase in program.phases:
        uses = _first_uses(program, phase)
        # A unit kept over the turn is full already: in the backward it begins at its first call.
        begins = [full if data(full).phase is phase else call for full, call in uses]
        for index, (full, _) in enumerate(uses):
            if data(full).phase is phase:
                for node in _started_for(full, phase):
                    begins[max(index - prefetch, 0)].prepend(node)
        if prefetch:
            _start_outside(program, phase)
    return program


def _started_for(full: fx.Node, phase: Phase) -> list[fx.Node]:
    """The gather of a unit, behind the wait for its secondary shards where this is their first use."""
    (gather,) = full.all_input_nodes
    secondary = [node for node in gather.all_input_nodes if isinstance(data(node).op, WaitSecondary)]
    first = [node for node in secondary if data(node).phase is phase and next(iter(node.users)) is gather]
    return [*first, gather]


def _start_outside(program: Program, phase: Phase) -> None:
    """Move the gathers of secondary shards to the begin of `phase`, in their order."""
    others = (node for node in program.body(phase) if not isinstance(data(node).op, GatherOutside))
    begin = next(others, None)
    for node in program.nodes(GatherOutside, phase=phase):
        assert begin is not None, "what is gathered is waited for"
        begin.prepend(node)


def _first_uses(program: Program, phase: Phase) -> list[tuple[fx.Node, fx.Node]]:
    """Full parameters in the order in which `phase` first calls a region with them, with that call.

    Those of one call are in the order in which they are waited for: a gather must not move behind its own wait.
    """
    uses: dict[fx.Node, fx.Node] = {}
    place = {full: index for index, full in enumerate(program.nodes(WaitGather))}
    for call in program.nodes(Call, phase=phase):
        for full in sorted(place.keys() & set(call.all_input_nodes), key=place.__getitem__):
            uses.setdefault(full, call)
    return list(uses.items())
