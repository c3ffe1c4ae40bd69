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
    # Copies to the device have to end before the host may write to shards, those of gradients before it steps.
    "stage 2, parameters": 2,
    "stage 3, parameters": 2,
    "stage 3, parameters, arenas": 2,
    "stage 3, parameters, bf16, arenas": 2,
    # The host updates each of five units.
    "train step, stage 3, parameters": 7,
    # It may look at the state between steps.
    "train step, stage 3, optimizer": 1,
}
"""How often the host waits for the device in one step, where it does."""


@pytest.mark.filterwarnings("ignore")
@quickly("name", list(SCENARIOS), QUICK)
def test_everything_is_ordered(gpus: Ranks, name: str) -> None:
    (report,) = gpus.run(4, scenarios.run, name)
    assert report.findings == []
    assert sum(report.waits.values()) == WAITS.get(name, 0), report.waits
