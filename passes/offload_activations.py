"""offload_activations: move what is saved for the backward out of the device's memory, and back before it is needed.

    ya = region_0(a, x)                         ya = region_0(a, x)
    yb = region_0(b, ya)                        ya_offloaded = offload(ya, away)
    ...                                         yb = region_0(b, ya)
    return [yb], [x, ya]                        ...
                                    ->          return [yb], [x, ya_offloaded]

    db, gc = region_1(c, dy, yb)                ya_fetch = fetch(ya_offloaded, away)
    da, gb = region_1(b, db, ya)                db, gc = region_1(c, dy, yb)
                                                ya_again = wait(ya_fetch)
                                                da, gb = region_1(b, db, ya_again)

Each is on its way out from the moment in which it is there, while the forward goes on, and on its way back `ahead`
regions before the one that reads it (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.2). What is small stays, and
what the last region makes or the backward's first one reads: it is needed at once. With a limit of memory no more is
moved than the step needs to keep it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.cost.memory import live_bytes
from zcompile.ir.operation import Data, data
from zcompile.ir.ops import OffloadStore
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.passes.common.move_saved import LEAST, fetched_at, movable, move


def offload_activations(
    program: Program, *, ahead: int = 1, least: int = LEAST, memory_limit: int | None = None
) -> Program:
    """A program that keeps what it saves of at least `least` bytes away, and fetches it `ahead` regions early.

    With `memory_limit`: as much as is needed, if that is enough, for the step to hold so many bytes at most.
    """
    program = program.copy()
    waiting = movable(program, least)
    if not waiting:
        return program
    away, moved = program.add_placeholder("away", Data(OffloadStore())), list[fx.Node]()
    while node := _next(program, waiting, ahead, memory_limit):
        move(program, node, waiting.pop(node), away, ahead)
        moved.append(node)
    if not moved:
        program.graph.erase_node(away)
    gone, left = (human_bytes(sum(data(node).nbytes for node in nodes)) for nodes in (moved, waiting))
    note = f"activations away: {len(moved)}, {gone}; {left} stay that could be"
    return replace(program, notes=(*program.notes, note))


def _next(program: Program, waiting: dict[fx.Node, fx.Node], ahead: int, limit: int | None) -> fx.Node | None:
    """What to move next: of what is saved while the step holds the most, the first made, which is away the longest."""
    if limit is None:
        return next(reversed(waiting), None)
    peak, held = max(live_bytes(program).items(), key=lambda line: line[1])
    if held <= limit:
        return None
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    away = (
        node for node, maker in waiting.items() if place[maker] < place[peak] < place[fetched_at(program, node, ahead)]
    )
    return next(away, None)
