"""The page of a plan: every choice as a dot in time and memory, and as a row with its memory by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cost.forecast import CHOICE, FIGURES, Forecast, Plan, choice_cells, figure_cells
from zcompile.report.pages import rendered, write

WIDTH, HEIGHT, MARGIN = 900, 320, 46
"""Of the chart, in pixels of a wide screen."""
BAR = 1000
"""Width of the bars in the table, in their own units."""


@dataclass(frozen=True)
class Row:
    """One choice."""

    number: int
    forecast: Forecast
    cells: Sequence[tuple[str, float | str]]
    """Texts, each with what it is sorted by."""
    kinds: Sequence[tuple[str, float, float]]
    """Kinds of memory, each with where it starts in the bar and how wide it is."""
    x: float
    y: float
    verdict: str
    """"best", "too big" or nothing."""

    @property
    def is_best(self) -> bool:
        return self.verdict == "best"


@dataclass(frozen=True)
class World:
    """What the page shows of one number of ranks."""

    ranks: int
    title: str
    advice: str
    """What is recommended, or why nothing is."""
    fits: bool
    """True if something is."""
    rows: Sequence[Row]
    limit: float | None
    """Where the limit is in the chart; None if it is beyond."""
    ticks: Sequence[tuple[str, float, str]]
    """Marks of the axes: the axis, the place, and the text."""


def write_plan_page(path: Path, plan: Plan) -> Path:
    """Write the page of a plan.

    Raises:
        OSError: the file cannot be written.
    """
    return write(path, plan_page_text(plan))


def plan_page_text(plan: Plan) -> str:
    """The page as HTML."""
    worlds = [_world(plan, ranks) for ranks in plan.worlds]
    kinds = dict.fromkeys(name for world in worlds for row in world.rows for name, *_ in row.kinds)
    headings = (*CHOICE, *FIGURES)
    sizes = {"width": WIDTH, "height": HEIGHT, "margin": MARGIN, "bar": BAR}
    return rendered("plan.html.j2", title=plan.model, plan=plan, worlds=worlds, kinds=kinds, headings=headings, **sizes)


def _world(plan: Plan, ranks: int) -> World:
    forecasts = plan.of(ranks)
    slowest = max(forecast.seconds for forecast in forecasts) or 1.0
    largest = max(forecast.nbytes for forecast in forecasts) or 1

    def across(seconds: float) -> float:
        return MARGIN + seconds / slowest * (WIDTH - 2 * MARGIN)

    def down(nbytes: float) -> float:
        return HEIGHT - MARGIN - nbytes / largest * (HEIGHT - 2 * MARGIN)

    rows = []
    for number, forecast in enumerate(forecasts):
        place = across(forecast.seconds), down(forecast.nbytes)
        kinds = list(_kinds(forecast, largest))
        rows.append(Row(number, forecast, list(_cells(forecast)), kinds, *place, plan.verdict(forecast)))
    ticks = [("x", across(at), f"{at:.3g} s") for at in _round(slowest)]
    ticks += [("y", down(at), _memory(at)) for at in _round(largest)]
    limit = down(plan.memory_limit) if plan.memory_limit <= largest else None
    return World(ranks, plan.title(ranks), plan.advice(ranks), plan.fastest(ranks) is not None, rows, limit, ticks)


def _memory(nbytes: float) -> str:
    """A few characters, on an axis."""
    return f"{nbytes / 1e12:.3g} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g} GB"


def _round(most: float) -> Iterator[float]:
    """Some round figures from 0 to `most`."""
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    yield from (step * count for count in range(int(most / step + 1e-9) + 1))


def _cells(forecast: Forecast) -> Iterator[tuple[str, float | str]]:
    """Texts, each with what its column is sorted by: figures by themselves."""
    for heading, text in zip(CHOICE, choice_cells(forecast.choice), strict=True):
        yield text, (float(text or -1) if heading in ("stage", "prefetch") else text)
    hidden = forecast.hidden_share
    figures = (forecast.nbytes, forecast.seconds, forecast.rate, -1.0 if hidden is None else hidden)
    yield from zip(figure_cells(forecast), figures, strict=True)


def _kinds(forecast: Forecast, largest: int) -> Iterator[tuple[str, float, float]]:
    start = 0.0
    for name, nbytes in forecast.by_kind().items():
        width = nbytes / largest * BAR
        if nbytes:
            yield name, start, width
        start += width
