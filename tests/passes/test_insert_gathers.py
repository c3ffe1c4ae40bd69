from __future__ import annotations

import pytest

from tests.passes.programs import CHAIN, GATHERED_TWICE, OUTLINED, PAIR, REGIONS, at_stage, changed, check, joined
from zcompile.passes.insert_gathers import insert_gathers

KEPT = """
def forward(box):
    (
        a,                               #            1 parameter  unit a
        b,                               #            1 parameter  unit b
        c,                               #            1 parameter  unit c
        x,                               # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a, keep=True)  #            +64 B        a
    a_full = wait(a_gather)              #                         a
    ya = region_0(a_full, x)             # f32[8, 4]  +128 B       a
    b_gather = all_gather(b, keep=True)  #            +64 B        b
    b_full = wait(b_gather)              #                         b
    yb = region_0(b_full, ya)            # f32[8, 4]  +128 B       b
    c_gather = all_gather(c, keep=True)  #            +64 B        c
    c_full = wait(c_gather)              #                         c
    yc = region_0(c_full, yb)            # f32[8, 4]  +128 B       c
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
    da, gb = region_1(b_full, db, ya)  # f32[8, 4], f32[4, 4]  +192 B  b
    del ya, db                         #                       -256 B
    ga = region_2(da, x)               # f32[4, 4]             +64 B   a.lin
    del x, da                          #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""

NEIGHBOURS = """
def forward(box):
    (
        a,                #            1 parameter  unit a
        b,                #            1 parameter  unit b
        x,                # f32[8, 4]
    ) = unbox(box)
    y1 = region_0(a, x)   # f32[8, 4]  +128 B       a
    y2 = region_0(a, y1)  # f32[8, 4]  +128 B       a
    del y1                #            -128 B
    y3 = region_0(b, y2)  # f32[8, 4]  +128 B       b
    del y2                #            -128 B
    return [y3], [x]


def backward(box):
    (
        x,               # f32[8, 4]
        dy,              # f32[8, 4]         tangent
    ) = unbox(box)
    g = region_2(dy, x)  # f32[4, 4]  +64 B
    del x, dy
    return [g], []
"""

NEIGHBOURS_GATHERED = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    a_full = wait(a_gather)    #                         a
    y1 = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    y2 = region_0(a_full, y1)  # f32[8, 4]  +128 B       a
    del y1                     #            -128 B
    release(a_full)            #            -64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    b_full = wait(b_gather)    #                         b
    y3 = region_0(b_full, y2)  # f32[8, 4]  +128 B       b
    del y2                     #            -128 B
    release(b_full)            #            -64 B        b
    return [y3], [x]
"""

FAR_APART = changed(
    NEIGHBOURS,
    """
def forward(box):
    (
        a,                #            1 parameter  unit a
        b,                #            1 parameter  unit b
        x,                # f32[8, 4]
    ) = unbox(box)
    y1 = region_0(a, x)   # f32[8, 4]  +128 B       a
    y2 = region_0(b, y1)  # f32[8, 4]  +128 B       b
    del y1                #            -128 B
    y3 = region_0(a, y2)  # f32[8, 4]  +128 B       a
    del y2                #            -128 B
    return [y3], [x]
""",
)

FAR_APART_GATHERED = """
def forward(box):
    (
        a,                       #            1 parameter  unit a
        b,                       #            1 parameter  unit b
        x,                       # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)     #            +64 B        a
    a_full = wait(a_gather)      #                         a
    y1 = region_0(a_full, x)     # f32[8, 4]  +128 B       a
    release(a_full)              #            -64 B        a
    b_gather = all_gather(b)     #            +64 B        b
    b_full = wait(b_gather)      #                         b
    y2 = region_0(b_full, y1)    # f32[8, 4]  +128 B       b
    del y1                       #            -128 B
    release(b_full)              #            -64 B        b
    a_gather_1 = all_gather(a)   #            +64 B        a
    a_full_1 = wait(a_gather_1)  #                         a
    y3 = region_0(a_full_1, y2)  # f32[8, 4]  +128 B       a
    del y2                       #            -128 B
    release(a_full_1)            #            -64 B        a
    return [y3], [x]
"""

TWO_UNITS_HEAD = joined(
    PAIR,
    changed(
        REGIONS,
        """
def region_1(box):
    (
        v,                     # f32[4, 4]          argument 0 item 0
        w,                     # f32[4, 4]          argument 1 item 0
        x,                     # f32[8, 4]          argument 2
    ) = unbox(box)
    u = aten.mul.Tensor(v, w)  # f32[4, 4]  +64 B   a
    y = aten.mm.default(x, u)  # f32[8, 4]  +128 B  a
    return [y]
""",
    ),
)

TWO_UNITS = changed(
    NEIGHBOURS,
    """
def forward(box):
    (
        a,                   #            1 parameter  unit a
        b,                   #            1 parameter  unit b
        x,                   # f32[8, 4]
    ) = unbox(box)
    y1 = region_0(a, x)      # f32[8, 4]  +128 B       a
    y2 = region_1(a, b, y1)  # f32[8, 4]  +128 B       a + b
    del y1                   #            -128 B
    y3 = region_0(b, y2)     # f32[8, 4]  +128 B       b
    del y2                   #            -128 B
    return [y3], [x]
""",
)

TWO_UNITS_GATHERED = """
def forward(box):
    (
        a,                             #            1 parameter  unit a
        b,                             #            1 parameter  unit b
        x,                             # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)           #            +64 B        a
    a_full = wait(a_gather)            #                         a
    y1 = region_0(a_full, x)           # f32[8, 4]  +128 B       a
    b_gather = all_gather(b)           #            +64 B        b
    b_full = wait(b_gather)            #                         b
    y2 = region_1(a_full, b_full, y1)  # f32[8, 4]  +128 B       a + b
    del y1                             #            -128 B
    release(a_full)                    #            -64 B        a
    y3 = region_0(b_full, y2)          # f32[8, 4]  +128 B       b
    del y2                             #            -128 B
    release(b_full)                    #            -64 B        b
    return [y3], [x]
"""


def test_a_unit_is_full_from_its_first_use_in_a_phase_to_its_last() -> None:
    check(insert_gathers, CHAIN, OUTLINED, GATHERED_TWICE)


@pytest.mark.parametrize("stage", [1, 2])
def test_without_sharded_parameters_a_unit_is_gathered_once_and_kept(stage: int) -> None:
    check(insert_gathers, at_stage(CHAIN, stage), OUTLINED, KEPT)


def test_consecutive_calls_read_one_gather() -> None:
    check(insert_gathers, CHAIN, NEIGHBOURS, NEIGHBOURS_GATHERED)


def test_a_unit_used_in_two_places_is_gathered_and_released_in_each() -> None:
    check(insert_gathers, CHAIN, FAR_APART, FAR_APART_GATHERED)


def test_a_region_that_reads_two_units_has_both_full() -> None:
    check(insert_gathers, TWO_UNITS_HEAD, TWO_UNITS, TWO_UNITS_GATHERED)
