from __future__ import annotations

from functools import partial

import pytest

import zcompile
from tests.passes.programs import CHAIN, OUTLINED, REDUCED, at_stage, check, parsed
from zcompile import ProgramError, facts, verify
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Reduce
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.pack_small import pack_small
from zcompile.passes.split_large import split_large

LARGE_A = CHAIN.replace("a.weight f32[4, 4]", "a.weight f32[5, 4]")
"""Padded for two ranks: 96 bytes."""
SPLIT = """
def backward(box):
    (
        a,                                         #                       1 parameter  unit a
        b,                                         #                       1 parameter  unit b
        c,                                         #                       1 parameter  unit c
        x,                                         # f32[8, 4]
        ya,                                        # f32[8, 4]                          a
        yb,                                        # f32[8, 4]                          b
        dy,                                        # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)                   # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                                     #                       -128 B
    c_reduce = reduce_scatter(c, [gc])             #                       +32 B        c
    del gc
    c_grads = wait(c_reduce)                       #                       -64 B        c
    da, gb = region_1(b, db, ya)                   # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                     #                       -256 B
    b_reduce = reduce_scatter(b, [gb])             #                       +32 B        b
    del gb
    b_grads = wait(b_reduce)                       #                       -64 B        b
    ga = region_2(da, x)                           # f32[4, 4]             +64 B        a.lin
    del x, da                                      #                       -128 B
    a_reduce = reduce_scatter(a, [ga], bucket=64)  #                       +48 B        a
    del ga
    a_grads = wait(a_reduce)                       #                       -64 B        a
    return [None], [c_grads, b_grads, a_grads]
"""


def test_reductions_of_large_messages_are_told_the_bucket() -> None:
    split = check(partial(split_large, bucket=64), LARGE_A, larger(REDUCED), SPLIT)
    verify(split, (facts.buffers_bounded(64),), "here")
    assert [op_of(node, Reduce).bucket for node in split.nodes(Reduce)] == [None, None, 64]
    assert split.digest() != parsed(LARGE_A, larger(REDUCED)).digest(), "ranks must agree on the pieces"
    assert split.volume() == parsed(LARGE_A, larger(REDUCED)).volume()


def larger(phases: str) -> str:
    return str(zcompile.parse(f"{LARGE_A}\n\n\n{phases}")).strip("\n")


def test_splitting_twice_changes_nothing() -> None:
    once = split_large(parsed(CHAIN, REDUCED), bucket=32)
    assert str(split_large(once, bucket=32)) == str(once)


def test_what_stays_whole_is_left_alone() -> None:
    check(partial(split_large, bucket=64), CHAIN, REDUCED, REDUCED)
    whole = insert_reductions(parsed(at_stage(CHAIN, 0), OUTLINED))
    assert str(split_large(whole, bucket=1)) == str(whole), "an all_reduce works in place"


def test_a_reduction_that_copies_more_than_the_bucket_is_found() -> None:
    with pytest.raises(ProgramError, match=r"c_reduce may copy 64 B to send it; 32 B are allowed"):
        verify(parsed(CHAIN, REDUCED), (facts.buffers_bounded(32),), "here")


def test_packed_messages_grow_to_the_bucket() -> None:
    many = ", ".join(f'"a.p{index} f32[8]"' for index in range(7))
    text = f'axes = {{"dp": "shard 2"}}\nstage = 3\nunits = {{\n    "a": [{many}],\n}}\npacked = {{\n}}\n\n\n'
    program = zcompile.parse(
        text + "def forward(box):\n    (\n        x,  # f32[8]\n    ) = unbox(box)\n    return [x], []\n"
    )
    (unit,) = pack_small(program, bucket=100).layout.units
    assert unit.messages == ((0, 1, 2), (3, 4, 5), (6,))
    (unit,) = pack_small(program, bucket=8).layout.units
    assert unit.messages == tuple((index,) for index in range(7))
