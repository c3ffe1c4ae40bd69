"""keep_within: keep more units full from the forward to the backward, as far as a memory limit allows.

Each unit kept saves its second gather and costs its full bytes from its forward to its backward. The units nearest to
the turn, which are held for the shortest time, are kept first; a unit that does not fit is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from zcompile.cost.memory import live_bytes, peak_bytes
from zcompile.errors import OptionError
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import AllGather, WaitGather
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.passes.keep_full import keep, release_of


def keep_within(program: Program, *, memory_limit: int, units: Sequence[str] | None = None) -> Program:
    """Return a program that keeps units full within `memory_limit` bytes, as `zcompile.cost.memory` counts them.

    The limit excludes shards and optimizer state. If `units` is given, exactly these are kept and the limit is not
    checked: ranks whose batches differ in size must keep the same units.

    Raises:
        OptionError: the program exceeds the limit already.
    """
    if units is None:
        check_fits(peak_bytes(program), memory_limit)
        units = choose_kept_units(program, memory_limit)
    program = program.copy()
    for unit, full, again in _gathered_again(program):
        if unit in units:
            keep(program, full, again)
    return program


def check_fits(least: int, memory_limit: int) -> None:
    """Raise OptionError if a step that takes at least `least` bytes exceeds the limit."""
    if least > memory_limit:
        problem = f"{human_bytes(memory_limit)} is less than the {human_bytes(least)} that this step takes"
        raise OptionError(
            "memory_limit", problem, f"give at least {least} bytes, a smaller prefetch, or a smaller batch"
        )


def choose_kept_units(program: Program, memory_limit: int) -> tuple[str, ...]:
    """Return the units to keep, those nearest to the turn first."""
    return tuple(that_fit(program, _gathered_again(program), memory_limit))


def that_fit(
    program: Program, gathered: Iterable[Again], memory_limit: int, *, shortest_first: bool = False
) -> Iterator[str]:
    """Yield the names of the entries that can stay full from their release to their next gather, chosen greedily.

    Entries are tried in the given order, or, with `shortest_first`, in the order of how many lines they stay full for.
    """
    live = live_bytes(program)
    position, held = {line: index for index, line in enumerate(live)}, list(live.values())
    gaps = []
    for name, full, again in gathered:
        release, gather = position[release_of(full)], position[again.all_input_nodes[0]]  # maybe prefetched before that
        gaps.append((name, slice(release, max(release, gather)), -program.memory(release_of(full))))
    if shortest_first:
        gaps.sort(key=lambda gap: gap[1].stop - gap[1].start)
    for name, gap, nbytes in gaps:
        if max(held[gap], default=0) + nbytes <= memory_limit:
            held[gap] = [already + nbytes for already in held[gap]]
            yield name


Again = tuple[str, fx.Node, fx.Node]
"""A name, the full parameters of a unit, and the full parameters of its next gather."""


def _gathered_again(program: Program) -> Iterator[Again]:
    """Yield the units that are gathered exactly once in each phase, in the order of the backward's gathers.

    Each comes with its full parameters of the forward and of the backward.
    """
    gathers = {phase: program.nodes(AllGather, phase=phase) for phase in program.phases}
    gathered = {phase: [op_of(node, AllGather).unit for node in nodes] for phase, nodes in gathers.items()}
    for unit in gathered[Phase.BACKWARD]:
        if all(units.count(unit) == 1 for units in gathered.values()):
            full, again = (node for node in program.nodes(WaitGather) if op_of(node, WaitGather).unit == unit)
            yield unit, full, again
