from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import CHAIN, GATHERED, GATHERED_TWICE, check, parsed
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import AllGather, Release
from zcompile.passes.keep_full import keep_full

KEPT = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    c_gather = all_gather(c)   #            +64 B        c
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    return [yc], [b_full, c_full, x, ya, yb]


def backward(box):
    (
        b_full,                        #                               full unit b
        c_full,                        #                               full unit c
        x,                             # f32[8, 4]
        ya,                            # f32[8, 4]                     a
        yb,                            # f32[8, 4]                     b
        dy,                            # f32[8, 4]                     tangent
    ) = unbox(box)
    db, gc = region_1(c_full, dy, yb)  # f32[8, 4], f32[4, 4]  +192 B  c
    del yb, dy                         #                       -128 B
    release(c_full)                    #                       -64 B   c
    da, gb = region_1(b_full, db, ya)  # f32[8, 4], f32[4, 4]  +192 B  b
    del ya, db                         #                       -256 B
    release(b_full)                    #                       -64 B   b
    ga = region_2(da, x)               # f32[4, 4]             +64 B   a.lin
    del x, da                          #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""


def test_without_prefetch_only_the_last_unit_is_kept() -> None:
    check(partial(keep_full, prefetch=0), CHAIN, GATHERED_TWICE, GATHERED)


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_units_that_would_be_gathered_again_at_once_are_kept_over_the_turn(prefetch: int) -> None:
    check(partial(keep_full, prefetch=prefetch), CHAIN, GATHERED_TWICE, KEPT)


def test_what_is_kept_is_gathered_once_and_released_once() -> None:
    program = keep_full(parsed(CHAIN, GATHERED_TWICE), prefetch=1)
    assert [op_of(node, AllGather).unit for node in program.nodes(AllGather)] == ["a", "b", "c"]
    assert [op_of(node, Release).unit for node in program.nodes(Release, phase=Phase.BACKWARD)] == ["c", "b"]
