"""Dumps: everything about the programs of a model, as files for people and tools.

The folder contains

    report.html                everything below on one page: see `zcompile.report.program_page`
    explain.txt                the text of `explain()`
    NOTES.txt                  what could not be written, if anything
    manifest.json              the files that `zcompile prove` reads, with a checksum of each line
    trace.json                 predicted and, if available, measured steps, for ui.perfetto.dev
    program_0/
        00_capture.py          the traced program with its regions, for `zcompile.parse`; for a pipeline rank, the step
                               of one micro-batch
        01_split_phases.py     the same after each pass
        01_split_phases.diff   the changes of the pass
        forward.py backward.py the text that runs; of a pipeline step.py
        program.json           the outer program as networkx's node-link data: bytes, FLOPs, predicted seconds
        program.dot            the same as a drawing; program.svg if graphviz is installed
        regions/region_0.py    the ATen operations of each region
        regions/region_0.inductor.py   Inductor's code of the region, if requested

If a pass fails, the program's folder has the text after each pass before it, and its own output: 03_name.failed.py.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import networkx as nx
import torch
from torch import fx

from zcompile.cost.dag import dag
from zcompile.cost.hardware import Hardware
from zcompile.cost.roofline import line_seconds
from zcompile.cost.simulator import simulate
from zcompile.cost.timeline import Timeline
from zcompile.errors import OptionError, PipelineError, ProgramError
from zcompile.ir.operation import Phase, Role, data
from zcompile.ir.ops import Call, Communication, Item, Results
from zcompile.ir.printer import region_text
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.ir.tensor_type import human_bytes
from zcompile.proof.checker_texts import CAPTURE
from zcompile.proof.dumps import MANIFEST, write_manifest
from zcompile.proof.parts import described, part_of
from zcompile.schedule.pipeline import Journal

NOTE = "graphviz is not installed, so programs are not drawn: install it, or run `dot -Tsvg program.dot` elsewhere"
PATIENCE = 60.0
"""Timeout of graphviz in seconds: drawing a very deep model may take minutes."""


def check_dump(folder: str | os.PathLike[str] | None) -> None:
    """Make the folder of a dump, and check that files can be written there.

    Raises:
        OptionError: it cannot be made or written to.
    """
    if folder is None:
        return
    with writing("dump", folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def writing(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert file system errors while option `what` is written to `path`.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        problem = f"is {os.fspath(path)!r}, which cannot be written: {error.strerror or error}"
        fix = "give another folder (dump=, or ZCOMPILE_DUMP)" if what == "dump" else "give another path"
        raise OptionError(what, problem, fix) from error


def write_dump(
    folder: Path,
    journals: Sequence[Journal],
    explained: str,
    hardware: Hardware,
    *,
    measured: Sequence[Timeline] = (),
    code: Callable[[Region], str] | None = None,
) -> list[str]:
    """Write a dump to `folder`; `code` returns Inductor's code of a region. Returns notes on what could not be written.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # absent until all files that it names are complete
    (folder / "explain.txt").write_text(explained)
    notes: dict[str, None] = {}
    files: dict[str, list[str]] = {}
    rules: dict[str, list[dict[str, str]]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for number, journal in enumerate(journals):
        home = folder / f"program_{number}"
        home.mkdir(exist_ok=True)
        phases = [home / f"{phase}.py" for phase in Phase]
        _clear(home)
        program = journal.entries[-1].after
        _write_passes(home, journal)
        for phase in program.phases if program.has_backward else program.phases[:1]:
            (home / f"{phase}.py").write_text(str(program.phase(phase)))
        (home / "program.json").write_text(
            json.dumps(nx.node_link_data(dag(program, hardware), edges="edges"), indent=1)
        )
        notes |= dict.fromkeys(_draw(home, program, hardware))
        _write_regions(home / "regions", program, code)
        files[home.name] = [CAPTURE, *(path.name for path in phases if path.exists())]
        files[home.name] += [f"regions/{name}.py" for name in program.regions]
        files[home.name] += [path.name for path in sorted(home.glob("[0-9][0-9]_*.py"))[1:][-1:]]  # has the axes
        if journal.part is not None:
            parts[home.name] = described(part_of(journal.part, program))
        rules[home.name] = [asdict(rule) for entry in journal.entries for rule in entry.step.rules]
    for stale in folder.glob("program_[0-9]*"):
        if stale.name not in files:
            _clear(stale)
            (stale / CAPTURE).unlink(missing_ok=True)
    programs = [journal.entries[-1].after for journal in journals]
    (folder / "trace.json").write_text(json.dumps(trace(programs, hardware, measured)))
    (folder / "NOTES.txt").unlink(missing_ok=True)
    if notes:
        (folder / "NOTES.txt").write_text("".join(f"{note}.\n" for note in notes))
    write_manifest(folder, files, torch.__version__, rules, parts)
    return list(notes)


@contextlib.contextmanager
def dumping_failures(folder: Path | None, number: int, journal: Journal) -> Iterator[None]:
    """If a pass on program `number` fails, dump what `journal` has, and add the folder to the error.

    Without a folder, failures of zcompile's own passes are dumped to a temporary folder.

    Raises:
        PipelineError, ProgramError: the error of the pass, with the folder.
    """
    try:
        yield
    except (PipelineError, ProgramError) as error:
        if journal.failure is None or (folder is None and not journal.is_own):
            raise
        home = (folder or Path(tempfile.gettempdir()) / f"zcompile_failed_{os.getpid()}") / f"program_{number}"
        try:
            _write_failed(home, journal)
            note = f"{home} has the program after each pass before the error"
        except OSError as refused:
            note = f"{home} cannot be written: {refused.strerror or refused}"
        fix = f"{error.fix.rstrip()}\n  Dump: {note}."
        raise type(error)(error.subject, error.problem, fix).with_traceback(error.__traceback__) from error.__cause__


def _write_failed(home: Path, journal: Journal) -> None:
    """Write the text before and after each pass, and the output of the failed pass."""
    failure = journal.failure
    assert failure is not None, "a pass has failed"
    home.mkdir(parents=True, exist_ok=True)
    (home.parent / MANIFEST).unlink(missing_ok=True)  # it names files that are removed here
    _clear(home)
    if journal.entries:
        _write_passes(home, journal)
    else:
        (home / CAPTURE).write_text(failure.before.text(regions=True))
    if failure.after is not None:
        (home / f"{len(journal.entries) + 1:02}_{failure.name}.failed.py").write_text(_text_of(failure.after))


def _text_of(program: Program) -> str:
    """The text of a program, or of its graph if it is too broken to be printed."""
    try:
        return program.text(regions=True)
    except Exception as error:
        return f"# the program cannot be printed: {type(error).__name__}: {error}\n{program.graph}"


def _clear(home: Path) -> None:
    """Remove files of earlier dumps, except drawings, which `_draw` reuses."""
    phases = [home / f"{phase}.py" for phase in Phase]
    for stale in (*home.glob("[0-9][0-9]_*"), *(home / "regions").glob("region_*"), *filter(Path.exists, phases)):
        stale.unlink()


def trace(programs: Sequence[Program], hardware: Hardware, measured: Sequence[Timeline] = ()) -> dict[str, Any]:
    """A trace in Chrome's format: the predicted step of each program, and measured steps.

    Predicted steps begin at the start of the first measured step.
    """
    began = min((timeline.began for timeline in measured), default=0.0)
    events = [event for timeline in measured for event in timeline.trace_events()]
    for number, program in enumerate(programs):
        predicted = replace(simulate(program, hardware, steps=True), began=began)
        name = f"predicted for {hardware.name}: program {number}"
        events += predicted.trace_events(process=_PREDICTED + number, name=name)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_PREDICTED = 1_000_000
"""Process id of the first predicted step in a trace; process ids of measured steps are ranks."""


def _write_passes(home: Path, journal: Journal) -> None:
    """Write the text before and after each pass, and the differences."""
    before = _traced(journal).text(regions=True)
    (home / CAPTURE).write_text(before)
    previous = "00_capture"
    made = [(entry.name, entry.after) for entry in journal.entries]
    if journal.part is not None:
        made.insert(0, ("unroll_microbatches", journal.entries[0].before))
    for index, (pass_, program) in enumerate(made, 1):
        name, after = f"{index:02}_{pass_}", program.text(regions=True)
        (home / f"{name}.py").write_text(after)
        (home / f"{name}.diff").write_text(difference(before, after, previous, name))
        before, previous = after, name


def _traced(journal: Journal) -> Program:
    """The traced program before all passes; for a pipeline rank, the step of one micro-batch."""
    return journal.entries[0].before if journal.part is None else journal.part.terms.traced


def difference(before: str, after: str, old: str, new: str) -> str:
    """A unified diff of two texts; empty if they are equal."""
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"{old}.py", f"{new}.py"))


