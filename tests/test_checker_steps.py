"""Steps of pipelines in dumps: what is right is proven from its texts, what computes something else is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.mutants.step_programs import Steps, Texts, steps_of
from benchmarks.mutants.steps import MUTATIONS, PROGRAMS, judged, program
from tests.cases import quickly
from tests.pipelines import UNITS, batch_of, loss_of, model_of
from zcompile import ProofError
from zcompile.proof.checker_texts import CAPTURE, STEP
from zcompile.proof.parts import check_parts

MIXED = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Loss(nn.Module):
    """A model of the tests of pipelines with its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = model_of(name)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, x, y)


class Drawn(nn.Module):
    """Blocks that drop out, so that each micro-batch draws in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return ((x * torch.rand(2, 4) - y) ** 2).mean()


def made(name: str, schedule: str, columns: int = 1, replicas: int = 1, **given: Any) -> Steps:
    if name == "drawn":
        batch = torch.ones(2, 4), torch.ones(2, 4)
        return steps_of(Drawn(), batch, schedule, units=["blocks.*"], columns=columns, given=given)
    units = [f"model.{unit}" for unit in UNITS.get(name, {}).get("units", ())] or None
    batch = batch_of(name, 0, 0, rows=2)
    return steps_of(Loss(name), batch, schedule, units=units, columns=columns, replicas=replicas, given=given)


SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


@pytest.mark.slow
@quickly(
    "name, schedule, stage, columns",
    [
        (name, schedule, stage, columns)
        for name in ("gpt tied", "skips", "skips tied", "norms", "drawn")
        for schedule in SCHEDULES
        for stage in range(4)
        for columns in (1, 2)
    ],
    [
        ("skips", "gpipe", 0, 1),
        ("norms", "interleaved1f1b", 2, 1),
        ("skips tied", "interleavedzerobubble", 3, 2),
        ("drawn", "zbvzerobubble", 3, 1),
    ],
)
def test_steps_are_proven_from_their_texts(name: str, schedule: str, stage: int, columns: int) -> None:
    steps = made(name, schedule, columns, stage=stage)
    steps.prove(steps.texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "columns", "replicas", "given"),
    [
        ("1f1b", 2, 1, {"stage": 1, **MIXED}),
        ("zbvzerobubble", 2, 1, {"stage": 3, **MIXED}),
        ("1f1b", 1, 1, {"stage": 3, "checkpoint": "unit"}),
        ("interleaved1f1b", 1, 1, {"stage": 2, "memory_limit": "1 MB"}),
        ("1f1b", 1, 1, {"stage": 1, "offload_activations": "disk:/tmp"}),
        ("1f1b", 4, 2, {"stage": 3}),
        ("gpipe", 4, 2, {"stage": 2, "shard": "hfsdp"}),
        ("1f1b", 4, 2, {"stage": 1, "shard": "hpz"}),
    ],
)
def test_options_are_proven_too(schedule: str, columns: int, replicas: int, given: dict[str, Any]) -> None:
    steps = made("skips tied", schedule, columns, replicas, **given)
    steps.prove(steps.texts)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def edited(steps: Steps, place: int, old: str, new: str, file: str = STEP) -> list[Texts]:
    """The texts with one edit in those of a rank, the first one that `old` finds."""
    text, count = re.subn(old, new, steps.texts[place][file], count=1, flags=re.DOTALL)
    assert count == 1
    assert text != steps.texts[place][file]
    return [{**one, file: text} if at == place else one for at, one in enumerate(steps.texts)]


TIED, PLAIN, FORWARDS = "1f1b, stage 3, tied", "1f1b, stage 1", "gpipe, stage 0"


@pytest.mark.parametrize(
    ("name", "place", "old", "new", "says"),
    [
        (
            FORWARDS,
            1,
            r"(m1_loss.*?, )m1_(blocks_3_out)",
            r"\1m0_\2",
            r"result \d of micro-batch 1 is not what was traced",
        ),
        (PLAIN, 1, r"(m1_loss.*?, )m1_(blocks_3_out)", r"\1m0_\2", "m0_blocks_3_out was deleted"),
        (PLAIN, 0, r"send\(m1_", "send(m0_", "reads|m0_|is not what was traced"),
        (PLAIN, 1, r"message='m1_", "message='m0_", r"result \d of micro-batch 1 is not what was traced"),
        (PLAIN, 0, r"add\((\w+), (\w+), (\[[^]]*\]|\w+)\)", r"add(\1, \2, \2)", "given away|is not what was traced"),
        (PLAIN, 0, r"(add\(\w+, \w+, \w+)\)", r"\1, dtype=torch.float64)", "in f64; its units say nothing"),
        (TIED, 0, r"(all_gather\(\w+)\)", r"\1, dtype=torch.bfloat16)", "in bf16; its units say nothing"),
        (TIED, 1, r"(reduce_scatter\(\w+, \w+)\)", r"\1, dtype=torch.bfloat16)", "in bf16; its units say nothing"),
        (
            TIED,
            1,
            r"plus\((\w+),([^\n]*\n\s+)(\w+)\)",
            r"plus(\3,\2\1)",
            "what is sent as 'stage1_.*_grad' to 0 is not",
        ),
        (TIED, 0, r"\n +m0_(\w+) = recv\(", r"\n    m0_\1 = rcv(", "rcv is not a function"),
        (TIED, 0, r"(m0_x,[^\n]*\n)(.*?)(        m1_x,[^\n]*\n)", r"\3\2        \1", "is not what was traced"),
        (TIED, 0, r"(        blocks_0,[^\n]*\n)(        blocks_1,[^\n]*\n)", r"\2\1", "is not what is given there"),
        (TIED, 0, r"\n    update\(", "\n    copy(", "has no name|not a value|is missing"),
        (TIED, 0, r"source=1", "source=0", "comes after"),
        (TIED, 1, r"'f32\[2, 4\]'", "'f32[4, 2]'", "receives as"),
        (PLAIN, 1, r"return \[(\w+), (\w+)", r"return [\2, \1", r"result \d of micro-batch 0 is not what was traced"),
    ],
)
def test_a_step_that_computes_something_else_is_refused(name: str, place: int, old: str, new: str, says: str) -> None:
    steps, *_ = program(name)
    with pytest.raises(ProofError, match=says) as error:
        steps.prove(edited(steps, place, old, new), place)
    assert "step.py" in error.value.subject


@pytest.mark.slow
def test_a_value_that_several_stages_of_a_rank_need_is_received_for_each() -> None:
    steps, *_ = program("interleaved1f1b, stage 2")
    assert len(re.findall(r"= recv\(.*message='m0_tanh'\)", steps.texts[1][STEP])) == 2
    steps.prove(steps.texts)


def test_parts_that_are_not_the_whole_step_are_refused() -> None:
    steps, *_ = program(PLAIN)
    first, second = ((texts[CAPTURE], part) for texts, part in zip(steps.texts, steps.parts, strict=True))
    whole = {0: first, 1: first, 2: second, 3: second}
    check_parts(whole)
    for part, says in (
        (replace(second[1], units=second[1].units[1:]), "no rank has unit blocks.3"),
        (replace(second[1], units=(*second[1].units, "blocks.0")), "several ranks have unit blocks.0"),
        (replace(second[1], results=second[1].results[1:]), "no rank has result"),
        (replace(second[1], microbatches=3), "microbatches"),
    ):
        with pytest.raises(ProofError, match=says):
            check_parts({**whole, 2: (second[0], part)})
    with pytest.raises(ProofError, match="traced other steps"):
        check_parts({**whole, 2: (second[0].replace("tanh", "sin"), second[1])})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_no_mutant_of_a_step_is_a_hole(number: int) -> None:
    mutation, name = [*MUTATIONS][number], [*PROGRAMS][number % len(PROGRAMS)]
    for seed in range(3):
        try:
            verdict = judged(name, mutation, Random(f"{seed} {number}"))
        except IndexError:  # the program has no such line
            continue
        assert verdict != "HOLE", (name, mutation, seed)


def test_the_oracle_sees_what_computes_something_else() -> None:
    from benchmarks.mutants.step_oracle import run, same

    steps, given, wanted = program(PLAIN)
    texts = edited(steps, 0, r"send\(m1_", "send(m0_")
    assert same(run(steps.texts, given, steps.columns), wanted)
    assert not same(run(texts, given, steps.columns), wanted)
