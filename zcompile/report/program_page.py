"""The page: a program as one file of HTML, its text, timeline, memory, collectives and passes marked in each other.

Python works everything out and the template writes it down; what runs in the browser only marks what belongs together.
Nothing is fetched. Text of the program, names of modules above all, is escaped by the template.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import MemoryKind, alive_at, live_by_kind, model_state
from zcompile.cost.simulator import idle_share, simulate, simulate_pipeline
from zcompile.cost.timeline import Spent, Timeline
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Communication
from zcompile.ir.printer import function_text, lines_with_nodes
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.dumps import difference
from zcompile.report.explain import layout_line, model_line, state_line, volume_line
from zcompile.report.pages import rendered, write
from zcompile.schedule.pipeline import Journal, JournalEntry

WIDTH = 100_000
"""Of charts, in their own units; on the screen they are as wide as the page."""
HEIGHT = 300
"""Of the chart of memory."""
MOST_CHANGED = 1500
"""Lines of a difference that are shown: passes before the outlining of regions change operations by thousands."""
MOST_ALIVE = 60
"""Lines listed at the peak; the rest is counted."""
LONGEST_LINE = 90
"""Characters of a line that is named outside of the program."""


@dataclass(frozen=True)
class Bar:
    """A span of a lane."""

    start: float
    width: float
    kind: str
    title: str
    node: str


@dataclass(frozen=True)
class Lane:
    """Spans that follow each other."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Chart:
    """A step on its lanes."""

    title: str
    summary: str
    lanes: Sequence[Lane]
    seconds: float


@dataclass(frozen=True)
class Curve:
    """The memory of a step, line by line: a band for each kind, stacked."""

    bands: Mapping[str, str]
    """The path of each kind's band."""
    places: Mapping[str, float]
    """Where each line is, by its node."""
    peak: float
    peak_node: str
    peak_line: str
    """The line as it is printed, or its beginning."""
    most: int
    """Bytes at the peak."""
    beside: int
    """Of them, those beside shards and optimizer state."""
    alive: Sequence[tuple[str, str, str, str]]
    """At the peak: node, kind, bytes and the module they come from."""
    left: int
    """Lines that are alive beside these."""


@dataclass(frozen=True)
class PageStep:
    """A pass: what it needs and leaves, and what it has changed."""

    entry: JournalEntry
    diff: Sequence[tuple[str, str]]
    """Lines of the difference, each with what it is: added, removed, a place, or context."""


def write_page(
    path: Path,
    title: str,
    journals: Sequence[Journal],
    hardware: Hardware,
    measured: Sequence[Timeline] = (),
    ranks: Sequence[Program] = (),
) -> Path:
    """Write the page of a model's programs; `measured` steps stand beside the predicted ones.

    `ranks`: of a pipeline, the programs of the ranks along its axis.

    Raises:
        OSError: the file cannot be written.
    """
    return write(path, page_text(title, journals, hardware, measured, ranks))


def page_text(
    title: str,
    journals: Sequence[Journal],
    hardware: Hardware,
    measured: Sequence[Timeline] = (),
    ranks: Sequence[Program] = (),
) -> str:
    """The page as HTML."""
    sections = [_Section(number, journal, hardware, measured) for number, journal in enumerate(journals)]
    if ranks:
        sections[0].charts.insert(0, pipeline_chart(ranks, hardware))
    return rendered("report.html.j2", title=title, sections=sections, width=WIDTH, height=HEIGHT)


class _Section:
    """What the template shows of one program."""

    def __init__(self, number: int, journal: Journal, hardware: Hardware, measured: Sequence[Timeline]) -> None:
        self.number = number
        self.program = program = journal.entries[-1].after
        self.kind = "training step" if program.has_backward else "inference"
        told = simulate(program, hardware, steps=True)
        alike = [timeline for timeline in measured if timeline.trains is program.has_backward]
        self.charts = [_chart(told, f"predicted for {hardware.name}")]
        self.charts += [_chart(one, f"measured: step {one.number}, rank {one.rank}") for one in alike[-1:]]
        self.overview = list(_overview(program, told))
        self.text = lines_with_nodes(program)
        self.curve = _curve(program)
        self.collectives = list(_collectives(program, told))
        self.steps = [_step(entry) for entry in journal.entries]


