"""The page of a plan: every choice as a dot in time and memory, and as a row with its memory by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cost.forecast import CHOICE, Forecast, Plan, choice_cells
from zcompile.report.axes import decimal_bytes, human_seconds
from zcompile.report.pages import rates, rendered, write
from zcompile.report.plan_chart import HEIGHT, PlanChart, name_of, plan_chart

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
