"""What passes make of programs in which both axes of a mesh divide what ranks keep (HFSDP, hpZ)."""

from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import HYBRID, OUTLINED, at_stage, changed, check
from tests.passes.test_insert_gathers import KEPT as IN_ONE_AXIS
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.schedule_prefetch import schedule_prefetch

HPZ = HYBRID.replace("stage = 3", 'stage = 3\nhybrid = "hpz"')
HFSDP = HPZ.replace("hpz", "hfsdp")

HPZ_GATHERED = """
def forward(box):
    (
        a,                                 #            1 parameter  unit a
        b,                                 #            1 parameter  unit b
        c,                                 #            1 parameter  unit c
        replicate,                         #                         group replicate
        x,                                 # f32[8, 4]
    ) = unbox(box)
    a_outside = all_gather(a, replicate)   # u8[256]    +256 B       a
    a_secondary = wait(a_outside)          # &u8[256]                a
    del a_outside
    a_gather = all_gather(a, a_secondary)  #            +96 B        a
    del a_secondary
    a_full = wait(a_gather)                #            -256 B       a
    ya = region_0(a_full, x)               # f32[8, 4]  +128 B       a
    release(a_full)                        #            -96 B        a
    b_outside = all_gather(b, replicate)   # u8[256]    +256 B       b
    b_secondary = wait(b_outside)          # &u8[256]                b
    del b_outside
    b_gather = all_gather(b, b_secondary)  #            +96 B        b
    b_full = wait(b_gather)                #                         b
    yb = region_0(b_full, ya)              # f32[8, 4]  +128 B       b
    release(b_full)                        #            -96 B        b
    c_outside = all_gather(c, replicate)   # u8[256]    +256 B       c
    c_secondary = wait(c_outside)          # &u8[256]                c
    del c_outside
    c_gather = all_gather(c, c_secondary)  #            +96 B        c
    c_full = wait(c_gather)                #                         c
    yc = region_0(c_full, yb)              # f32[8, 4]  +128 B       c
    release(c_full)                        #            -96 B        c
    return [yc], [x, ya, b_secondary, yb, c_secondary]


def backward(box):
    (
        b,                                   #                       1 parameter  unit b
        c,                                   #                       1 parameter  unit c
        x,                                   # f32[8, 4]
        ya,                                  # f32[8, 4]                          a
        b_secondary,                         # &u8[256]                           secondary unit b
        yb,                                  # f32[8, 4]                          b
        c_secondary,                         # &u8[256]                           secondary unit c
        dy,                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    c_gather_1 = all_gather(c, c_secondary)  #                       +96 B        c
    del c_secondary
    c_full_1 = wait(c_gather_1)              #                       -256 B       c
    db, gc = region_1(c_full_1, dy, yb)      # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                               #                       -128 B
    release(c_full_1)                        #                       -96 B        c
    b_gather_1 = all_gather(b, b_secondary)  #                       +96 B        b
    del b_secondary
    b_full_1 = wait(b_gather_1)              #                       -256 B       b
    da, gb = region_1(b_full_1, db, ya)      # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                               #                       -256 B
    release(b_full_1)                        #                       -96 B        b
    ga = region_2(da, x)                     # f32[4, 4]             +64 B        a.lin
    del x, da                                #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""

HFSDP_GATHERED = """
def forward(box):
    (
        a,                                           #            1 parameter  unit a
        b,                                           #            1 parameter  unit b
        c,                                           #            1 parameter  unit c
        replicate,                                   #                         group replicate
        x,                                           # f32[8, 4]
    ) = unbox(box)
    a_outside = all_gather(a, replicate, keep=True)  # u8[256]    +256 B       a
    a_secondary = wait(a_outside)                    # &u8[256]                a
    del a_outside
    a_gather = all_gather(a, a_secondary)            #            +96 B        a
    del a_secondary
    a_full = wait(a_gather)                          #                         a
    ya = region_0(a_full, x)                         # f32[8, 4]  +128 B       a
    release(a_full)                                  #            -96 B        a
    b_outside = all_gather(b, replicate, keep=True)  # u8[256]    +256 B       b
    b_secondary = wait(b_outside)                    # &u8[256]                b
    del b_outside
    b_gather = all_gather(b, b_secondary)            #            +96 B        b
    b_full = wait(b_gather)                          #                         b
    yb = region_0(b_full, ya)                        # f32[8, 4]  +128 B       b
    release(b_full)                                  #            -96 B        b
    c_outside = all_gather(c, replicate, keep=True)  # u8[256]    +256 B       c
    c_secondary = wait(c_outside)                    # &u8[256]                c
    del c_outside
    c_gather = all_gather(c, c_secondary)            #            +96 B        c
    c_full = wait(c_gather)                          #                         c
    yc = region_0(c_full, yb)                        # f32[8, 4]  +128 B       c
    release(c_full)                                  #            -96 B        c
    return [yc], [x, ya, b_secondary, yb, c_secondary]


