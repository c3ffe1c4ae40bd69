"""Dumps: what lies in the folder, and that tools open it."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import zcompile
from tests.models import batch, make
from zcompile import OptionError, Program, TimelineError
from zcompile.cost.dag import dag
from zcompile.cost.hardware import Hardware
from zcompile.facts import PHASES_SPLIT, RELEASED_ONCE
from zcompile.ir.ops import Release
from zcompile.report import dumps
from zcompile.report.dumps import NOTE, difference, dot_text, trace
from zcompile.tools import planner, tracing

RATES = Hardware.of(flops=1e9, memory_bandwidth=1e9, latency=1e-5, bandwidth=1e8)


@pytest.fixture(scope="module")
def compiled() -> zcompile.CompiledModule:
    made = zcompile.compile(make("gpt"), backend="eager")
    made(*batch("gpt", 0, 0)).backward()
    return made


@pytest.fixture
def dumped(compiled: zcompile.CompiledModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dumps.shutil, "which", lambda _: None)
    return compiled.dump(tmp_path / "dump", hardware=RATES)


@pytest.mark.parametrize("folder", ["/proc/dump", "taken"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_model_is_touched(tmp_path: Path, folder: str) -> None:
    (tmp_path / "taken").write_text("")
    model = make("mlp")
    before = dict(model.named_parameters())
    with pytest.raises(OptionError, match=r"dump: is '.*', which cannot be written: "):
        zcompile.compile(model, dump=tmp_path / folder)
    assert all(after is before[name] for name, after in model.named_parameters())
    with pytest.raises(RuntimeError, match=r"OptionError: dump: is '.*', which cannot be written: "):
        torch.compile(model, backend=zcompile.backend(dump=tmp_path / folder))(*batch("mlp", 0, 0))


@pytest.mark.slow
def test_differences_lead_from_the_first_text_to_the_last(dumped: Path) -> None:
    texts = sorted((dumped / "program_0").glob("[0-9]*.py"))
    diffs = sorted((dumped / "program_0").glob("[0-9]*.diff"))
    assert [diff.stem for diff in diffs] == [text.stem for text in texts[1:]]
    before = texts[0].read_text()
    for text, diff in zip(texts[1:], diffs, strict=True):
        after = text.read_text()
        assert diff.read_text() == difference(before, after, *_names(diff))
        before = after
    (gathers,) = (diff for diff in diffs if "insert_gathers" in diff.name)
    assert re.search(r"^\+ .*all_gather\(", gathers.read_text(), re.MULTILINE)


def _names(diff: Path) -> tuple[str, str]:
    """Of the files that a diff compares, as it says them; those of an empty one are nobody's."""
    found = re.findall(r"^(?:---|\+\+\+) (\S+)\.py", diff.read_text(), re.MULTILINE)
    return (found[0], found[1]) if found else ("", "")


@pytest.mark.slow
def test_the_program_is_a_graph_that_networkx_reads(compiled: zcompile.CompiledModule, dumped: Path) -> None:
    found = nx.node_link_graph(json.loads((dumped / "program_0" / "program.json").read_text()), edges="edges")
    program = compiled._engine.runtime.steps[0].program
    assert set(found) == set(dag(program))
    assert all(isinstance(about["seconds"], float) for _, about in found.nodes(data=True))


@pytest.mark.slow
def test_regions_are_texts_of_their_own(dumped: Path) -> None:
    whole = (dumped / "program_0" / "00_capture.py").read_text()
    regions = sorted((dumped / "program_0" / "regions").glob("*.py"))
    assert regions
    assert "def region_" not in whole
    assert all(f"def {region.stem}(box):" in region.read_text() for region in regions)
    assert "aten.mm" in "".join(region.read_text() for region in regions)


def test_a_drawing_has_every_line_and_the_order_of_collectives(compiled: zcompile.CompiledModule) -> None:
    program = compiled._engine.runtime.steps[0].program
    text = dot_text(program, RATES)
    assert text.count("{") == text.count("}")
    for line in program.nodes():
        if line.op == "call_function" and "getitem" not in str(line.target):
            assert f'"{line.name}"' in text, line.name
    assert text.count("style=dashed") == len(program.communications()) - 1


