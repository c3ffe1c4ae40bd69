"""offload_activations: move what is saved for the backward out of the device's memory, and back before it is needed.

    ya = region_0(a, x)                         ya = region_0(a, x)
    yb = region_0(b, ya)                        ya_stashed = stash(ya, away)
    ...                                         yb = region_0(b, ya)
    return [yb], [x, ya]                        ...
                                    ->          return [yb], [x, ya_stashed]

    db, gc = region_1(c, dy, yb)                ya_fetch = fetch(ya_stashed, away)
    da, gb = region_1(b, db, ya)                db, gc = region_1(c, dy, yb)
                                                ya_again = wait(ya_fetch)
                                                da, gb = region_1(b, db, ya_again)

Each is on its way out from the moment in which it is there, while the forward goes on, and on its way back `ahead`
regions before the one that reads it (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.2). What is small stays, and
what the last region makes or the backward's first one reads: it is needed at once.
"""

from __future__ import annotations

from zcompile.moving import LEAST, movable, move
from zcompile.ops import Away, Data
from zcompile.program import Program


def offload_activations(program: Program, *, ahead: int = 1, least: int = LEAST) -> Program:
    """A program that keeps what it saves of at least `least` bytes away, and fetches it `ahead` regions early."""
    program = program.copy()
    found = movable(program, least)
    if not found:
        return program
    away = program.add_placeholder("away", Data(Away()))
    for node, maker in reversed(found.items()):
        move(program, node, maker, away, ahead)
    return program
