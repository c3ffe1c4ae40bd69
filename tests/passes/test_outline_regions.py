from __future__ import annotations

from dataclasses import replace

from tests.passes.programs import PAIR, check, joined, parsed
from zcompile import Program
from zcompile.ir.operation import data, set_data
from zcompile.ir.ops import Call
from zcompile.passes.assign_units import assign_units
from zcompile.passes.outline_regions import outline_regions

SPLIT = """
def forward(box):
    (
        a_weight,                  # f32[4, 4]           parameter a.weight
        b_weight,                  # f32[4, 4]           parameter b.weight
        x,                         # f32[8, 4]
    ) = unbox(box)
    ta = aten.t.default(a_weight)  # &f32[4, 4]          a
    ya = aten.mm.default(x, ta)    # f32[8, 4]   +128 B  a
    del x, ta
    tb = aten.t.default(b_weight)  # &f32[4, 4]          b
    yb = aten.mm.default(ya, tb)   # f32[8, 4]   +128 B  b
    del tb
    return [yb], [ya]


def backward(box):
    (
        b_weight,                    # f32[4, 4]           parameter b.weight
        ya,                          # f32[8, 4]           a
        dy,                          # f32[8, 4]           tangent
    ) = unbox(box)
    tb_1 = aten.t.default(b_weight)  # &f32[4, 4]          b
    t = aten.t.default(tb_1)         # &f32[4, 4]          b
    del tb_1
    db = aten.mm.default(dy, t)      # f32[8, 4]   +128 B  b
    del t
    td = aten.t.default(dy)          # &f32[4, 8]          b
    del dy
    gb = aten.mm.default(td, ya)     # f32[4, 4]   +64 B   b
    del ya, td                       #             -128 B
    return [db], {'b.weight': gb}
"""

REGIONS = joined(
    PAIR,
    """
def region_0(box):
    (
        a_weight,                  # f32[4, 4]           argument 0 item 0
        x,                         # f32[8, 4]           argument 1
    ) = unbox(box)
    ta = aten.t.default(a_weight)  # &f32[4, 4]          a
    ya = aten.mm.default(x, ta)    # f32[8, 4]   +128 B  a
    return [ya]


def region_1(box):
    (
        b_weight,                    # f32[4, 4]           argument 0 item 0
        dy,                          # f32[8, 4]           argument 1
        ya,                          # f32[8, 4]           argument 2
    ) = unbox(box)
    tb_1 = aten.t.default(b_weight)  # &f32[4, 4]          b
    t = aten.t.default(tb_1)         # &f32[4, 4]          b
    db = aten.mm.default(dy, t)      # f32[8, 4]   +128 B  b
    td = aten.t.default(dy)          # &f32[4, 8]          b
    gb = aten.mm.default(td, ya)     # f32[4, 4]   +64 B   b
    return [db, gb]
""",
)

OUTLINED = """
def forward(box):
    (
        a,                      #            1 parameter  unit a
        b,                      #            1 parameter  unit b
        x,                      # f32[8, 4]
    ) = unbox(box)
    a_out = region_0(a, x)      # f32[8, 4]  +128 B       a
    del x
    b_out = region_0(b, a_out)  # f32[8, 4]  +128 B       b
    return [b_out], [a_out]


def backward(box):
    (
        b,                                                       #                       1 parameter  unit b
        a_out,                                                   # f32[8, 4]                          a
        grad_output,                                             # f32[8, 4]                          tangent
    ) = unbox(box)
    b_grad_input, b_full_grad = region_1(b, grad_output, a_out)  # f32[8, 4], f32[4, 4]  +192 B       b
    del a_out, grad_output                                       #                       -128 B
    return [b_grad_input], {'b.weight': b_full_grad}
"""

DERIVED = """
def forward(box):
    (
        a_weight,                       # f32[4, 4]           parameter a.weight
        b_weight,                       # f32[4, 4]           parameter b.weight
        x,                              # f32[8, 4]
    ) = unbox(box)
    t = aten.t.default(a_weight)        # &f32[4, 4]          a
    y1 = aten.mm.default(x, t)          # f32[8, 4]   +128 B  a
    del x
    y2 = aten.mm.default(y1, b_weight)  # f32[8, 4]   +128 B  b
    del y1                              #             -128 B
    y3 = aten.mm.default(y2, t)         # f32[8, 4]   +128 B  a
    del t, y2                           #             -128 B
    return [y3], []


def backward(box):
    (
        dy,                    # f32[8, 4]          tangent
    ) = unbox(box)
    dx = aten.neg.default(dy)  # f32[8, 4]  +128 B
    del dy
    return [dx], []
"""

