"""offload_activations: move saved activations out of device memory, and fetch them back before they are needed.

    ya = region_0(a, x)                         ya = region_0(a, x)
    yb = region_0(b, ya)                        ya_offloaded = offload(ya, away)
    ...                                         yb = region_0(b, ya)
    return [yb], [x, ya]                        ...
                                    ->          return [yb], [x, ya_offloaded]

    db, gc = region_1(c, dy, yb)                ya_fetch = fetch(ya_offloaded, away)
    da, gb = region_1(b, db, ya)                db, gc = region_1(c, dy, yb)
                                                ya_again = wait(ya_fetch)
                                                da, gb = region_1(b, db, ya_again)

Each copy out starts as soon as the value is computed, and overlaps with the rest of the forward. Each copy back starts
`ahead` regions before the region that reads the value (Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2.2). Small
values stay, and so do values that the last region computes or the first region of the backward reads: they are needed
at once. With a memory limit, no more is moved than is needed to stay within it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zcompile.ir.program import Program
from zcompile.passes.common.move_saved import LEAST, Saved, away_at_peak, movable, offload


def offload_activations(
    program: Program, *, ahead: int = 1, least: int = LEAST, memory_limit: int | None = None
) -> Program:
    """Return a program that offloads activations of at least `least` bytes, and fetches them `ahead` regions early.

    With `memory_limit`, in bytes, activations are offloaded only until the step's peak is within it, if it can be.
    """
    program = program.copy()

    def choose(left: list[Saved]) -> Sequence[Saved]:
        """Choose all values, or, if over the limit, the value live at the peak that would be offloaded the longest."""
        if memory_limit is None:
            return left[::-1]
        held, away = away_at_peak(program, left)
        return away[:1] if held > memory_limit else ()

    return offload(program, movable(program, least, ahead), choose)
