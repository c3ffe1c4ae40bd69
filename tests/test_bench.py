"""The benchmark's arithmetic and its behaviour where something is missing; no test starts torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.configurations import BY_NAME, CONFIGURATIONS, REFERENCES, groups, peers
from benchmarks.common.figures import Spread, ratio, spread
from benchmarks.common.links import LINKS, LOOPBACK, Link, LinkError, opened
from benchmarks.common.protocol import Ready, Turn
from benchmarks.common.ranks import ROOT, Team, TeamError
from benchmarks.speed import __main__ as bench
from benchmarks.speed import rounds
from benchmarks.speed.__main__ import measure_link, parse
from benchmarks.speed.floor import floors, lowest, traffic
from benchmarks.speed.nodes import NodesResult, Trained
from benchmarks.speed.report import write
from benchmarks.speed.results import Entry, Line, LinkResult, Result, fail_other_losses
from benchmarks.speed.rounds import Plan
from benchmarks.speed.targets import TARGETS, Target, outcome

pytestmark = pytest.mark.slow  # of the benchmarks, which users do not run

SECONDS = {"compute-compiled": 2.0, "ddp": 3.0, "zcompile-3": 2.4, "fsdp2-3": 4.0, "fsdp2-3-compiled": 3.2}


def entry(seconds: float, losses: tuple[float, ...] = (9.0, 8.0, 7.0), peak: int = 2**30) -> Entry:
    times = {"0/0": seconds, "0/1": 2 * seconds}
    return Entry(times, losses={"0": [list(losses), list(losses)]}, peak=peak)


def link(**entries: Entry) -> LinkResult:
    named = {name: entry(seconds) for name, seconds in SECONDS.items()}
    named |= {name.replace("_", "-"): one for name, one in entries.items()}
    return LinkResult(entries=named, line=Line({"0/0": 1e8, "0/1": 1e8}, {"0/0": 1e-9, "0/1": 1e-9}))


def result(**found: LinkResult) -> Result:
    return Result(
        {}, {"starts": 1, "rounds": 2, "steps": 1}, cores=2, parameters=100_000_000, links=found or {"loopback": link()}
    )


def printed(of: Result) -> str:
    text = io.StringIO()
    write(of, text)
    return text.getvalue()


def test_a_spread_is_the_median_with_the_least_and_the_largest() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert str(spread([3.0, 1.0, 2.0])) == "2.00 (1.00 to 3.00)"
    assert spread([]) is None


def test_nodes_are_told_by_the_slowest_rank_and_the_bytes_of_one_node() -> None:
    def trained(seconds: float, outside: int | None) -> list[Trained]:
        return [Trained([seconds / (1 + rank)] * 3, 4_000_000, outside, 7.5) for rank in range(4)]

    rounds = {
        "fsdp2 hsdp": [trained(2.0, None)] * 3,
        "zcompile hpz": [trained(1.0, 1_000_000)] * 2 + [trained(1.5, 1_000_000)],
    }
    found = result()
    found.nodes["nodes-1gbit"] = NodesResult(steps=2, rounds=rounds, foretold={"zcompile hpz": 1.25})
    line = next(line for line in printed(found).splitlines() if "zcompile hpz" in line)
    assert line.replace("│", " ").split()[2:] == [
        "1.000",
        "0.50",
        "0.50",
        "to",
        "0.75",
        "1.250",
        "2.00",
        "1.00",
        "7.5000",
    ]
    found.nodes["nodes-1gbit"] = NodesResult(left_out="no tc")
    assert "nodes-1gbit is left out: no tc" in printed(found)


def test_a_ratio_is_taken_within_each_round() -> None:
    slow_machine = ({"0/0": 1.0, "0/1": 10.0}, {"0/0": 2.0, "0/1": 20.0, "0/2": 1.0})
    assert ratio(*slow_machine) == Spread(0.5, 0.5, 0.5)
    assert ratio({"0/0": 1.0}, {"1/0": 1.0}) is None


def test_a_step_takes_as_long_as_its_slower_rank() -> None:
    found = Entry()
    ready = [Ready(Turn([9.0], [8.0 + rank], 1.0, 5), 10) for rank in range(2)]
    found.began(0, ready)
    found.took("0/0", [Turn([1.0, 2.0], [7.0, 6.0], 4.0, 30), Turn([2.0, 2.0], [7.5, 6.5], 2.0, 20)])
    assert found.seconds == {"0/0": 2.0}
    assert found.cpu == {"0/0": 3.0}
    assert found.losses == {"0": [[8.0, 7.0, 6.0], [9.0, 7.5, 6.5]]}
    assert (found.peak_start, found.peak) == (5, 30)


def test_bytes_that_any_step_must_send() -> None:
    assert traffic(100) == 2 * 100 * 4 // 2
    assert traffic(100, ranks=4) == 2 * 100 * 4 * 3 // 4


def test_a_failure_costs_the_turns_of_its_own_group() -> None:
    found = entry(2.0)
    found.failure = "rank 0 died"
    found.settle(group=1)
    assert (found.failure, len(found.seconds), found.gaps) == (None, 2, ["rank 0 died"])
    found.failure = "no room"
    found.began(1, [Ready(Turn([9.0], [8.0], 1.0, 5), 10)] * 2)
    assert (found.failure, found.gaps) == (None, ["rank 0 died", "no room"])
    found.failure = "rank 0 died"
    found.settle(group=0)
    assert (found.failure, found.seconds) == ("rank 0 died", {})


@pytest.mark.parametrize(
    ("wire", "moving", "cores", "floor"),
    [
        (9.0, 0.5, 2, 9.0),  # a slow line decides
        (1.0, 0.5, 2, 2.25),  # compute and moving bytes share two cores
        (1.0, 0.5, 8, 2.0),  # with cores to spare, moving costs compute nothing
    ],
)
def test_the_floor_is_the_line_or_the_processor(wire: float, moving: float, cores: int, floor: float) -> None:
    assert lowest(wire, compute=2.0, moving=moving, cores=cores) == floor


def test_the_floor_is_that_of_each_round() -> None:
    found = link()
    assert floors(found, 100_000_000, cores=2) == {"0/0": 4.0, "0/1": 4.2}  # the line, then compute and moving
    del found.entries["compute-compiled"]
    assert floors(found, 100_000_000, cores=2) == {}


def test_a_target_is_held_against_the_strongest_peer() -> None:
    found = outcome(Target("loopback", "zcompile-3", ("fsdp2-3", "fsdp2-3-compiled"), 0.8), result())
    assert (found.against, found.verdict) == ("fsdp2-3-compiled", "met")
    assert found.found
    assert found.found.median == pytest.approx(0.75)
    assert outcome(Target("loopback", "zcompile-3", ("ddp",), 0.7), result()).verdict == "NOT MET"


def test_a_target_says_which_peer_it_was_measured_without() -> None:
    found = outcome(Target("loopback", "zcompile-3", ("fsdp2-3", "deepspeed-3"), 0.8), result())
    assert found.verdict == "met, without deepspeed-3"
    assert outcome(Target("loopback", "zcompile-3", ("deepspeed-3",), 0.8), result()).verdict == "not measured"
    assert outcome(Target("1gbit", "zcompile-3", ("ddp",), 0.8), result()).verdict == "not measured"


def test_targets_compare_memory_and_the_floor_too() -> None:
    found = result(loopback=link(zcompile_3=entry(2.4, peak=2**29)))
    assert outcome(Target("loopback", "zcompile-3", ("ddp",), 1.0, memory=True), found).found == Spread(0.5, 0.5, 0.5)
    assert outcome(Target("loopback", "zcompile-3", ("floor",), 1.08), found).found is not None


def test_targets_name_configurations_and_links_that_exist() -> None:
    for target in TARGETS:
        assert target.where in LINKS
        assert target.subject in BY_NAME
        assert all(name == "floor" or name in BY_NAME for name in target.against)
    assert all(peers(stage) for stage in range(4))


def test_other_losses_are_a_failure_and_take_part_in_no_ratio() -> None:
    found = link(zcompile_3=entry(0.1, losses=(9.0, 8.0, 7.1)), fsdp2_3=entry(0.1, losses=(9.0, 8.001, 7.0)))
    fail_other_losses(found)
    assert found.entries["zcompile-3"].failure == "other losses: 7.1 where 7 is right, step 2, rank 0"
    assert found.healthy("fsdp2-3"), "rounding is no failure"
    assert outcome(Target("loopback", "zcompile-3", ("ddp",), 1.0), result(loopback=found)).verdict == "not measured"
    assert "FAILED: other losses: 7.1 where 7 is right" in printed(result(loopback=found))


@pytest.mark.parametrize("group", ["0", "1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_losses_of_every_start_and_every_rank_count(group: str, rank: int) -> None:
    wrong = entry(2.4)
    wrong.losses["1"] = [list(losses) for losses in wrong.losses["0"]]
    wrong.losses[group][rank][1] = 8.1
    found = link(zcompile_3=wrong)
    fail_other_losses(found)
    assert wrong.failure == f"other losses: 8.1 where 8 is right, step 1, rank {rank}"


def test_what_was_measured_is_judged_and_ours_decide_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(link_measured: object, options: object, plan: object, found: Result, say: object) -> None:
        found.links["loopback"] = link(zcompile_3=entry(2.4, losses=(9.0, 8.0, 7.5)))

    monkeypatch.setattr(bench, "measure_link", measured)
    assert bench.main(["--links", "loopback", "--output", str(tmp_path)]) == 1
    assert "FAILED: other losses: 7.5 where 7 is right" in (tmp_path / "table.txt").read_text()
    assert "FAILED" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_a_failure() -> None:
    found = link(zcompile_3=entry(2.4, losses=(9.0, float("nan"), 7.0)))
    fail_other_losses(found)
    assert found.healthy("zcompile-3") is None


def test_ranks_that_do_not_communicate_share_only_the_first_loss() -> None:
    found = link(compute_compiled=entry(2.0, losses=(9.0, 1.0, 1.0)), compute=entry(2.0, losses=(8.0, 8.0, 7.0)))
    fail_other_losses(found)
    assert found.healthy("compute-compiled")
    assert found.healthy("compute") is None


def test_losses_are_compared_without_the_baseline_too() -> None:
    found = link(ddp=Entry(failure="died"), zcompile_3=entry(2.4, losses=(9.0, 8.0, 6.0)))
    fail_other_losses(found)
    assert found.entries["zcompile-3"].failure, "fsdp2-3 comes first and has other losses"


def test_the_table_names_what_failed_and_what_was_left_out() -> None:
    found = {"loopback": link(fsdp2_3=Entry(failure="rank 0 died (signal 9)")), "1gbit": LinkResult(left_out="no tc")}
    text = printed(result(**found))
    assert "FAILED: rank 0 died (signal 9)" in text
    assert "1gbit is left out: no tc" in text
    found["loopback"].entries["fsdp2-3"] = Entry({"0/1": 6.0}, peak=9, gaps=["rank 1 died"])
    assert "fsdp2-3 has fewer rounds: rank 1 died" in printed(result(**found))


def test_results_are_written_as_json(tmp_path: Path) -> None:
    result().write(tmp_path / "results.json")
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["links"]["loopback"]["entries"]["ddp"]["seconds"] == {"0/0": 3.0, "0/1": 6.0}


def test_each_group_holds_the_references_and_whole_stages() -> None:
    names = [configuration.name for configuration in CONFIGURATIONS]
    assert groups(names, largest=len(names)) == [CONFIGURATIONS]
    split = groups(names, largest=8)
    assert len(split) == 3
    for group in split:
        assert [c.name for c in group[:2]] == list(REFERENCES)
    rest = [c.name for group in split for c in group[2:]]
    assert sorted(rest) == sorted(set(names) - set(REFERENCES))


def test_references_alone_are_a_group_however_few_fit() -> None:
    assert [[c.name for c in group] for group in groups(["ddp", "compute-compiled"], 1)] == [
        ["compute-compiled", "ddp"]
    ]


def test_a_machine_without_the_tools_leaves_the_link_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, said = result(), []
    options = parse(["--output", str(tmp_path)])
    measure_link(LINKS["1gbit"], options, Plan(tmp_path), found, said.append)
    assert found.links["1gbit"].left_out == "ip and tc not found: install iproute2"
    assert said == ["1gbit is left out: ip and tc not found: install iproute2"]


def test_what_was_set_up_is_taken_down_when_the_rest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for tool, does in {"ip": f'echo "$@" >> {log}', "tc": "echo Operation not permitted >&2; exit 2"}.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(LinkError, match=r"Operation not permitted.*run as root"), opened(Link("slow", "1mbit")):
        pass
    commands = log.read_text().splitlines()
    made = [line.split()[-1] for line in commands if line.startswith("netns add")]
    assert [line.split()[-1] for line in commands if line.startswith("netns delete")] == made
    assert len(made) == 2


def test_a_process_that_dies_is_an_error_with_its_status(tmp_path: Path) -> None:
    with Team("benchmarks.absent:serve", (LOOPBACK, LOOPBACK), tmp_path / "log", timeout=60) as team:
        with pytest.raises(TeamError, match=r"died \(exit status 1\)"):
            team.hear()
        assert all(process.returncode is not None for process in team.processes)
    assert "benchmarks.absent" in (tmp_path / "log.rank0.log").read_text()


def test_a_process_that_hangs_is_an_error_and_is_ended(tmp_path: Path) -> None:
    both = {"RANK": "1"}  # both call, nobody listens
    with Team("benchmarks.speed.line:Line", (LOOPBACK, LOOPBACK), tmp_path / "log", 0.5, both) as team:
        team.begin(LOOPBACK.address, tmp_path / "store")
        with pytest.raises(TeamError, match="no answer within"):
            team.hear()
        assert all(process.returncode is not None for process in team.processes)


def test_the_line_is_measured_over_loopback(tmp_path: Path) -> None:
    found = LinkResult()
    with (
        rounds.placed("loopback", 0, (LOOPBACK, LOOPBACK)) as place,
        rounds.line_between(place, Plan(tmp_path, timeout=60)) as line,
    ):
        rounds.exchange("0/0", line, found.line, 2**22, print)
        line.close()
        rounds.exchange("0/1", line, found.line, 2**22, print)
    assert found.line.rate["0/0"] > 0
    assert "0/1" not in found.line.rate
    assert found.line.failure


def test_the_command_refuses_what_cannot_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--rounds", "0"], "give 1 or more"),
        (["--together", "-1"], "give 1 or more"),
        (["--timeout", "0"], "give 1 or more"),
        (["--only", "fsdp3"], "invalid choice"),
        (["--output", __file__], "cannot be written to"),
        (["--output", "/proc/nowhere"], "cannot be written to"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert message in capsys.readouterr().err


def test_the_command_starts_without_torch_and_the_peers() -> None:
    script = "import sys, benchmarks.speed.__main__; print({'torch', 'deepspeed', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
