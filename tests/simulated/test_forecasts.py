"""A plan for GPUs traces on the CPU what a GPU is given to compute."""

from __future__ import annotations

import pytest
import torch

from tests.cases import quickly
from tests.ranks import Ranks
from tests.simulated import forecasts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@quickly("kind", ["gpt", "conv", "mlp"], ["gpt"])
def test_a_plan_is_of_the_operations_that_a_gpu_runs(gpus: Ranks, kind: str) -> None:
    planned = forecasts.here(kind, torch.bfloat16)
    (compiled,) = gpus.run(1, forecasts.on_a_gpu, kind, torch.bfloat16)
    assert (dict(planned - compiled), dict(compiled - planned)) == ({}, {})
