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
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Call, WaitGather
from zcompile.ir.program import Program


def schedule_prefetch(program: Program, *, prefetch: int = 2) -> Program:
    """Move each gather to where the unit `prefetch` uses earlier begins."""
    program = program.copy()
    for phase in Phase:
        uses = _first_uses(program, phase)
        # A unit kept over the turn is full already: in the backward it begins at its first call.
        begins = [full if data(full).phase is phase else call for full, call in uses]
        for index, (full, _) in enumerate(uses):
            if data(full).phase is phase:
                begins[max(index - prefetch, 0)].prepend(full.all_input_nodes[0])
    return program


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
