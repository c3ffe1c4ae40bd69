from __future__ import annotations

from tests.passes.programs import CHAIN, OUTLINED, REDUCED, at_stage, check, head_of, joined, parsed
from zcompile import facts, verify
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Update
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.sink_waits import sink_waits

UPDATED = """
def backward(box):
    (
        a,                              #                       1 parameter  unit a
        b,                              #                       1 parameter  unit b
        c,                              #                       1 parameter  unit c
        x,                              # f32[8, 4]
        ya,                             # f32[8, 4]                          a
        yb,                             # f32[8, 4]                          b
        dy,                             # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)        # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                          #                       -128 B
    c_reduce = reduce_scatter(c, [gc])  #                       +32 B        c
    del gc
    da, gb = region_1(b, db, ya)        # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                          #                       -256 B
    c_grads = wait(c_reduce)            #                       -64 B        c
    b_reduce = reduce_scatter(b, [gb])  #                       +32 B        b
    del gb
    update(c, c_grads)                  #                       -32 B        c
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    b_grads = wait(b_reduce)            #                       -64 B        b
    a_reduce = reduce_scatter(a, [ga])  #                       +32 B        a
    del ga
    update(b, b_grads)                  #                       -32 B        b
    a_grads = wait(a_reduce)            #                       -64 B        a
    update(a, a_grads)                  #                       -32 B        a
    return [None], []
"""


def test_gradients_are_used_as_they_arrive_while_the_next_reduction_is_in_flight() -> None:
    sunk = sink_waits(parsed(CHAIN, REDUCED), depth=1)
    updated = check(insert_updates, CHAIN, str(sunk), UPDATED)
    verify(updated, (facts.REDUCED_ONCE, facts.UPDATED_ONCE), "here")
    assert updated.has_backward


def test_stage_0_does_not_wait_for_the_end_if_gradients_are_consumed() -> None:
    reduced = insert_reductions(parsed(at_stage(CHAIN, 0), OUTLINED))
    program = insert_updates(sink_waits(reduced, depth=1, consumed=True))
    lines = [line.split("#")[0].strip() for line in str(program).splitlines()]
    assert lines.index("update(c, c_grads)") < lines.index("ga = region_2(da, x)") + 3
    assert lines[-1] == "return [None], []"


TIED = joined(
    head_of("a"),
    """
def region_0(box):
    (
        w,                     # f32[4, 4]          argument 0 item 0
        x,                     # f32[8, 4]          argument 1
    ) = unbox(box)
    y = aten.mm.default(x, w)  # f32[8, 4]  +128 B  a
    return [y]


def region_1(box):
    (
        dy,                       # f32[8, 4]          argument 0
        x,                        # f32[8, 4]          argument 1
    ) = unbox(box)
    xt = aten.t.default(x)        # &f32[4, 8]         a
    dw = aten.mm.default(xt, dy)  # f32[4, 4]   +64 B  a
    return [dw]
""",
)

READ_AGAIN = """
def forward(box):
    (
        a,              #            1 parameter  unit a
        x,              # f32[8, 4]
    ) = unbox(box)
    y = region_0(a, x)  # f32[8, 4]  +128 B       a
    return [y], [x]


def backward(box):
    (
        a,                              #            1 parameter  unit a
        x,                              # f32[8, 4]
        dy,                             # f32[8, 4]               tangent
    ) = unbox(box)
    ga = region_1(dy, x)                # f32[4, 4]  +64 B        a
    del x
    a_reduce = reduce_scatter(a, [ga])  #            +32 B        a
    del ga
    a_grads = wait(a_reduce)            #            -64 B        a
    dx = region_0(a, dy)                # f32[8, 4]  +128 B       a
    del dy
    return [dx], [a_grads]
"""


def test_a_unit_is_updated_after_its_last_read() -> None:
    program = insert_updates(parsed(TIED, READ_AGAIN))
    verify(program, (facts.UPDATED_ONCE,), "here")
    (update,) = program.nodes(Update)
    assert op_of(update, Update).params == ("a.weight",)
    assert update.prev.name == "dx"
