"""Programs with a mistake in them are refused, or give the same numbers: by an oracle that runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from torch.func import functional_call

from benchmarks.mutants import __main__ as mutants
from benchmarks.mutants.__main__ import MUTATIONS, Verdict, judged, run
from benchmarks.mutants.oracle import STEPS, Outcome, outcome
from benchmarks.mutants.programs import MODELS, PROGRAMS, original
from tests.cases import quickly
from zcompile import Program, ProgramError
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Accumulate, GatherInside, GatherOutside, Input, Kind

ROOT = Path(__file__).parent.parent
QUICK = (
    "odd, 3 ranks",
    "drawn",
    "hybrid, no_sync",
    "hybrid",
    "gpt, train_step, arenas",
    "tensor parallel, activation shards",
    "gpt, offload",
    "hpz, train_step, stage 3",
)
"""Programs that have something for every mutation."""


def plain(name: str) -> dict[str, torch.Tensor]:
    """Parameters after the steps of an oracle's run, of plain PyTorch on what the ranks of that were given."""
    given, model = original(name), MODELS[PROGRAMS[name][0]][0]()
    found, world = outcome(given.program).given, given.program.layout.world
    params = {name: lanes[0].clone().requires_grad_() for name, lanes in found.items() if name[0] not in "01"}
    inputs = sorted(given.program.nodes(Input), key=lambda node: op_of(node, Input).index)
    for step in range(STEPS):
        for rank in range(world):
            args, tangents = (
                [found[f"{step} {node.name}"][rank] for node in inputs if chosen(op_of(node, Input))]
                for chosen in (
                    lambda one: one.kind is Kind.DATA and not one.held,
                    lambda one: one.kind is Kind.TANGENT,
                )
            )
            buffers = {op_of(node, Input).held: found[f"{step} {node.name}"][rank].clone() for node in inputs}
            results = functional_call(model, {**params, **{k: v for k, v in buffers.items() if k}}, tuple(args))
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, tangents)
        with torch.no_grad():
            for param in params.values():
                param.sub_(param.grad / world, alpha=0.1)
                param.grad = None
    return {name: param.detach() for name, param in params.items()}


