"""The page of a plan: each choice as a dot in a chart of time and memory, and as a row with its memory by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cost.forecast import CHOICE, Forecast, Plan, choice_cells
from zcompile.report.axes import decimal_bytes, human_seconds, ticks
from zcompile.report.pages import rates, rendered

BAR = 1000
"""Width of the bars in the table, in SVG units."""
HEADINGS = (*CHOICE, "memory", "step", "TFLOP/s", "hidden")
"""Headings of the table: options, and forecasts."""
NAMED = 3
"""Number of choices listed in a sentence; others are counted."""
WHY = "chosen by hardware= or --hardware; h100 is the default"
"""The reason for this hardware."""


@dataclass(frozen=True)
class Row:
    """One choice: a row of the table, and a dot of the chart."""

    number: int
    forecast: Forecast
    verdict: str
    """"best", "too big", "rows" or nothing."""
    note: str
    """Text after its bar."""
    kinds: Sequence[tuple[str, float, float]]
    """Kinds of memory, with their start and width in the bar."""
    x: float
    """Position of the dot, in percent from the left."""
    y: float
    """Position of the dot, in percent from the top."""

    @property
    def radius(self) -> float:
        """Radius in pixels. Stage 1 is larger, to be visible behind stage 2, which often has the same position."""
        return {1: 8.0, 2: 5.0}.get(self.forecast.choice.stage, 6.0)

    @property
    def cells(self) -> Iterator[tuple[str, float | str]]:
        """The text of each cell, and the value that its column is sorted by."""
        forecast = self.forecast
        for heading, text in zip(CHOICE, choice_cells(forecast.choice), strict=True):
            yield text, (float(text or -1) if heading == "prefetch" else text)
        hidden = forecast.hidden_share
        yield decimal_bytes(forecast.nbytes), forecast.nbytes
        yield human_seconds(forecast.seconds), forecast.seconds
        yield f"{forecast.rate / 1e12:.3g}", forecast.rate
        yield ("", -1.0) if hidden is None else (f"{hidden:.0%}", hidden)


def write_plan_page(path: Path, plan: Plan) -> Path:
    """Write the page of a plan.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(plan_page_text(plan), encoding="utf-8")
    return path


def plan_page_text(plan: Plan) -> str:
    """The page as HTML."""
    worlds = [PlannedWorld(plan, ranks) for ranks in plan.worlds]
    kinds = dict.fromkeys(name for world in worlds for row in world.rows for name, *_ in row.kinds)
    assumed = {"rates": list(rates(plan.hardware)), "why": WHY, "has_limit": math.isfinite(plan.memory_limit)}
    sizes = {"height": HEIGHT, "bar": BAR}
    return rendered(
        "plan.html.j2", title=plan.model, plan=plan, worlds=worlds, kinds=kinds, headings=HEADINGS, **assumed, **sizes
    )


