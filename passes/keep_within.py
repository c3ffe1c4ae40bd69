"""keep_within: keep further units full from the forward to the backward, as far as a limit of memory allows.

Each one kept saves its second gather and costs its full bytes from its forward to its backward. Those nearest to the
turn, which stay for the shortest time, are kept first; one that does not fit is passed over.
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
    """A program that holds at most `memory_limit` bytes beside shards and optimizer state (see `zcompile.cost.memory`).

    With `units`, those are kept, whatever it then holds: ranks with batches of other sizes must keep the same ones.

    Raises:
        OptionError: it holds more already.
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
    """Raise OptionError if a step that takes `least` bytes is over the limit."""
    if least > memory_limit:
        problem = f"{human_bytes(memory_limit)} is less than the {human_bytes(least)} that this step takes"
        raise OptionError(
            "memory_limit", problem, f"give at least {least} bytes, a smaller prefetch, or a smaller batch"
        )


def choose_kept_units(program: Program, memory_limit: int) -> tuple[str, ...]:
    """The units to keep, those nearest to the turn first."""
    return tuple(that_fit(program, _gathered_again(program), memory_limit))


def that_fit(
    program: Program, gathered: Iterable[Again], memory_limit: int, *, shortest_first: bool = False
) -> Iterator[str]:
    """The names of those that may stay full from their release to their next gather: the first ones first.

    `shortest_first`: those first for which that is the fewest lines.
    """
    live = live_bytes(program)
    place, held = {line: index for index, line in enumerate(live)}, list(live.values())
    gaps = []
    for name, full, again in gathered:
        released, gather = place[release_of(full)], place[again.all_input_nodes[0]]  # it may be gathered ahead of that
        gaps.append((name, slice(released, max(released, gather)), -program.memory(release_of(full))))
    if shortest_first:
        gaps.sort(key=lambda gap: gap[1].stop - gap[1].start)
    for name, meanwhile, nbytes in gaps:
        if max(held[meanwhile], default=0) + nbytes <= memory_limit:
            held[meanwhile] = [already + nbytes for already in held[meanwhile]]
            yield name


Again = tuple[str, fx.Node, fx.Node]
"""A name, the full parameters of a unit, and those that are gathered again."""


def _gathered_again(program: Program) -> Iterator[Again]:
    """Units that are gathered once in the forward and once more in the backward, in the backward's order.

    With each, the full parameters of the forward and of the backward.
    """
    gathers = {phase: program.nodes(AllGather, phase=phase) for phase in program.phases}
    gathered = {phase: [op_of(node, AllGather).unit for node in nodes] for phase, nodes in gathers.items()}
    for unit in gathered[Phase.BACKWARD]:
        if all(units.count(unit) == 1 for units in gathered.values()):
            full, again = (node for node in program.nodes(WaitGather) if op_of(node, WaitGather).unit == unit)
            yield unit, full, again
