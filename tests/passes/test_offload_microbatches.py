"""The pass that moves what actions save out of the device's memory, by the text of a step, and by what it holds."""

from __future__ import annotations

import pytest

from tests.passes.test_unroll_microbatches import stages
from zcompile import Program, verify
from zcompile.cost.memory import peak_bytes
from zcompile.ir.actions import ActionTable
from zcompile.ir.ops import Fetch, Offload
from zcompile.passes.pipelining.offload_microbatches import offload_microbatches
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches
from zcompile.pipelining.action_tables import action_table
from zcompile.schedule.pipeline import ALWAYS

MOVED = """
def step(box):
    (
        a,                                                          #                       1 parameter  unit a
        b,                                                          #                       1 parameter  unit b
        c,                                                          #                       1 parameter  unit c
        away,                                                       #                                    away
        m0_x,                                                       # f32[8, 4]
        m1_x,                                                       # f32[8, 4]
        grad_output,                                                # f32[8, 4]                          tangent
    ) = unbox(box)
    # 0F0
    m0_a_out = region_0(a, m0_x)                                    # f32[8, 4]             +128 B       a
    m0_a_out_offloaded = offload(m0_a_out, away)                    # i64[]                 +8 B         a
    m0_b_out = region_0(b, m0_a_out)                                # f32[8, 4]             +128 B       b
    del m0_a_out                                                    #                       -128 B
    m0_b_out_offloaded = offload(m0_b_out, away)                    # i64[]                 +8 B         b
    m0_c_out = region_0(c, m0_b_out)                                # f32[8, 4]             +128 B       c
    del m0_b_out                                                    #                       -128 B
    # 0F1
    m1_a_out = region_0(a, m1_x)                                    # f32[8, 4]             +128 B       a
    m1_a_out_offloaded = offload(m1_a_out, away)                    # i64[]                 +8 B         a
    m1_b_out = region_0(b, m1_a_out)                                # f32[8, 4]             +128 B       b
    del m1_a_out                                                    #                       -128 B
    m1_b_out_offloaded = offload(m1_b_out, away)                    # i64[]                 +8 B         b
    m0_b_out_fetch = fetch(m0_b_out_offloaded, away)                # f32[8, 4]             +128 B       b
    del m0_b_out_offloaded                                          #                       -8 B
    m1_c_out = region_0(c, m1_b_out)                                # f32[8, 4]             +128 B       c
    del m1_b_out                                                    #                       -128 B
    # 0B0
    m0_a_out_fetch = fetch(m0_a_out_offloaded, away)                # f32[8, 4]             +128 B       a
    del m0_a_out_offloaded                                          #                       -8 B
    m0_b_out_again = wait(m0_b_out_fetch)                           # &f32[8, 4]                         b
    del m0_b_out_fetch
    m0_c_grad_input, m0_c_full_grad = region_1(c, grad_output,      # f32[8, 4], f32[4, 4]  +192 B       c
            m0_b_out_again)
    del m0_b_out_again                                              #                       -128 B
    m0_a_out_again = wait(m0_a_out_fetch)                           # &f32[8, 4]                         a
    del m0_a_out_fetch
    m0_b_grad_input, m0_b_full_grad = region_1(b, m0_c_grad_input,  # f32[8, 4], f32[4, 4]  +192 B       b
            m0_a_out_again)
    del m0_c_grad_input, m0_a_out_again                             #                       -256 B
    m1_b_out_fetch = fetch(m1_b_out_offloaded, away)                # f32[8, 4]             +128 B       b
    del m1_b_out_offloaded                                          #                       -8 B
    m0_a_full_grad = region_2(m0_x, m0_b_grad_input)                # f32[4, 4]             +64 B        a
    del m0_x, m0_b_grad_input                                       #                       -128 B
    # 0B1
    m1_a_out_fetch = fetch(m1_a_out_offloaded, away)                # f32[8, 4]             +128 B       a
    del m1_a_out_offloaded                                          #                       -8 B
    m1_b_out_again = wait(m1_b_out_fetch)                           # &f32[8, 4]                         b
    del m1_b_out_fetch
    m1_c_grad_input, m1_c_full_grad = region_1(c, grad_output,      # f32[8, 4], f32[4, 4]  +192 B       c
            m1_b_out_again)
    del grad_output, m1_b_out_again                                 #                       -128 B
    m1_a_out_again = wait(m1_a_out_fetch)                           # &f32[8, 4]                         a
    del m1_a_out_fetch
    m1_b_grad_input, m1_b_full_grad = region_1(b, m1_c_grad_input,  # f32[8, 4], f32[4, 4]  +192 B       b
            m1_a_out_again)
    del m1_c_grad_input, m1_a_out_again                             #                       -256 B
    m1_a_full_grad = region_2(m1_x, m1_b_grad_input)                # f32[4, 4]             +64 B        a
    del m1_x, m1_b_grad_input                                       #                       -128 B
    return [m0_c_out, m1_c_out], {'a.weight': [m0_a_full_grad, m1_a_full_grad], 'b.weight': [m0_b_full_grad, m1_b_full_grad], 'c.weight': [m0_c_full_grad, m1_c_full_grad]}
"""


def step(table: ActionTable, rank: int = 0, *starts: str) -> Program:
    return unroll_microbatches(stages(*starts, ranks=len(table.rows)), table=table, rank=rank, axis="pp")


def test_what_an_action_saves_is_away_until_a_later_one_reads_it() -> None:
    moved = offload_microbatches(step(ActionTable.parse("0F0, 0F1, 0B0, 0B1")), least=1)
    assert str(moved).strip() == MOVED.strip()


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_all_that_waits_long_enough_goes_and_comes_back_before_it_is_read(name: str, ahead: int) -> None:
    program = step(action_table(name, 2, 4), 0, "c")
    moved = offload_microbatches(program, ahead=ahead, least=1)
    verify(moved, ALWAYS, "after offload_microbatches")
    assert len(moved.nodes(Offload)) == len(moved.nodes(Fetch)) > 0


def test_what_is_read_again_at_once_stays() -> None:
    program = step(action_table("1f1b", 2, 4), 1, "c")  # each backward follows its forward
    assert not offload_microbatches(program, least=1).nodes(Offload)
    assert not offload_microbatches(step(action_table("gpipe", 2, 4)), least=129).nodes(Offload)


def test_within_a_limit_no_more_is_moved_than_has_to_be() -> None:
    program = step(ActionTable.parse("0F0, 0F1, 0F2, 0F3, 0B0, 0B1, 0B2, 0B3"))
    every = len(offload_microbatches(program, least=1).nodes(Offload))
    counts = []
    for spared in (0, 1, 128, 192):
        limit = peak_bytes(program) - spared
        moved = offload_microbatches(program, least=1, memory_limit=limit)
        assert peak_bytes(moved) <= limit
        counts.append(len(moved.nodes(Offload)))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert 0 < counts[1] <= counts[-1] < every
