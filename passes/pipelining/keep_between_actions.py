"""keep_between_actions: keep units full from one action of a pipeline to a later one, as far as a memory limit allows.

    # 0F0                                             # 0F0
    m0_a_out = region_0(a_full, m0_x)                 m0_a_out = region_0(a_full, m0_x)
    release(a_full)
    # 0F1                                      ->     # 0F1
    a_gather_1 = all_gather(a)
    a_full_1 = wait(a_gather_1)
    m1_a_out = region_0(a_full_1, m1_x)               m1_a_out = region_0(a_full, m1_x)
    release(a_full_1)                                 release(a_full)

Each gather that is left out costs the unit's full bytes from the release before it. Those that cost them for the
shortest time are left out first; where that does not fit, the unit is gathered again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from zcompile.cost.memory import live_bytes, peak_bytes
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import AllGather, Release, WaitGather
from zcompile.ir.program import Program
from zcompile.passes.keep_full import keep
from zcompile.passes.keep_within import check_fits


def keep_between_actions(program: Program, *, memory_limit: int) -> Program:
    """A step that holds at most `memory_limit` bytes beside shards and optimizer state (see `zcompile.cost.memory`).

    Raises:
        OptionError: it holds more already.
    """
    check_fits(peak_bytes(program), memory_limit)
    program = program.copy()
    fitting = _that_fit(program, memory_limit)
    for gathered in _by_unit(program).values():
        full = gathered[0]
        for again in gathered[1:]:
            if again.name in fitting:
                keep(program, full, again)
            else:
                full = again
    return program


@dataclass(frozen=True, slots=True)
class _Gap:
    """Lines between the release of a unit and its next gather."""

    again: str
    """What that gives."""
    lines: slice
    nbytes: int


def _by_unit(program: Program) -> dict[str, list[fx.Node]]:
    """The full parameters of each unit, in the order in which they are gathered."""
    result: dict[str, list[fx.Node]] = {}
    for full in program.nodes(WaitGather):
        (gather,) = full.all_input_nodes
        if not op_of(gather, AllGather).keep:
            result.setdefault(op_of(full, WaitGather).unit, []).append(full)
    return result


def _that_fit(program: Program, memory_limit: int) -> set[str]:
    """The names of the full parameters that need not be gathered, as those before them are kept."""
    live = live_bytes(program)
    place, held = {line: index for index, line in enumerate(live)}, list(live.values())
    fitting = set[str]()
    for gap in sorted(_gaps(program, place), key=lambda gap: gap.lines.stop - gap.lines.start):
        if max(held[gap.lines], default=0) + gap.nbytes <= memory_limit:
            held[gap.lines] = [already + gap.nbytes for already in held[gap.lines]]
            fitting.add(gap.again)
    return fitting


def _gaps(program: Program, place: dict[fx.Node, int]) -> list[_Gap]:
    found = []
    for gathered in _by_unit(program).values():
        for full, again in itertools.pairwise(gathered):
            (released,) = [user for user in full.users if isinstance(data(user).op, Release)]
            begin, end = place[released], place[again.all_input_nodes[0]]  # the second may be gathered ahead of that
            found.append(_Gap(again.name, slice(begin, max(begin, end)), -program.memory(released)))
    return found