class Odd(nn.Module):
    """A model whose module is called as nobody should call one."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module('a"b<c>', nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, 'a"b<c>')(x)


def test_names_with_quotes_stay_within_their_strings(tmp_path: Path) -> None:
    made = zcompile.compile(Odd(), backend="eager")
    made(torch.ones(2, 4)).sum().backward()
    text = dot_text(made._engine.runtime.steps[0].program, RATES)
    assert 'region_0 of a\\"b<c>' in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_draws_it(compiled: zcompile.CompiledModule, tmp_path: Path) -> None:
    compiled.dump(tmp_path)
    assert (tmp_path / "program_0" / "program.svg").read_text().count("<g id=") > 10


@pytest.mark.slow
def test_without_graphviz_a_note_says_so(dumped: Path) -> None:
    assert not (dumped / "program_0" / "program.svg").exists()
    assert (dumped / "NOTES.txt").read_text() == f"{NOTE}.\n"


def test_a_graphviz_that_fails_is_told_of(compiled: zcompile.CompiledModule, tmp_path: Path, monkeypatch: Any) -> None:
    fails = shutil.which("false")
    monkeypatch.setattr(dumps.shutil, "which", lambda _: fails)
    compiled.dump(tmp_path)
    assert "graphviz could not draw" in (tmp_path / "NOTES.txt").read_text()


@pytest.mark.slow
def test_inductor_shows_its_code_on_request(tmp_path: Path) -> None:
    made = zcompile.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="eager")
    with torch.no_grad():
        made(torch.ones(2, 4))
    made.dump(tmp_path, code=True)
    (code,) = (tmp_path / "program_0" / "regions").glob("*.inductor.py")
    assert "def call(" in code.read_text()


# -- traces -----------------------------------------------------------------------------------------------------------


def steps(compiled: zcompile.CompiledModule, count: int) -> None:
    for number in range(count):
        compiled(*batch("gpt", 0, number)).backward()
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.mul_(0.999)
                parameter.grad = None


def lanes_of(events: list[dict[str, Any]], process: int) -> set[str]:
    return {e["args"]["name"] for e in events if e["pid"] == process and e["name"] == "thread_name"}


@pytest.mark.slow
def test_a_trace_has_the_predicted_step_beside_measured_ones(tmp_path: Path) -> None:
    compiled = zcompile.compile(make("gpt"), backend="eager")
    steps(compiled, 1)
    with compiled.profile():
        steps(compiled, 2)
    compiled.dump(tmp_path, hardware=RATES)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()).count("rank 0") == 1
    (predicted,) = (process for process, name in names.items() if name == "predicted for unnamed: program 0")
    assert {"compute", "optimizer"} <= lanes_of(events, predicted)
    spans = [event for event in events if event["ph"] == "X"]
    assert len({event["args"]["trains"] for event in spans if event["name"].startswith("step ")}) == 1
    assert sum(event["name"].startswith("step ") and event["pid"] == 0 for event in spans) == 2
    starts = [min(e["ts"] for e in spans if e["pid"] == process) for process in names]
    assert max(starts) - min(starts) < 1e3, "they begin together"


@pytest.mark.slow
def test_several_ranks_send_on_a_lane_of_their_own(compiled: zcompile.CompiledModule) -> None:
    traced = tracing.trace(make("gpt"), batch("gpt", 0, 0))
    program = planner.Rewriter(make("gpt"), traced, None).program(planner.Choice(3, 2, None, None), 2)
    events = trace([program], RATES)["traceEvents"]
    assert "communication" in lanes_of(events, events[0]["pid"])


def test_a_profile_without_a_step_is_an_error(compiled: zcompile.CompiledModule) -> None:
    with pytest.raises(TimelineError, match="profile: no step has begun and ended within it"), compiled.profile():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["/proc/dump", "taken/dump"])
def test_what_cannot_be_written_is_an_error_that_names_it(
    compiled: zcompile.CompiledModule, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    target = tmp_path / folder
    with pytest.raises(OptionError, match=f"^dump: is '{target}', which cannot be written"):
        compiled.dump(target, hardware=RATES)
    with pytest.raises(OptionError, match=f"^report: is '{target}/report.html', which cannot be written"):
        compiled.report(target / "report.html", hardware=RATES)


def test_training_goes_on_where_the_folder_of_the_dump_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    made = zcompile.compile(make("mlp"), backend="eager", dump=folder)
    folder.rmdir()
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="is not dumped: dump: is '.*', which cannot be written"):
        made(*batch("mlp", 0, 0)).backward()
    assert all(param.grad is not None for param in made.parameters())


# -- where a pass fails -----------------------------------------------------------------------------------------------


def forget(found: Program) -> Program:
    """Without the first release of a full parameter."""
    found = found.copy()
    found.graph.erase_node(found.nodes(Release)[0])
    return found


def give_up(found: Program) -> Program:
    raise KeyError("no such node")


@pytest.mark.parametrize("wrong", [forget, give_up])
def test_an_error_of_zcompiles_own_is_dumped_and_says_how_to_go_on(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrong, "__module__", "zcompile.passes.wrong")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = zcompile.Pass("wrong", partial(wrong), (RELEASED_ONCE,))
    made = zcompile.compile(make("mlp"), backend="eager", passes={"wrong": mine})
    with pytest.raises(zcompile.ZcompileError, match="this is an error in zcompile, not in your model") as caught:
        made(*batch("mlp", 0, 0))
    assert "fix the pass" not in str(caught.value)
    (home,) = tmp_path.glob("zcompile_failed_*/program_0")
    assert f"Dump: {home}" in str(caught.value)
    assert (home / "00_capture.py").exists()


@pytest.mark.parametrize("options", [{}, {"memory_limit": "1 MiB"}, {"prefetch": "auto"}], ids=str)
def test_where_a_pass_breaks_a_fact_its_input_and_output_are_dumped(tmp_path: Path, options: dict[str, Any]) -> None:
    mine = zcompile.Pass("forget", forget, (RELEASED_ONCE,))
    (home := tmp_path / "program_0").mkdir()
    (home / "09_old.py").touch()
    made = zcompile.compile(make("mlp"), backend="eager", dump=tmp_path, passes={"forget": mine}, **options)
    with pytest.raises(RuntimeError, match="after forget: gathers released exactly once") as caught:
        made(*batch("mlp", 0, 0))
    assert f"Dump: {home} has the program after each pass before the error." in str(caught.value)
    assert "fix the pass forget: this held before it ran, and does not hold after it" in str(caught.value)
    texts = sorted(path.name for path in home.glob("*.py"))
    assert texts[:2] == ["00_capture.py", "01_split_phases.py"]
    assert texts[-1] == f"{len(texts) - 1:02}_forget.failed.py"
    before, after = ((home / name).read_text() for name in texts[-2:])
    assert zcompile.parse(before).text(regions=True) == before
    (line,) = [one for one in difference(before, after, "before", "after").splitlines() if one.startswith("-  ")]
    assert "release(" in line


def test_where_a_pass_raises_its_input_is_dumped(tmp_path: Path) -> None:
    passes = {"split_phases": zcompile.Pass("split_phases", give_up, ensures=(PHASES_SPLIT,))}
    made = zcompile.compile(make("mlp"), backend="eager", dump=tmp_path, passes=passes)
    with pytest.raises(RuntimeError, match=r"split_phases: raised KeyError: 'no such node'.\n.*\n  Dump: "):
        made(*batch("mlp", 0, 0))
    assert [path.name for path in (tmp_path / "program_0").iterdir()] == ["00_capture.py"]


def test_without_a_folder_nothing_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = zcompile.compile(make("mlp"), backend="eager", passes={"give_up": zcompile.Pass("give_up", give_up)})
    with pytest.raises(RuntimeError, match="give_up: raised KeyError") as caught:
        made(*batch("mlp", 0, 0))
    assert "Dump:" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_printed_is_dumped_all_the_same(tmp_path: Path) -> None:
    def cut(found: Program) -> Program:
        found = found.copy()
        found.nodes(Release)[0].meta.clear()
        return found

    made = zcompile.compile(make("mlp"), backend="eager", dump=tmp_path, passes={"cut": zcompile.Pass("cut", cut)})
    with pytest.raises(RuntimeError, match="Dump: "):
        made(*batch("mlp", 0, 0))
    (last,) = (tmp_path / "program_0").glob("*.failed.py")
    assert last.read_text().startswith("# the program cannot be printed: KeyError")
