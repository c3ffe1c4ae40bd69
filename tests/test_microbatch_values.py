"""The proof of what a rank of a pipeline computes: wrong programs are refused with their lines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from tests.cases import diagonal
from tests.models import GPT, TiedGPT
from zcompile import Program
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Input, Plus, Receive, Reduce, Send, Sum, SumAverages
from zcompile.pipelining.action_tables import SCHEDULES, action_table
from zcompile.pipelining.program import PipelinePlace, choose_starts, rewrite, values_of_rank
from zcompile.proof.values import RankValues
from zcompile.schedule.options import Options
from zcompile.tools.tracing import trace

AXES = (Axis("pp", AxisKind.PIPELINE, 2, 2), Axis("dp", AxisKind.SHARD, 2))


class Dropped(nn.Module):
    """Random draws in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.5)
        return nn.functional.dropout(self.last(h), 0.3).square().mean()


@functools.cache
def traced_step(stage: int, model: str) -> Program:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    if model == "dropped":
        program = trace(Dropped(), (torch.zeros(2, 4),), units=["first", "last"])
    else:
        program = trace(TiedGPT() if model == "tied" else GPT(layers=2, width=8, heads=2), (tokens, tokens))
    return replace(program, layout=replace(program.layout.over(2), stage=STAGES[stage], axes=AXES))


@functools.cache
def step_of(
    stage: int, rank: int, schedule: str = "1f1b", microbatches: int = 3, model: str = "gpt"
) -> tuple[Program, RankValues]:
    """The program of a rank, and what it has to compute."""
    traced = traced_step(stage, model)
    table = action_table(schedule, 2, microbatches)
    place = PipelinePlace(table, rank, "pp", choose_starts(traced, table, None))
    made = rewrite(traced, place, Options(stage=stage, backend="eager", prefetch=1))
    return made.program, values_of_rank(traced, made.program, made.stages, place)


@diagonal("schedule, rank, traced", SCHEDULES, [0, 1], [("gpt", 1), ("tied", 3)])
def test_programs_of_all_schedules_compute_what_was_traced(schedule: str, rank: int, traced: tuple[str, int]) -> None:
    model, stage = traced
    program, values = step_of(stage, rank, schedule, 4, model)
    assert list(values.violations(program)) == []


def test_random_draws_are_those_of_their_micro_batch() -> None:
    for rank in range(2):
        program, values = step_of(1, rank, model="dropped")
        assert len(values.draws) == 3
        assert list(values.violations(program)) == []
        wrong = replace(values, draws=(values.draws[1], values.draws[0], *values.draws[2:]))
        assert "is not what was traced" in next(iter(wrong.violations(program))).message or rank == 1


def exchange_inputs(program: Program) -> fx.Node:
    """A region of micro-batch 0 is given what is micro-batch 1's."""
    one, other = [node for node in program.nodes(Input) if op_of(node, Input).microbatch is not None][:2]
    user = next(iter(one.users))
    user.replace_input_with(one, other)
    return user


def say_other(program: Program) -> fx.Node:
    """A message is said to be of another micro-batch."""
    node = program.nodes(Send)[0]
    op = op_of(node, Send)
    program.respell(node, replace(op, message=op.message.replace("m0_", "m1_")))
    return node


def receive_other(program: Program) -> fx.Node:
    node = program.nodes(Receive)[0]
    op = op_of(node, Receive)
    program.respell(node, replace(op, message=op.message.replace("m0_", "m2_")))
    return node


def receive_unknown(program: Program) -> fx.Node:
    node = program.nodes(Receive)[0]
    program.respell(node, replace(op_of(node, Receive), message="m0_x"))
    return node


def leave_out_a_sum(program: Program) -> fx.Node:
    node = program.nodes(Sum, SumAverages)[-1]
    node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
    program.graph.erase_node(node)
    return program.nodes(Reduce)[0]


def add_twice(program: Program) -> fx.Node:
    nodes = program.nodes(Sum, SumAverages)
    last = nodes[-1]
    again = next(node for node in nodes if data(node).source == data(last).source)
    last.args = (*last.args[:2], again.args[2])
    return last