DERIVED_REGIONS = joined(
    PAIR,
    """
def region_0(box):
    (
        a_weight,                 # f32[4, 4]           argument 0 item 0
        x,                        # f32[8, 4]           argument 1
    ) = unbox(box)
    t = aten.t.default(a_weight)  # &f32[4, 4]          a
    y1 = aten.mm.default(x, t)    # f32[8, 4]   +128 B  a
    return [y1]


def region_1(box):
    (
        b_weight,                       # f32[4, 4]          argument 0 item 0
        y1,                             # f32[8, 4]          argument 1
    ) = unbox(box)
    y2 = aten.mm.default(y1, b_weight)  # f32[8, 4]  +128 B  b
    return [y2]


def region_2(box):
    (
        dy,                    # f32[8, 4]          argument 0
    ) = unbox(box)
    dx = aten.neg.default(dy)  # f32[8, 4]  +128 B
    return [dx]
""",
)

DERIVED_OUTLINED = """
def forward(box):
    (
        a,                        #            1 parameter  unit a
        b,                        #            1 parameter  unit b
        x,                        # f32[8, 4]
    ) = unbox(box)
    a_out = region_0(a, x)        # f32[8, 4]  +128 B       a
    del x
    b_out = region_1(b, a_out)    # f32[8, 4]  +128 B       b
    del a_out                     #            -128 B
    a_out_1 = region_0(a, b_out)  # f32[8, 4]  +128 B       a
    del b_out                     #            -128 B
    return [a_out_1], []


def backward(box):
    (
        grad_output,                    # f32[8, 4]          tangent
    ) = unbox(box)
    grad_input = region_2(grad_output)  # f32[8, 4]  +128 B
    del grad_output
    return [grad_input], []
"""

GLUE = """
def forward(box):
    (
        a_weight,                            # f32[4, 4]           parameter a.weight
        b_weight,                            # f32[4, 4]           parameter b.weight
        x,                                   # f32[8, 4]
    ) = unbox(box)
    first = aten.sin.default(x)              # f32[8, 4]   +128 B
    del x
    y1 = aten.mm.default(first, a_weight)    # f32[8, 4]   +128 B  a
    del first                                #             -128 B
    between = aten.sin.default(y1)           # f32[8, 4]   +128 B
    del y1                                   #             -128 B
    y2 = aten.mm.default(between, b_weight)  # f32[8, 4]   +128 B  b
    del between                              #             -128 B
    turned = aten.t.default(y2)              # &f32[4, 8]          b
    low = aten.slice.Tensor(y2, 0, 0, 4)     # &f32[4, 4]
    high = aten.slice.Tensor(y2, 0, 4, 8)    # &f32[4, 4]
    del y2
    last = aten.sin.default(high)            # f32[4, 4]   +64 B
    del high
    return [last, turned], [low]


def backward(box):
    (
        low,                       # &f32[4, 4]
        dy,                        # f32[4, 4]          tangent
        dt,                        # f32[4, 8]          tangent
    ) = unbox(box)
    dx = aten.mul.Tensor(dy, low)  # f32[4, 4]   +64 B
    del low, dy
    return [dx], []
"""

GLUE_REGIONS = joined(
    PAIR,
    """
def region_0(box):
    (
        a_weight,                          # f32[4, 4]          argument 0 item 0
        x,                                 # f32[8, 4]          argument 1
    ) = unbox(box)
    first = aten.sin.default(x)            # f32[8, 4]  +128 B
    y1 = aten.mm.default(first, a_weight)  # f32[8, 4]  +128 B  a
    between = aten.sin.default(y1)         # f32[8, 4]  +128 B
    return [between]


def region_1(box):
    (
        b_weight,                            # f32[4, 4]           argument 0 item 0
        between,                             # f32[8, 4]           argument 1
    ) = unbox(box)
    y2 = aten.mm.default(between, b_weight)  # f32[8, 4]   +128 B  b
    turned = aten.t.default(y2)              # &f32[4, 8]          b
    low = aten.slice.Tensor(y2, 0, 0, 4)     # &f32[4, 4]
    high = aten.slice.Tensor(y2, 0, 4, 8)    # &f32[4, 4]
    last = aten.sin.default(high)            # f32[4, 4]   +64 B
    return [turned, last, low]


def region_2(box):
    (
        dy,                        # f32[4, 4]         argument 0
        low,                       # f32[4, 4]         argument 1
    ) = unbox(box)
    dx = aten.mul.Tensor(dy, low)  # f32[4, 4]  +64 B
    return [dx]
""",
)

