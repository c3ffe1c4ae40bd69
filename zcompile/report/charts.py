"""Charts of a step over time: compute, messages, waits, and the memory of a rank.

The template draws them. Positions are in percent of the width, except within lanes and bands, which use `WIDTH`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zcompile.cost.line_calls import line_of
from zcompile.cost.memory import MemoryKind, alive_at, live_by_kind, model_state
from zcompile.cost.simulator import idle_share
from zcompile.cost.timeline import Event, Spent, Timeline
from zcompile.ir.operation import Phase, data
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.axes import Tick, binary_bytes, human_seconds, ticks

WIDTH = 100_000
"""Width of lanes and bands in SVG units; on the screen they are as wide as the page."""
HEIGHT = 300
"""Height of the memory chart in SVG units."""
MOST_ALIVE = 60
"""Number of values listed at the peak; the others are counted."""
HEADROOM = 1.1
"""Height of the memory chart relative to the peak, to leave room for the peak's label."""
ROW, LEAST_HEIGHT = 8, 26
"""Height of a row, and least height of a lane, in pixels."""
LEAST_WIDTH = 20.0
"""Least width of a bar, so that very short events are visible."""


@dataclass(frozen=True)
class Bar:
    """A time span in a lane."""

    start: float
    width: float
    kind: str
    title: str
    node: str
    row: int = 0
    """Row within the lane: messages in flight at the same time are in different rows."""

    @property
    def is_thin(self) -> bool:
        """True if it is too narrow to be drawn with gaps beside it."""
        return self.width < WIDTH / 250


@dataclass(frozen=True)
class Lane:
    """Bars in rows; the bars of a row do not overlap."""

    name: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        """Height in pixels."""
        return max(ROW * self._rows + 4, LEAST_HEIGHT)

    @property
    def row_height(self) -> float:
        """Height of each row in pixels."""
        return (self.height - 4) / self._rows

    @property
    def _rows(self) -> int:
        return 1 + max((bar.row for bar in self.bars), default=0)


@dataclass(frozen=True)
class Part:
    """A part of a step named above its lanes: forward, backward or optimizer. Positions are in percent."""

    name: str
    start: float
    width: float


@dataclass(frozen=True)
class Alive:
    """A value that is alive at the peak: the line that made it, its kind, bytes and module."""

    node: str
    kind: str
    nbytes: int
    source: str


@dataclass(frozen=True)
class Curve:
    """The memory of a rank during a step, as a stacked band for each kind."""

    bands: Mapping[str, str]
    """SVG path of each kind's band."""
    spans: Mapping[str, tuple[float, float]]
    """Start and end of each line by its node, in percent of the width."""
    held: Mapping[str, int]
    """Bytes during each line, by its node."""
    peak_node: str
    peak: str
    """Description of the line at the peak: its function, unit and phase."""
    most: int
    """Bytes at the peak."""
    beside: int
    """Bytes at the peak without shards and optimizer state."""
    alive: Sequence[Alive]
    """The largest values at the peak."""
    left: int
    """Number of further values."""
    ticks: Sequence[Tick]
    """Ticks of the memory axis, from the bottom."""

    @property
    def peak_at(self) -> float:
        """The middle of the line at the peak, in percent of the width."""
        return sum(self.spans[self.peak_node]) / 2