def backward(box):
    (
        b,                                   #                       1 parameter  unit b
        c,                                   #                       1 parameter  unit c
        x,                                   # f32[8, 4]
        ya,                                  # f32[8, 4]                          a
        b_secondary,                         # &u8[256]                           secondary unit b
        yb,                                  # f32[8, 4]                          b
        c_secondary,                         # &u8[256]                           secondary unit c
        dy,                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    c_gather_1 = all_gather(c, c_secondary)  #                       +96 B        c
    del c_secondary
    c_full_1 = wait(c_gather_1)              #                                    c
    db, gc = region_1(c_full_1, dy, yb)      # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                               #                       -128 B
    release(c_full_1)                        #                       -96 B        c
    b_gather_1 = all_gather(b, b_secondary)  #                       +96 B        b
    del b_secondary
    b_full_1 = wait(b_gather_1)              #                                    b
    da, gb = region_1(b_full_1, db, ya)      # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                               #                       -256 B
    release(b_full_1)                        #                       -96 B        b
    ga = region_2(da, x)                     # f32[4, 4]             +64 B        a.lin
    del x, da                                #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""

KEPT = changed(
    IN_ONE_AXIS,
    """
def forward(box):
    (
        a,                                            #            1 parameter  unit a
        b,                                            #            1 parameter  unit b
        c,                                            #            1 parameter  unit c
        replicate,                                    #                         group replicate
        x,                                            # f32[8, 4]
    ) = unbox(box)
    a_outside = all_gather(a, replicate)              # u8[256]    +256 B       a
    a_secondary = wait(a_outside)                     # &u8[256]                a
    del a_outside
    a_gather = all_gather(a, a_secondary, keep=True)  #            +96 B        a
    del a_secondary
    a_full = wait(a_gather)                           #            -256 B       a
    ya = region_0(a_full, x)                          # f32[8, 4]  +128 B       a
    b_outside = all_gather(b, replicate)              # u8[256]    +256 B       b
    b_secondary = wait(b_outside)                     # &u8[256]                b
    del b_outside
    b_gather = all_gather(b, b_secondary, keep=True)  #            +96 B        b
    del b_secondary
    b_full = wait(b_gather)                           #            -256 B       b
    yb = region_0(b_full, ya)                         # f32[8, 4]  +128 B       b
    c_outside = all_gather(c, replicate)              # u8[256]    +256 B       c
    c_secondary = wait(c_outside)                     # &u8[256]                c
    del c_outside
    c_gather = all_gather(c, c_secondary, keep=True)  #            +96 B        c
    del c_secondary
    c_full = wait(c_gather)                           #            -256 B       c
    yc = region_0(c_full, yb)                         # f32[8, 4]  +128 B       c
    return [yc], [b_full, c_full, x, ya, yb]
""",
)

REDUCED = """
def backward(box):
    (
        a,                                                   #                       1 parameter  unit a
        b,                                                   #                       1 parameter  unit b
        c,                                                   #                       1 parameter  unit c
        replicate,                                           #                                    group replicate
        x,                                                   # f32[8, 4]
        ya,                                                  # f32[8, 4]                          a
        yb,                                                  # f32[8, 4]                          b
        dy,                                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)                             # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                                               #                       -128 B
    c_reduce = reduce_scatter(c, [gc])                       #                       +48 B        c
    del gc
    c_shard_grads = wait(c_reduce)                           #                       -64 B        c
    c_average = reduce_scatter(c, c_shard_grads, replicate)  #                       +16 B        c
    c_grads = wait(c_average)                                #                       -48 B        c
    da, gb = region_1(b, db, ya)                             # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                               #                       -256 B
    b_reduce = reduce_scatter(b, [gb])                       #                       +48 B        b
    del gb
    b_shard_grads = wait(b_reduce)                           #                       -64 B        b
    b_average = reduce_scatter(b, b_shard_grads, replicate)  #                       +16 B        b
    b_grads = wait(b_average)                                #                       -48 B        b
    ga = region_2(da, x)                                     # f32[4, 4]             +64 B        a.lin
    del x, da                                                #                       -128 B
    a_reduce = reduce_scatter(a, [ga])                       #                       +48 B        a
    del ga
    a_shard_grads = wait(a_reduce)                           #                       -64 B        a
    a_average = reduce_scatter(a, a_shard_grads, replicate)  #                       +16 B        a
    a_grads = wait(a_average)                                #                       -48 B        a
    return [None], [c_grads, b_grads, a_grads]
"""

AHEAD = """
def forward(box):
    (
        a,                                 #            1 parameter  unit a
        b,                                 #            1 parameter  unit b
        c,                                 #            1 parameter  unit c
        replicate,                         #                         group replicate
        x,                                 # f32[8, 4]
    ) = unbox(box)
    a_outside = all_gather(a, replicate)   # u8[256]    +256 B       a
    b_outside = all_gather(b, replicate)   # u8[256]    +256 B       b
    c_outside = all_gather(c, replicate)   # u8[256]    +256 B       c
    a_secondary = wait(a_outside)          # &u8[256]                a
    del a_outside
    a_gather = all_gather(a, a_secondary)  #            +96 B        a
    del a_secondary
    b_secondary = wait(b_outside)          # &u8[256]                b
    del b_outside
    b_gather = all_gather(b, b_secondary)  #            +96 B        b
    a_full = wait(a_gather)                #            -256 B       a
    ya = region_0(a_full, x)               # f32[8, 4]  +128 B       a
    release(a_full)                        #            -96 B        a
    c_secondary = wait(c_outside)          # &u8[256]                c
    del c_outside
    c_gather = all_gather(c, c_secondary)  #            +96 B        c
    b_full = wait(b_gather)                #                         b
    yb = region_0(b_full, ya)              # f32[8, 4]  +128 B       b
    release(b_full)                        #            -96 B        b
    c_full = wait(c_gather)                #                         c
    yc = region_0(c_full, yb)              # f32[8, 4]  +128 B       c
    release(c_full)                        #            -96 B        c
    return [yc], [x, b_secondary, ya, c_secondary, yb]


def backward(box):
    (
        b,                                   #                       1 parameter  unit b
        c,                                   #                       1 parameter  unit c
        x,                                   # f32[8, 4]
        b_secondary,                         # &u8[256]                           secondary unit b
        ya,                                  # f32[8, 4]                          a
        c_secondary,                         # &u8[256]                           secondary unit c
        yb,                                  # f32[8, 4]                          b
        dy,                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    c_gather_1 = all_gather(c, c_secondary)  #                       +96 B        c
    del c_secondary
    b_gather_1 = all_gather(b, b_secondary)  #                       +96 B        b
    del b_secondary
    c_full_1 = wait(c_gather_1)              #                       -256 B       c
    db, gc = region_1(c_full_1, dy, yb)      # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                               #                       -128 B
    release(c_full_1)                        #                       -96 B        c
    b_full_1 = wait(b_gather_1)              #                       -256 B       b
    da, gb = region_1(b_full_1, db, ya)      # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                               #                       -256 B
    release(b_full_1)                        #                       -96 B        b
    ga = region_2(da, x)                     # f32[4, 4]             +64 B        a.lin
    del x, da                                #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""


def test_a_unit_is_gathered_outside_once_and_inside_in_both_phases() -> None:
    check(insert_gathers, HPZ, OUTLINED, HPZ_GATHERED)


def test_hfsdp_keeps_its_secondary_shards() -> None:
    check(insert_gathers, HFSDP, OUTLINED, HFSDP_GATHERED)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("head", [HPZ, HFSDP])
def test_without_sharded_parameters_full_copies_are_kept_alone(head: str, stage: int) -> None:
    check(insert_gathers, at_stage(head, stage), OUTLINED, KEPT)


def test_averages_inside_are_scattered_outside() -> None:
    check(insert_reductions, HPZ, OUTLINED, REDUCED)


def test_gathers_outside_start_at_once_and_those_inside_ahead() -> None:
    check(partial(schedule_prefetch, prefetch=1), HPZ, HPZ_GATHERED, AHEAD)
