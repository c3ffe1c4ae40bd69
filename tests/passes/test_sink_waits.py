from __future__ import annotations

from functools import partial

from tests.passes.programs import CHAIN, HYBRID, OUTLINED, REDUCED, at_stage, changed, check, parsed
from tests.passes.test_insert_reductions import OVER_BOTH
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.sink_waits import sink_waits

DEPTH_1 = changed(
    REDUCED,
    """
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
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    b_grads = wait(b_reduce)            #                       -64 B        b
    a_reduce = reduce_scatter(a, [ga])  #                       +32 B        a
    del ga
    a_grads = wait(a_reduce)            #                       -64 B        a
    return [None], [c_grads, b_grads, a_grads]
""",
)

DEPTH_2 = """
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
    b_reduce = reduce_scatter(b, [gb])  #                       +32 B        b
    del gb
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    c_grads = wait(c_reduce)            #                       -64 B        c
    a_reduce = reduce_scatter(a, [ga])  #                       +32 B        a
    del ga
    b_grads = wait(b_reduce)            #                       -64 B        b
    a_grads = wait(a_reduce)            #                       -64 B        a
    return [None], [c_grads, b_grads, a_grads]
"""


def test_a_wait_stands_before_the_next_reduction() -> None:
    check(partial(sink_waits, depth=1), CHAIN, REDUCED, DEPTH_1)


def test_a_wait_stands_before_the_reduction_depth_later() -> None:
    check(partial(sink_waits, depth=2), CHAIN, REDUCED, DEPTH_2)


def test_sinking_twice_changes_nothing() -> None:
    check(partial(sink_waits, depth=1), CHAIN, DEPTH_1, DEPTH_1)


def test_stage_0_waits_at_the_end_in_the_order_of_the_reductions() -> None:
    program = sink_waits(insert_reductions(parsed(at_stage(CHAIN, 0), OUTLINED)), depth=1)
    lines = [line.split("#")[0].strip() for line in str(program).splitlines()]
    waits = ["c_grads = wait(c_reduce)", "b_grads = wait(b_reduce)", "a_grads = wait(a_reduce)"]
    assert lines[-5:] == ["del ga", *waits, "return [None], [c_grads, b_grads, a_grads]"]


def test_a_program_without_reductions_is_left_alone() -> None:
    check(sink_waits, CHAIN, OUTLINED, OUTLINED)


REPLICAS_LATE = """
def backward(box):
    (
        a,                                               #                       1 parameter  unit a
        b,                                               #                       1 parameter  unit b
        c,                                               #                       1 parameter  unit c
        replicate,                                       #                                    group replicate
        x,                                               # f32[8, 4]
        ya,                                              # f32[8, 4]                          a
        yb,                                              # f32[8, 4]                          b
        dy,                                              # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)                         # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                                           #                       -128 B
    c_reduce = reduce_scatter(c, [gc])                   #                       +32 B        c
    del gc
    da, gb = region_1(b, db, ya)                         # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                           #                       -256 B
    c_shard_grads = wait(c_reduce)                       #                       -64 B        c
    c_average = all_reduce(c, c_shard_grads, replicate)  #                                    c
    b_reduce = reduce_scatter(b, [gb])                   #                       +32 B        b
    del gb
    ga = region_2(da, x)                                 # f32[4, 4]             +64 B        a.lin
    del x, da                                            #                       -128 B
    b_shard_grads = wait(b_reduce)                       #                       -64 B        b
    b_average = all_reduce(b, b_shard_grads, replicate)  #                                    b
    a_reduce = reduce_scatter(a, [ga])                   #                       +32 B        a
    del ga
    a_shard_grads = wait(a_reduce)                       #                       -64 B        a
    a_average = all_reduce(a, a_shard_grads, replicate)  #                                    a
    c_grads = wait(c_average)                            #                                    c
    b_grads = wait(b_average)                            #                                    b
    a_grads = wait(a_average)                            #                                    a
    return [None], [c_grads, b_grads, a_grads]
"""

REPLICAS_USED_UP = """
def backward(box):
    (
        a,                                               #                       1 parameter  unit a
        b,                                               #                       1 parameter  unit b
        c,                                               #                       1 parameter  unit c
        replicate,                                       #                                    group replicate
        x,                                               # f32[8, 4]
        ya,                                              # f32[8, 4]                          a
        yb,                                              # f32[8, 4]                          b
        dy,                                              # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)                         # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                                           #                       -128 B
    c_reduce = reduce_scatter(c, [gc])                   #                       +32 B        c
    del gc
    da, gb = region_1(b, db, ya)                         # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                           #                       -256 B
    c_shard_grads = wait(c_reduce)                       #                       -64 B        c
    c_average = all_reduce(c, c_shard_grads, replicate)  #                                    c
    b_reduce = reduce_scatter(b, [gb])                   #                       +32 B        b
    del gb
    ga = region_2(da, x)                                 # f32[4, 4]             +64 B        a.lin
    del x, da                                            #                       -128 B
    b_shard_grads = wait(b_reduce)                       #                       -64 B        b
    c_grads = wait(c_average)                            #                                    c
    b_average = all_reduce(b, b_shard_grads, replicate)  #                                    b
    a_reduce = reduce_scatter(a, [ga])                   #                       +32 B        a
    del ga
    a_shard_grads = wait(a_reduce)                       #                       -64 B        a
    b_grads = wait(b_average)                            #                                    b
    a_average = all_reduce(a, a_shard_grads, replicate)  #                                    a
    a_grads = wait(a_average)                            #                                    a
    return [None], [c_grads, b_grads, a_grads]
"""


def test_averages_over_replicas_start_at_once_and_are_waited_for_at_the_end() -> None:
    check(
        partial(sink_waits, depth=1),
        HYBRID,
        f"{OUTLINED.partition('def backward')[0]}{OVER_BOTH.strip()}\n",
        REPLICAS_LATE,
    )


def test_averages_over_replicas_that_are_used_up_are_waited_for_before_the_next() -> None:
    step = partial(sink_waits, depth=1, consumed=True)
    check(step, HYBRID, f"{OUTLINED.partition('def backward')[0]}{OVER_BOTH.strip()}\n", REPLICAS_USED_UP)
