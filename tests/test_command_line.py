"""The command: what it prints and writes, what it says of mistakes, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from torch import nn

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from zcompile import SubjectError
from zcompile.cost.hardware import load_profile
from zcompile.engine.step_trace import Traced, intercepting
from zcompile.schedule.decision import Request
from zcompile.tools import command_line, doctor
from zcompile.tools.arguments import tokens_of
from zcompile.tools.named_models import subject_of

Run = Callable[..., tuple[int, str, str]]

FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (torch.empty(3, 8),)

class Loss(nn.Sequential):
    def forward(self, x):
        return super().forward(x).mean()

def trained():
    return Loss(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (torch.empty(3, 8),)

def with_names():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
        def forward(self, x, scale):
            return self.inner(x) * scale
    return Named(), (torch.empty(3, 8),), {"scale": 2.0}

def fails():
    raise ValueError("no [bold]luck[/]")

def gives_none():
    return None

def deep():
    return {}["width"]

def alone():
    return nn.Linear(8, 8)

def misfit():
    return nn.Linear(8, 8), (torch.empty(3, 7),)

number = 3
"""
CHOOSING = """
import torch
import zcompile
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
compiled = zcompile.compile(model, backend="eager", units=["*"], dump="own", **OPTIONS)
compiled(torch.ones(3, 32)).sum().backward()
"""
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import zcompile

assert sys.argv[1:] == ["--width", "8"], sys.argv
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
compiled = zcompile.compile(model, stage=2, backend="eager")
try:
    compiled(torch.ones(3, 8)).sum().backward()
except Exception:
    pass