@dataclass(frozen=True)
class Chart:
    """The chart of a step."""

    title: str
    seconds: float
    summary: str
    lanes: Sequence[Lane]
    parts: Sequence[Part]
    curve: Curve | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of its bars, without duplicates."""
        return list(dict.fromkeys(bar.kind for lane in self.lanes for bar in lane.bars))

    @property
    def ticks(self) -> Sequence[Tick]:
        """Ticks of the time axis."""
        return ticks(self.seconds, human_seconds, about=8)


def step_chart(timeline: Timeline, title: str, program: Program, curve: Curve | None = None) -> Chart:
    """The chart of a step of one rank that runs `program`, with memory if `curve` is given."""
    total = timeline.seconds or 1.0
    lanes: dict[str, list[Bar]] = {}
    actions = _actions(program)
    for event in timeline.events:
        if event.own > 0 and event.spent in _LANES:
            what = f"{event.operation} {event.unit}".strip()
            bar = _bar(total, event.start, event.end, _kind(actions, event), what, event.node)
            lanes.setdefault(_LANES[event.spent], []).append(bar)
    lanes = {name: lanes[name] for name in dict.fromkeys(_LANES.values()) if name in lanes}
    rows: Counter[str] = Counter()
    for messages in timeline.flights().values():
        group = messages[0].group
        for message in messages:
            what = f"{message.operation} {message.unit}".strip() + f", {human_bytes(message.nbytes)}"
            bar = _bar(total, message.start, message.end, "message", what, message.node)
            name = f"along {group}" if group else "communication"
            lanes.setdefault(name, []).append(replace(bar, row=rows[group]))
        rows[group] += 1
    spent = [f"{kind} {human_seconds(timeline.spent(kind))}" for kind in Spent if timeline.spent(kind) > 1e-9]
    parts = list(_parts(timeline.events, total))
    return Chart(title, timeline.seconds, ", ".join(spent), [Lane(*lane) for lane in lanes.items()], parts, curve)


_LANES = {Spent.COMPUTE: "compute", Spent.OPTIMIZER: "compute", Spent.EXPOSED: "waiting"}


def _actions(program: Program) -> dict[str, str]:
    """The pipeline action of each line, by its node; empty for other programs."""
    return {node.name: action for node in program.graph.nodes if (action := data(node).action)}


def _kind(actions: Mapping[str, str], event: Event) -> str:
    """The kind of a bar. In a pipeline, where they alternate, backwards are a separate kind."""
    action = actions.get(event.node, "") if event.spent is Spent.COMPUTE else ""
    return "backward" if action.strip("0123456789") in ("B", "I", "W") else str(event.spent)


def _bar(total: float, start: float, end: float, kind: str, what: str, node: str) -> Bar:
    width = max((end - start) / total * WIDTH, LEAST_WIDTH)
    return Bar(start / total * WIDTH, width, kind, f"{what}: {human_seconds(end - start)}", node)


def _parts(events: Sequence[Event], total: float) -> Iterator[Part]:
    """The spans of forward, backward and optimizer, as far as they exist."""
    named: dict[str, list[Event]] = {}
    for event in events:
        name = event.phase or (str(Spent.OPTIMIZER) if event.spent is Spent.OPTIMIZER else "")
        named.setdefault(name, []).append(event)
    for name in (Phase.FORWARD, Phase.BACKWARD, Spent.OPTIMIZER):
        if among := named.get(name):
            start, end = min(event.start for event in among), max(event.end for event in among)
            yield Part(name, 100 * start / total, 100 * (end - start) / total)


def pipeline_chart(programs: Sequence[Program], timelines: Sequence[Timeline], title: str) -> Chart:
    """The chart of a step of all pipeline ranks: a lane for each rank, with a bar for each compute event."""
    total = max(timeline.seconds for timeline in timelines) or 1.0
    lanes = []
    for place, (program, timeline) in enumerate(zip(programs, timelines, strict=True)):
        bars, actions = [], _actions(program)
        for event in (event for event in timeline.events if event.spent in (Spent.COMPUTE, Spent.OPTIMIZER)):
            what = f"{actions.get(event.node) or event.operation} {event.unit}".strip()
            bars.append(_bar(total, event.start, event.end, _kind(actions, event), what, ""))
        lanes.append(Lane(f"rank {place}", bars))
    idle = f"{idle_share(timelines):.1%} of the time of all ranks is idle, in bubbles and waits"
    return Chart(title, total, idle, lanes, ())


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_curve(program: Program, timeline: Timeline) -> Curve | None:
    """The memory of a program during `timeline`; None for a program without lines, which only returns inputs."""
    live, state = live_by_kind(program), model_state(program.layout)
    if not live or not timeline.seconds:
        return None
    spans = _spans([node.name for node in live], timeline)
    always = {"optimizer state": state.moments, "shards": state.parameters}
    kinds = {name: [nbytes] * len(live) for name, nbytes in always.items()}
    kinds |= {str(kind): [held[kind] for held in live.values()] for kind in MemoryKind}
    totals = {node: sum(held.values()) for node, held in live.items()}
    peak = max(totals, key=lambda node: totals[node])
    most = sum(always.values()) + totals[peak]
    alive = [Alive(n.name, str(kind), size, data(n).source or "the root") for n, kind, size in alive_at(program, peak)]
    return Curve(
        bands=_bands(kinds, list(spans.values()), HEADROOM * most),
        spans=spans,
        held={node.name: sum(always.values()) + nbytes for node, nbytes in totals.items()},
        peak_node=peak.name,
        peak=_name_of(program, peak.name),
        most=most,
        beside=totals[peak],
        alive=alive[:MOST_ALIVE],
        left=max(len(alive) - MOST_ALIVE, 0),
        ticks=ticks(HEADROOM * most, binary_bytes, about=5, base=1024),
    )


def _name_of(program: Program, name: str) -> str:
    """Describe the line of a node: its function, unit, and phase or pipeline action."""
    node = program.node(name)
    line, meta = line_of(program, node), data(node)
    unit = f" of {line.unit}" if line.unit else ""
    when = meta.action if meta.phase is Phase.STEP else f"the {meta.phase}"
    return f"{line.operation}{unit}" + (f", in {when}" if when else "")


def _spans(nodes: Sequence[str], timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Start and end of each line in percent; a line without an event is placed at the end of the line before it."""
    ran = {event.node: event for event in timeline.events if event.node}
    result, now = {}, 0.0
    for node in nodes:
        start, end = (ran[node].start, ran[node].end) if node in ran else (now, now)
        result[node] = 100 * start / timeline.seconds, 100 * end / timeline.seconds
        now = end
    return result


def _bands(kinds: Mapping[str, Sequence[int]], spans: Sequence[tuple[float, float]], top: float) -> dict[str, str]:
    """The outline of each kind's band as an SVG path; each line's memory extends to the start of the next line."""
    starts = [start for start, _ in spans]
    ends = [*starts[1:], 100.0]
    across = [place * WIDTH / 100 for span in zip(starts, ends, strict=True) for place in span]
    below, result = [0.0] * len(spans), {}
    for name, heights in kinds.items():
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if above != below:
            edges = [_edge(across, levels, top) for levels in (above, below)]
            result[name] = f"M{' L'.join([*edges[0], *reversed(edges[1])])} Z"
        below = above
    return result


def _edge(across: Sequence[float], levels: Sequence[float], top: float) -> list[str]:
    """Points of a step function that has the value of each level from its start to its end."""
    twice = (level for level in levels for _ in range(2))
    return [f"{x:.0f},{HEIGHT * (1 - level / top):.2f}" for x, level in zip(across, twice, strict=True)]
