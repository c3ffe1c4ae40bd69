"""What a step costs the host, of which a GPU waits: how many calls of Python's and of torch's own it makes."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch

import zcompile
from tests.models import GPT, batch

STEPS = 3
MOST = {3: (3_200, 680), 0: (3_000, 600)}
"""By the stage: calls of a step of two blocks, and of each further one; a process that has other models makes more."""


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


@pytest.mark.parametrize("stage", MOST)
def test_the_host_makes_few_calls(stage: int) -> None:
    most, each = MOST[stage]
    few = calls(stage, 2)
    assert few <= most
    assert (calls(stage, 4) - few) / 2 <= each
