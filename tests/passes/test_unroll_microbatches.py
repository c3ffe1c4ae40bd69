from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.passes.programs import CHAIN, TRACED, joined
from zcompile import parse
from zcompile.errors import ProofError
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.operation import data, set_data
from zcompile.ir.ops import Call, Receive, Send, Shards
from zcompile.passes.common.boundary import Boundary, Crossing, End, PipelineStage
from zcompile.passes.pipelining.cut_stages import cut_stages
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches
from zcompile.pipelining.action_tables import SCHEDULES, action_table
from zcompile.proof.ranks import check_texts
from zcompile.schedule.default_pipeline import of_stages
from zcompile.schedule.pipeline import Verified

HEAD = CHAIN.partition("def ")[0]
AXES = (Axis("pp", AxisKind.PIPELINE, 2), Axis("dp", AxisKind.SHARD, 1))
FIRST = """
def step(box):
    (
        a,                                                         #                       1 parameter  unit a
        b,                                                         #                       1 parameter  unit b
        pp,                                                        #                                    group pp
        m0_x,                                                      # f32[8, 4]
        m1_x,                                                      # f32[8, 4]
    ) = unbox(box)
    # 0F0
    m0_a_out = region_0(a, m0_x)                                   # f32[8, 4]             +128 B       a
    m0_b_out = region_0(b, m0_a_out)                               # f32[8, 4]             +128 B       b
    m0_b_out_sent = send(m0_b_out, pp, to=1, message='m0_yb')      # &f32[8, 4]                         b
    del m0_b_out
    # 0F1
    m1_a_out = region_0(a, m1_x)                                   # f32[8, 4]             +128 B       a
    m1_b_out = region_0(b, m1_a_out)                               # f32[8, 4]             +128 B       b
    m1_b_out_sent = send(m1_b_out, pp, to=1, message='m1_yb')      # &f32[8, 4]                         b
    del m1_b_out
    # 0B0
    wait(m0_b_out_sent)
    del m0_b_out_sent                                              #                       -128 B
    m0_grad_output_recv = recv(pp, 'f32[8, 4]', source=1, message='m0_db')  # f32[8, 4]    +128 B       c
    m0_grad_output = wait(m0_grad_output_recv)                     # &f32[8, 4]                         c
    del m0_grad_output_recv
    m0_b_grad_input, m0_b_full_grad = region_1(b, m0_grad_output,  # f32[8, 4], f32[4, 4]  +192 B       b
            m0_a_out)
    del m0_a_out, m0_grad_output                                   #                       -256 B
    m0_a_full_grad = region_2(m0_x, m0_b_grad_input)               # f32[4, 4]             +64 B        a
    del m0_x, m0_b_grad_input                                      #                       -128 B
    # 0B1
    wait(m1_b_out_sent)
    del m1_b_out_sent                                              #                       -128 B
    m1_grad_output_recv = recv(pp, 'f32[8, 4]', source=1, message='m1_db')  # f32[8, 4]    +128 B       c
    m1_grad_output = wait(m1_grad_output_recv)                     # &f32[8, 4]                         c
    del m1_grad_output_recv
    m1_b_grad_input, m1_b_full_grad = region_1(b, m1_grad_output,  # f32[8, 4], f32[4, 4]  +192 B       b
            m1_a_out)
    del m1_a_out, m1_grad_output                                   #                       -256 B
    m1_a_full_grad = region_2(m1_x, m1_b_grad_input)               # f32[4, 4]             +64 B        a
    del m1_x, m1_b_grad_input                                      #                       -128 B
    return [], {'a.weight': [m0_a_full_grad, m1_a_full_grad], 'b.weight': [m0_b_full_grad, m1_b_full_grad]}
"""
SECOND = """
def step(box):
    (
        c,                                                            #                       1 parameter  unit c
        pp,                                                           #                                    group pp
        grad_output,                                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    # 1F0
    m0_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m0_yb')  # f32[8, 4]             +128 B       b
    m0_b_out = wait(m0_b_out_recv)                                    # &f32[8, 4]                         b
    del m0_b_out_recv
    m0_c_out = region_0(c, m0_b_out)                                  # f32[8, 4]             +128 B       c
    # 1B0
    m0_c_grad_input, m0_c_full_grad = region_1(c, grad_output,        # f32[8, 4], f32[4, 4]  +192 B       c
            m0_b_out)
    del m0_b_out                                                      #                       -128 B
    m0_c_grad_input_sent = send(m0_c_grad_input, pp, to=0, message='m0_db')  # &f32[8, 4]                  c
    del m0_c_grad_input
    # 1F1
    m1_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m1_yb')  # f32[8, 4]             +128 B       b
    m1_b_out = wait(m1_b_out_recv)                                    # &f32[8, 4]                         b
    del m1_b_out_recv
    m1_c_out = region_0(c, m1_b_out)                                  # f32[8, 4]             +128 B       c
    # 1B1
    m1_c_grad_input, m1_c_full_grad = region_1(c, grad_output,        # f32[8, 4], f32[4, 4]  +192 B       c
            m1_b_out)
    del grad_output, m1_b_out                                         #                       -128 B
    m1_c_grad_input_sent = send(m1_c_grad_input, pp, to=0, message='m1_db')  # &f32[8, 4]                  c
    del m1_c_grad_input
    # end
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                          #                       -128 B
    wait(m1_c_grad_input_sent)
    del m1_c_grad_input_sent                                          #                       -128 B
    return [m0_c_out, m1_c_out], {'c.weight': [m0_c_full_grad, m1_c_full_grad]}
"""
DIVIDED = """
def step(box):
    (
        c,                                                                   #             1 parameter  unit c
        pp,                                                                  #                          group pp
        grad_output,                                                         # f32[8, 4]                tangent
    ) = unbox(box)
    # 1F0
    m0_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m0_yb')         # f32[8, 4]   +128 B       b
    m0_b_out = wait(m0_b_out_recv)                                           # &f32[8, 4]               b
    del m0_b_out_recv
    m0_c_out = region_0(c, m0_b_out)                                         # f32[8, 4]   +128 B       c
    # 1I0
    m0_c_grad_input = region_1(c, grad_output)                               # f32[8, 4]   +128 B       c
    m0_c_grad_input_sent = send(m0_c_grad_input, pp, to=0, message='m0_db')  # &f32[8, 4]               c
    del m0_c_grad_input
    # 1W0
    m0_c_run2_full_grad = region_2(m0_b_out, grad_output)                    # f32[4, 4]   +64 B        c
    del grad_output, m0_b_out                                                #             -128 B
    # end
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                                 #             -128 B
    return [m0_c_out], {'c.weight': [m0_c_run2_full_grad]}
"""


