"""Predicted memory against counted memory, in a process that counts what it allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.live_bytes import build
from benchmarks.common.ranks import ROOT
from tests.cases import quickly

SCRIPT = """
import json, os, sys, torch, zcompile
from torch.distributed.device_mesh import init_device_mesh
from benchmarks.common.live_bytes import LiveBytes
from tests.models import GPT
from zcompile.cost.memory import peak_bytes

torch.set_num_threads(1)
found = []
rank, ranks, mesh = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
if ranks > 1:
    store = f"file://{os.environ['STORE']}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "sp"))
for options in json.loads(sys.argv[1]):
    options |= {"mesh": mesh, "sequence": "ulysses"} if mesh else {}
    torch.manual_seed(0)
    words = 8192 if "chunk" in options else 512
    model = GPT(layers=3, width=128, context=128, vocabulary=words)
    compiled = zcompile.compile(model, backend=sys.argv[2], **options)
    tokens = torch.randint(0, words, (8, 129))
    inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(3):
        compiled.zero_grad()
        counter = LiveBytes()
        before, _ = counter.live(), counter.peak()
        compiled(*inputs).backward()
        measured = counter.peak() - before
    found.append((peak_bytes(compiled._engine.runtime.steps[0].program), measured))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tolerance", "settings"),
    [
        ("eager", 0.02, [{}, {"checkpoint": 0.7}, {"chunk": 64, "checkpoint": "unit"}]),
        pytest.param("eager", 0.02, [{"checkpoint": "unit"}, {"chunk": 200}], marks=pytest.mark.nightly),
        pytest.param(  # fusions are foretold
            *("inductor", 0.08, [{}, {"checkpoint": "unit"}, {"checkpoint": 0.7}, {"chunk": 64}]),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_predicted_peak_is_what_a_step_takes(
    tmp_path: Path, backend: str, tolerance: float, settings: list[Any]
) -> None:
    for setting, (predicted, measured) in zip(settings, counted(tmp_path, settings, backend), strict=True):
        assert measured == pytest.approx(predicted, rel=tolerance), setting


def counted(folder: Path, settings: Sequence[Any], backend: str, ranks: int = 1) -> list[tuple[int, int]]:
    """The predicted and the counted peak of steps with `settings`, on the first of ranks that divide tokens."""
    environment = {**os.environ, "LD_PRELOAD": str(build(folder)), "OMP_NUM_THREADS": "1", "STORE": str(folder)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), backend]
    pipes: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    started = [subprocess.Popen(command, env={**environment, **place}, **pipes) for place in places]
    said = [process.communicate() for process in started]
    assert not any(process.returncode for process in started), said
    found: list[tuple[int, int]] = json.loads(said[0][0])
    return found


@quickly("ranks, share", [(2, 0.6), (4, 0.35)], [], slow=[(2, 0.6)])
def test_ranks_that_divide_tokens_hold_their_parts_of_activations(tmp_path: Path, ranks: int, share: float) -> None:
    """And of gradients; what a unit gathers is the same for any number of ranks."""
    ((_, whole),) = counted(tmp_path, [{"stage": 3}], "eager")
    ((predicted, measured),) = counted(tmp_path, [{"stage": 3}], "eager", ranks)
    assert measured == pytest.approx(predicted, rel=0.02)
    assert measured < share * whole
