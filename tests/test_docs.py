"""The documentation: its programs are those that are printed, its code runs, and its pass does as it says."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from torch import nn

import zcompile
from examples.own_pass import WAIT_AT_END, Net, wait_at_end
from tests.ranks import Ranks
from zcompile import ProgramError, facts
from zcompile.facts import RELEASED_ONCE
from zcompile.ir import ops
from zcompile.ir.operation import Phase
from zcompile.ir.ops import AllGather, Call, Release, WaitReduce
from zcompile.schedule.pipeline import ALWAYS
from zcompile.tools.command_line import app

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def printed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("printed", ROOT / "docs" / "printed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STALE = "run `python -m docs.printed` and read the diff"


@pytest.mark.slow
def test_the_stages_side_by_side_are_as_printed(printed: ModuleType) -> None:
    assert printed.STAGES_PAGE.read_text() == printed.stages_page(), STALE


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/programs.md", "docs/passes.md", "docs/proof.md"])
def test_programs_are_as_printed(printed: ModuleType, page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- pr" in text
    assert printed.with_blocks(text) == text, STALE


@pytest.mark.slow
def test_the_quick_start_trains(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    (script,) = (block for block in blocks if "import zcompile" in block)
    eager = script.replace("stage=3, prefetch=2)", 'stage=3, prefetch=2, backend="eager")')
    assert eager != script
    (tmp_path / "train.py").write_text(eager)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (loss,) = re.findall(r"loss (\d\.\d+)", ended.stdout)
    assert float(loss) < 1.8  # it starts at about 2.4
    assert "all_gather(" in ended.stdout


@pytest.mark.slow
def test_the_complete_script_trains_and_goes_on_with_another_world(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## A complete script\n")[2]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "train.py").write_text(script.replace("step % 20", "step % 2"))
    for world, end in ((2, 2), (1, 4)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command += ["train.py", str(end)]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert f"step {end}: loss" in ended.stdout
    assert "step 2:" not in ended.stdout
    load = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, tmp_path / "run"], check=True)


def test_pictures_are_there() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text()):
            assert (page.parent / picture).exists(), picture


# -- the pass that is shown -------------------------------------------------------------------------------------------


def train(rank: int, own: bool) -> tuple[list[str], list[torch.Tensor], list[int]]:
    """Communications of a step, the parameters after two, and where the reductions are waited for."""
    torch.manual_seed(0)
    compiled = zcompile.compile(Net(), passes={"sink_waits": WAIT_AT_END} if own else None, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(2):
        compiled(torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    program = compiled._engine.runtime.steps[0].program
    body = program.body(Phase.BACKWARD)
    last = max(body.index(node) for node in program.nodes(Call, phase=Phase.BACKWARD))
    waits = [body.index(node) - last for node in program.nodes(WaitReduce)]
    sent = sorted(program.communications())
    return sent, [p.full_tensor().detach() for p in compiled.parameters()], waits


@pytest.mark.slow
def test_the_own_pass_waits_at_the_end_and_changes_no_number(ranks: Ranks) -> None:
    plain, own = (ranks.run(2, train, own)[0] for own in (False, True))
    assert min(plain[2]) < 0 < min(own[2])
    assert plain[0] == own[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], own[1], strict=True))


@pytest.mark.slow
def test_the_own_pass_prints_its_program() -> None:
    for arguments in ([], ["--plain", "--stage", "1"]):
        command = [sys.executable, "examples/own_pass.py", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert "def backward(box):" in ended.stdout


def test_the_own_pass_is_shown_as_it_is() -> None:
    page, example = (ROOT / "docs" / "passes.md").read_text(), (ROOT / "examples" / "own_pass.py").read_text()
    assert inspect.getsource(wait_at_end) in page
    (shown,) = re.findall(r"^WAIT_AT_END = .*$", page, re.MULTILINE)
    assert shown in example


def test_a_comment_without_its_block_is_an_error(printed: ModuleType) -> None:
    with pytest.raises(ValueError, match="not right above"):
        printed.with_blocks("<!-- printed: layers=2 stage=3 phase=forward -->\n\n```python\n...\n```\n")


def test_a_fact_as_it_is_shown() -> None:
    page = (ROOT / "docs" / "passes.md").read_text()
    (code,) = re.findall(r"```python\n(from zcompile import Fact.*?)```", page, re.DOTALL)
    names: dict[str, zcompile.Fact] = {}
    exec(code, names)
    compiled = zcompile.compile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), backend="eager", units=["*"])
    compiled(torch.ones(2, 4)).sum().backward()
    program = compiled._engine.runtime.steps[0].program
    assert len(program.nodes(AllGather)) > 8
    with pytest.raises(ProgramError, match="my pass: at most eight gathers: one gather too many"):
        zcompile.verify(program, [names["FEW_GATHERS"]], "my pass")


PASSES = (ROOT / "docs" / "passes.md").read_text()


def blocks(page: str, heading: str) -> list[str]:
    """The code of a section."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_passes_land_where_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(PASSES, "Where a pass lands")
    exec(code, {})
    said = [line.rpartition("# ")[2] for line in code.splitlines() if "names)" in line]
    names = [line for line in capsys.readouterr().out.splitlines() if line.startswith("['")]
    for line, found in zip(said, names, strict=True):
        pattern = re.escape(line).replace(r"\[\.\.\.,", r"\[.*").replace(r"\.\.\.,", ".*")
        assert re.fullmatch(pattern, found), (line, found)