def stages(*starts: str, ranks: int = 2, divides: bool = False) -> list[PipelineStage]:
    """The stages of a step of three units, with outlined regions."""
    traced = parse(joined(HEAD, TRACED))
    axes = (replace(AXES[0], size=ranks), AXES[1])
    cut = cut_stages(replace(traced, layout=replace(traced.layout, axes=axes)), starts=starts)
    return [rewritten(stage, divides=divides) for stage in cut]


def rewritten(stage: PipelineStage, *, divides: bool = False) -> PipelineStage:
    """A stage, and what it lends, with outlined regions."""
    passes = of_stages(partition="default", sent=stage.boundary.sent_back if divides else None, bucket=2**20)
    lent = stage.lent and Verified.traced(stage.lent).after(passes).program
    return replace(stage, program=Verified.traced(stage.program).after(passes).program, lent=lent)


def four_stages() -> list[PipelineStage]:
    """Four stages of the same step, of which two are alike."""
    first, second, third = stages("b", "c")
    return [_at(0, first), *(_at(number, second) for number in (1, 2)), _at(3, third)]


def _at(number: int, stage: PipelineStage) -> PipelineStage:
    """The same stage at another place of the chain: what it receives and sends is called by places there."""
    boundary = stage.boundary

    def ends(given: tuple[End, ...], name: str, other: int, of: int) -> tuple[End, ...]:
        return tuple(Crossing(f"{name}{of}", other) if isinstance(end, Crossing) else end for end in given)

    layout = stage.program.layout
    (unit,) = layout.units
    own = replace(unit, name=f"{unit.name}{number}")
    program = stage.program.copy()
    for node in program.nodes(Shards, Call):
        op = data(node).op
        same = Shards(own.name) if isinstance(op, Shards) else replace(op, units=(own.name,) * len(op.units))  # type: ignore[attr-defined,type-var]
        set_data(node, replace(data(node), op=same))
    moved = Boundary(
        ends(boundary.inputs, "y", number - 1, number - 1),
        ends(boundary.tangents, "d", number + 1, number + 1),
        ends(boundary.outputs, "y", number + 1, number),
        ends(boundary.gradients, "d", number - 1, number),
    )
    program = replace(program, layout=layout.with_units((own,)))
    return replace(stage, number=number, program=program, boundary=moved)


def test_actions_are_written_out_in_their_order() -> None:
    table = ActionTable.parse("0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1")
    first, second = (unroll_microbatches(stages("c"), table=table, rank=rank, axis="pp") for rank in range(2))
    assert str(first).strip("\n") == FIRST.strip("\n")
    assert str(second).strip("\n") == SECOND.strip("\n")


def test_a_divided_backward_sends_first() -> None:
    table = ActionTable.parse("0F0, 0B0\n1F0, 1I0, 1W0")
    second = unroll_microbatches(stages("c", divides=True), table=table, rank=1, axis="pp")
    assert str(second).strip("\n") == DIVIDED.strip("\n")


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    table = ActionTable.parse("0F0, 1F0, 2F0, 2B0, 1B0, 0B0")
    program = unroll_microbatches(stages("b", "c", ranks=1), table=table, rank=0, axis="pp")
    assert program.nodes(Send, Receive) == []
    assert len(program.regions) < 6, "equal regions of its stages are one"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ranks_programs_fit_together(name: str) -> None:
    table = action_table(name, 2, 4)
    parts = stages("c") if table.stages == 2 else four_stages()
    texts = {r: unroll_microbatches(parts, table=table, rank=r, axis="pp").text(regions=True) for r in range(2)}
    check_texts(texts)


def test_a_message_that_one_rank_takes_for_another_one_is_told_with_its_line() -> None:
    table = action_table("1f1b", 2, 3)
    parts = stages("c")
    texts = [unroll_microbatches(parts, table=table, rank=r, axis="pp").text(regions=True) for r in range(2)]
    for seed in range(20):
        source = random.Random(seed)
        rank = source.randrange(2)
        lines = texts[rank].splitlines()
        at = [i for i, line in enumerate(lines) if " = recv(" in line or " = send(" in line]
        one, other = source.sample(at, 2)
        if (" = recv(" in lines[one]) is not (" = recv(" in lines[other]):
            continue
        messages = [line.partition("message=")[2].partition(")")[0] for line in (lines[one], lines[other])]
        lines[one] = lines[one].replace(messages[0], messages[1])
        wrong = {rank: "\n".join(lines), 1 - rank: texts[1 - rank]}
        with pytest.raises(ProofError, match=r"message \d from rank \d to rank \d over pp differs: .*line \d+"):
            check_texts(wrong)
