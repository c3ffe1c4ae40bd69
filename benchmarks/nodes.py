"""What two nodes of two ranks say to the command that measures them, and the table of what they found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

NODES, RANKS = 2, 2
WORLD = NODES * RANKS
BASE = "fsdp2 hsdp"


@dataclass(frozen=True)
class Begin:
    """The first message to a rank."""

    rank: int
    store: str
    ways: Sequence[str]
    warmup: int


@dataclass(frozen=True)
class Round:
    """Train so many steps in one way, all ranks together."""

    way: str
    steps: int


@dataclass(frozen=True)
class Foretell:
    """Measure the machine and its links, all ranks together, and simulate a step of every way that is ours."""


@dataclass(frozen=True)
class Trained:
    """What came of a round.

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

    def seconds(self, way: str) -> list[float]:
        """Of a step of the slowest rank, by round."""
        return [max(statistics.median(one.seconds) for one in ranks) for ranks in self.rounds[way]]

    def table(self, link: str) -> Table:
        """Times, their ratios in each round, and bytes of a node in a step."""
        result = Table(title=f"{link}, {NODES} nodes of {RANKS} ranks", title_justify="left")
        for heading in ("way", "step s", f"of {BASE}", "spread", "foretold", "wire MB", "program MB", "loss"):
            result.add_column(heading, justify="left" if heading == "way" else "right")
        for way in self.rounds:
            result.add_row(way, *self._cells(way))
        return result

    def _cells(self, way: str) -> list[str]:
        rows, seconds = self.rounds[way], self.seconds(way)
        base = self.seconds(BASE) if BASE in self.rounds else seconds
        ratios = [one / other for one, other in zip(seconds, base, strict=True)]
        wire = statistics.median(ranks[0].wire for ranks in rows) / self.steps / 1e6
        outside = [one.outside for one in rows[-1][:RANKS]]
        return [
            f"{statistics.median(seconds):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{self.foretold[way]:.3f}" if way in self.foretold else "",
            f"{wire:.2f}" if wire else "",
            "" if None in outside else f"{sum(one or 0 for one in outside) / self.steps / 1e6:.2f}",
            f"{statistics.mean(one.loss for one in rows[-1]):.4f}",
        ]
