"""Every way to train on a GPU: nothing is left to its timing, and the host waits no more than it must."""

from __future__ import annotations

import pytest

from tests.cases import quickly
from tests.ranks import Ranks
from tests.simulated import scenarios
from tests.simulated.scenarios import SCENARIOS

QUICK = (
    "stage 1, accumulating",
    "stage 3",
    "stage 3, activations, arenas",
    "stage 3, graph breaks",
    "stage 3, parameters, arenas",
    "stage 3, side stream",
    "train step, stage 3, alternating",
    "train step, stage 3, optimizer",
)
WAITS = {
    "stage 3, activations": 30,
    "stage 3, activations, checkpoint": 3,
    "stage 3, activations, arenas": 3,
    "stage 2, parameters": 5,
    "stage 3, parameters": 5,
    "stage 3, parameters, arenas": 5,
    "stage 3, parameters, bf16, arenas": 5,
    "stage 1, accumulating": 11,
    "stage 2, evaluating": 2,
    "stage 3, side stream, arenas": 30,
    "stage 3, graph breaks": 2,
    "stage 1, graph breaks": 3,
    "train step, stage 2": 1,
    "train step, stage 3": 1,
    "train step, stage 3, bf16": 1,
    "train step, stage 3, optimizer": 3,
    "train step, stage 3, parameters": 11,
    "train step, stage 3, pieces, arenas": 1,
    "train step, stage 1, alternating": 1,
    "train step, stage 3, alternating": 1,
}
"""How often the host waits for the device in one step, where it does."""


@pytest.mark.filterwarnings("ignore")
@quickly("name", list(SCENARIOS), QUICK)
def test_everything_is_ordered(gpus: Ranks, name: str) -> None:
    (report,) = gpus.run(4, scenarios.run, name)
    assert report.findings == []
    assert sum(report.waits.values()) == WAITS.get(name, 0), report.waits
