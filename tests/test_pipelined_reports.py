"""What pipelines show of themselves, and that it is what they do: bubbles and memory as predicted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from benchmarks.common.live_bytes import build
from benchmarks.common.ranks import ROOT
from tests.models import GPT
from tests.pipelines import batch_of, loss_of, mesh_of
from tests.ranks import Ranks
from zcompile import Program
from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.simulator import idle_share, simulate_pipeline
from zcompile.cost.timeline import Timeline
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Call
from zcompile.pipelining.step import PipelinedStep
from zcompile.proof.dumps import rank_folders
from zcompile.proof.ranks import check_folders


def shows(rank: int, folder: str) -> dict[str, Any]:
    mesh, model = mesh_of(2, 2), GPT(layers=4, width=32, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, microbatches=4, stage=1, backend="eager")
    assert isinstance(step, PipelinedStep)
    early = ""
    try:
        step.explain()
    except zcompile.StateError as error:
        early = str(error)
    step.prepare(*batch_of("gpt", rank % 2, 0))
    with step.profile():
        for number in range(3):
            step(*batch_of("gpt", rank % 2, number))
    step.report(Path(folder) / "report.html")
    step.dump(Path(folder) / "dump", all_ranks=True)
    timeline = step.timeline
    return {
        "early": early,
        "explain": step.explain(),
        "page": (Path(folder) / "report.html").read_text() if rank == 0 else "",
        "compute": timeline.compute,
        "adds": timeline.compute + timeline.exposed + timeline.optimizer + timeline.overhead + timeline.idle,
        "seconds": timeline.seconds,
        "sent": step.traffic.axes["pp"].to_one,
        "lines": [line.operation for line in timeline.lines],
    }


@pytest.mark.slow
def test_a_pipeline_shows_what_all_ranks_do(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, shows, str(tmp_path))
    idle = re.findall(r"[\d.]+% of the time of all ranks", found[0]["page"])
    assert len(idle) == 1
    for rank, one in enumerate(found):
        assert one["early"].startswith("model: has no program yet")
        assert one["explain"].startswith("2 pipeline stages on 2 ranks, 4 micro-batches\nstage 1, world 2")
        assert "│ 0    │ 0      │ tokens to blocks.1 │" in one["explain"]
        assert one["compute"] > 0
        assert one["adds"] == pytest.approx(one["seconds"])
        # Three steps, each of four micro-batches of 2 rows of 16 tokens, 32 wide, forward or backward.
        assert one["sent"] == 3 * 4 * (2 * 16 * 32) * 4
        assert "send" in one["lines"]
        assert "recv" in one["lines"]
        assert (rank == 0) is ("all ranks of the pipeline" in one["page"])
        assert re.findall(r"[\d.]+% of the time of all ranks", one["explain"]) == idle
    page = found[0]["page"]
    assert page.count('class="lane-name" title="rank ') == 2
    assert "1B3 blocks.2" in page
    assert "idle, in bubbles and waits" in page
    check_folders(rank_folders(tmp_path / "dump"))
    assert (tmp_path / "dump" / "rank_3" / "program_0" / "step.py").exists()


# -- bubbles ----------------------------------------------------------------------------------------------------------

FORWARD, GRADIENT = 0.012, 0.012
"""Seconds that a layer sleeps in its forward, and in each half of its backward: so that two cores are enough."""


@torch.library.custom_op("zcompile_tests::sleepy", mutates_args=())
def sleepy(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x * weight


@sleepy.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    return x * weight


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    return sleepy(grad, weight, GRADIENT), sleepy(grad, x, GRADIENT).sum(0), None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


sleepy.register_autograd(_backward, setup_context=_save)


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = sleepy(x, self.weight, FORWARD)
        return result


def asleep(program: Program, node: fx.Node, hardware: Hardware) -> float:
    """What a region sleeps; messages arrive at once."""
    if not isinstance(data(node).op, Call):
        return 0.0
    region = program.regions[op_of(node, Call).region]
    called = [one for one in region.graph.nodes if one.op == "call_function" and "sleepy" in str(one.target)]
    return sum(float(one.args[2]) for one in called)  # type: ignore[arg-type]


def sleeping(rank: int, schedule: str, ranks: int, microbatches: int) -> tuple[list[float], list[str]]:
    """Seconds of some steps, and those of them that this rank was asleep; the programs of all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Sleepy() for _ in range(8)))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).mean()
        return loss

    made = {"schedule": schedule, "microbatches": microbatches, "stage": 0, "backend": "eager"}
    step = zcompile.train_step(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, units=["*"], **made
    )
    assert isinstance(step, PipelinedStep)
    found = []
    for _ in range(4):
        step(torch.ones(microbatches, 8))
        timeline: Timeline = step.timeline
        own = sum(line.seconds for line in timeline.lines if line.operation.startswith("region"))
        found.append((timeline.seconds, own))
    best = min(found[1:])
    return list(best), list(step._shown().shown.texts)


