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

from collections.abc import Sequence

from zcompile.ir.program import Program
from zcompile.passes.common.move_saved import LEAST, Saved, away_at_peak, movable, offload


def offload_activations(
    program: Program, *, ahead: int = 1, least: int = LEAST, memory_limit: int | None = None
) -> Program:
    """A program that keeps what it saves of at least `least` bytes away, and fetches it `ahead` regions early.

    With `memory_limit`: as much as is needed, if that is enough, for the step to hold so many bytes at most.
    """
    program = program.copy()

    def choose(left: list[Saved]) -> Sequence[Saved]:
        """Of what is saved while the step holds the most, the first made, which is away the longest."""
        if memory_limit is None:
            return left[::-1]
        held, away = away_at_peak(program, left)
        return away[:1] if held > memory_limit else ()

    return offload(program, movable(program, least, ahead), choose)
