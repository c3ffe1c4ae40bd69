from __future__ import annotations

from dataclasses import replace

from tests.passes.test_unroll_microbatches import stages
from zcompile import Program, parse
from zcompile.ir.actions import ActionTable
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.passes.pipelining.reduce_microbatches import reduce_microbatches
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches

AXES = (Axis("pp", AxisKind.PIPELINE, 2, 2), Axis("dp", AxisKind.SHARD, 2))
SUMMED = """
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
    del m1_b_out                                                      #                       -128 B
    m1_c_grad_input_sent = send(m1_c_grad_input, pp, to=0, message='m1_db')  # &f32[8, 4]                  c
    del m1_c_grad_input
    c_sum = add(c, [m0_c_full_grad], [m1_c_full_grad])                #                                    c
    del m0_c_full_grad, m1_c_full_grad                                #                       -64 B
    # 1F2
    m2_b_out_recv = recv(pp, 'f32[8, 4]', source=0, message='m2_yb')  # f32[8, 4]             +128 B       b
    m2_b_out = wait(m2_b_out_recv)                                    # &f32[8, 4]                         b
    del m2_b_out_recv
    m2_c_out = region_0(c, m2_b_out)                                  # f32[8, 4]             +128 B       c
    # 1B2
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                          #                       -128 B
    m2_c_grad_input, m2_c_full_grad = region_1(c, grad_output,        # f32[8, 4], f32[4, 4]  +192 B       c
            m2_b_out)
    del grad_output, m2_b_out                                         #                       -128 B
    m2_c_grad_input_sent = send(m2_c_grad_input, pp, to=0, message='m2_db')  # &f32[8, 4]                  c
    del m2_c_grad_input
    c_sum_1 = add(c, c_sum, [m2_c_full_grad])                         #                                    c
    del m2_c_full_grad                                                #                       -64 B
    c_reduce = reduce_scatter(c, c_sum_1)                             #                       +32 B        c
    c_grads = wait(c_reduce)                                          #                       -64 B        c
    # end
    wait(m1_c_grad_input_sent)
    del m1_c_grad_input_sent                                          #                       -128 B
    wait(m2_c_grad_input_sent)
    del m2_c_grad_input_sent                                          #                       -128 B
    return [m0_c_out, m1_c_out, m2_c_out], [c_grads]
"""
AVERAGED = """
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
    m0_c_reduce = reduce_scatter(c, [m0_c_full_grad])                 #                       +32 B        c
    del m0_c_full_grad
    m0_c_grads = wait(m0_c_reduce)                                    #                       -64 B        c
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
    m1_c_reduce = reduce_scatter(c, [m1_c_full_grad])                 #                       +32 B        c
    del m1_c_full_grad
    m1_c_grads = wait(m1_c_reduce)                                    #                       -64 B        c
    c_grads = add(c, m0_c_grads, m1_c_grads)                          #                       -32 B        c
    # end
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                          #                       -128 B
    wait(m1_c_grad_input_sent)
    del m1_c_grad_input_sent                                          #                       -128 B
    return [m0_c_out, m1_c_out], [c_grads]
"""
ALONE = """
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
    del grad_output, m0_b_out                                         #                       -128 B
    m0_c_grad_input_sent = send(m0_c_grad_input, pp, to=0, message='m0_db')  # &f32[8, 4]                  c
    del m0_c_grad_input
    c_reduce = reduce_scatter(c, [m0_c_full_grad])                    #                       +32 B        c
    del m0_c_full_grad
    c_grads = wait(c_reduce)                                          #                       -64 B        c
    # end
    wait(m0_c_grad_input_sent)
    del m0_c_grad_input_sent                                          #                       -128 B
    return [m0_c_out], [c_grads]
"""


def step(stage: int, microbatches: int) -> Program:
    """What the second of two ranks does, of a step of so many micro-batches."""
    first = ", ".join(f"0F{i}, 0B{i}" for i in range(microbatches))
    second = ", ".join(f"1F{i}, 1B{i}" for i in range(microbatches))
    table = ActionTable.parse(f"{first}\n{second}")
    parts = [
        replace(one, program=replace(one.program, layout=replace(one.program.layout, stage=STAGES[stage], axes=AXES)))
        for one in stages("c")
    ]
    return unroll_microbatches(parts, table=table, rank=1, axis="pp")


def check(stage: int, microbatches: int, after: str) -> None:
    program = step(stage, microbatches)
    before = str(program)
    result = reduce_microbatches(program)
    assert str(result).strip("\n") == after.strip("\n")
    assert str(program) == before, "a pass works on a copy"
    text = result.text(regions=True)
    assert parse(text).text(regions=True) == text, "what it has made is read as it is printed"


def test_stage_1_sums_and_communicates_once() -> None:
    check(1, 3, SUMMED)


def test_stage_2_averages_each_and_sums_shards() -> None:
    check(2, 2, AVERAGED)


def test_one_micro_batch_is_not_summed() -> None:
    check(2, 1, ALONE)
