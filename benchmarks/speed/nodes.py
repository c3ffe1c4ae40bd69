"""What two nodes of two ranks have found, and its table; nothing here imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.common.turns import compared, slowest, table

NODES, RANKS = 2, 2
WORLD = NODES * RANKS
BASE = "fsdp2 hsdp"


@dataclass(frozen=True)
class Trained:
    """What came of a round on one rank.

    Attributes:
        seconds: Of each step.
        wire: Bytes that this rank's node has sent over the cable; 0 on loopback.
        outside: Bytes that this rank says it has sent along the axis of nodes; None where that is not known.
        loss: Of the last step.
    """

    seconds: Sequence[float]
    wire: int
    outside: int | None
    loss: float


@dataclass
class NodesResult:
    """All ways to train over one link between the nodes."""

    left_out: str | None = None
    """Why it was not measured."""
    steps: int = 0
    """In a round."""
    rounds: dict[str, list[list[Trained]]] = field(default_factory=dict)
    """What each rank has seen in each round, by the way to train."""
    foretold: dict[str, float] = field(default_factory=dict)
    """Seconds of a step as they are simulated, of the ways that are ours."""

    def table(self, link: str) -> Table:
        """Times, their ratios in each round, and bytes of a node in a step."""
        headings = ("way", "step s", f"of {BASE}", "spread", "foretold", "wire MB", "program MB", "loss")
        result = table(f"{link}, {NODES} nodes of {RANKS} ranks", *headings)
        for way, rows in self.rounds.items():
            wire = statistics.median(ranks[0].wire for ranks in rows) / self.steps / 1e6
            outside = [one.outside for one in rows[-1][:RANKS]]
            result.add_row(
                way,
                *compared(slowest(rows), slowest(self.rounds.get(BASE, rows))),
                f"{self.foretold[way]:.3f}" if way in self.foretold else "",
                f"{wire:.2f}" if wire else "",
                "" if None in outside else f"{sum(one or 0 for one in outside) / self.steps / 1e6:.2f}",
                f"{statistics.mean(one.loss for one in rows[-1]):.4f}",
            )
        return result
