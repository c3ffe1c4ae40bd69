"""`make gpu` where there is no GPU: what runs, within which limits, and what the report says of it."""

from __future__ import annotations

import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.configurations import Sizes
from benchmarks.common.models import make_model
from benchmarks.common.ranks import ROOT
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.__main__ import parse
from benchmarks.gpu.check import WAITS, Ended, Part, is_marked, main, parts_of, report, run, run_all
from benchmarks.gpu.machine import Card, Machine
from benchmarks.gpu.protocol import LARGE

pytestmark = pytest.mark.slow  # of the benchmarks, which users do not run

CARD = Card("A100", 40 * 2**30, 39 * 2**30)
ONE = Machine("2.13.0", "12.8", "570.1", "2.27.5", (CARD,))
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"


def part(script: str, share: float = 1.0, skipped: str = "") -> Part:
    return Part("one", "One part", lambda _: [sys.executable, "-c", script], share, skipped)


def parameters(command: list[str]) -> int:
    """Of the model that a command of the benchmark measures."""
    given = parse(command[3:])
    sizes = {field.name: value for field in fields(Sizes) if (value := getattr(given, field.name)) is not None}
    with torch.device("meta"):
        return sum(one.numel() for one in make_model(replace(LARGE, **sizes), 0).parameters())


def outcomes(found: list[Ended]) -> list[str]:
    return [one.outcome for one in found]


def test_a_part_passes_or_fails_by_its_exit_status(tmp_path: Path) -> None:
    passed = run(part("import sys; print('a table'); print('in the making', file=sys.stderr)"), 60, tmp_path)
    assert (passed.outcome, passed.shown) == ("passed", "a table")
    failed = run(part("print('a table'); raise SystemExit('the reason')"), 60, tmp_path)
    assert (failed.outcome, failed.reason, failed.shown) == ("FAILED", "exit status 1", "a table\nthe reason")


def test_a_part_that_outlives_its_limit_is_stopped_and_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "import time\nprint('begun', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('written')"
    script = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # as `main` has it\n{script}"
    found = run(part(script), 5, tmp_path)
    assert (found.outcome, found.reason) == ("GAP", "stopped: it did not end within 5 s")
    assert found.shown == "begun\nwritten"
    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    began = time.monotonic()
    assert run(part(STUBBORN), 2, tmp_path).outcome == "GAP"
    assert time.monotonic() - began < 30, "what does not stop is killed"


def test_what_follows_a_failure_still_runs(tmp_path: Path) -> None:
    parts = [part("raise SystemExit(3)"), part("", skipped="there is one GPU"), part("print('here')")]
    said: list[str] = []
    found = run_all(parts, time.monotonic() + 120, tmp_path, said.append)
    assert outcomes(found) == ["FAILED", "skipped", "passed"]
    assert "One part: skipped after 0 s (there is one GPU)" in said


def test_without_time_nothing_begins(tmp_path: Path) -> None:
    (found,) = run_all([part("print('here')")], time.monotonic() + gpu_check.GRACE, tmp_path, print)
    assert (found.outcome, found.reason) == ("GAP", "no time was left for it")


def test_an_interrupt_leaves_the_rest_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "wait", lambda process, seconds: ("GAP", gpu_check.STOPPED))
    found = run_all([part("import time; time.sleep(60)"), part("")], time.monotonic() + 120, tmp_path, print)
    assert [one.reason for one in found] == ["interrupted", "the run was interrupted before it"]


def test_several_ranks_are_for_several_gpus(tmp_path: Path) -> None:
    *_, alone, small, together = parts_of(ONE, tmp_path)
    assert not alone.skipped
    assert [round(parameters(one.command(120.0)) / 1e6) for one in (alone, small)] == [406, 124]
    assert together.skipped == "there is one GPU: several ranks over NCCL want one each"
    two = parts_of(Machine("2.13.0", "12.8", cards=(CARD, CARD)), tmp_path)
    assert not any(one.skipped for one in two)
    command = two[-1].command(120.0)
    assert command[command.index("--ranks") + 1] == "2"
    assert command[command.index("--minutes") + 1] == "1.75"


def test_every_test_that_wants_a_gpu_runs_once(tmp_path: Path) -> None:
    tests, waits, ranks, *_ = (one.command(60.0) for one in parts_of(ONE, tmp_path))
    assert {"tests/test_gpu.py", "tests/test_behaviour.py"} <= set(tests)
    assert ranks[-1] == gpu_check.RANKS not in tests
    assert is_marked(ROOT / gpu_check.RANKS)
    assert tests[tests.index("--deselect") + 1] == WAITS == waits[-1]
    file, _, name = WAITS.partition("::")
    assert is_marked(ROOT / file)
    assert f"def {name}(" in (ROOT / file).read_text()
    assert not is_marked(Path(__file__))


def test_the_report_names_the_machine_and_every_part() -> None:
    ended = [
        Ended(part(""), "FAILED", "exit status 1", 12.4, "a table"),
        Ended(part(""), "skipped", "there is one GPU"),
    ]
    lines = report(ONE, ended).splitlines()
    for line in (
        "| GPUs | A100, 40.0 GiB, 39.0 free |",
        "| torch | 2.13.0 |",
        "| CUDA | 12.8 |",
        "| driver | 570.1 |",
        "| NCCL | 2.27.5 |",
        "| One part | FAILED | 12 | exit status 1 |",
        "| One part | skipped | 0 | there is one GPU |",
        "## One part: FAILED",
        "a table",
    ):
        assert line in lines


@pytest.mark.parametrize(("script", "status"), [("print('a table')", 0), ("raise SystemExit(1)", 1)])
def test_the_command_writes_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, status: int) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda: ONE)
    monkeypatch.setattr(gpu_check, "parts_of", lambda found, output: (part(script), part("", skipped="one GPU")))
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    assert main(["--output", str(tmp_path)]) == status
    assert "## One part" in (tmp_path / "report.md").read_text() or status


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (Machine("2.13.0+cpu"), "no GPU: torch 2.13.0+cpu is built without CUDA"),
        (Machine("2.13.0", "12.8", cards=(Card("A100", 40 * 2**30, 2**30),)), "GPU 0 (A100) is busy: 39.0 of its 40.0"),
    ],
)
def test_without_a_free_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    found: Machine,
    sentence: str,
) -> None:
    monkeypatch.setattr(gpu_check, "machine", lambda: found)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    assert main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(sentence)
    assert not (tmp_path / "report.md").exists()