def test_a_program_is_read_as_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(PASSES, "Reading and editing a program")
    compiled = zcompile.compile(Net(), backend="eager")
    compiled(torch.ones(8, 64)).backward()
    exec(code, {"program": compiled.journals[0].entries[-1].after})
    assert "layers_1_gather layers.1 layers_1_full" in capsys.readouterr().out


def test_fields_of_operations_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| `[^|]*` \| `(\w+)`[^|]*\|([^|]*)\|", PASSES, re.MULTILINE)
    assert len(rows) == 10
    for name, named in rows:
        fields = {field.name for field in dataclasses.fields(getattr(ops, name))} if named.strip() else set()
        assert set(re.findall(r"`(\w+)`", named)) <= fields, name


def test_the_table_of_facts_has_all_with_the_passes_that_ensure_them() -> None:
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| .*? \|$", PASSES.partition("\n## Facts")[2], re.MULTILINE)
    known = {name: eval(name, vars(facts)) for name, *_ in rows}
    constants = {name for name, value in vars(facts).items() if isinstance(value, zcompile.Fact)}
    made = {"units_bounded", "buffers_bounded", "memory_bounded"}
    assert {name.partition("(")[0] for name in known} == constants | made
    options: dict[str, Any] = {"prefetch": 2, "bucket": 2**20, "updates": True, "arenas": True, "cuda_graphs": True}
    pipelines = [zcompile.pipeline(**options, memory_limit=limit) for limit in (None, 2**30)]
    for name, printed, makers in rows:
        assert printed == str(known[name])
        ensuring = [step.name for pipeline in pipelines for step in pipeline.passes if known[name] in step.ensures]
        assert re.findall("`(.*?)`", makers) == list(dict.fromkeys(ensuring)), name
        assert ("always" in makers) == (known[name] in ALWAYS)
        assert ("end of the pipeline" in makers) == (known[name] in pipelines[0].goals)


def test_a_pass_is_tested_as_it_is_shown() -> None:
    by_text, by_facts = blocks(PASSES, "Testing it")
    compiled = zcompile.compile(Net(), backend="eager")
    compiled(torch.ones(8, 64)).backward()
    names = {**vars(facts), "zcompile": zcompile, "compiled": compiled, "wait_at_end": wait_at_end}
    exec(by_facts, names)
    before = names["program"].text(regions=True)
    exec(by_text, names | {"before": before, "after": wait_at_end(zcompile.parse(before)).text(regions=True)})
    with pytest.raises(zcompile.ProofError, match="computes: was given a program that communicates"):
        zcompile.computes(names["program"])


