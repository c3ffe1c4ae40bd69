"""Predicted memory against counted memory, in a process that counts what it allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.live_bytes import build
from benchmarks.common.ranks import ROOT

SCRIPT = """
import json, sys, torch, zcompile
from benchmarks.common.live_bytes import LiveBytes
from tests.models import GPT
from zcompile.cost.memory import peak_bytes

torch.set_num_threads(1)
found = []
for options in json.loads(sys.argv[1]):
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
    environment = {**os.environ, "LD_PRELOAD": str(build(tmp_path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), backend]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for setting, (predicted, measured) in zip(settings, json.loads(ended.stdout), strict=True):
        assert measured == pytest.approx(predicted, rel=tolerance), setting
