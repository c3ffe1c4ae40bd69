"""The pass that keeps units full between the actions of a pipeline, by the text of a step before and after."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.passes.test_reduce_microbatches import AXES
from tests.passes.test_unroll_microbatches import stages
from zcompile import OptionError, Program, parse
from zcompile.cost.memory import peak_bytes
from zcompile.ir.actions import ActionTable
from zcompile.ir.ops import AllGather
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.pipelining.keep_between_actions import keep_between_actions
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches

BEFORE = """
def step(box):
    (
        a,                                                #                       1 parameter  unit a
        b,                                                #                       1 parameter  unit b
        c,                                                #                       1 parameter  unit c
        m0_x,                                             # f32[8, 4]
        m1_x,                                             # f32[8, 4]
        grad_output,                                      # f32[8, 4]                          tangent
    ) = unbox(box)
    a_gather = all_gather(a)                              #                       +64 B        a
    a_full = wait(a_gather)                               #                                    a
    # 0F0
    m0_a_out = region_0(a_full, m0_x)                     # f32[8, 4]             +128 B       a
    release(a_full)                                       #                       -64 B        a
    b_gather = all_gather(b)                              #                       +64 B        b
    b_full = wait(b_gather)                               #                                    b
    m0_b_out = region_0(b_full, m0_a_out)                 # f32[8, 4]             +128 B       b
    release(b_full)                                       #                       -64 B        b
    c_gather = all_gather(c)                              #                       +64 B        c
    c_full = wait(c_gather)                               #                                    c
    m0_c_out = region_0(c_full, m0_b_out)                 # f32[8, 4]             +128 B       c
    release(c_full)                                       #                       -64 B        c
    a_gather_1 = all_gather(a)                            #                       +64 B        a
    a_full_1 = wait(a_gather_1)                           #                                    a
    # 0F1
    m1_a_out = region_0(a_full_1, m1_x)                   # f32[8, 4]             +128 B       a
    release(a_full_1)                                     #                       -64 B        a
    b_gather_1 = all_gather(b)                            #                       +64 B        b
    b_full_1 = wait(b_gather_1)                           #                                    b
    m1_b_out = region_0(b_full_1, m1_a_out)               # f32[8, 4]             +128 B       b
    release(b_full_1)                                     #                       -64 B        b
    c_gather_1 = all_gather(c)                            #                       +64 B        c
    c_full_1 = wait(c_gather_1)                           #                                    c
    m1_c_out = region_0(c_full_1, m1_b_out)               # f32[8, 4]             +128 B       c
    # 0B0
    m0_c_grad_input, m0_c_full_grad = region_1(           # f32[8, 4], f32[4, 4]  +192 B       c
            c_full_1, grad_output, m0_b_out)
    del m0_b_out                                          #                       -128 B
    release(c_full_1)                                     #                       -64 B        c
    b_gather_2 = all_gather(b)                            #                       +64 B        b
    b_full_2 = wait(b_gather_2)                           #                                    b
    m0_b_grad_input, m0_b_full_grad = region_1(b_full_2,  # f32[8, 4], f32[4, 4]  +192 B       b
            m0_c_grad_input, m0_a_out)
    del m0_a_out, m0_c_grad_input                         #                       -256 B
    release(b_full_2)                                     #                       -64 B        b
    m0_a_full_grad = region_2(m0_x, m0_b_grad_input)      # f32[4, 4]             +64 B        a
    del m0_x, m0_b_grad_input                             #                       -128 B
    c_gather_2 = all_gather(c)                            #                       +64 B        c
    c_full_2 = wait(c_gather_2)                           #                                    c
    # 0B1
    m1_c_grad_input, m1_c_full_grad = region_1(           # f32[8, 4], f32[4, 4]  +192 B       c
            c_full_2, grad_output, m1_b_out)
    del grad_output, m1_b_out                             #                       -128 B
    release(c_full_2)                                     #                       -64 B        c
    b_gather_3 = all_gather(b)                            #                       +64 B        b
    b_full_3 = wait(b_gather_3)                           #                                    b
    m1_b_grad_input, m1_b_full_grad = region_1(b_full_3,  # f32[8, 4], f32[4, 4]  +192 B       b
            m1_c_grad_input, m1_a_out)
    del m1_a_out, m1_c_grad_input                         #                       -256 B
    release(b_full_3)                                     #                       -64 B        b
    m1_a_full_grad = region_2(m1_x, m1_b_grad_input)      # f32[4, 4]             +64 B        a
    del m1_x, m1_b_grad_input                             #                       -128 B
    return [m0_c_out, m1_c_out], {'a.weight': [m0_a_full_grad, m1_a_full_grad], 'b.weight': [m0_b_full_grad, m1_b_full_grad], 'c.weight': [m0_c_full_grad, m1_c_full_grad]}