@quickly("name", ["odd, 3 ranks", "conv", "gpt, train_step, arenas", "hpz, odd, 2 by 3"], ["conv", "hpz, odd, 2 by 3"])
def test_the_oracle_computes_what_plain_pytorch_does(name: str) -> None:
    found = outcome(original(name).program).tensors
    for param, wanted in plain(name).items():
        for rank in found[f"parameter {param}"]:
            torch.testing.assert_close(rank, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_oracle_gives_the_same_bits_whatever_two_axes_divide() -> None:
    repeated, divided = (outcome(original(name).program) for name in ("hybrid", "hfsdp, train_step, stage 3"))
    found = {name: value for name, value in divided.tensors.items() if name.startswith(("parameter", "result"))}
    assert len(found) > 50
    assert not Outcome(found).differs(Outcome({name: repeated.tensors[name] for name in found}))


_TOLD = re.compile(
    rf"\d+: (?P<mutation>{'|'.join(map(re.escape, MUTATIONS))}) in "
    rf"(?P<program>{'|'.join(map(re.escape, PROGRAMS))}): (?P<verdict>\w+)"
)


def campaign(*arguments: object) -> list[re.Match[str]]:
    """What is told of mutants, in a process that has no group of ranks yet: tensor parallelism wants a fake one."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.mutants", *map(str, arguments)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return [told for line in found.stdout.splitlines() if (told := _TOLD.match(line))]


@pytest.mark.nightly
@quickly("every", [1, 3], [3], slow=())
def test_every_mutation_makes_mutants_and_none_is_a_hole(every: int) -> None:
    told = campaign("--only", *range(0, len(MUTATIONS), every), "--program", *QUICK)
    assert [one["mutation"] for one in told] == list(MUTATIONS)[::every]
    assert {Verdict.STRUCTURE, Verdict.VALUES, Verdict.RANKS, Verdict.EQUAL} <= {one["verdict"] for one in told}


@pytest.mark.nightly
def test_no_mutant_of_any_program_is_a_hole() -> None:
    told = campaign("--seed", 1, "--only", *range(9 * len(MUTATIONS)))
    assert len(told) == 9 * len(MUTATIONS)
    assert {one["program"] for one in told} == set(PROGRAMS)


@pytest.mark.parametrize(
    "mutation", ["exchange saved", "swap results", "reduce twice", "region: exchange draw", "region: change constant"]
)
def test_what_computes_something_else_would_be_seen_if_it_were_accepted(mutation: str) -> None:
    seen = 0
    for number in range(4):
        given, _, mutant = mutants.mutant(0, number, [mutation], ["odd, 3 ranks", "drawn"])
        seen += run(given, mutant)[0] in (Verdict.HOLE, Verdict.FAILS)
    assert seen >= 2


@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        *product(["gather over another axis", "gather inside of another unit"], ["hpz, odd, 2 by 3", "hfsdp, frozen"]),
        pytest.param("send shards otherwise", "hpz, bf16 gathers", marks=pytest.mark.slow),
        pytest.param("send shards otherwise", "hfsdp, bf16 gathers, train_step", marks=pytest.mark.slow),
    ],
)
def test_secondary_shards_that_are_not_a_units_own_would_be_seen(mutation: str, name: str) -> None:
    found = set()
    for number in range(4):
        given, _, mutant = mutants.mutant(0, number, [mutation], [name])
        found.add(run(given, mutant)[0])
    assert found & {Verdict.HOLE, Verdict.FAILS}


def stale_and_anew(name: str) -> tuple[Program, Program]:
    """Two mutants of a program, in which a region behind a unit's update reads the unit in place of a twin.

    One gathers it inside from what was sent outside before the update, the other one sends it once more.
    """
    given, count = original(name), len(original(name).program.nodes(GatherOutside))
    for seed in range(100):
        stale = MUTATIONS["gather inside behind update"](Random(seed), given.program.copy())
        assert stale is not None
        if len(stale.nodes(GatherOutside)) == count and run(given, stale)[0] is Verdict.HOLE:
            break
    anew = stale.copy()
    (gather,) = (node for node in anew.nodes(GatherInside) if node.name.endswith("_again"))
    wait = gather.all_input_nodes[1]
    with anew.graph.inserting_before(gather):
        started = anew.graph.node_copy(wait.all_input_nodes[0])
        gather.replace_input_with(wait, anew.graph.node_copy(wait, lambda _: started))
    return stale, anew


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"), [("hpz, train_step, prefetch 0", False), ("hfsdp, train_step, prefetch 0", True)]
)
def test_the_oracle_tells_stale_secondary_shards_from_new_ones(name: str, kept: bool) -> None:
    """Where they are kept, a gather in the same step gives them as they were, as that of the runtime does."""
    stale, anew = stale_and_anew(name)
    assert (not outcome(stale).differs(outcome(anew))) is kept


# -- what users of other systems have trained with, unseen ------------------------------------------------------------


def told(name: str, mutation: str) -> str:
    """What is said of such a mutant of a program; the line has an arrow."""
    program = MUTATIONS[mutation](Random(0), original(name).program.copy())
    assert program is not None, f"{name} has nothing for {mutation!r}"
    with pytest.raises(ProgramError) as error:
        original(name).verify(program)
    return str(error.value)


@pytest.mark.slow
def test_a_micro_batch_that_is_missing_from_a_sum_is_refused_with_its_line() -> None:
    given = original("gpt, no_sync")
    program = given.program.copy()
    held = program.nodes(Accumulate)[1]
    shards, gradients = held.args
    held.args = (shards, [None, *gradients[1:]])
    with pytest.raises(ProgramError, match=r"the gradient of blocks.2.norm_1.weight is missing; want") as error:
        given.verify(program)
    assert "--> " in str(error.value)


@pytest.mark.slow
def test_a_copy_that_nobody_refreshes_is_refused_with_its_line() -> None:
    text = told("gpt, train_step, arenas", "gather ahead early")
    (line,) = (line for line in text.splitlines() if line.startswith("-->"))
    assert "gather_ahead(" in line
    assert "before its update" in text


@pytest.mark.parametrize("name", ["gpt, train_step, arenas", "odd, 3 ranks"])
def test_a_gradient_that_is_averaged_twice_is_refused_with_its_line(name: str) -> None:
    line, *_ = (line for line in told(name, "reduce twice").splitlines() if line.startswith("-->"))
    assert "_reduce_again = reduce_scatter(" in line


def test_another_divisor_is_refused_with_what_it_should_be() -> None:
    assert "the axes of the layout: dp: shard 2; the traced step has dp: shard 3" in told("odd, 3 ranks", "turn axes")


def test_ranks_that_average_over_different_groups_are_refused() -> None:
    found = judged(0, 0, ["one rank: turn axes"], ["odd, 3 ranks"])
    assert found.compiler is Verdict.RANKS
    assert "over different groups: rank 0, 2: dp: shard 3; rank 1: dp: shard" in found.about
