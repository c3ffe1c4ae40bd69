"""Ways to do one thing that take turns in the same processes, so that ratios of their times are of one run."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from benchmarks.common.figures import Spread
from benchmarks.common.ranks import Team

T = TypeVar("T")
Rounds = Mapping[str, Sequence[Sequence[T]]]
"""By way, of each round what each rank has found."""


class Timed(Protocol):
    """What a rank has found in a round."""

    @property
    def seconds(self) -> Sequence[float]:
        """Of each step."""


class Ways(ABC, Generic[T]):
    """All ways on one rank, which does the one that it is told (`turns`)."""

    def __init__(self, ways: Sequence[str], warmup: int) -> None:
        self.warmup = warmup
        self.ways = {way: self.build(way) for way in ways}
        self.counts = dict.fromkeys(ways, 0)
        """Steps that each has done, from which its next batch follows."""

    @abstractmethod
    def build(self, way: str) -> T:
        """What does a step."""

    @abstractmethod
    def train(self, way: str, steps: int) -> Any:
        """Do so many steps in one way, all ranks together."""

    def ready(self) -> None:
        """Warm up."""
        for way in self.ways:
            self.train(way, self.warmup)

    def next_step(self, way: str) -> int:
        """The number of the step that begins."""
        self.counts[way] += 1
        return self.counts[way] - 1


def turns(team: Team, ways: Sequence[str], rounds: int, steps: int) -> dict[str, list[list[Any]]]:
    """Let all ways on the ranks of a team take turns, in every other round from the last to the first."""
    found: dict[str, list[list[Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            found[way].append(team.ask("train", way, steps))
    return found


def slowest(rounds: Sequence[Sequence[Timed]]) -> list[float]:
    """Seconds of a step of the slowest rank, by round."""
    return [max(statistics.median(one.seconds) for one in ranks) for ranks in rounds]


def compared(seconds: Sequence[float], base: Sequence[float]) -> list[str]:
    """Three cells: the median, that of the ratios to `base` in each round, and their spread."""
    ratios = Spread.of([one / other for one, other in zip(seconds, base, strict=True)])
    return [f"{statistics.median(seconds):.3f}", f"{ratios.median:.2f}", f"{ratios.low:.2f} to {ratios.high:.2f}"]


def table(title: str, *headings: str, left: Sequence[str] = ("way",), ruled: bool = True) -> Table:
    """An empty table, whose columns of figures are flush right; `ruled`: with lines around its cells."""
    style = {} if ruled else {"box": box.SIMPLE_HEAD}
    result = Table(title=title, title_justify="left", **style)  # type: ignore[arg-type]
    for heading in headings:
        result.add_column(heading, justify="left" if heading in left else "right")
    return result


def print_to(paths: Iterable[Path], *shown: RenderableType, width: int = 110) -> None:
    """Print to the screen, and to files."""
    Console(width=width).print(*shown)
    for path in paths:
        with path.open("w") as file:
            Console(file=file, width=width).print(*shown)