@pytest.mark.slow
def test_a_unit_is_kept_full_as_it_is_shown() -> None:
    (code,) = blocks(PASSES, "Keeping a unit full")
    names: dict[str, Any] = {"model": Net(6), "zcompile": zcompile}
    exec(code, names)
    compiled, x = names["compiled"], torch.ones(8, 64)
    compiled(x).backward()
    forward, backward = compiled.programs[:2]
    assert "layers_1_full" in str(forward).partition("return")[2]
    assert "layers_1_gather" not in str(backward)
    with torch.no_grad():
        compiled(x)
    refused = zcompile.compile(Net(6), prefetch=1, passes={"keep_unit": names["KEEP"]}, backend="eager")
    with pytest.raises(ProgramError) as caught:
        refused(x)
    (shown,) = re.findall(r"^    ProgramError: (after schedule_prefetch:.*)$", PASSES, re.MULTILINE)
    assert str(caught.value).splitlines()[0] == shown


def forget(program: zcompile.Program) -> zcompile.Program:
    program = program.copy()
    program.graph.erase_node(program.nodes(Release)[0])
    return program


def exchange(program: zcompile.Program) -> zcompile.Program:
    """Gives the second layer the input of the first."""
    program = program.copy()
    first, second, *_ = program.nodes(Call, phase=Phase.FORWARD)
    second.replace_input_with(second.all_input_nodes[1], first.all_input_nodes[1])
    return program


@pytest.mark.parametrize("change", [forget, exchange])
def test_a_pass_that_is_mistaken_does_not_get_far(change: Callable[..., zcompile.Program]) -> None:
    step = zcompile.Pass(change.__name__, change, requires=(RELEASED_ONCE,))
    compiled = zcompile.compile(Net(), passes={change.__name__: step}, backend="eager")
    with pytest.raises(ProgramError) as raised:
        compiled(torch.ones(8, 64)).backward()
    page = (ROOT / "docs" / "passes.md").read_text()
    (shown,) = re.findall(rf"^    ProgramError: (after {change.__name__}:.*\n.*)$", page, re.MULTILINE)
    assert " ".join(str(raised.value).split()).startswith(" ".join(shown.split()))


# -- commands ---------------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """The commands of all pages, in blocks and in sentences."""
    found = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        lines = "\n".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
        spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        found += [line.removeprefix("$ ").partition("  #")[0].strip() for line in (*lines, *spans)]
    return [re.sub(r"^([A-Z_]+=\S* )+", "", one) for one in found]


def test_commands_of_the_pages_are_there() -> None:
    made = {name for name, _ in re.findall(r"^([a-z-]+):(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    ours: Any = typer.main.get_command(app)
    measures = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("**/*.py"))
    checked = 0
    for command in commands():
        head, *words = command.split() or [""]
        given = (
            [word.partition("=")[0] for word in words[: words.index("--")] if word != "--"] if "--" in words else words
        )
        options = {word.partition("=")[0] for word in given if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
        if head == "zcompile" and words and re.fullmatch("[a-z]+", words[0]):
            known = {name for one in ours.commands[words[0]].params for name in one.opts}
            assert options - {"--help"} <= known, command
        elif head == "make" and words and re.fullmatch("[a-z-]+", words[0]):
            assert words[0] in made, command
        elif head == "python" and words[:1] == ["-m"]:
            path = ROOT / words[1].replace(".", "/")
            assert path.exists() or path.with_suffix(".py").exists() or importlib.util.find_spec(words[1]), command
            assert words[1].partition(".")[0] != "benchmarks" or all(
                f'"{name}"' in measures for name in options - {"-m"}
            )
        elif head in ("pytest", "python", "torchrun"):
            paths = [
                word.partition("::")[0] for word in words if re.fullmatch(r"(tests|examples|docs|benchmarks)/\S+", word)
            ]
            assert all((ROOT / path).exists() for path in paths), command
        else:
            continue
        checked += 1
    assert checked > 100
