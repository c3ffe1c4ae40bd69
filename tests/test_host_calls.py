"""What a step costs the host, of which a GPU waits: how many calls of Python's and of torch's own it makes."""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
import sys

import pytest
import torch

import zcompile
from benchmarks.common.ranks import ROOT
from tests.models import GPT, batch

STEPS = 3
MOST = {3: (2_700, 620), 0: (2_500, 530)}
"""By the stage: calls of a step of two blocks, and of each further one."""


def calls(stage: int, layers: int) -> float:
    """Of one step of a loop, once all is compiled and the state of the optimizer made."""
    torch.manual_seed(0)
    compiled = zcompile.compile(GPT(layers=layers, width=16, heads=2), stage=stage, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3, fused=True)
    given, profile = batch("gpt", 0, 0), cProfile.Profile()

    def train() -> None:
        for _ in range(STEPS):
            compiled(*given).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    profile.runcall(train)
    total: float = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total / STEPS


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[float, float]]:
    """By the stage: calls with two blocks and with four, in a process of their own: other models add to them."""
    ended = subprocess.run([sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, tuple[float, float]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("stage", MOST)
def test_the_host_makes_few_calls(counted: dict[str, tuple[float, float]], stage: int) -> None:
    few, more = counted[str(stage)]
    most, each = MOST[stage]
    assert few <= most
    assert (more - few) / 2 <= each


if __name__ == "__main__":
    print(json.dumps({stage: (calls(stage, 2), calls(stage, 4)) for stage in MOST}))