def return_less(program: Program) -> None:
    end = program.graph.output_node()
    (results,) = end.args
    end.args = ({**results, "outputs": list(results["outputs"])[:-1]},)  # type: ignore[dict-item]


def add_up_less(program: Program) -> fx.Node:
    """A sum of gradients for the stage that keeps the parameter lacks one."""
    node = program.nodes(Plus)[-1]
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(node)
    return program.nodes(Send)[-1]


def say_gradient(program: Program) -> fx.Node:
    """The value of a parameter is said to be its gradient."""
    node = program.nodes(Send)[0]
    op = op_of(node, Send)
    program.respell(node, replace(op, message=f"{op.message}_grad"))
    return node


TIED: list[tuple[Callable[[Program], object], int, int, str]] = [
    (leave_out_a_sum, 1, 0, "the gradient of tokens.weight is not the sum over micro-batches in order"),
    (leave_out_a_sum, 3, 0, "the gradient of tokens.weight is not the sum over micro-batches in order"),
    (add_up_less, 1, 1, "stage1_tokens_weight_grad, which .* sends, is not what was traced"),
    (say_gradient, 1, 0, "stage1_tokens_weight_grad, which .* sends, is not what was traced"),
]


@pytest.mark.parametrize(("mistake", "stage", "rank", "message"), TIED)
def test_wrong_programs_with_tied_parameters_are_refused(
    mistake: Callable[[Program], object], stage: int, rank: int, message: str
) -> None:
    program, values = step_of(stage, rank, model="tied")
    wrong = program.copy()
    mistake(wrong)
    found = [violation.message for violation in values.violations(wrong)]
    assert found
    assert re.search(message, found[0]), found


def test_gradients_of_tied_parameters_are_all_of_what_was_traced() -> None:
    _, values = step_of(1, 0, model="tied")
    (shared,) = values.shared
    less = replace(values, shared=(replace(shared, parts={0: shared.parts[0]}),))
    program, _ = step_of(1, 0, model="tied")
    assert "the gradient of tokens.weight is the sum of" in next(iter(less.violations(program))).message


MISTAKES: list[tuple[Callable[[Program], object], int, int, str]] = [
    (exchange_inputs, 1, 0, "is not what was traced"),
    (say_other, 1, 0, "which m0_.* sends, is not what was traced"),
    (say_other, 1, 1, "which m0_.* sends, is not what was traced"),
    (receive_other, 1, 1, "is received 2 times; want once|is not what was traced"),
    (receive_unknown, 1, 1, "receives 'm0_x', which no other rank computes|is not what was traced"),
    (leave_out_a_sum, 1, 0, "is not the sum over micro-batches in order"),
    (leave_out_a_sum, 2, 1, "is not the sum over micro-batches in order"),
    (add_twice, 1, 1, "is not the sum over micro-batches in order"),
    (add_twice, 3, 0, "is not the sum over micro-batches in order"),
    (return_less, 1, 1, "2 results; want 3"),
]


@pytest.mark.parametrize(("mistake", "stage", "rank", "message"), MISTAKES)
def test_wrong_programs_are_refused(mistake: Callable[[Program], object], stage: int, rank: int, message: str) -> None:
    program, values = step_of(stage, rank)
    wrong = program.copy()
    mistake(wrong)
    found = [violation.message for violation in values.violations(wrong)]
    assert found
    assert re.search(message, found[0]), found[0]


def test_claims_beside_the_program_are_found_out() -> None:
    program, values = step_of(1, 0)
    name = next(iter(program.layout.trainable))
    wrong = replace(program, unused=frozenset({name}))
    assert next(iter(values.violations(wrong))).message == f"{name} is said to be unused; it is not"
    frozen = program.layout.with_trainable({param.name: False for param in program.layout.params})
    message = next(iter(values.violations(replace(program, layout=frozen)))).message
    assert message.endswith("the parameters of tokens are not those that tokens was traced with")