def _draw(home: Path, program: Program, hardware: Hardware) -> list[str]:
    """Write the program as DOT, and as SVG if possible; returns notes on failures."""
    source, target, text = home / "program.dot", home / "program.svg", dot_text(program, hardware)
    if target.exists() and source.read_text() == text:
        return []  # unchanged: a model is dumped again with each new program
    source.write_text(text)
    target.unlink(missing_ok=True)
    if (dot := shutil.which("dot")) is None:
        return [NOTE]
    command = [dot, "-Tsvg", str(source), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return [f"graphviz did not draw {source} within {PATIENCE:.0f} s: the program is large"]
    except subprocess.CalledProcessError as error:
        return [f"graphviz could not draw {source}: {error.stderr.strip()}"]
    return []


def _write_regions(home: Path, program: Program, code: Callable[[Region], str] | None) -> None:
    home.mkdir(exist_ok=True)
    for name, region in program.regions.items():
        (home / f"{name}.py").write_text(region_text(region))
        if code is not None:
            (home / f"{name}.inductor.py").write_text(code(region))


_TEMPLATE = """\
digraph program {
    rankdir=TB; newrank=true; nodesep=0.25; ranksep=0.3; bgcolor=transparent
    node [fontname="Helvetica", fontsize=10, style="filled,rounded", shape=box, color="#606060"]
    edge [color="#808080", arrowsize=0.6]
{%- for title, nodes in clusters.items() %}
    subgraph {{ "cluster_" ~ title }} {
        label={{ quote(title) }}; fontname="Helvetica"; color="#b0b0b0"
{%- for node in nodes %}
        {{ quote(node.name) }} [label={{ quote(node.label) }}, fillcolor="{{ node.color }}"]
{%- endfor %}
    }
{%- endfor %}
{%- for start, end, style in edges %}
    {{ quote(start) }} -> {{ quote(end) }}{{ style }}
{%- endfor %}
}
"""
_COLORS = {
    Role.COMPUTE: "#9ecae1",
    Role.GATHER: "#a1d99b",
    Role.REDUCE: "#fdae6b",
    Role.FREE: "#e0e0e0",
    Role.UPDATE: "#bcbddc",
}


@dataclass(frozen=True, slots=True)
class _Box:
    name: str
    label: str
    color: str


def dot_text(program: Program, hardware: Hardware) -> str:
    """The program in DOT: regions, communications and their arguments, in a cluster for each phase.

    Times are predicted for `hardware`. Dashed edges show the order in which collectives are issued.
    """
    shown = [node for node in program.graph.nodes if _is_shown(node)]
    clusters = {
        str(phase): [_box(program, node, hardware) for node in shown if data(node).phase is phase]
        for phase in program.phases
    }
    edges = dict.fromkeys((_source(one).name, node.name, "") for node in shown for one in node.all_input_nodes)
    order = itertools.pairwise(node.name for node in shown if isinstance(data(node).op, Communication))
    edges |= dict.fromkeys((one, other, " [style=dashed, constraint=false]") for one, other in order)
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(_TEMPLATE)
    return template.render(clusters=clusters, edges=edges, quote=json.dumps)


def _is_shown(node: fx.Node) -> bool:
    """True for lines that do something and for used inputs; the results of a call are part of its box."""
    return not isinstance(data(node).op, (Item, Results)) and bool(node.users or node.op == "call_function")


def _source(node: fx.Node) -> fx.Node:
    while isinstance(data(node).op, Item):
        node = node.all_input_nodes[0]
    return node


def _box(program: Program, node: fx.Node, hardware: Hardware) -> _Box:
    meta = data(node)
    lines = [node.name]
    if isinstance(meta.op, Call):
        lines = [f"{meta.op.region} of {meta.source or 'the root'}"]
    if node.op == "call_function":
        if seconds := line_seconds(program, node, hardware):
            lines.append(f"{seconds * 1e3:.3g} ms")
        if nbytes := program.memory(node):
            lines.append(f"{'+' if nbytes > 0 else '-'}{human_bytes(abs(nbytes))}")
    elif meta.type:
        lines.append(str(meta.type))
    return _Box(node.name, "\n".join(lines), _COLORS.get(meta.op.role, "#ffffff"))
