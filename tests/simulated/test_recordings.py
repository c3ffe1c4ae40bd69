"""Recordings on a GPU: what is read is complete, and what was recorded there is replayed there, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.cases import quickly
from tests.ranks import Ranks
from tests.simulated import scenarios
from zcompile.recording.archive import Archive
from zcompile.tools.replay import Replay

NAMES = (
    "stage 0",
    "stage 3, activations, arenas",
    "stage 3, parameters, bf16, arenas",
    "stage 3, side stream, arenas",
    "stage 3, pieces",
    "stage 1, accumulating",
    "stage 1, graphs, accumulating",
    "stage 3, graphs, bf16, checkpoint",
    "train step, stage 3",
    "torch.compile, stage 3, activations, arenas",
    "tensor parallel, stage 3",
    "tensor parallel, parts, activations",
)


def recorded(rank: int, name: str, folder: Path) -> tuple[list[str], dict[str, int]]:
    """What was not ordered while one step was recorded and others were not, and what replay says of the recording."""
    report = scenarios.run(rank, name, {"record": folder})
    lines = Replay(Archive(folder, rank)).lines()
    return report.findings, Counter(str(value.verdict) for line in lines for value in line.values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@quickly("name", NAMES, ["stage 3, activations, arenas"], slow=NAMES[:1])
def test_what_is_recorded_is_complete(gpus: Ranks, tmp_path: Path, name: str) -> None:
    world = 2 * scenarios.SCENARIOS[name].tensor  # of four, the first is there alone
    for findings, verdicts in gpus.run(world, recorded, name, tmp_path):
        assert findings == []
        assert set(verdicts) == {"given", "equal"}, verdicts
        assert verdicts["equal"] > 5