class PlannedWorld:
    """The part of the page for one number of ranks."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        forecasts, limit = plan.of(ranks), plan.memory_limit
        self.ranks, self.title, self.advice = ranks, plan.title(ranks), plan.advice(ranks)
        self.best = best = plan.fastest(ranks)
        self.reason = _reason(plan, best) if best else ""
        largest = max(forecast.nbytes for forecast in forecasts) or 1
        right = 1.04 * max(forecast.seconds for forecast in forecasts) or 1.0
        has_limit, is_near = math.isfinite(limit), limit <= 2.5 * largest
        top = 1.08 * (max(largest, limit) if is_near else largest)
        self.across, self.up = ticks(right, human_seconds, about=8), ticks(top, decimal_bytes, about=5)
        self.rows = [
            Row(
                number,
                forecast,
                plan.verdict(forecast),
                _note(plan, forecast, best),
                list(_kinds(forecast, largest)),
                100 * forecast.seconds / right,
                100 * (1 - forecast.nbytes / top),
            )
            for number, forecast in enumerate(forecasts)
        ]
        self.limit_in_bars = limit / largest * BAR if limit <= largest else None
        """Position of the memory limit in the bars; None if it is beyond them."""
        self.limit = (100 * (1 - limit / top) if is_near else 0.0) if has_limit else None
        """Position of the limit in percent from the top; 0 if it is above the chart, None if there is no limit."""
        self.limit_sides = {screen: self._limit_side(screen) for screen in WIDTHS}
        """The end of the limit's line with its label, for each kind of screen: "start" or "end"."""
        self.labels = [label for screen in WIDTHS for label in self._labels(screen)]

    @property
    def dots(self) -> list[Row]:
        """The rows in drawing order of their dots; the best choice, if it has a label, comes last."""
        named = {label.dot.number for label in self.labels if label.is_best}
        return sorted(self.rows, key=lambda dot: (dot.number in named, dot.forecast.choice.stage))

    @property
    def stages(self) -> list[int]:
        return sorted({row.forecast.choice.stage for row in self.rows})

    def _limit_box(self, screen: str, side: str) -> Box:
        """The box of the limit's label: above its line, or below it at the top of the chart."""
        y = (self.limit or 0.0) * HEIGHT / 100
        top = y - LINE if y > LINE else y
        left = 0.0 if side == "start" else WIDTHS[screen] - _LIMIT_NAME
        return left, top, left + _LIMIT_NAME, top + LINE

    def _limit_side(self, screen: str) -> str:
        """The end of the limit's line with fewer dots around it."""
        around = [_around(dot, WIDTHS[screen]) for dot in self.rows]
        return min(("end", "start"), key=lambda side: sum(_meet(self._limit_box(screen, side), one) for one in around))

    def _labels(self, screen: str) -> Iterator[Label]:
        """Place labels, of the best choice first and then by time, so that they cover neither dots nor labels."""
        width = WIDTHS[screen]
        taken = [_around(dot, width) for dot in self.rows]
        if self.limit is not None:
            y = self.limit * HEIGHT / 100
            taken += [(0.0, y - 3, width, y + 3), self._limit_box(screen, self.limit_sides[screen])]
        for group in self._groups(screen):
            lead, is_best = group[0], group[0].forecast is self.best
            text = _name([dot.forecast for dot in group], [dot.forecast for dot in self.rows])
            if is_best:
                text = f"best: {name_of(lead.forecast)}" if screen == "wide" else "best"
            if len(text) > LONGEST[screen] and not is_best:
                continue
            for dx, dy in _AROUND_BEST if is_best else _AROUND[screen]:
                x, y, long = lead.x * width / 100 + dx, lead.y * HEIGHT / 100 + dy, len(text) * LETTER
                box = (x if dx > 0 else x - long, y - LINE / 2, x + long if dx > 0 else x, y + LINE / 2)
                inside = box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= HEIGHT
                if inside and not any(_meet(box, other) for other in taken):
                    taken.append(box)
                    yield Label(screen, 100 * x / width, 100 * y / HEIGHT, text, lead, dx, is_best)
                    break

    def _groups(self, screen: str) -> list[list[Row]]:
        """Group dots that are close together; the group of the best choice first, then by time."""
        groups: list[list[Row]] = []
        width = WIDTHS[screen]
        for dot in sorted(self.rows, key=lambda dot: (dot.forecast is not self.best, dot.x, -dot.y)):
            here = dot.x * width / 100, dot.y * HEIGHT / 100
            for group in groups:
                if math.dist(here, (group[0].x * width / 100, group[0].y * HEIGHT / 100)) <= NEAR[screen]:
                    group.append(dot)
                    break
            else:
                groups.append([dot])
        return groups


def _note(plan: Plan, forecast: Forecast, best: Forecast | None) -> str:
    verdict = {"rows": "not whole"}.get(plan.verdict(forecast), plan.verdict(forecast))
    return verdict or ("as fast" if best and forecast.seconds == best.seconds else "")