GLUE_OUTLINED = """
def forward(box):
    (
        a,                                        #            1 parameter  unit a
        b,                                        #            1 parameter  unit b
        x,                                        # f32[8, 4]
    ) = unbox(box)
    a_out = region_0(a, x)                        # f32[8, 4]  +128 B       a
    del x
    b_out, b_out_1, b_saved = region_1(b, a_out)  # f32[4, 8], f32[4, 4], &f32[4, 4]  +192 B       b
    del a_out                                     #            -128 B
    return [b_out_1, b_out], [b_saved]


def backward(box):
    (
        b_saved,                                 # &f32[4, 4]         b
        grad_output,                             # f32[4, 4]          tangent
        grad_output_1,                           # f32[4, 8]          tangent
    ) = unbox(box)
    grad_input = region_2(grad_output, b_saved)  # f32[4, 4]   +64 B
    del b_saved, grad_output
    return [grad_input], []
"""


PART = """
def forward(box):
    (
        a_weight,                      # f32[4, 4]           parameter a.weight
        b_weight,                      # f32[4, 4]           parameter b.weight
        x,                             # f32[8, 4]
    ) = unbox(box)
    h = aten.mm.default(x, a_weight)   # f32[8, 4]   +128 B  a
    del x
    s = aten.slice.Tensor(h, 0, 0, 4)  # &f32[4, 4]          a
    del h
    y = aten.mm.default(s, b_weight)   # f32[4, 4]   +64 B   b
    del s                              #             -128 B
    return [y], []
"""

PART_OUTLINED = """
def forward(box):
    (
        a,                      #                1 parameter  unit a
        b,                      #                1 parameter  unit b
        x,                      # f32[8, 4]
    ) = unbox(box)
    a_out = region_0(a, x)      # f32[4, 4]@128  +128 B       a
    del x
    b_out = region_1(b, a_out)  # f32[4, 4]      +64 B        b
    del a_out                   #                -128 B
    return [b_out], []
"""

PART_REGIONS = joined(
    PAIR,
    """
def region_0(box):
    (
        a_weight,                      # f32[4, 4]           argument 0 item 0
        x,                             # f32[8, 4]           argument 1
    ) = unbox(box)
    h = aten.mm.default(x, a_weight)   # f32[8, 4]   +128 B  a
    s = aten.slice.Tensor(h, 0, 0, 4)  # &f32[4, 4]          a
    return [s]


def region_1(box):
    (
        b_weight,                     # f32[4, 4]         argument 0 item 0
        s,                            # f32[4, 4]         argument 1
    ) = unbox(box)
    y = aten.mm.default(s, b_weight)  # f32[4, 4]  +64 B  b
    return [y]
""",
)


def outlined(program: Program) -> Program:
    """Units are not printed: a parsed program has none yet."""
    return outline_regions(assign_units(program))


def test_runs_of_one_unit_become_regions_and_equal_ones_are_shared() -> None:
    check(outlined, PAIR, SPLIT, OUTLINED, REGIONS)


def test_a_view_of_a_parameter_is_taken_inside_each_region_that_reads_it() -> None:
    check(outlined, PAIR, DERIVED, DERIVED_OUTLINED, DERIVED_REGIONS)


def test_glue_joins_the_region_beside_it_and_shared_memory_is_marked() -> None:
    check(outlined, PAIR, GLUE, GLUE_OUTLINED, GLUE_REGIONS)


def test_a_part_that_leaves_a_region_keeps_the_whole() -> None:
    result = check(outlined, PAIR, PART, PART_OUTLINED, PART_REGIONS)
    assert result.memory(result.node("a_out")) == 8 * 4 * 4


def test_regions_do_not_depend_on_the_stage() -> None:
    regions = [
        outlined(parsed(PAIR.replace("stage = 3", f"stage = {stage}"), SPLIT)).regions["region_0"].key()
        for stage in range(4)
    ]
    assert len(set(regions)) == 1


def test_a_region_comes_from_its_unit_or_else_from_the_module_of_its_operations() -> None:
    program = parsed(PAIR, GLUE)
    for name, source in (("y1", "a.inner"), ("dx", "loss")):
        node = program.node(name)
        set_data(node, replace(data(node), source=source))
    assert [data(call).source for call in outlined(program).nodes(Call)] == ["a", "b", "loss"]
