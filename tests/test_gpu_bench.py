"""The benchmark on a device: its arithmetic, and what it does where something is missing. A slow test starts torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.configurations import Configuration
from benchmarks.common.links import LOOPBACK
from benchmarks.common.ranks import ROOT, TeamError, surroundings
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import Plan, Series, main, measure, ordered, parse, plan_of, steps_of_a_turn
from benchmarks.gpu.counts import counts, covered
from benchmarks.gpu.machine import Card, Machine, refusal
from benchmarks.gpu.protocol import BY_NAME, LARGE, TINY, Built, Inspection, Turn, Warm, chosen, reference, usual
from benchmarks.gpu.report import write
from benchmarks.gpu.results import (
    TARGETS,
    Entry,
    Part,
    Result,
    Target,
    apart,
    fail_other_losses,
    flops,
    name_gaps,
    outcome,
    utilisation,
)

pytestmark = pytest.mark.slow  # of the benchmarks, which users do not run

MIB = 2**20
LOSSES = [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0]


def entry(seconds: float, losses: list[float] = LOSSES, allocated: int = 100 * MIB) -> Entry:
    times = {"0/0": seconds, "0/1": 2 * seconds}
    host = {"0/0": seconds / 2}
    starts = {"0": [list(losses)], "1": [LOSSES[:3]]}
    return Entry(times, times, host, {"0/0": seconds}, starts, warmup=[5.0, seconds], allocated=allocated)


def part(**entries: Entry) -> Part:
    found = {"compile": entry(0.1)} | {name.replace("_", "-"): one for name, one in entries.items()}
    return Part("bf16", 1, steps=3, entries=found)


def result(of: Part, device: str = "NVIDIA H200") -> Result:
    return Result(
        {"torch": "2"}, {"starts": 2, "rounds": 2}, LARGE, of.world, device, 2**37, 400_000_000, {of.precision: of}
    )


def printed(of: Result) -> str:
    text = io.StringIO()
    write(of, text)
    return text.getvalue()


def plan(tmp_path: Path, **changed: Any) -> Plan:
    given: dict[str, Any] = {"only": ("compile", "zcompile-0"), "began": time.monotonic(), "rounds": 2, "starts": 2}
    return Plan(tmp_path, "cpu", 1, TINY, **(given | changed))


class Answering:
    """A team that answers at once, or fails where it is asked for what `fails` says."""

    def __init__(self, name: str, fails: str, there: list[str]) -> None:
        self.name, self.fails, self.there = name, fails, there

    def begin(self, *args: Any) -> None:
        assert self.there == [], "no other configuration is on the device"
        self.there.append(self.name)

    def hear(self) -> list[Any]:
        return self.answer("begin", Built(10, "CPU", 2**30))

    def ask(self, name: str, *args: Any) -> list[Any]:
        if name == "warm_up":
            return self.answer(name, Warm([3.0, 0.5], [4.0, 3.0]))
        if name == "run":
            return self.answer(name, Turn(0.5, None, 0.4, 0.5, [2.0] * args[0], 2**20, 0))
        return self.answer(name, Inspection())

    def answer(self, asked: str, given: Any) -> list[Any]:
        if asked == self.fails:
            raise TeamError("rank 0 died (signal 9)")
        return [given]

    def dismiss(self) -> None:
        assert self.there == [], "one that trains is closed, and waited for"

    def close(self) -> None:
        self.there[:] = []

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measured(monkeypatch: pytest.MonkeyPatch, given: Plan, fails: str = "") -> tuple[Result, list[str]]:
    """What `measure` finds where zcompile-0 fails where it is asked for what `fails` says."""
    said: list[str] = []
    found = Result({}, {"starts": given.starts, "rounds": given.rounds}, given.sizes, given.world)
    there: list[str] = []

    def team(_: Series, configuration: Configuration) -> Answering:
        return Answering(configuration.name, fails if configuration.name == "zcompile-0" else "", there)

    monkeypatch.setattr(Series, "team", team)
    measure("fp32", given, found, said.append)
    return found, said


def test_without_a_device_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(gpu, "machine", lambda: Machine("2.13.0+cpu"))
    assert main([]) == gpu.NO_DEVICE == 2
    assert "no GPU: torch 2.13.0+cpu is built without CUDA" in capsys.readouterr().err
    with pytest.raises(gpu.NoDeviceError, match="--device cpu --tiny"):
        plan_of(parse([]))


def test_what_cannot_be_measured_is_refused_in_a_sentence() -> None:
    idle, busy = Card("A100", 40 * 2**30, 39 * 2**30), Card("A100", 40 * 2**30, 4 * 2**30)
    assert refusal(Machine("2.13.0", "12.8", cards=(idle, idle))) is None
    assert refusal(Machine("2.13.0", "12.8")) == "no GPU: torch 2.13.0 finds no device that it can use"
    assert refusal(Machine("2.13.0", "12.8", error="out of memory")) == (
        "no GPU: torch 2.13.0 cannot use its device: out of memory"
    )
    assert refusal(Machine("2.13.0", "12.8", cards=(idle, busy))) == (
        "GPU 1 (A100) is busy: 36.0 of its 40.0 GiB are taken; end the processes that nvidia-smi lists, "
        "or choose other GPUs by CUDA_VISIBLE_DEVICES"
    )


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "devices", lambda: 1)
    assert plan_of(parse([])).world == 1
    with pytest.raises(gpu.NoDeviceError, match="give --ranks 1"):
        plan_of(parse(["--ranks", "2"]))


def test_sizes_can_be_given_one_by_one() -> None:
    assert plan_of(parse(["--device", "cpu"])).sizes == LARGE
    small = plan_of(parse(["--device", "cpu", "--tiny", "--blocks", "5"])).sizes
    assert (small.blocks, small.width) == (5, TINY.width)


def test_what_is_measured_unless_asked_for_otherwise() -> None:
    assert [name for name in usual(1) if not BY_NAME[name].ours] == ["compile", "eager", "compile-graphs"]
    assert reference(1) in usual(1)
    assert reference(2) in usual(2)
    assert all(BY_NAME[name].communicates for name in usual(2))
    assert not any(c.cast for c in chosen(usual(1), "fp32"))
    assert any(c.cast for c in chosen(usual(1), "bf16"))


def test_targets_name_configurations_that_exist() -> None:
    for target in TARGETS:
        assert BY_NAME[target.subject].ours
        assert target.against
        assert all(name in BY_NAME for name in target.against)


def test_a_target_is_held_against_plain_compile() -> None:
    found = part(zcompile_3=entry(0.101, allocated=120 * MIB))
    time_of, memory = (
        Target("one", "zcompile-3", ("compile",), 1.02),
        Target("one", "zcompile-3", ("compile",), 1, True),
    )
    assert outcome(time_of, found).verdict == "met"
    assert outcome(memory, found).verdict == "NOT MET"
    assert outcome(Target("one", "zcompile-3", ("compile", "ddp"), 1.0), found).verdict == "NOT MET, without ddp"
    assert outcome(time_of, part()).verdict == "not measured"


def test_losses_are_compared_by_means_of_a_few_steps() -> None:
    assert apart([LOSSES], [LOSSES]) == 0
    assert apart([[10.0, 8.9, 8.1, 7.0, 6.0]], [LOSSES]) == pytest.approx(0)
    assert apart([[11.0, *LOSSES[1:]]], [LOSSES], steps=1) == pytest.approx(0.1)


@pytest.mark.parametrize("losses", [[*LOSSES[:6], 4.5], [float("nan"), *LOSSES[1:]], [10.05, *LOSSES[1:]]])
def test_other_losses_are_a_failure_and_take_part_in_no_ratio(losses: list[float]) -> None:
    found = part(zcompile_3=entry(0.05, losses), eager=entry(0.2))
    fail_other_losses(found)
    assert found.healthy("eager")
    assert "other losses" in (found.entries["zcompile-3"].failure or "")
    assert outcome(Target("one", "zcompile-3", ("compile",), 1.02), found).verdict == "not measured"
    assert "zcompile-3 FAILED: other losses" in printed(result(found))


def test_ranks_that_do_not_communicate_share_only_the_first_loss() -> None:
    found = Part("bf16", 2, entries={"ddp": entry(0.1), "eager": entry(0.1, [10.0, *[1.0] * 6])})
    fail_other_losses(found)
    assert found.healthy("eager")


def test_who_is_waited_for() -> None:
    assert entry(0.1).limit == "device"
    assert Entry(host={"0/0": 0.99}, single={"0/0": 1.0}).limit == "host"
    assert Entry().limit == "-"


def test_utilisation_is_that_of_known_devices() -> None:
    assert flops(LARGE) == 6 * (24 * (12 * 1024**2 + 1024 * 1024) + 1024 * 50304)
    found = utilisation(result(part()), "bf16", seconds=0.05)
    assert found == pytest.approx(flops(LARGE) * 8192 / 0.05 / 989e12)
    assert utilisation(result(part(), device="Other"), "bf16", 0.05) is None


def test_a_step_is_counted_in_a_trace() -> None:
    def call(name: str, correlation: int, kind: str = "cuda_runtime") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": 0, "dur": 1, "args": {"correlation": correlation}}

    def ran(name: str, ts: float, dur: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur}

    host = [call("cudaLaunchKernel", 1), call("cuLaunchKernelEx", 2, "cuda_driver"), call("cudaGraphLaunch", 3)]
    host += [call("cuLaunchKernel", 1, "cuda_driver"), call("cudaStreamSynchronize", 4), call("cudaMemcpyAsync", 5)]
    device = [ran("a", 0, 10), ran("b", 5, 10), ran("a", 30, 10), ran("copy", 50, 5, "gpu_memcpy")]
    found = counts([*host, *device, {"ph": "M", "name": "process_name"}])
    assert found
    assert (found.launches, found.graphs, found.kernels, found.copies, found.waits) == (2, 1, 3, 1, 1)
    assert found.busy == pytest.approx(30e-6)
    assert found.longest[0] == ("a", 2, pytest.approx(20e-6))
    assert counts(host) is None
    assert covered([]) == 0


def test_every_configuration_has_its_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = measured(monkeypatch, plan(tmp_path))
    for one in found.parts["fp32"].entries.values():
        assert sorted(one.seconds) == ["0/0", "0/1", "1/0", "1/1"]
        assert [len(start[0]) for start in one.losses.values()] == [2 + 2 * 4] * 2
        assert one.inspection
        assert not one.failure
    assert found.parts["fp32"].steps == 4, "two seconds at half a second each"
    assert not found.parts["fp32"].incomplete
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["fp32"]["entries"]["compile"]["seconds"]


@pytest.mark.parametrize("fails", ["begin", "warm_up", "run"])
def test_what_fails_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str) -> None:
    found, _ = measured(monkeypatch, plan(tmp_path), fails)
    entries = found.parts["fp32"].entries
    assert entries["zcompile-0"].failure == "rank 0 died (signal 9)"
    assert len(entries["compile"].seconds) == 4
    assert found.parts["fp32"].incomplete
    assert "zcompile-0 FAILED: rank 0 died" in printed(found)


def test_the_time_of_a_failure_is_no_pace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(Series, "fits", lambda series, name: not seen.append(set(series.took)))
    measured(monkeypatch, plan(tmp_path, only=("zcompile-0", "zcompile-1")), "run")
    assert seen == [set(), set(), {"zcompile-1"}]


def test_a_look_that_fails_costs_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = measured(monkeypatch, plan(tmp_path), "inspect")
    one = found.parts["fp32"].entries["zcompile-0"]
    assert one.failure is None
    assert one.gap == "rank 0 died (signal 9)"
    assert "zcompile-0: no look into a step: rank 0 died" in printed(found)


def test_when_the_minutes_are_over_nothing_new_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, said = measured(monkeypatch, plan(tmp_path, minutes=0.0))
    assert found.parts["fp32"].left_out == "0 minutes were over: run it with --precisions fp32"
    assert "left out: 0 minutes were over" in said[0]
    assert "left out: 0 minutes were over" in printed(found)


def test_no_configuration_starts_that_would_not_end_in_time(tmp_path: Path) -> None:
    series = Series(part(), plan(tmp_path, minutes=1.0), result(part()), print)
    assert series.fits("compile")
    series.took = {"compile": 300.0}
    assert not series.fits("compile")
    assert not series.fits("zcompile-0"), "it may be as slow as the slowest"
    series.took["zcompile-0"] = 1.0
    assert series.fits("zcompile-0")


def test_a_start_for_which_there_is_no_time_costs_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Series, "fits", lambda series, name: name == "compile" and name not in series.took)
    found, said = measured(monkeypatch, plan(tmp_path, minutes=5.0))
    entries = found.parts["fp32"].entries
    assert sorted(entries["compile"].seconds) == ["0/0", "0/1"]
    assert entries["compile"].failure is None
    assert "compile: no time for start 1" in said
    assert entries["zcompile-0"].failure == "left out: 5 minutes were nearly over"


def test_the_reference_begins_and_later_orders_are_random() -> None:
    there = chosen(usual(1), "bf16")
    assert ordered(there, 0, 0) == there
    assert there[0].name == reference(1)
    assert ordered(there, 0, 1) != ordered(there, 0, 2)
    assert set(ordered(there, 0, 1)) == set(there)


def test_what_had_no_turn_says_so() -> None:
    found = part(zcompile_3=Entry())
    name_gaps(found)
    assert "zcompile-3 FAILED: it had no turn before the end" in printed(result(found))


def test_a_turn_is_as_long_as_was_asked(tmp_path: Path) -> None:
    assert steps_of_a_turn(part(compile=entry(0.05)), plan(tmp_path)) == 10
    assert steps_of_a_turn(part(compile=entry(9.0)), plan(tmp_path)) == 2
    assert steps_of_a_turn(Part("bf16", 1), plan(tmp_path)) == 10


def test_ranks_on_devices_see_them() -> None:
    seen = surroundings({"CUDA_VISIBLE_DEVICES": "3"}, 0, 1, LOOPBACK, device="cuda")
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["WORLD_SIZE"]) == ("3", "1")
    assert surroundings({}, 0, 1, LOOPBACK, device="cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_the_command_starts_without_torch() -> None:
    script = "import sys, benchmarks.gpu.__main__; print({'torch', 'deepspeed', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.nightly
def test_the_whole_way_on_the_processor(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tiny", "--starts", "1", "--rounds", "2", "--steps", "2", "--precisions", "bf16"]
    names = ["--only", "compile", "eager", "zcompile-0", "zcompile-3-cast", "--minutes", "4", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments, *names]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=290)
    entries = json.loads((tmp_path / "results.json").read_text())["parts"]["bf16"]["entries"]
    assert set(entries) == {"compile", "eager", "zcompile-0", "zcompile-3-cast"}
    for name, one in entries.items():
        assert one["failure"] is None, name
        assert one["gap"] is None, name
        assert len(one["seconds"]) == 2
    assert entries["zcompile-0"]["inspection"]["timelines"]["host"]["seconds"] > 0
    made = {path.name for path in (tmp_path / "steps" / "bf16").iterdir()}
    assert {"zcompile-0.timeline.host.json", "zcompile-0.explain.txt", "eager.profile.rank0.json.gz"} <= made
    assert "targets" in (tmp_path / "table.txt").read_text()
