"""The matrix of model families: its cells tell equal from unequal, and its page shows its results."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.families import table
from benchmarks.families.cells import Outcome, whole
from benchmarks.families.family import families
from benchmarks.families.plain_models import FAMILIES
from benchmarks.families.recorder import Recorder, distance
from benchmarks.families.several_losses import FAMILIES as OTHERS
from benchmarks.families.table import Results
from benchmarks.families.worker import References, run
from tests.ranks import Ranks, on_ranks

BY_NAME = {family.name: family for family in (*FAMILIES, *OTHERS)}


def cell(rank: int, family: str, name: str) -> Outcome:
    return run(name, BY_NAME[family], References())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gan", "dlrm"])
def test_a_cell_has_the_bits_of_distributed_data_parallel(ranks: Ranks, family: str) -> None:
    assert [one.kind for one in ranks.run(2, cell, family, "stage3")] == ["bits", "bits"]


@pytest.mark.slow
def test_a_refusal_is_kept_with_its_sentence(ranks: Ranks) -> None:
    for outcome in ranks.run(2, cell, "wgan_gp", "stage3"):
        assert outcome.kind == "refused"
        assert "create_graph" in outcome.said


@pytest.mark.slow
@on_ranks(2)
def test_another_loss_is_a_distance(rank: int) -> None:
    """A family whose loss is another one once DistributedDataParallel has been trained: a mistake to be found."""
    given = BY_NAME["deeponet"]
    references = References()
    references.of(given, "plain")
    (phase,) = given.phases
    wrong = dataclasses.replace(phase, loss=lambda models, batch: 2 * phase.loss(models, batch))
    other = dataclasses.replace(given, phases=(wrong,))
    outcome = run("stage3", other, references)
    assert outcome.kind == "distance"
    assert outcome.distance > 0.01


def recorded(**values: torch.Tensor) -> Recorder:
    return Recorder(state=dict(values))


def test_the_distance_is_relative_and_names_what_is_farthest_off() -> None:
    weight, bias = torch.tensor([4.0, -8.0]), torch.tensor([1e-9])
    ours, theirs = recorded(weight=weight + 0.8, bias=bias), recorded(weight=weight, bias=bias * 2)
    far, where = distance(ours, theirs)
    assert where == "weight"
    assert far == pytest.approx(0.1)
    assert distance(theirs, theirs) == (0.0, "")


def test_nan_is_farther_off_than_anything() -> None:
    far, where = distance(
        recorded(a=torch.tensor(float("nan")), b=torch.tensor(2.0)), recorded(a=torch.tensor(1.0), b=torch.tensor(1.0))
    )
    assert far != far
    assert where == "a"


def test_what_only_one_has_is_no_result() -> None:
    with pytest.raises(ValueError, match="only one of both has"):
        distance(recorded(a=torch.ones(1)), recorded(b=torch.ones(1)))


def test_the_rank_that_knows_most_speaks_for_both() -> None:
    refused, lost = Outcome("refused", "a sentence"), Outcome("lost", "gloo", seconds=2.0)
    assert whole([lost, refused]) == Outcome("refused", "a sentence", seconds=2.0)
    assert whole([Outcome("bits"), Outcome("distance", "w", 1e-7)]).kind == "distance"


def test_the_page_shows_the_results() -> None:
    assert table.tables(Results.read()) in table.PAGE.read_text(), "run `python -m benchmarks.families --table`"


def test_there_are_many_families() -> None:
    assert len(families()) >= 40


def test_no_cell_of_the_page_crashes_or_is_wrong() -> None:
    """What is refused says how to fix it."""
    for name, family in Results.read().families.items():
        for cell, found in family["cells"].items():
            assert found["kind"] in ("bits", "distance", "refused", "void"), (name, cell, found)
            assert found["kind"] != "refused" or "Fix: " in found["said"], (name, cell, found)