def _overview(program: Program, told: Timeline) -> Iterator[tuple[str, str]]:
    layout = program.layout
    count = sum(param.numel for param in layout.params)
    yield "stage", layout_line(layout).removeprefix("stage ")
    yield "parameters", f"Ψ = {count:,} in {len(layout.units)} units"
    for line in (state_line(layout), volume_line(program), model_line(program), *program.notes):
        head, _, rest = line.partition(": ")
        if line:
            yield (head, rest) if rest else ("note", line)
    hidden = told.hidden or 0.0
    yield "predicted step", f"{told.seconds * 1e3:.4g} ms, {told.exposed * 1e3:.4g} ms of it exposed communication"
    yield "predicted hidden", f"{hidden * 1e3:.4g} ms of communication behind compute"
    yield "digest", program.digest()[:12]


def pipeline_chart(programs: Sequence[Program], hardware: Hardware) -> Chart:
    """The ranks of a pipeline in a step, as predicted: a lane each, with a bar for what an action computes."""
    timelines = simulate_pipeline(programs, hardware)
    total = max(timeline.seconds for timeline in timelines) or 1.0
    lanes = []
    for place, (program, timeline) in enumerate(zip(programs, timelines, strict=True)):
        bars = []
        for event in (event for event in timeline.events if event.spent in (Spent.COMPUTE, Spent.OPTIMIZER)):
            action = data(program.node(event.node)).action if event.node else ""
            kind = "backward" if action.strip("0123456789") in ("B", "I", "W") else str(event.spent)
            what = f"{action or event.operation} {event.unit}: {event.seconds * 1e3:.4g} ms"
            width = max(event.seconds / total * WIDTH, 20.0)
            bars.append(Bar(event.start / total * WIDTH, width, kind, what, ""))
        lanes.append(Lane(f"rank {place}", bars))
    idle = f"{idle_share(timelines):.1%} of the time of all ranks is idle, in bubbles and waits"
    return Chart(
        "all ranks of the pipeline", f"{total * 1e3:.4g} ms predicted for {hardware.name}: {idle}", lanes, total
    )


def _chart(timeline: Timeline, title: str) -> Chart:
    total = timeline.seconds or 1.0

    def bar(start: float, end: float, kind: str, what: str, node: str) -> Bar:
        shown = f"{what}: {(end - start) * 1e3:.4g} ms"
        return Bar(start / total * WIDTH, max((end - start) / total * WIDTH, 20.0), kind, shown, node)

    lanes: dict[str, list[Bar]] = {}
    for event in timeline.events:
        if event.own > 0 and event.spent in _LANES:
            what = f"{event.operation} {event.unit}" if event.unit else event.operation
            lanes.setdefault(_LANES[event.spent], []).append(
                bar(event.start, event.end, str(event.spent), what, event.node)
            )
    for name, messages in timeline.flights().items():
        for message in messages:
            what = f"{message.operation} {message.unit}".strip() + f", {human_bytes(message.nbytes)}"
            lanes.setdefault(name, []).append(bar(message.start, message.end, "message", what, message.node))
    spent = ", ".join(f"{kind} {timeline.spent(kind) * 1e3:.4g} ms" for kind in Spent if timeline.spent(kind) > 1e-9)
    order = [name for name in dict.fromkeys(_LANES.values()) if name in lanes]
    order += [name for name in lanes if name not in order]
    summary = f"{timeline.seconds * 1e3:.4g} ms: {spent}"
    return Chart(title, summary, [Lane(name, lanes[name]) for name in order], timeline.seconds)


