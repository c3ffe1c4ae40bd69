"""Figures of several rounds, and files of them; nothing here imports torch."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class Spread:
    """The median of figures, and the least and the largest of them; or their quartiles (`quartiles`)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """The spread of one figure or more."""
        return cls(statistics.median(figures), min(figures), max(figures))

    def times(self, scale: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * scale, self.low * scale, self.high * scale)

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"

    def __str__(self) -> str:
        return f"{self:.2f}"


def quartiles(figures: Sequence[float]) -> Spread:
    """Of a step's noise, in which the least and the largest of many figures say little."""
    low, middle, high = statistics.quantiles(figures, n=4)
    return Spread(middle, low, high)


def spread(figures: Sequence[float]) -> Spread | None:
    """The spread of `figures`; None of none."""
    return Spread.of(figures) if figures else None


def ratio(subject: Mapping[str, float], reference: Mapping[str, float]) -> Spread | None:
    """How many times `reference` the `subject` is, taken turn by turn; None where they share no turn."""
    return spread([subject[turn] / reference[turn] for turn in subject if turn in reference])


class Measured(Protocol):
    """A configuration."""

    seconds: dict[str, float]
    failure: str | None


M = TypeVar("M", bound=Measured)


def usable(entry: M | None) -> M | None:
    """`entry` if its figures may be used."""
    return entry if entry and entry.seconds and not entry.failure else None


def write_json(found: Any, path: Path) -> None:
    """Write a file as a whole, or not at all."""
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(found, indent=1, default=_plain) + "\n")
    whole.replace(path)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
