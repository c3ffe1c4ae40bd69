from __future__ import annotations

from dataclasses import replace

from tests.passes.programs import CHAIN, GATHERED, OUTLINED, at_stage, check, head_of, joined, parsed
from tests.passes.test_capture_graphs import on_gpu
from zcompile.ir.placement import WHOLE, RowLoop
from zcompile.passes.merge_regions import merge_regions

REGIONS = """
def region_3(box):
    (
        w,                           # f32[4, 4]          argument 0 item 0
        w_1,                         # f32[4, 4]          argument 1 item 0
        w_2,                         # f32[4, 4]          argument 2 item 0
        x,                           # f32[8, 4]          argument 3
    ) = unbox(box)
    y = aten.mm.default(x, w)        # f32[8, 4]  +128 B  a
    y_1 = aten.mm.default(y, w_1)    # f32[8, 4]  +128 B  a
    y_2 = aten.mm.default(y_1, w_2)  # f32[8, 4]  +128 B  a
    return [y, y_1, y_2]


def region_4(box):
    (
        w,                              # f32[4, 4]           argument 0 item 0
        w_1,                            # f32[4, 4]           argument 1 item 0
        dy,                             # f32[8, 4]           argument 2
        x,                              # f32[8, 4]           argument 3
        x_1,                            # f32[8, 4]           argument 4
        x_2,                            # f32[8, 4]           argument 5
    ) = unbox(box)
    wt = aten.t.default(w)              # &f32[4, 4]          c
    dx = aten.mm.default(dy, wt)        # f32[8, 4]   +128 B  c
    xt = aten.t.default(x)              # &f32[4, 8]          c
    dw = aten.mm.default(xt, dy)        # f32[4, 4]   +64 B   c
    wt_1 = aten.t.default(w_1)          # &f32[4, 4]          c
    dx_1 = aten.mm.default(dx, wt_1)    # f32[8, 4]   +128 B  c
    xt_1 = aten.t.default(x_1)          # &f32[4, 8]          c
    dw_1 = aten.mm.default(xt_1, dx)    # f32[4, 4]   +64 B   c
    xt_2 = aten.t.default(x_2)          # &f32[4, 8]          a
    dw_2 = aten.mm.default(xt_2, dx_1)  # f32[4, 4]   +64 B   a
    return [dw, dw_1, dw_2]
"""
MERGED = """
def forward(box):
    (
        a,                             #            1 parameter  unit a
        b,                             #            1 parameter  unit b
        c,                             #            1 parameter  unit c
        x,                             # f32[8, 4]
    ) = unbox(box)
    ya, yb, yc = region_3(a, b, c, x)  # f32[8, 4], f32[8, 4], f32[8, 4]  +384 B       a + b + c
    return [yc], [x, ya, yb]


def backward(box):
    (
        b,                                      #            1 parameter  unit b
        c,                                      #            1 parameter  unit c
        x,                                      # f32[8, 4]
        ya,                                     # f32[8, 4]               a
        yb,                                     # f32[8, 4]               b
        dy,                                     # f32[8, 4]               tangent
    ) = unbox(box)
    gc, gb, ga = region_4(c, b, dy, yb, ya, x)  # f32[4, 4], f32[4, 4], f32[4, 4]  +192 B       c + b + a.lin
    del x, ya, yb, dy                           #            -256 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""


def test_regions_that_follow_each_other_become_one() -> None:
    merged = joined(at_stage(head_of("a", "b", "c"), 0), REGIONS)
    check(on_gpu(merge_regions), at_stage(CHAIN, 0), OUTLINED, MERGED, merged)


def test_lines_between_regions_part_them() -> None:
    """So in stage 3, where each unit is gathered and released: nothing is alive for longer."""
    gathered = parsed(CHAIN, GATHERED)
    assert on_gpu(merge_regions)(gathered).text(regions=True) == gathered.text(regions=True)


def test_what_cannot_be_captured_remains_by_itself() -> None:
    outlined = parsed(at_stage(CHAIN, 0), OUTLINED)
    assert merge_regions(outlined).text(regions=True) == outlined.text(regions=True)  # on the host
    loop = RowLoop(8, 4, (WHOLE, WHOLE), (WHOLE,))
    looped = replace(
        outlined, regions={**outlined.regions, "region_0": replace(outlined.regions["region_0"], rows=loop)}
    )
    merged = on_gpu(merge_regions)(looped)
    assert [name for name in merged.regions if name in looped.regions] == ["region_0"]
    assert len(merged.regions) == 2