raise SystemExit("this is not reached")
"""
TRAIN_STEP = """
import torch
import zcompile
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = zcompile.train_step(model, lambda model, x: model(x).sum(), optimizer, backend="eager")
step(torch.ones(3, 8))
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command in a folder of its own; gives its exit status and what it has printed."""
    (tmp_path / "fac.py").write_text(FACTORY)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zcompile", *arguments])
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


LITTLE = ("--stage", "3", "--prefetch", "1", "--dtype", "own")


def test_a_plan_ends_in_a_line_to_write(run: Run) -> None:
    code, out, _ = run("plan", "fac.py:make", "-w", "2", "-w", "4", *LITTLE)
    assert code == 0
    assert out.count("fastest that fits: zcompile.compile(model, stage=3, prefetch=1") == 2
    assert "2 ranks" in out
    assert "4 ranks" in out


def test_json_is_all_that_is_printed(run: Run) -> None:
    code, out, err = run("plan", "fac.py:with_names", "-w", "2", "--json", *LITTLE)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["recommended"]["2"].startswith("zcompile.compile(model")
    (forecast,) = [one for one in found["forecasts"] if one["checkpoint"] is None]
    assert forecast["bytes"] == sum(forecast["bytes_by_kind"].values())
    assert found["parameters"] == 72


def test_a_limit_that_nothing_meets_ends_with_1(run: Run) -> None:
    code, out, err = run("plan", "fac.py:make", "-w", "2", "-m", "1 KB", *LITTLE)
    assert code == 1
    assert "too big" in out
    assert "1e-06 GB fits no choice on 2 ranks" in out
    code, out, err = run("plan", "fac.py:make", "-w", "2", "-m", "1000", "--json", *LITTLE)
    assert (code, json.loads(out)["recommended"]) == (1, {"2": None})
    assert "error: memory_limit: 1e-06 GB fits no choice on 2 ranks" in err


@pytest.mark.slow
def test_a_plan_over_meshes_ends_in_lines_to_write(run: Run) -> None:
    options = ["-w", "4", "--mesh", "auto", "--stage", "1", "--dtype", "float32", "--checkpoint", "none"]
    code, out, _ = run("plan", "fac.py:trained", *options)
    assert code == 0
    assert "fastest that fits:\n    mesh = init_device_mesh('cuda', (" in out
    assert "no tensor parallelism: " in out
    code, out, _ = run("plan", "fac.py:trained", *options, "--json")
    made = json.loads(out)
    assert code == 0
    assert made["recommended"][-1].startswith("step = zcompile.train_step(model, None, optimizer, mesh=mesh")
    code, out, _ = run("plan", "fac.py:trained", *options, "-m", "1 KB")
    assert code == 1
    assert "fits no choice on 4 ranks" in out


def test_a_plan_is_written_as_a_page(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("plan", "fac.py:make", "-w", "2", "--html", "plan.html", *LITTLE)
    assert code == 0
    assert "fastest that fits" in out
    text = (tmp_path / "plan.html").read_text()
    assert "2 ranks" in text
    assert "zcompile.compile(model, stage=3, prefetch=1" in text


@pytest.mark.parametrize("target", ["plan.txt", "/proc/plan.html", "taken.html"])
def test_a_page_that_cannot_be_written_is_refused_before_planning(run: Run, tmp_path: Path, target: str) -> None:
    (tmp_path / "taken.html").mkdir()
    code, out, err = run("plan", "fac.py:make", "--html", target)
    assert (code, out) == (1, "")
    assert re.search(r"html: '.*' (cannot be written|is not a .html file)", err)


def test_inspect_writes_the_program_after_every_pass(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("inspect", "fac.py:make", "-o", "dump", "-w", "3")
    assert code == 0
    assert "stage 3, world 3: 144 parameters" in out
    text = (tmp_path / "dump" / "program_0" / "06_insert_gathers.py").read_text()
    assert 'axes = {"dp": "shard 3"}' in text
    assert zcompile.parse(text).text(regions=True) == text


@pytest.mark.slow
def test_inspect_writes_the_steps_of_all_stages_of_a_pipeline(run: Run, tmp_path: Path) -> None:
    asked = ("--mesh", "2x1", "--microbatches", "4", "--stage", "1", "-s", "16", "--schedule", "interleavedzerobubble")
    code, out, _ = run("inspect", "gpt:4x64", *asked, "--split", "blocks.2", "-o", "dump")
    assert code == 0
    assert "2 pipeline stages on 2 ranks, 4 micro-batches" in out
    for rank in range(2):
        step = (tmp_path / f"dump/rank_{rank}/program_0/step.py").read_text()
        assert f"# {rank}F3\n" in step.replace("    #", "#")
        assert ("W3" in step) == (rank == 1), (
            "the gradients of weights are apart, where others wait for those of inputs"
        )
        assert "lane" in (tmp_path / f"dump/rank_{rank}/report.html").read_text()
    code, out, err = run("prove", "dump")
    assert (code, err) == (0, "")
    assert "fit" in out


def test_inspect_runs_a_script_until_its_model_is_traced(run: Run, tmp_path: Path) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    before = dict(os.environ)
    code, out, err = run("inspect", "script.py", "-w", "4", "--", "--width", "8")
    torch.distributed.destroy_process_group()
    assert (code, err) == (0, "")
    assert "stage 2, world 4: 144 parameters" in out
    assert (tmp_path / "zcompile_dump" / "program_0" / "backward.py").exists()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "options",
    ["memory_limit='27 KB', prefetch=1", "memory_limit='30 KB', prefetch=0"],
)
@pytest.mark.slow
def test_an_inspected_script_has_the_schedule_of_its_run(run: Run, tmp_path: Path, options: str) -> None:
    (tmp_path / "script.py").write_text(CHOOSING.replace("**OPTIONS", options))
    assert run("inspect", "script.py", "-w", "1")[0] == 0
    subprocess.run([sys.executable, "script.py"], check=True, cwd=tmp_path)
    for name in ("forward.py", "backward.py"):
        inspected, ran = (tmp_path / home / "program_0" / name for home in ("zcompile_dump", "own"))
        assert inspected.read_text() == ran.read_text()


def test_what_is_inspected_is_asked_for_as_in_a_run() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return self.last(x if x.sum() > 0 else -x)

    for model, keeps in ((nn.Linear(8, 8), True), (Broken(), False)):
        compiled = zcompile.compile(model, backend="eager")
        with pytest.raises(Traced) as traced, intercepting(), warnings.catch_warnings(action="ignore"):
            compiled(torch.ones(3, 8))
        assert traced.value.request == Request(compiled._engine.runtime.options, compiled._engine.schedule, keeps)


def test_an_inspected_script_whose_pass_fails_is_dumped_up_to_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        CHOOSING.replace("**OPTIONS", "passes={'fails': zcompile.Pass('fails', lambda p: 3)}")
    )
    code, _, err = run("inspect", "script.py", "-w", "2", "-o", "dump")
    assert code == 1
    assert "error: fails: returned int." in err
    assert "Dump: dump/program_0 has the program after each pass before the error." in err
    names = sorted(path.name for path in (tmp_path / "dump" / "program_0").glob("*.py"))
    assert (names[0], names[-1]) == ("00_capture.py", "11_sink_waits.py")


def test_an_inspected_limit_that_cannot_be_kept_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHOOSING.replace("**OPTIONS", "memory_limit='1 KB'"))
    code, _, err = run("inspect", "script.py", "-w", "2")
    assert code == 1
    assert err.startswith("error: memory_limit: ")


@pytest.mark.slow
def test_a_schedule_that_training_measures_is_that_of_the_profile(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHOOSING.replace("**OPTIONS", "prefetch='auto', checkpoint='auto'"))
    code, out, _ = run("inspect", "script.py", "-w", "2")
    assert code == 0
    assert "6 units" in out or "stage 3, world 2" in out


def test_an_option_of_ours_that_is_misspelled_is_not_the_scripts(run: Run) -> None:
    code, out, err = run("inspect", "script.py", "--wrold", "4")
    assert (code, out) == (2, "")
    assert "--wrold" in err


def test_where_the_options_of_a_script_belong_is_said_with_the_line_to_write(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, _, err = run("inspect", "script.py", "-w", "4", "--width=8", "--steps", "3")
    assert code == 2
    assert "No such option: --width. Put arguments of the script after `--`:" in err
    assert "zcompile inspect script.py -w 4 -- --width=8 --steps 3" in re.sub(r"[\s│]+", " ", err)
    assert "Put arguments" not in run("inspect", "gpt:2x64", "--wrold", "4")[2]
    assert "if it is the script's own, put it after `--`" in run("inspect", "script.py", "--stage", "1")[2]


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt:1.3b", "1.5b"), ("gpt:1B", "774m"), ("gpt:100b", "128b"), ("llama:7b", "8b"), ("llama:300b", "405b")],
)
def test_the_nearest_size_is_offered(run: Run, name: str, near: str) -> None:
    assert f"Fix: did you mean {near!r}? choose from " in run("plan", name)[2]


def test_what_is_no_size_has_none_that_is_near(run: Run) -> None:
    assert "Fix: choose from '8b', '70b', '405b'; or LAYERSxWIDTH" in run("plan", "llama:small")[2]


@pytest.mark.slow
def test_a_dump_takes_the_place_of_another(run: Run, tmp_path: Path) -> None:
    assert run("inspect", "gpt:2x64", "-s", "16", "-o", "dump")[0] == 0
    assert run("inspect", "fac.py:make", "-o", "dump", "--stage", "0")[0] == 0
    home = tmp_path / "dump" / "program_0"
    text = (home / "forward.py").read_text() + (home / "backward.py").read_text()
    regions = {file.name.split(".")[0] for file in (home / "regions").iterdir()}
    assert regions == set(re.findall(r"region_\d+", text))
    assert len(list(home.glob("01_*.py"))) == 1


def test_prove_says_what_is_proven_and_at_which_line_it_is_not(run: Run, tmp_path: Path) -> None:
    assert run("inspect", "fac.py:make", "-o", "dump")[0] == 0
    code, out, err = run("prove", "dump")
    assert (code, err) == (0, "")
    assert re.match(r"program_0: proven: \d+ lines, \d+ terms, 4 gradients of parameters, ", out)
    assert "Trusted: " in out
    path = tmp_path / "dump" / "program_0" / "regions" / "region_0.py"
    path.write_text(path.read_text().replace("aten.relu.default", "aten.sin.default"))
    code, out, err = run("prove", "dump")
    assert (code, out) == (1, "program_0: not proven\n")
    assert re.match(r"error: program_0/forward.py line \d+, regions/region_0.py line \d+: result 0 is not what", err)
    code, out, err = run("prove", "absent")
    assert (code, out) == (1, "")
    assert "is not there" in err


def test_prove_holds_the_dumps_of_all_ranks_against_each_other(run: Run, tmp_path: Path) -> None:
    for rank in range(2):
        assert run("inspect", "fac.py:make", "-w", "2", "-o", f"dump/rank_{rank}")[0] == 0
    code, out, err = run("prove", "dump")
    assert (code, err) == (0, "")
    assert [line.partition(":")[0] for line in out.splitlines()][:2] == ["rank_0/program_0", "rank_1/program_0"]
    assert "2 ranks: their communications fit together" in out
    path = tmp_path / "dump" / "rank_1" / "program_0" / "forward.py"
    lines = path.read_text().splitlines(keepends=True)
    gather = next(number for number, line in enumerate(lines) if "all_gather(" in line)
    path.write_text("".join([*lines[:gather], lines[gather], *lines[gather:]]))
    code, out, err = run("prove", "dump")
    assert code == 1
    assert re.search(r"error: rank_1/program_0/forward.py line \d+", err)
    assert re.search(r"error: program 0: the ranks' communications: message 2 .*rank 0: .*rank 1: ", err, re.DOTALL)
    path.write_text("".join(lines))
    shutil.rmtree(path.parent.parent)
    code, out, err = run("prove", "dump")
    assert (code, err) == (3, "")
    assert "not proven: 1 rank of the mesh not read, 1: give the folder of dump(folder, all_ranks=True)" in out
    assert "Trusted" not in out


def test_prove_says_what_it_has_not_read(run: Run, tmp_path: Path) -> None:
    assert run("inspect", "fac.py:make", "-o", "dump")[0] == 0
    shutil.copytree(tmp_path / "dump" / "program_0", tmp_path / "dump" / "program_1")
    code, out, err = run("prove", "dump")
    assert (code, err) == (3, "")
    assert "program_1: not proven: it was not read, for the manifest does not name it" in out
    last = max((tmp_path / "dump" / "program_0").glob("[0-9]*_*.py"))
    last.write_text(last.read_text().replace("stage = 3", "stage = 2"))
    code, out, err = run("prove", "dump")
    assert (code, f"{last.name} line " in err) == (1, True)


@pytest.mark.slow
def test_prove_reads_the_steps_of_a_pipeline(run: Run, tmp_path: Path) -> None:
    asked = ("gpt:2x64", "--mesh", "2x1", "--schedule", "gpipe", "--microbatches", "2", "-s", "8", "-o", "dump")
    assert run("inspect", *asked, "--checkpoint", "auto")[0] == 0  # of the profile's memory
    code, out, err = run("prove", "dump")
    assert (code, err) == (0, "")
    assert "rank_1/program_0: proven, if it receives what is named: " in out
    assert "program_0: the parts of all ranks are the whole step" in out
    code, out, err = run("prove", "dump/rank_0")
    assert (code, err) == (3, "")
    assert "not proven: program_0 is the step of one rank of a pipeline" in out
    path = tmp_path / "dump" / "rank_1" / "program_0" / "step.py"
    path.write_text(re.sub(r"(m1_loss, .*? = region_0\(norm_full, )m1_", r"\1m0_", path.read_text()))
    code, out, err = run("prove", "dump")
    assert (code, "rank_1/program_0: not proven" in out) == (1, True)
    assert re.search(
        r"error: rank_1/program_0/step.py line \d+.*: result 0 of micro-batch 1 is not what was traced", err
    )
    assert re.search(
        r"It has\n.*\btokens of micro-batch 0\b.*\n.*the traced step has\n.*\btokens of micro-batch 1\b", err
    )


@pytest.mark.slow
def test_a_plan_fits_a_narrow_terminal() -> None:
    subject = subject_of("gpt:2x64", batch=1, sequence=16)
    made = zcompile.plan(subject.model, subject.args, stages=[3], prefetches=[1], dtypes=[None])
    for width, kinds in ((80, False), (200, True)):
        console = Console(width=width, file=io.StringIO())
        made.print(console)
        text = console.file.getvalue()
        assert "…" not in text
        assert ("activations" in text.split("caption")[0]) is kinds
        assert "best" in text
        assert "a rank's batch: i64[1, 16], i64[1, 16]" in text


def test_an_inspected_train_step_has_its_updates(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN_STEP)
    code, _, err = run("inspect", "script.py")
    assert (code, err) == (0, "")
    assert "update(" in (tmp_path / "zcompile_dump" / "program_0" / "backward.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "gpt:9b"], "model: gpt:9b is not a known size"),
        (["plan", "gpt:1x8", "--mesh", "8by8"], "mesh: '8by8' is not a mesh of two levels"),
        (["plan", "llama:9b"], "model: llama:9b is not a known size"),
        (["plan", "fac.py:make", "--mesh", "auto", "--html", "plan.html"], "html: is not compared over meshes"),
        (["plan", "fac.py:make", "--mesh", "auto", "-w", "2", "-w", "4"], "world: is given 2 times"),
        (["plan", "fac.py:make", "--batch", "4"], "batch: does not apply here: the factory makes the batch"),
        (["inspect", "fac.py:make", "-s", "4"], "sequence: does not apply here: the factory makes the batch"),
        (["plan", "fac.py:make", "--global-batch", "4"], "global_batch: is for --mesh auto"),
        (["plan", "nothing"], "nothing: does not name a model"),
        (["plan", "fac.py:fails"], "fac.py:fails: raised ValueError: no [bold]luck[/]"),
        (["plan", "fac.py:gives_none"], "fac.py:gives_none: returns NoneType"),
        (["plan", "fac.py:mak"], "fac.py: has no function 'mak'"),
        (["plan", "fac.py:number"], "fac.py: has 'number', which is not a function"),
        (["plan", "absent.py:make"], "absent.py: is not a file"),
        (["plan", "no.such.module:make"], "no.such.module:make: cannot be imported"),
        (["plan", "fac.py:make", "--hardware", "h1000"], "h1000: is not a profile"),
        (["plan", "fac.py:make", "--dtype", "float61"], "dtype: 'float61' is unknown"),
        (["plan", "fac.py:make", "--checkpoint", "often"], "checkpoint: 'often' is not a setting"),
        (["plan", "fac.py:make", "-m", "much"], "memory_limit: 'much' is not a size"),
        (["plan", "fac.py:deep"], "fac.py:deep: raised KeyError: 'width', at fac.py:31"),
        (["plan", "fac.py:alone"], "args: do not fit the forward of Linear: missing a required argument: 'input'"),
        (["plan", "fac.py:misfit"], "Linear: cannot be computed with these arguments: RuntimeError("),
        (["plan", "fac.py::one:"], "fac.py::one:: cannot be imported"),
        (["inspect", "script.py", "--stage", "1"], "stage: does not apply here: the script chooses its own"),
        (["inspect", "script.py", "--mesh", "2x1"], "mesh: does not apply here: the script chooses its own"),
        (["inspect", "gpt:2x64", "--mesh", "2"], "mesh: '2' is not a mesh"),
        (["inspect", "gpt:2x64", "--mesh", "2x1", "--world", "3"], "world: does not apply here: --mesh sets it"),
        (["inspect", "gpt:2x64", "--split", "blocks.1"], "split: does not apply here: it is for a pipeline"),
        (["inspect", "gpt:2x64", "--mesh", "9x1"], "schedule: has 9 stages, and the model has 4 units"),
        (["doctor", "--ranks", "2"], "ranks: is for measuring, which --write asks for"),
        (["inspect", "fac.py:make", "--", "--steps"], "--steps: does not apply here"),
        (["inspect", "fac.py:make", "-o", "fac.py"], "fac.py: cannot be written: File exists"),
        (["inspect", "absent.py"], "absent.py: is not a file"),
        (["inspect", "fac.py"], "fac.py: ended without calling a compiled model"),
        (["doctor", "--write", "/proc/no/where.toml"], "write: '/proc/no/where.toml' cannot be written"),
        (["doctor", "--write", "profile.json"], "write: 'profile.json' is not a .toml file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_paragraph(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 1
    assert err.strip().startswith(f"error: {message}")
    assert "Traceback" not in err
    assert "Fix: " in err


@pytest.mark.parametrize(("given", "meant"), [("gtp:7b", "gpt:7b"), ("LLama:8b", "llama:8b")])
def test_a_misspelt_model_is_told_the_nearest_name(run: Run, given: str, meant: str) -> None:
    _, _, err = run("plan", given)
    assert f"did you mean {meant!r}?" in err


def test_help_speaks_of_options_that_a_command_has() -> None:
    for name, command in typer.main.get_group(command_line.app).commands.items():  # type: ignore[attr-defined]
        known = {option for param in command.params for option in param.opts}
        said = " ".join([command.help or "", *(getattr(param, "help", None) or "" for param in command.params)])
        assert known.issuperset(re.findall(r"--[a-z][a-z-]+", said)), name
        assert name == "plan" or "--mesh auto" not in said


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(SubjectError):
        run("--debug", "plan", "nothing")


def test_versions(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out == f"zcompile {zcompile.__version__}, torch {torch.__version__}\n"


@pytest.mark.slow
def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("zcompile")
    found = subprocess.run(
        [command, "--help"], capture_output=True, text=True, check=True, env={**os.environ, "TERM": ""}
    )
    assert all(
        name in found.stdout for name in ("plan", "inspect", "prove", "doctor", "--version", "--install-completion")
    )


# -- subjects ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_config_of_hugging_face_is_a_model_on_meta(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject = subject_of(str(tmp_path), batch=2, sequence=16)
    assert all(parameter.is_meta for parameter in subject.model.parameters())
    plan = zcompile.plan(subject.model, subject.args, subject.kwargs, stages=[3], prefetches=[1], dtypes=[None])
    assert plan.forecasts
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(small))
    subject = subject_of(str(tmp_path), batch=2, sequence=16)
    assert zcompile.plan(
        subject.model, subject.args, subject.kwargs, stages=[3], prefetches=[1], dtypes=[None]
    ).forecasts
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SubjectError, match="is not the config of a causal language model"):
        subject_of(str(tmp_path), batch=2, sequence=16)


# -- the doctor -------------------------------------------------------------------------------------------------------


def test_no_ranks_measure_nothing() -> None:
    with pytest.raises(zcompile.OptionError, match=r"(?s)ranks: is 0, .* give at least 1"):
        doctor.measured("here", 0)


def test_the_doctor_finds_what_is_there(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert torch.__version__ in out


def test_the_doctor_says_where_something_needed_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    code, out, _ = run("doctor")
    assert code == 1
    assert "missing" in out


def test_the_doctor_names_the_releases_of_torch_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {finding.subject: finding for finding in doctor.examine()}
    assert findings["torch"].found == torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.15.7+cpu")
    findings = {finding.subject: finding for finding in doctor.examine()}
    assert findings["torch"].found.startswith("2.15.7+cpu, on which the tests have not run; they have on 2.11.0, ")
    assert findings["torch"].is_well


def trained_alone(rank: int) -> float:
    compiled = zcompile.compile(make("mlp"), mesh=doctor.mesh_of_this_rank("cpu"), stage=0, backend="eager")
    compiled(*batch("mlp", rank, 0)).backward()
    return next(compiled.parameters()).grad.sum().item()


@pytest.mark.slow
def test_a_rank_of_the_doctor_trains_alone(ranks: Ranks) -> None:
    first, second = ranks.run(2, trained_alone)
    assert first != second


@pytest.mark.nightly
def test_the_doctor_writes_a_profile_that_plans_take(run: Run, tmp_path: Path) -> None:
    code, _, _ = run("doctor", "--write", "here.toml", "--ranks", "2")
    assert code == 0
    hardware = load_profile(str(tmp_path / "here.toml"))
    assert 1e8 < hardware.flops["float32"] < 1e13
    assert hardware.links[0].bandwidth > 1e6
    assert run("plan", "fac.py:make", "--hardware", "here.toml", *LITTLE)[0] == 0


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("128k", 131_072), ("1M", 1_048_576), (7, 7)])
def test_numbers_of_tokens_have_suffixes(text: str | int, tokens: int) -> None:
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["0", "-1", "1.5k", "1m", "k", ""])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"is not a number of tokens, such as 4096, 128k or 1M"):
        tokens_of(text)
