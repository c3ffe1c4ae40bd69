from __future__ import annotations

from functools import partial

import pytest

import zcompile
from tests.passes.programs import CHAIN, GATHERED, GATHERED_TWICE, OUTLINED, at_stage, check, joined, parsed
from zcompile import ProgramError, facts, verify
from zcompile.cost.memory import arena_bytes, live_bytes, peak_bytes
from zcompile.ir.arena_places import place_bytes
from zcompile.ir.operation import Data, op_of, set_data
from zcompile.ir.ops import AllGather, Reduce, Store
from zcompile.ir.program import Program
from zcompile.passes.gather_ahead import gather_ahead
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.plan_memory import plan_memory
from zcompile.passes.schedule_prefetch import schedule_prefetch

PLACED = """
def forward(box):
    (
        a,                                     #            1 parameter  unit a
        b,                                     #            1 parameter  unit b
        c,                                     #            1 parameter  unit c
        arena,                                 # &u8[256]                arena
        x,                                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a, at=arena[0:256])  #                         a
    a_full = wait(a_gather)                    #                         a
    ya = region_0(a_full, x)                   # f32[8, 4]  +128 B       a
    release(a_full)                            #                         a
    b_gather = all_gather(b, at=arena[0:256])  #                         b
    b_full = wait(b_gather)                    #                         b
    yb = region_0(b_full, ya)                  # f32[8, 4]  +128 B       b
    release(b_full)                            #                         b
    c_gather = all_gather(c, at=arena[0:256])  #                         c
    c_full = wait(c_gather)                    #                         c
    yc = region_0(c_full, yb)                  # f32[8, 4]  +128 B       c
    return [yc], [c_full, x, ya, yb]


def backward(box):
    (
        b,                                       #                       1 parameter  unit b
        arena,                                   # &u8[256]                           arena
        c_full,                                  #                                    full unit c
        x,                                       # f32[8, 4]
        ya,                                      # f32[8, 4]                          a
        yb,                                      # f32[8, 4]                          b
        dy,                                      # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c_full, dy, yb)            # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                                   #                       -128 B
    release(c_full)                              #                                    c
    b_gather_1 = all_gather(b, at=arena[0:256])  #                                    b
    b_full_1 = wait(b_gather_1)                  #                                    b
    da, gb = region_1(b_full_1, db, ya)          # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                   #                       -256 B
    release(b_full_1)                            #                                    b
    ga = region_2(da, x)                         # f32[4, 4]             +64 B        a.lin
    del x, da                                    #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
PLACED_AND_STORED = """
def forward(box):
    (
        a,                                     #            1 parameter  unit a
        b,                                     #            1 parameter  unit b
        c,                                     #            1 parameter  unit c
        arena,                                 # &u8[256]                arena
        stack,                                 #                         stack
        x,                                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a, at=arena[0:256])  #                         a
    a_full = wait(a_gather)                    #                         a
    ya = region_0(a_full, x)                   # f32[8, 4]  +128 B       a
    ya_stored = store(ya, stack)               # f32[8, 4]               a
    del ya                                     #            -128 B
    release(a_full)                            #                         a
    b_gather = all_gather(b, at=arena[0:256])  #                         b
    b_full = wait(b_gather)                    #                         b
    yb = region_0(b_full, ya_stored)           # f32[8, 4]  +128 B       b
    yb_stored = store(yb, stack)               # f32[8, 4]               b
    del yb                                     #            -128 B
    release(b_full)                            #                         b
    c_gather = all_gather(c, at=arena[0:256])  #                         c
    c_full = wait(c_gather)                    #                         c
    yc = region_0(c_full, yb_stored)           # f32[8, 4]  +128 B       c
    return [yc], [c_full, x, ya_stored, yb_stored]