def measured_and_predicted(ranks: Ranks, schedule: str, places: int = 4, microbatches: int = 8) -> tuple[float, float]:
    """The share of idle time."""
    found = ranks.run(places, sleeping, schedule, places, microbatches)
    step = max(seconds for (seconds, _), _ in found)
    measured = 1 - sum(own for (_, own), _ in found) / (step * places)
    programs = [zcompile.parse(text) for text in found[0][1]]
    return measured, idle_share(simulate_pipeline(programs, CPU, asleep))


SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"]


@pytest.mark.nightly  # it compares seconds, which a busy machine changes
def test_bubbles_are_as_the_simulator_foretells_and_in_the_known_order(ranks: Ranks) -> None:
    shares = {schedule: measured_and_predicted(ranks, schedule) for schedule in SCHEDULES}
    for schedule, (measured, predicted) in shares.items():
        assert abs(measured - predicted) < 0.05, (schedule, shares)
    order = sorted(SCHEDULES, key=lambda schedule: shares[schedule][0])
    assert set(order[-2:]) == {"gpipe", "1f1b"}
    assert order[0] == "interleavedzerobubble"


# -- memory -----------------------------------------------------------------------------------------------------------

COUNTED = """
import json, os, sys, torch, zcompile
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from benchmarks.common.live_bytes import LiveBytes
from tests.models import GPT
from zcompile.cost.memory import peak_bytes

torch.set_num_threads(1)
rank, world, schedule, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
torch.manual_seed(0)
model = GPT(layers=24, width=64, heads=2, context=128, vocabulary=64)

def loss_fn(model, tokens, targets):
    return model(tokens, targets)

step = zcompile.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, schedule=schedule,
                           microbatches=8, stage=0, backend="eager", split=["blocks.6", "blocks.12", "blocks.18"])
tokens = torch.randint(0, 64, (64, 129))
inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
for _ in range(3):
    dist.barrier()
    counter = LiveBytes()
    before, _ = counter.live(), counter.peak()
    step(*inputs)
    measured = counter.peak() - before
print(json.dumps([peak_bytes(step.program), measured, step.table.in_flight(rank)]))
"""


def counted(tmp_path: Path, schedule: str, world: int = 4) -> list[list[int]]:
    """Of each rank the predicted and the counted peak, and the micro-batches in flight."""
    environment = {**os.environ, "LD_PRELOAD": str(build(tmp_path)), "OMP_NUM_THREADS": "1"}
    command: Callable[[int], list[str]] = lambda rank: [  # noqa: E731
        sys.executable, "-c", COUNTED, str(rank), str(world), schedule, str(tmp_path / f"store {schedule}")
    ]  # fmt: skip
    begun = [
        subprocess.Popen(command(rank), env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    ended = [process.communicate(timeout=240) for process in begun]
    assert all(process.returncode == 0 for process in begun), ended
    return [json.loads(out) for out, _ in ended]


@pytest.mark.nightly
def test_the_predicted_peak_of_each_rank_is_what_it_takes(tmp_path: Path) -> None:
    found = counted(tmp_path, "1f1b")
    assert [in_flight for _, _, in_flight in found] == [4, 3, 2, 1]
    for rank, (predicted, measured, _) in enumerate(found):
        assert measured == pytest.approx(predicted, rel=0.02), (rank, found)
    assert found[0][1] > 2 * found[-1][1]


def alone_on_its_stage(rank: int, folder: str) -> tuple[str, str]:
    mesh, model = mesh_of(2, 1), GPT(layers=2, width=32, heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, microbatches=4, stage=1, backend="eager")
    step.prepare(*batch_of("gpt", 0, 0))  # type: ignore[union-attr]
    page = step.report(Path(folder) / "report.html")  # type: ignore[union-attr]
    return step.explain(), page.read_text() if rank == 0 else ""  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_goes_along_a_pipeline_is_sent(ranks: Ranks, tmp_path: Path) -> None:
    (explained, page), (other, _) = ranks.run(2, alone_on_its_stage, str(tmp_path))
    assert explained == other
    sent = "16 KiB"  # four micro-batches of 2 rows of 16 tokens, 32 wide
    assert f"│ {sent}" in explained
    assert f"each rank sends {sent} to other pipeline stages" in page
    assert "a world of one sends nothing" not in page
    (step,) = re.findall(r"for cpu: ([\d.]+) ms a step", explained) or re.findall(r": ([\d.]+) ms a step", explained)
    assert any(abs(float(ms) / float(step) - 1) < 0.01 for ms in re.findall(r"([\d.]+) ms", page))
