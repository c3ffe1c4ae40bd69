"""The report page: text, timeline, memory, collectives and passes of a program in one HTML file, linked to each other.

Everything is computed in Python and written by the template; scripts only highlight related elements. Nothing is
fetched. The template escapes the text of programs and the names of modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from torch import fx

from zcompile.cost.hardware import Hardware
from zcompile.cost.simulator import simulate, simulate_pipeline
from zcompile.cost.timeline import Timeline
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Communication
from zcompile.ir.printer import function_text, lines_with_nodes
from zcompile.ir.program import Program
from zcompile.ir.tensor_type import human_bytes
from zcompile.report.axes import human_count, human_seconds
from zcompile.report.charts import HEIGHT, WIDTH, Curve, memory_curve, pipeline_chart, step_chart
from zcompile.report.explain import layout_line, model_line, stage_bytes, state_line, volume_text
from zcompile.report.pages import rates, rendered
from zcompile.schedule.pipeline import Journal, JournalEntry

MOST_CHANGED = 1500
"""Most lines of a diff that are shown: passes before regions are outlined may change thousands of operations."""
GIVEN = "given as hardware="
"""The reason for this hardware, if the caller has given it."""

NAMES = {
    "exposed": "exposed communication",
    "message": "communication in flight",
    "backward": "backward, of a pipeline",
}
"""Names of kinds of bars in the legend, if different from the kind."""


@dataclass(frozen=True)
class PageLine:
    """A line of the program's text; a line without a node has only text."""

    text: str
    node: str = ""
    start: str = ""
    """Start and end, in percent of the step."""
    end: str = ""
    about: str = ""
    """Its time, and the memory of a rank then."""


@dataclass(frozen=True)
class PageStep:
    """A pass and its diff."""

    entry: JournalEntry
    diff: Sequence[tuple[str, str, str]]
    """Lines of the diff: kind (added, removed, place or context), sign, and text."""

    @property
    def added(self) -> int:
        """Number of added lines."""
        return sum(kind == "added" for kind, *_ in self.diff)

    @property
    def removed(self) -> int:
        """Number of removed lines."""
        return sum(kind == "removed" for kind, *_ in self.diff)


