"""The page of a plan: every choice as a dot in time and memory, and as a row with its memory by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zcompile.cost.forecast import CHOICE, Forecast, Plan, choice_cells
from zcompile.report.axes import Tick, decimal_bytes, human_seconds, ticks
from zcompile.report.pages import rates, rendered, write

BAR = 1000
"""Width of the bars in the table, in their own units."""
HEADINGS = (*CHOICE, "memory", "step", "TFLOP/s", "hidden")
"""Of the table: the choice, and what it gives."""
NAMED = 3
"""Choices that are named in a sentence; others are counted."""
WHY = "as hardware= or --hardware said; h100 is the default"
"""Why steps are predicted for this hardware and no other."""


@dataclass(frozen=True)
class Row:
    """One choice."""

    number: int
    forecast: Forecast
    cells: Sequence[tuple[str, float | str]]
    """Texts, each with what it is sorted by."""
    kinds: Sequence[tuple[str, float, float]]
    """Kinds of memory, each with where it starts in the bar and how wide it is."""
    verdict: str
    """"best", "too big", "rows" or nothing."""
    note: str
    """What is said of it behind its bar."""


@dataclass(frozen=True)
class World:
    """What the page shows of one number of ranks."""

    ranks: int
    title: str
    advice: str
    """What is recommended, or why nothing is."""
    fits: bool
    """True if something is."""
    reason: str
    """Why it is this one."""
    rows: Sequence[Row]
    chart: PlanChart
    limit: float | None
    """Where the limit is in the bars; None if it is beyond."""


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
    assumed = {"rates": list(rates(plan.hardware)), "why": WHY, "has_limit": math.isfinite(plan.memory_limit)}
    sizes = {"height": HEIGHT, "bar": BAR}
    return rendered(
        "plan.html.j2", title=plan.model, plan=plan, worlds=worlds, kinds=kinds, headings=HEADINGS, **assumed, **sizes
    )


def _world(plan: Plan, ranks: int) -> World:
    forecasts = plan.of(ranks)
    largest = max(forecast.nbytes for forecast in forecasts) or 1
    best = plan.fastest(ranks)
    rows = [
        Row(
            number=number,
            forecast=forecast,
            cells=list(_cells(forecast)),
            kinds=list(_kinds(forecast, largest)),
            verdict=plan.verdict(forecast),
            note=_note(plan, forecast, best),
        )
        for number, forecast in enumerate(forecasts)
    ]
    limit = plan.memory_limit / largest * BAR if plan.memory_limit <= largest else None
    reason = _reason(plan, best) if best else ""
    title, advice = plan.title(ranks), plan.advice(ranks)
    return World(ranks, title, advice, best is not None, reason, rows, plan_chart(plan, ranks), limit)


def _note(plan: Plan, forecast: Forecast, best: Forecast | None) -> str:
    verdict = {"rows": "not whole"}.get(plan.verdict(forecast), plan.verdict(forecast))
    return verdict or ("as fast" if best and forecast.seconds == best.seconds else "")


def _reason(plan: Plan, best: Forecast) -> str:
    """Why a choice is called the best: by how much it is, and what decides between equals."""
    others = [one for one in plan.of(best.world) if one is not best and plan.serves(one) and plan.fits(one)]
    taken = f"{human_seconds(best.seconds)} a step and {decimal_bytes(best.nbytes)} of a rank"
    if not others:
        return f"{taken}. Nothing else fits."
    equal = [one for one in others if one.seconds == best.seconds]
    slower = sorted((one for one in others if one.seconds > best.seconds), key=lambda one: one.seconds)
    said = [taken]
    if equal:
        least = min(one.nbytes for one in equal)
        decides = (
            "takes the least memory" if least > best.nbytes else "is the first of those that take the least memory"
        )
        said.append(f"of {len(equal) + 1} choices that are as fast it {decides} (the others: {_listed(equal)})")
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


def _cells(forecast: Forecast) -> Iterator[tuple[str, float | str]]:
    """Texts, each with what its column is sorted by: figures by themselves."""
    for heading, text in zip(CHOICE, choice_cells(forecast.choice), strict=True):
        yield text, (float(text or -1) if heading == "prefetch" else text)
    hidden = forecast.hidden_share
    yield decimal_bytes(forecast.nbytes), forecast.nbytes
    yield human_seconds(forecast.seconds), forecast.seconds
    yield f"{forecast.rate / 1e12:.3g}", forecast.rate
    yield ("", -1.0) if hidden is None else (f"{hidden:.0%}", hidden)


def _kinds(forecast: Forecast, largest: int) -> Iterator[tuple[str, float, float]]:
    start = 0.0
    for name, nbytes in forecast.by_kind().items():
        width = nbytes / largest * BAR
        if nbytes:
            yield name, start, width
        start += width


HEIGHT = 340
"""Of the chart, in pixels of any screen."""
WIDTHS = {"wide": 1000, "narrow": 290}
"""Of the chart on a desktop and on a phone, about: names are placed for each."""
LETTER, LINE = 7, 16
"""Width and height of a letter of a name, in pixels, about."""
NEAR = {"wide": 9, "narrow": 14}
"""Pixels between dots that have one name."""
LONGEST = {"wide": 48, "narrow": 26}
"""Letters of a name; what would have longer ones has none."""


@dataclass(frozen=True)
class Dot:
    """A choice; places are percent of the chart, from the left and from the top."""

    number: int
    forecast: Forecast
    x: float
    y: float

    @property
    def radius(self) -> float:
        """In pixels; stage 1 is seen around stage 2, which is often as fast and as large."""
        return {1: 8.0, 2: 5.0}.get(self.forecast.choice.stage, 6.0)


@dataclass(frozen=True)
class Label:
    """The name of dots that stand together, on one kind of screen."""

    screen: str
    x: float
    y: float
    text: str
    dot: Dot
    """What it names, or the first of it."""
    away: int
    """How far to the right of its dot it begins, in pixels; it ends to the left of it, if this is negative."""
    is_best: bool

    @property
    def is_led_to(self) -> bool:
        """True if it does not stand beside its dot, so that a line leads there."""
        return abs(self.y - self.dot.y) * HEIGHT / 100 > 1


@dataclass(frozen=True)
class PlanChart:
    """What is drawn of one number of ranks."""

    dots: Sequence[Dot]
    limit: float | None
    """Where the memory limit is, in percent from the top; 0 if it is above the chart, None if there is none."""
    across: Sequence[Tick]
    up: Sequence[Tick]
    labels: Sequence[Label] = ()
    limit_sides: Mapping[str, str] = field(default_factory=dict)
    """At which end of its line the limit is named, on each kind of screen: "start" or "end"."""

    @property
    def drawn(self) -> list[Dot]:
        """The dots, those above others last."""
        best = {label.dot.number for label in self.labels if label.is_best}
        return sorted(self.dots, key=lambda dot: (dot.number in best, dot.forecast.choice.stage))

    @property
    def stages(self) -> list[int]:
        return sorted({dot.forecast.choice.stage for dot in self.dots})


def plan_chart(plan: Plan, ranks: int) -> PlanChart:
    """The chart of the choices for so many ranks."""
    forecasts = plan.of(ranks)
    right = 1.04 * max(forecast.seconds for forecast in forecasts) or 1.0
    largest = max(forecast.nbytes for forecast in forecasts) or 1
    has_limit, is_near = math.isfinite(plan.memory_limit), plan.memory_limit <= 2.5 * largest
    top = 1.08 * (max(largest, plan.memory_limit) if is_near else largest)
    dots = [
        Dot(number, forecast, 100 * forecast.seconds / right, 100 * (1 - forecast.nbytes / top))
        for number, forecast in enumerate(forecasts)
    ]
    limit = (100 * (1 - plan.memory_limit / top) if is_near else 0.0) if has_limit else None
    chart = PlanChart(dots, limit, ticks(right, human_seconds, about=8), ticks(top, decimal_bytes, about=5))
    chart = replace(chart, limit_sides={screen: _limit_side(chart, screen) for screen in WIDTHS})
    best = plan.fastest(ranks)
    return replace(chart, labels=[label for screen in WIDTHS for label in _labels(chart, screen, best)])


def name_of(forecast: Forecast) -> str:
    """A choice in a few words."""
    return _name([forecast], [])


def _name(near: Sequence[Forecast], all_of_them: Sequence[Forecast]) -> str:
    """What choices have in common; no word of what none of them chooses, or all there are differ in."""
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


def _limit_box(chart: PlanChart, screen: str, side: str) -> Box:
    """Where the limit's name would be: above its line, or below it at the top of the chart."""
    y = (chart.limit or 0.0) * HEIGHT / 100
    top = y - LINE if y > LINE else y
    left = 0.0 if side == "start" else WIDTHS[screen] - _LIMIT_NAME
    return left, top, left + _LIMIT_NAME, top + LINE


