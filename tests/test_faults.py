"""The campaign of faults can fail: its oracle tells right loops from wrong ones, and verdicts say what was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.faults.loop import Op, make_model, make_optimizer
from benchmarks.faults.of_ranks import FAULTS, Case, _own, _verdict, cases, names
from benchmarks.faults.oracle import simulate
from benchmarks.faults.ranks import Seen
from benchmarks.faults.worker import Raised

pytestmark = pytest.mark.slow  # of the benchmarks, which users do not run


def scripts(*letters: str) -> list[list[Op]]:
    return [[Op(letter, place) for place, letter in enumerate(each)] for each in letters]


def test_the_oracle_averages_the_gradients_of_the_ranks() -> None:
    expected = simulate(scripts("FBSZ", "FBSZ"), sharded_gradients=True)
    model = make_model()
    optimizer = make_optimizer(model)
    for rank in range(2):
        (model(*Op("F", 0).batch(rank)) / 2).backward()
    optimizer.step()
    for one in expected:
        assert one.complete
        for found, param in zip(one.steps[0], model.parameters(), strict=True):
            torch.testing.assert_close(found, param.detach())


@pytest.mark.parametrize(
    ("faulty", "right"),
    [
        ("EFBSZFBSZ", 2),  # an evaluation is nobody else's business
        ("FRBSZFBSZ", 1),  # the second backward meets the other rank's next one
        ("FBSSZFBSZ", 1),
        ("FBZFBSZ", 1),
        ("SZFBSZ", 0),
        ("gBSZFBSZ", 0),  # another program
    ],
)
def test_the_oracle_ends_where_what_meets_does_not_belong_together(faulty: str, right: int) -> None:
    expected = simulate(scripts("FBSZFBSZ", faulty), sharded_gradients=True)
    assert len(expected[0].steps) == right
    assert expected[0].complete == (right == 2)


def seen_by(case: Case, steps: int, error: Raised | None = None) -> list[Seen]:
    """What ranks see that do `steps` as the oracle says, and then raise `error` or come to their end."""
    expected = simulate(case.scripts(), sharded_gradients=case.stage >= 2)
    return [
        Seen(
            steps=[[_own(param, rank, case).tolist() for param in params] for params in one.steps[:steps]],
            raised=error,
            done=error is None,
        )
        for rank, one in enumerate(expected)
    ]


def verdict(case: Case, seen: list[Seen]) -> str:
    return _verdict(case, seen, simulate(case.scripts(), sharded_gradients=case.stage >= 2), timeout=6)[0]


def case_of(name: str) -> Case:
    return Case(next(fault for fault in FAULTS if fault.name == name), 3, 2, "last", "first")


def test_verdicts() -> None:
    none, more = case_of("none"), case_of("more-backward")
    said = Raised("AgreementError", True, "backward 2 of rank 1 ...", 1.0)
    assert verdict(none, seen_by(none, 5)) == "harmless"
    assert verdict(none, seen_by(none, 1, said)) == "refused"
    assert verdict(more, seen_by(more, 1, said)) == "error"
    assert verdict(more, seen_by(more, 1)) == "silent"
    assert verdict(more, seen_by(more, 1, Raised("RuntimeError", False, said.text, 1.0))) == "raw"
    assert verdict(more, seen_by(more, 1, Raised("GroupError", True, "a collective: failed", 1.0))) == "unnamed"
    late = Raised("GroupError", True, said.text, 30.0)
    assert verdict(more, seen_by(more, 1, late)) == "error", "the first operation may take long: it is traced"
    assert verdict(more, [replace(one, known={"start"}) for one in seen_by(more, 1, late)]) == "hang"
    assert verdict(more, [Seen(doing=one.doing, since=-1e9) for one in seen_by(more, 1)]) == "hang"
    assert verdict(more, [Seen(died=-6) for _ in range(2)]) == "abort"


def test_values_that_are_not_the_oracles_are_found() -> None:
    none = case_of("none")
    wrong = seen_by(none, 5)
    wrong[1].steps[2][0][0][0] += 0.01
    assert verdict(none, wrong) == "silent"
    wrong[0].raised = Raised("GroupError", True, "rank 1: forward", 1.0)
    assert verdict(none, wrong) == "mixed"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank 1 did not come to forward 3", True),
        ("ranks 0, 1: line 4", True),
        ("rank 0: line 4", False),
        ("rank 1", False),
    ],
)
def test_an_error_names_the_rank_and_the_place(text: str, named: bool) -> None:
    assert names(text, culprit=1) == named


def test_cases_are_the_same_in_every_run_and_hold_each_fault_in_each_stage() -> None:
    each = {(fault.name, stage) for fault in FAULTS for stage in fault.stages}
    chosen = cases(len(each), seed=0)
    assert chosen == cases(len(each), seed=0)
    assert len({case.name for case in chosen}) == len(each)
    assert {(case.fault.name, case.stage) for case in chosen} == each