def write_page(
    path: Path,
    title: str,
    journals: Sequence[Journal],
    hardware: Hardware,
    measured: Sequence[Timeline] = (),
    ranks: Sequence[Program] = (),
    *,
    why: str = GIVEN,
) -> Path:
    """Write the page of a model's programs, with predicted and `measured` steps.

    `ranks`: the programs of all ranks of a pipeline. `why`: the reason for `hardware`.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page_text(title, journals, hardware, measured, ranks, why=why), encoding="utf-8")
    return path


def page_text(
    title: str,
    journals: Sequence[Journal],
    hardware: Hardware,
    measured: Sequence[Timeline] = (),
    ranks: Sequence[Program] = (),
    *,
    why: str = GIVEN,
) -> str:
    """The page as HTML."""
    programs = [journal.entries[-1].after for journal in journals]
    own = {program.digest(): program for program in programs} if ranks else {}
    ranks = [own.get(one.digest(), one) for one in ranks]  # parsed programs have other node names
    along = simulate_pipeline(ranks, hardware) if ranks else []
    predicted = [_predicted(program, hardware, ranks, along) for program in programs]
    sections = [
        _Section(number, *both, hardware, measured) for number, both in enumerate(zip(journals, predicted, strict=True))
    ]
    if ranks:
        sections[0].charts.insert(0, pipeline_chart(ranks, along, "all ranks of the pipeline, predicted"))
    assumed = {"hardware": hardware, "why": why, "rates": list(rates(hardware))}
    sizes = {"width": WIDTH, "height": HEIGHT}
    return rendered("report.html.j2", title=title, sections=sections, names=NAMES, **assumed, **sizes)


def _predicted(program: Program, hardware: Hardware, ranks: Sequence[Program], along: Sequence[Timeline]) -> Timeline:
    """The predicted step of a program; of a pipeline rank, its timeline in `along`, as long as the longest."""
    for one, timeline in zip(ranks, along, strict=True):
        if one is program:
            return replace(timeline, seconds=max(other.seconds for other in along))
    return simulate(program, hardware, steps=True)


class _Section:
    """The data of one program for the template."""

    def __init__(
        self, number: int, journal: Journal, predicted: Timeline, hardware: Hardware, measured: Sequence[Timeline]
    ) -> None:
        self.number = number
        self.program = program = journal.entries[-1].after
        self.kind = "training step" if program.has_backward else "inference"
        place = f"rank {predicted.rank}, " if Phase.STEP in program.phases else ""
        alike = [timeline for timeline in measured if timeline.trains is program.has_backward]
        self.curve = curve = memory_curve(program, predicted)
        self.charts = [step_chart(predicted, f"{place}predicted for {hardware.name}", program, curve)]
        self.charts += [step_chart(one, f"measured: step {one.number}, rank {one.rank}", program) for one in alike[-1:]]
        self.figures = list(_figures(program, predicted, curve))
        self.overview = list(_overview(program))
        self.text = list(_lines(program, predicted, curve))
        self.collectives = list(_collectives(program, predicted))
        self.steps = [_step(entry) for entry in journal.entries]


def _figures(program: Program, predicted: Timeline, curve: Curve | None) -> Iterator[tuple[str, str, str]]:
    """The key figures: name, figure, and details."""
    layout = program.layout
    exposed, hidden = human_seconds(predicted.exposed), human_seconds(predicted.hidden or 0.0)
    waits = f"{exposed} of it waiting for communication, {hidden} hidden"
    yield "predicted step", human_seconds(predicted.seconds), waits
    if curve:
        yield "predicted peak of a rank", human_bytes(curve.most), f"in {curve.peak}"
    volume, onward = volume_text(program).replace("N-1", "N−1"), stage_bytes(program)
    about = volume.partition(" = ")[2] or volume
    if onward and layout.world > 1:
        about = f"{human_bytes(onward)} of it to other pipeline stages; the rest {about}"
    yield "each rank sends", human_bytes(program.volume() + onward), about
    count = sum(param.numel for param in layout.params)
    yield "parameters", human_count(count), f"Ψ = {count:,}, in {len(layout.units)} units"


def _overview(program: Program) -> Iterator[tuple[str, str]]:
    yield "stage", layout_line(program.layout).removeprefix("stage ")
    for line in (state_line(program.layout), model_line(program), *program.notes):
        head, _, rest = line.partition(": ")
        if line:
            yield (head, rest) if rest else ("note", line)
    yield "digest", program.digest()[:12]


def _lines(program: Program, predicted: Timeline, curve: Curve | None) -> Iterator[PageLine]:
    """The lines of the program, without a leading blank line."""
    lines = lines_with_nodes(program)
    for text, node in lines[1:] if lines and not lines[0][0].strip() else lines:
        if curve and node in curve.spans:
            start, end = curve.spans[node]
            moment = human_seconds(start / 100 * predicted.seconds)
            about = f"at {moment}: {human_bytes(curve.held[node])}"
            yield PageLine(text, node, f"{start:.3f}", f"{end:.3f}", about)
        else:
            yield PageLine(text, node)


def _collectives(program: Program, predicted: Timeline) -> Iterator[tuple[fx.Node, Sequence[str]]]:
    """Table rows: phase, operation, unit, messages, bytes, and predicted seconds in flight and waited for."""
    flown = {message.node: message.end - message.start for message in predicted.messages or ()}
    waited: dict[str, float] = {}
    for event in predicted.events:
        if event.operation == "wait":
            launched = program.node(event.node).all_input_nodes[0].name
            waited[launched] = waited.get(launched, 0.0) + event.seconds
    for phase in program.phases:
        for node in program.nodes(Communication, phase=phase):
            unit = getattr(data(node).op, "unit", "")
            traffic = op_of(node, Communication).traffic(node, program.layout)
            sent, messages = human_bytes(traffic.sent), str(traffic.messages)
            times = (human_seconds(found.get(node.name, 0.0)) for found in (flown, waited))
            yield node, (str(phase), function_text(node.target), unit, messages, sent, *times)


def _step(entry: JournalEntry) -> PageStep:
    lines = list(_changes(entry.before.text().splitlines(), entry.after.text().splitlines()))
    shown = lines[:MOST_CHANGED]
    if more := len(lines) - len(shown):
        shown.append(("place", "", f"... and {more} more lines, which dump() writes"))
    return PageStep(entry, shown)


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The lines of a unified diff that ignores the spacing of columns."""
    old, new = ([(len(line) - len(line.lstrip()), *line.split()) for line in text] for text in (before, after))
    for group in SequenceMatcher(None, old, new).get_grouped_opcodes(3):
        (_, a, _, b, _), (*_, c, _, d) = group[0], group[-1]
        yield "place", "", f"lines {a + 1} to {c}, now {b + 1} to {d}"
        for kind, start, end, new_start, new_end in group:
            if kind == "equal":
                yield from (("context", " ", line) for line in after[new_start:new_end])
            else:
                yield from (("removed", "-", line) for line in before[start:end])
                yield from (("added", "+", line) for line in after[new_start:new_end])
