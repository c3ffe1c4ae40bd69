"""The simulator of all ranks of a pipeline: what schedules cost, by hand and in their known order."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import fx

from tests.models import GPT
from zcompile import Program
from zcompile.cost.hardware import CPU, GPU, Hardware, Link
from zcompile.cost.simulator import idle_share, simulate, simulate_pipeline
from zcompile.cost.timeline import Spent, Timeline
from zcompile.ir.actions import Action, ActionKind
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Send
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.program import PipelinePlace, choose_starts, rewrite
from zcompile.schedule.options import Options
from zcompile.tools.tracing import trace

RANKS, MICROBATCHES = 4, 8
_WORK = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
}


@functools.cache
def programs_of(schedule: str, ranks: int = RANKS, microbatches: int = MICROBATCHES) -> list[Program]:
    traced = _traced()
    axes = (Axis("pp", AxisKind.PIPELINE, ranks), Axis("dp", AxisKind.SHARD, 1))
    traced = replace(traced, layout=replace(traced.layout, axes=axes))
    table = action_table(schedule, ranks, microbatches)
    starts = choose_starts(traced, table, None)
    places = [PipelinePlace(table, rank, "pp", starts) for rank in range(ranks)]
    return [rewrite(traced, place, Options(stage=0, backend="eager"), updates=False).program for place in places]


@functools.cache
def _traced() -> Program:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return trace(GPT(layers=6, width=8, heads=2), (tokens, tokens))


def unit_work(program: Program, node: fx.Node, hardware: Hardware) -> float:
    """Each action of a stage takes its share of one time unit a rank, whatever the regions are; messages take none."""
    if not isinstance(data(node).op, Call):
        return 0.0
    action = Action.parse(data(node).action)
    same = [one for one in program.nodes(Call) if data(one).action == data(node).action]
    return _WORK[action.kind] / len(same) / len({Action.parse(data(one).action).stage for one in program.nodes(Call)})


def timelines(schedule: str) -> list[Timeline]:
    """With the time that each line takes by the action that it is of."""
    programs = programs_of(schedule)
    return simulate_pipeline(programs, CPU, unit_work)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubbles_are_those_of_the_formula(schedule: str) -> None:
    """(p - 1) / (m + p - 1), of GPipe and 1F1B (Narayanan et al. 2021, section 2.2)."""
    assert idle_share(timelines(schedule)) == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1))


@pytest.mark.slow
def test_interleaved_stages_and_divided_backwards_have_smaller_bubbles() -> None:
    shares = {
        name: idle_share(timelines(name))
        for name in ("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble")
    }
    assert shares["1f1b"] > shares["interleaved1f1b"] > shares["interleavedzerobubble"]
    assert shares["zbvzerobubble"] == pytest.approx(shares["interleaved1f1b"])
    # With v stages a rank the bubble is 1/v of that (section 2.2).
    assert shares["interleaved1f1b"] == pytest.approx((RANKS - 1) / 2 / (MICROBATCHES + (RANKS - 1) / 2))


@pytest.mark.slow
def test_a_rank_waits_for_what_another_sends() -> None:
    programs = programs_of("1f1b")

    def slow(program: Program, node: fx.Node, hardware: Hardware) -> float:
        return 5.0 if isinstance(data(node).op, Send) else unit_work(program, node, hardware)

    first, second, *_ = simulate_pipeline(programs, CPU, slow)
    begins = min(event.start for event in second.events if event.spent is Spent.COMPUTE)
    assert begins == pytest.approx(6.0)
    waits = [event for event in second.events if event.spent is Spent.EXPOSED]
    assert waits[0].end == pytest.approx(begins)
    assert all(message.group == "pp to 1" for message in first.messages or ())


@pytest.mark.slow
def test_one_rank_alone_is_simulated_as_if_others_were_never_late() -> None:
    program = programs_of("1f1b")[1]
    alone = simulate(program, CPU)
    assert alone.seconds <= simulate_pipeline(programs_of("1f1b"), CPU)[1].seconds


def test_messages_cross_the_level_that_joins_the_ranks() -> None:
    inside, outside = Link("inside", 1e-6, 400e9, members=8), Link("outside", 10e-6, 50e9)
    hosts = replace(GPU, links=(inside, outside))
    near, far = Axis("pp", AxisKind.PIPELINE, 4, 1), Axis("pp", AxisKind.PIPELINE, 4, 8)
    assert hosts.message_seconds(400e6, near) == pytest.approx(1e-6 + 1e-3)
    assert hosts.message_seconds(400e6, far) == pytest.approx(10e-6 + 64e-3), "eight ranks of a host share its link"