def backward(box):
    (
        b,                                       #                       1 parameter  unit b
        arena,                                   # &u8[256]                           arena
        c_full,                                  #                                    full unit c
        x,                                       # f32[8, 4]
        ya_stored,                               # f32[8, 4]                          a
        yb_stored,                               # f32[8, 4]                          b
        dy,                                      # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c_full, dy, yb_stored)     # f32[8, 4], f32[4, 4]  +192 B       c
    del yb_stored, dy
    release(c_full)                              #                                    c
    b_gather_1 = all_gather(b, at=arena[0:256])  #                                    b
    b_full_1 = wait(b_gather_1)                  #                                    b
    da, gb = region_1(b_full_1, db, ya_stored)   # f32[8, 4], f32[4, 4]  +192 B       b
    del ya_stored, db                            #                       -128 B
    release(b_full_1)                            #                                    b
    ga = region_2(da, x)                         # f32[4, 4]             +64 B        a.lin
    del x, da                                    #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
UNEVEN = CHAIN.replace("f32[4, 4]", "f32[5, 4]")
"""Weights that two ranks do not divide: their gradients are copied to be sent."""


def test_gathers_have_places_that_later_ones_have_again() -> None:
    check(plan_memory, CHAIN, GATHERED, PLACED)


def test_saved_activations_are_stored_and_read_from_there() -> None:
    check(partial(plan_memory, activations=True), CHAIN, GATHERED, PLACED_AND_STORED)


def test_what_is_returned_or_comes_from_the_caller_is_not_stored() -> None:
    program = plan_memory(
        zcompile.parse(joined(CHAIN, GATHERED.replace("return [yc]", "return [yc, ya]"))), activations=True
    )
    assert [node.name for node in program.nodes(Store)] == ["yb_stored"]


def test_a_world_of_one_gathers_nothing() -> None:
    program = plan_memory(parsed(CHAIN.replace("shard 2", "shard 1"), OUTLINED))
    assert arena_bytes(program) == 0


def reduced(head: str = CHAIN) -> Program:
    return insert_reductions(schedule_prefetch(insert_gathers(zcompile.parse(joined(head, OUTLINED))), prefetch=1))


def test_gradients_have_places_where_they_are_copied_to_be_sent() -> None:
    even, uneven = plan_memory(reduced()), plan_memory(reduced(UNEVEN))
    assert [op_of(node, Reduce).at for node in even.nodes(Reduce)] == [None] * 3
    assert all(op_of(node, Reduce).at for node in uneven.nodes(Reduce))
    assert {place_bytes(uneven, node) for node in uneven.nodes(Reduce)} == {256}
    verify(uneven, [facts.PLACES_DISJOINT], "here")


@pytest.mark.parametrize("stage", [1, 2])
def test_kept_copies_have_memory_of_their_own(stage: int) -> None:
    program = plan_memory(reduced(at_stage(CHAIN, stage)))
    assert [op_of(node, AllGather).at for node in program.nodes(AllGather)] == [None] * 3


def test_what_is_gathered_ahead_has_memory_of_its_own() -> None:
    program = plan_memory(gather_ahead(insert_updates(reduced())))
    assert {op.unit: op.at is None for node in program.nodes(AllGather) if (op := op_of(node, AllGather))} == {
        "a": True,
        "b": False,
        "c": False,
    }


def test_the_arena_is_predicted_as_there_all_the_time() -> None:
    before, after = parsed(CHAIN, GATHERED_TWICE), plan_memory(parsed(CHAIN, GATHERED_TWICE))
    assert arena_bytes(after) == 256
    assert min(live_bytes(after).values()) >= 256
    assert peak_bytes(after) == peak_bytes(before) - 64 + 256


@pytest.mark.parametrize("at", [(0, 64), (128, 192), (512, 576), (0, 32), (-256, 0)])
def test_a_place_that_another_one_needs_or_that_is_none_is_refused(at: tuple[int, int]) -> None:
    program = plan_memory(schedule_prefetch(insert_gathers(zcompile.parse(joined(CHAIN, OUTLINED))), prefetch=1))
    verify(program, [facts.PLACES_DISJOINT], "here")
    second = program.node("b_gather")
    arena, *_ = second.kwargs["at"]  # type: ignore[misc]
    second.update_kwarg("at", (arena, *at))
    set_data(second, Data(AllGather("b", at=at)))
    with pytest.raises(ProgramError, match=r"b_gather|c_gather"):
        verify(program, [facts.PLACES_DISJOINT], "here")


def test_a_place_that_is_written_otherwise_than_meant_is_refused() -> None:
    program = plan_memory(parsed(CHAIN, GATHERED))
    arena, *_ = program.node("b_gather").kwargs["at"]  # type: ignore[misc]
    program.node("b_gather").update_kwarg("at", (arena, 256, 512))
    with pytest.raises(ProgramError, match="written otherwise"):
        verify(program, [facts.WELL_FORMED], "here")