_LIMIT_NAME = 90.0
"""Width of the limit's name, in pixels, about."""


def _limit_side(chart: PlanChart, screen: str) -> str:
    """The end of the limit's line where fewer dots are."""
    around = [_around(dot, WIDTHS[screen]) for dot in chart.dots]
    return min(("end", "start"), key=lambda side: sum(_meet(_limit_box(chart, screen, side), one) for one in around))


def _labels(chart: PlanChart, screen: str, best: Forecast | None) -> Iterator[Label]:
    """Names of dots, the best first and then the fastest, each where it covers neither a dot nor another name."""
    width = WIDTHS[screen]
    taken = [_around(dot, width) for dot in chart.dots]
    if chart.limit is not None:
        y = chart.limit * HEIGHT / 100
        taken += [(0.0, y - 3, width, y + 3), _limit_box(chart, screen, chart.limit_sides[screen])]
    for group in _groups(chart.dots, screen, best):
        lead, is_best = group[0], group[0].forecast is best
        text = _name([dot.forecast for dot in group], [dot.forecast for dot in chart.dots])
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


_AROUND = {"wide": [(dx, dy) for dy in (0, -LINE, LINE) for dx in (12, -12)], "narrow": [(12, 0), (-12, 0)]}
"""Where a name may begin, in pixels from its dot, the nearest first."""
_AROUND_BEST = sorted(
    ((dx, LINE * lines) for dx in (12, -12, 28, -28, 56, -56) for lines in range(-8, 9)),
    key=lambda place: math.hypot(*place),
)


def _groups(dots: Sequence[Dot], screen: str, best: Forecast | None) -> list[list[Dot]]:
    """Dots that stand together, those of the best choice first, then by time."""
    groups: list[list[Dot]] = []
    width = WIDTHS[screen]
    for dot in sorted(dots, key=lambda dot: (dot.forecast is not best, dot.x, -dot.y)):
        here = dot.x * width / 100, dot.y * HEIGHT / 100
        for group in groups:
            if math.dist(here, (group[0].x * width / 100, group[0].y * HEIGHT / 100)) <= NEAR[screen]:
                group.append(dot)
                break
        else:
            groups.append([dot])
    return groups


def _around(dot: Dot, width: int) -> Box:
    x, y = dot.x * width / 100, dot.y * HEIGHT / 100
    return x - 7, y - 7, x + 7, y + 7


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
