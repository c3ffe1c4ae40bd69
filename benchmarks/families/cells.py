"""The columns of the matrix, and what comes of a cell. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ORDER = ("crash", "refused", "hang", "lost", "void", "distance", "bits")
"""What a cell is whose ranks say different things: the first of these that one says."""
WRONG = 1e-4
"""A larger distance is no rounding."""

WITHOUT = "traced"
"""The loop of cells without zcompile: what torch.compile alone does to the numbers."""


@dataclass(frozen=True)
class Cell:
    """A way to train."""

    name: str
    loop: str
    """Of `loops`."""
    options: Mapping[str, Any]
    limit: float = 180.0
    """Seconds that it may take."""


CELLS = {
    cell.name: cell
    for cell in (
        *(Cell(f"stage{stage}", "plain", {"stage": stage, "backend": "eager"}) for stage in range(4)),
        Cell("inductor", "plain", {"stage": 3}, limit=400.0),
        Cell("autocast", "autocast", {"stage": 3, "backend": "eager"}),
        Cell("torch.compile", "compiled", {"stage": 3, "backend": "eager"}),
        Cell("accelerate", "accelerate", {"stage": 3, "backend": "eager"}),
        Cell("trainer", "trainer", {"stage": 3, "backend": "eager"}),
        Cell("lightning", "lightning", {"stage": 3, "backend": "eager"}),
        Cell("aot_eager", WITHOUT, {"backend": "aot_eager"}),
        Cell("ddp_inductor", WITHOUT, {"backend": "inductor"}, limit=400.0),
    )
}


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `kind` is one of ORDER."""

    kind: str
    said: str = ""
    """The sentence of a refusal, the error of a crash, or what is farthest off."""
    distance: float = 0.0
    seconds: float = 0.0
    trace: str = field(default="", compare=False)


def whole(outcomes: list[Outcome]) -> Outcome:
    """What the ranks say together."""
    worst = min(outcomes, key=lambda one: (ORDER.index(one.kind), -one.distance))
    return Outcome(worst.kind, worst.said, worst.distance, max(one.seconds for one in outcomes), worst.trace)