def _reason(plan: Plan, best: Forecast) -> str:
    """Why a choice is the best: its margin over others, and the tie-break among equally fast ones."""
    others = [one for one in plan.of(best.world) if one is not best and plan.serves(one) and plan.fits(one)]
    taken = f"{human_seconds(best.seconds)} per step and {decimal_bytes(best.nbytes)} per rank"
    if not others:
        return f"{taken}. Nothing else fits."
    equal = [one for one in others if one.seconds == best.seconds]
    slower = sorted((one for one in others if one.seconds > best.seconds), key=lambda one: one.seconds)
    said = [taken]
    if equal:
        least = min(one.nbytes for one in equal)
        decides = "takes the least memory" if least > best.nbytes else "is the first with the least memory"
        said.append(f"of {len(equal) + 1} equally fast choices it {decides} (the others: {_listed(equal)})")
    if slower:
        said.append(f"the next, {name_of(slower[0])}, takes {_share(slower[0].seconds / best.seconds - 1)} longer")
    smaller = [one for one in slower if one.seconds < 1.01 * best.seconds and one.nbytes < best.nbytes]
    if smaller:
        least_of = min(smaller, key=lambda one: one.nbytes)
        longer = _share(least_of.seconds / best.seconds - 1)
        said.append(f"with {decimal_bytes(least_of.nbytes)}, {name_of(least_of)} takes {longer} longer")
    return ". ".join(one[0].upper() + one[1:] for one in said) + "."


def _listed(forecasts: Sequence[Forecast]) -> str:
    names = [name_of(forecast) for forecast in forecasts[:NAMED]]
    more = len(forecasts) - len(names)
    return "; ".join([*names, *([f"{more} more"] if more else [])])


def _share(part: float) -> str:
    return f"{part:.2g}%" if (part := 100 * part) >= 0.01 else "less than 0.01%"


def _kinds(forecast: Forecast, largest: int) -> Iterator[tuple[str, float, float]]:
    start = 0.0
    for name, nbytes in forecast.by_kind().items():
        width = nbytes / largest * BAR
        if nbytes:
            yield name, start, width
        start += width


HEIGHT = 340
"""Height of the chart, in pixels."""
WIDTHS = {"wide": 1000, "narrow": 290}
"""Approximate widths of the chart on a desktop and on a phone, in pixels; labels are placed for both."""
LETTER, LINE = 7, 16
"""Approximate width and height of a letter, in pixels."""
NEAR = {"wide": 9, "narrow": 14}
"""Greatest distance in pixels between dots that share a label."""
LONGEST = {"wide": 48, "narrow": 26}
"""Greatest length of a label; longer labels are left out."""


@dataclass(frozen=True)
class Label:
    """The label of a group of dots, on one kind of screen."""

    screen: str
    x: float
    y: float
    text: str
    dot: Row
    """The first dot of its group."""
    away: int
    """Horizontal distance from its dot in pixels; negative for a label to the left of it."""
    is_best: bool

    @property
    def is_led_to(self) -> bool:
        """True if it is not level with its dot, so that a leader line is drawn."""
        return abs(self.y - self.dot.y) * HEIGHT / 100 > 1


def name_of(forecast: Forecast) -> str:
    """A choice in a few words."""
    return _name([forecast], [])


def _name(near: Sequence[Forecast], all_of_them: Sequence[Forecast]) -> str:
    """The options that choices share. Omits options that none sets, and prefetches if all of them are present."""
    cells = list(zip(*(choice_cells(forecast.choice) for forecast in near), strict=True))
    stages, prefetches, checkpoints, dtypes = (sorted(set(column)) for column in cells)
    among = {choice_cells(one.choice)[1] for one in all_of_them if choice_cells(one.choice)[0] in stages}
    parts = [f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"]
    if prefetches != [""] and (len(among) != len(prefetches) or not all_of_them):
        parts.append(f"prefetch {', '.join(prefetches)}")
    parts += [f"checkpoint {checkpoints[0]}"] if len(checkpoints) == 1 and checkpoints[0] else []
    parts += [dtypes[0]] if len(dtypes) == 1 and dtypes[0] else []
    return ", ".join(parts)


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


_LIMIT_NAME = 90.0
"""Approximate width of the limit's label, in pixels."""


_AROUND = {"wide": [(dx, dy) for dy in (0, -LINE, LINE) for dx in (12, -12)], "narrow": [(12, 0), (-12, 0)]}
"""Candidate offsets of a label from its dot, in pixels, the nearest first."""
_AROUND_BEST = sorted(
    ((dx, LINE * lines) for dx in (12, -12, 28, -28, 56, -56) for lines in range(-8, 9)),
    key=lambda place: math.hypot(*place),
)


def _around(dot: Row, width: int) -> Box:
    x, y = dot.x * width / 100, dot.y * HEIGHT / 100
    return x - 7, y - 7, x + 7, y + 7


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
