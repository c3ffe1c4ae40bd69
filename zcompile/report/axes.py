"""Axes of charts: ticks at round numbers, and the formats of seconds, bytes and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zcompile.ir.tensor_type import human_bytes


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Position in percent of the axis."""
    text: str
    is_fine: bool = False
    """True if its text is hidden on narrow screens: every other one of many."""


def ticks(most: float, text: Callable[[float], str], *, about: int = 4, base: int = 10) -> list[Tick]:
    """Ticks at round numbers from 0 to `most`; with `base` 1024, numbers that are round in KiB, MiB or GiB."""
    places = list(_round(most, about, base)) if most > 0 else []
    are_many = len(places) > 4
    return [Tick(100 * at / most, text(at), are_many and index % 2 == 1) for index, at in enumerate(places)]


def _round(most: float, about: int, base: int) -> Iterator[float]:
    """Multiples, from 0 to `most`, of a step of 1, 2 or 5 times a power of ten: at least about `about` / 2 of them."""
    unit = 1024.0 ** max(math.floor(math.log(most, 1024)), 0) if base == 1024 else 1.0
    rough = most / unit / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    yield from (step * count for count in range(int(most / step + 1e-9) + 1))


def human_seconds(seconds: float) -> str:
    """Format seconds: `781 µs`, `78.3 ms`, `1.2 s`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns" if seconds else "0"


def human_count(count: float) -> str:
    """Format a count: `376 M`, `8.03 B`."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f}"


def decimal_bytes(count: float) -> str:
    """Format bytes in powers of ten, as is usual for device memory: `80 GB`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def binary_bytes(count: float) -> str:
    """`human_bytes`, but 0 without a unit."""
    return human_bytes(count) if count else "0"


def _digits(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