"""
AFTER = """
def step(box):
    (
        a,                                                           #                       1 parameter  unit a
        b,                                                           #                       1 parameter  unit b
        c,                                                           #                       1 parameter  unit c
        m0_x,                                                        # f32[8, 4]
        m1_x,                                                        # f32[8, 4]
        grad_output,                                                 # f32[8, 4]                          tangent
    ) = unbox(box)
    a_gather = all_gather(a)                                         #                       +64 B        a
    a_full = wait(a_gather)                                          #                                    a
    # 0F0
    m0_a_out = region_0(a_full, m0_x)                                # f32[8, 4]             +128 B       a
    b_gather = all_gather(b)                                         #                       +64 B        b
    b_full = wait(b_gather)                                          #                                    b
    m0_b_out = region_0(b_full, m0_a_out)                            # f32[8, 4]             +128 B       b
    c_gather = all_gather(c)                                         #                       +64 B        c
    c_full = wait(c_gather)                                          #                                    c
    m0_c_out = region_0(c_full, m0_b_out)                            # f32[8, 4]             +128 B       c
    # 0F1
    m1_a_out = region_0(a_full, m1_x)                                # f32[8, 4]             +128 B       a
    release(a_full)                                                  #                       -64 B        a
    m1_b_out = region_0(b_full, m1_a_out)                            # f32[8, 4]             +128 B       b
    m1_c_out = region_0(c_full, m1_b_out)                            # f32[8, 4]             +128 B       c
    # 0B0
    m0_c_grad_input, m0_c_full_grad = region_1(c_full, grad_output,  # f32[8, 4], f32[4, 4]  +192 B       c
            m0_b_out)
    del m0_b_out                                                     #                       -128 B
    m0_b_grad_input, m0_b_full_grad = region_1(b_full,               # f32[8, 4], f32[4, 4]  +192 B       b
            m0_c_grad_input, m0_a_out)
    del m0_a_out, m0_c_grad_input                                    #                       -256 B
    m0_a_full_grad = region_2(m0_x, m0_b_grad_input)                 # f32[4, 4]             +64 B        a
    del m0_x, m0_b_grad_input                                        #                       -128 B
    # 0B1
    m1_c_grad_input, m1_c_full_grad = region_1(c_full, grad_output,  # f32[8, 4], f32[4, 4]  +192 B       c
            m1_b_out)
    del grad_output, m1_b_out                                        #                       -128 B
    release(c_full)                                                  #                       -64 B        c
    m1_b_grad_input, m1_b_full_grad = region_1(b_full,               # f32[8, 4], f32[4, 4]  +192 B       b
            m1_c_grad_input, m1_a_out)
    del m1_a_out, m1_c_grad_input                                    #                       -256 B
    release(b_full)                                                  #                       -64 B        b
    m1_a_full_grad = region_2(m1_x, m1_b_grad_input)                 # f32[4, 4]             +64 B        a
    del m1_x, m1_b_grad_input                                        #                       -128 B
    return [m0_c_out, m1_c_out], {'a.weight': [m0_a_full_grad, m1_a_full_grad], 'b.weight': [m0_b_full_grad, m1_b_full_grad], 'c.weight': [m0_c_full_grad, m1_c_full_grad]}
"""


@cache
def step() -> Program:
    """The first of two ranks, which has all three units; every use has a gather of its own."""
    table = ActionTable.parse("0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1")
    program = unroll_microbatches(stages(), table=table, rank=0, axis="pp")
    return insert_gathers(replace(program, layout=replace(program.layout, axes=AXES).over(2)))


def gathers(program: Program) -> int:
    return len(program.nodes(AllGather))


def test_units_stay_full_where_that_fits() -> None:
    assert step().text() == BEFORE
    kept = keep_between_actions(step(), memory_limit=peak_bytes(step()) + 64)
    assert kept.text() == AFTER
    assert step().text() == BEFORE, "the pass has left its argument alone"
    assert parse(kept.text(regions=True)).text() == AFTER


def test_more_memory_means_no_more_gathers_and_no_limit_is_passed() -> None:
    least, before = peak_bytes(step()), gathers(step())
    for limit in range(least, least + 300, 16):
        kept = keep_between_actions(step(), memory_limit=limit)
        assert peak_bytes(kept) <= limit
        assert gathers(kept) <= before
        before = gathers(kept)
    assert before == len(step().layout.units)


def test_a_limit_that_the_step_is_over_is_refused() -> None:
    with pytest.raises(OptionError, match=r"memory_limit: .* is less than the .* that this step takes"):
        keep_between_actions(step(), memory_limit=peak_bytes(step()) - 1)