_LANES = {Spent.COMPUTE: "compute", Spent.OPTIMIZER: "compute", Spent.EXPOSED: "waiting"}


def _curve(program: Program) -> Curve | None:
    """None of a program that has no line: its model gives back what it is given."""
    live, state = live_by_kind(program), model_state(program.layout)
    nodes, totals = list(live), [sum(held.values()) for held in live.values()]
    if not nodes:
        return None
    always = {"optimizer state": state.moments, "shards": state.parameters}
    kinds = {name: [nbytes] * len(nodes) for name, nbytes in always.items()}
    kinds |= {str(kind): [held[kind] for held in live.values()] for kind in MemoryKind}
    most = sum(always.values()) + max(totals)
    across = [(index + 0.5) / len(nodes) * WIDTH for index in range(len(nodes))]
    below, bands = [0.0] * len(nodes), {}
    for name, heights in kinds.items():
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if above != below:
            bands[name] = _band(across, below, above, most)
        below = above
    peak = totals.index(max(totals))
    alive = alive_at(program, nodes[peak])
    shown = [(n.name, str(kind), human_bytes(size), data(n).source or "the root") for n, kind, size in alive]
    places = {node.name: place for node, place in zip(nodes, across, strict=True)}
    left = max(len(shown) - MOST_ALIVE, 0)
    line = _line_of(program, nodes[peak].name)
    return Curve(bands, places, across[peak], nodes[peak].name, line, most, max(totals), shown[:MOST_ALIVE], left)


def _line_of(program: Program, node: str) -> str:
    """The statement of a line, shortened; one over several lines in one."""
    parts = [text.partition("  #")[0].strip() for text, of in lines_with_nodes(program) if of == node]
    return textwrap.shorten(" ".join(parts), LONGEST_LINE, placeholder=" ...")


def _band(across: Sequence[float], below: Sequence[float], above: Sequence[float], most: int) -> str:
    """The outline of a band as an SVG path."""
    up = [f"{x:.0f},{HEIGHT * (1 - y / most):.2f}" for x, y in zip(across, above, strict=True)]
    down = [f"{x:.0f},{HEIGHT * (1 - y / most):.2f}" for x, y in zip(across, below, strict=True)]
    return f"M{' L'.join([*up, *reversed(down)])} Z"


def _collectives(program: Program, told: Timeline) -> Iterator[tuple[fx.Node, Sequence[str]]]:
    """A row for each: phase, operation, unit, messages, bytes, predicted milliseconds in flight and waited for."""
    flown = {message.node: message.end - message.start for message in told.messages or ()}
    waited: dict[str, float] = {}
    for event in told.events:
        if event.operation == "wait":
            launched = program.node(event.node).all_input_nodes[0].name
            waited[launched] = waited.get(launched, 0.0) + event.seconds
    for phase in program.phases:
        for node in program.nodes(Communication, phase=phase):
            unit = getattr(data(node).op, "unit", "")
            traffic = op_of(node, Communication).traffic(node, program.layout)
            sent, messages = human_bytes(traffic.sent), str(traffic.messages)
            times = (f"{flown.get(node.name, 0.0) * 1e3:.4g}", f"{waited.get(node.name, 0.0) * 1e3:.4g}")
            yield node, (str(phase), function_text(node.target), unit, messages, sent, *times)


def _step(entry: JournalEntry) -> PageStep:
    before, after = entry.before.text(), entry.after.text()
    kinds = {"+": "added", "-": "removed", "@": "place"}
    lines = difference(before, after, "before", "after").splitlines()[2:]
    shown = [(kinds.get(line[:1], "context"), line) for line in lines[:MOST_CHANGED]]
    if more := len(lines) - len(shown):
        shown.append(("place", f"... and {more} lines more: they are in what dump() writes"))
    return PageStep(entry, shown)
