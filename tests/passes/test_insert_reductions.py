from __future__ import annotations

from tests.passes.programs import CHAIN, HYBRID, OUTLINED, REDUCED, at_stage, changed, check
from zcompile.passes.insert_reductions import insert_reductions

GRADIENTS_HEAD = """
axes = {"dp": "shard 2"}
stage = 3
units = {
    "u": [
        "p f32[8]",
        "q f32[8]",
        "r f32[8]",
    ],
    "v": [
        "s f32[8] frozen",
    ],
}
packed = {
}


def region_0(box):
    (
        w,                     # f32[8]         argument 0 item 0
        x,                     # f32[8]         argument 1
    ) = unbox(box)
    y = aten.add.Tensor(x, w)  # f32[8]  +32 B
    return [y]


def region_1(box):
    (
        x,                   # f32[8]         argument 0
    ) = unbox(box)
    y = aten.sin.default(x)  # f32[8]  +32 B
    return [y]


def region_2(box):
    (
        x,                     # f32[8]          argument 0
    ) = unbox(box)
    y = aten.sin.default(x)    # f32[8]   +32 B
    z = aten.alias.default(x)  # &f32[8]
    return [y, z]


def region_3(box):
    (
        x,                     # f32[8]          argument 0
    ) = unbox(box)
    y = aten.sin.default(x)    # f32[8]   +32 B
    z = aten.alias.default(y)  # &f32[8]
    p = aten.cos.default(x)    # f32[8]   +32 B
    return [y, z, p]
"""

MISSING = """
def forward(box):
    (
        u,              #         3 parameters  unit u
        x,              # f32[8]
    ) = unbox(box)
    y = region_0(u, x)  # f32[8]  +32 B         u
    del x
    return [y], []


def backward(box):
    (
        dy,           # f32[8]         tangent
    ) = unbox(box)
    g = region_1(dy)  # f32[8]  +32 B
    del dy
    return [None], {'q': g}
"""

MISSING_REDUCED = """
def backward(box):
    (
        u,                                         #         3 parameters  unit u
        dy,                                        # f32[8]                tangent
    ) = unbox(box)
    g = region_1(dy)                               # f32[8]  +32 B
    del dy
    u_reduce = reduce_scatter(u, [None, g, None])  #         +16 B         u
    del g
    u_grads = wait(u_reduce)                       #         -32 B         u
    return [None], [u_grads]
"""

USED_AGAIN = changed(
    MISSING,
    """
def backward(box):
    (
        dy,           # f32[8]         tangent
    ) = unbox(box)
    g = region_1(dy)  # f32[8]  +32 B
    del dy
    dx = region_1(g)  # f32[8]  +32 B
    return [dx], {'p': g}
""",
)

USED_AGAIN_REDUCED = """
def backward(box):
    (
        u,                                              #         3 parameters  unit u
        dy,                                             # f32[8]                tangent
    ) = unbox(box)
    g = region_1(dy)                                    # f32[8]  +32 B
    del dy
    g_copy = copy(g)                                    # f32[8]  +32 B         u
    u_reduce = reduce_scatter(u, [g_copy, None, None])  #         +16 B         u
    del g_copy
    u_grads = wait(u_reduce)                            #         -32 B         u
    dx = region_1(g)                                    # f32[8]  +32 B
    del g                                               #         -32 B
    return [dx], [u_grads]
"""

TWINS = changed(
    MISSING,
    """
def backward(box):
    (
        dy,           # f32[8]         tangent
    ) = unbox(box)
    g = region_1(dy)  # f32[8]  +32 B
    del dy
    return [None], {'p': g, 'r': g}
""",
)

TWINS_REDUCED = """
def backward(box):
    (
        u,                                                  #         3 parameters  unit u
        dy,                                                 # f32[8]                tangent
    ) = unbox(box)
    g = region_1(dy)                                        # f32[8]  +32 B
    del dy
    g_copy = copy(g)                                        # f32[8]  +32 B         u
    g_copy_1 = copy(g)                                      # f32[8]  +32 B         u
    del g                                                   #         -32 B
    u_reduce = reduce_scatter(u, [g_copy, None, g_copy_1])  #         +32 B         u
    del g_copy, g_copy_1
    u_grads = wait(u_reduce)                                #         -64 B         u
    return [None], [u_grads]
"""

NOT_ITS_OWN = changed(
    MISSING,
    """
def backward(box):
    (
        dy,              # f32[8]                  tangent
    ) = unbox(box)
    g, h = region_2(dy)  # f32[8], &f32[8]  +32 B
    return [None], {'p': g, 'q': h, 'r': dy}
""",
)

NOT_ITS_OWN_REDUCED = """
def backward(box):
    (
        u,                                              #                  3 parameters  unit u
        dy,                                             # f32[8]                         tangent
    ) = unbox(box)
    g, h = region_2(dy)                                 # f32[8], &f32[8]  +32 B
    h_copy = copy(h)                                    # f32[8]           +32 B         u
    del h
    dy_copy = copy(dy)                                  # f32[8]           +32 B         u
    del dy
    u_reduce = reduce_scatter(u, [g, h_copy, dy_copy])  #                  +48 B         u
    del g, h_copy, dy_copy
    u_grads = wait(u_reduce)                            #                  -96 B         u
    return [None], [u_grads]
"""

BESIDE_A_VIEW = changed(
    MISSING,
    """
def backward(box):
    (
        dy,                 # f32[8]                          tangent
    ) = unbox(box)
    g, h, i = region_3(dy)  # f32[8], &f32[8], f32[8]  +64 B
    del dy
    return [None], {'p': g, 'q': i}
""",
)

BESIDE_A_VIEW_REDUCED = """
def backward(box):
    (
        u,                                           #                          3 parameters  unit u
        dy,                                          # f32[8]                                 tangent
    ) = unbox(box)
    g, h, i = region_3(dy)                           # f32[8], &f32[8], f32[8]  +64 B
    del dy
    g_copy = copy(g)                                 # f32[8]                   +32 B         u
    del g                                            #                          -32 B
    u_reduce = reduce_scatter(u, [g_copy, i, None])  #                          +32 B         u
    del i, g_copy
    u_grads = wait(u_reduce)                         #                          -64 B         u
    return [None], [u_grads]
"""

ALL_REDUCED = """
def backward(box):
    (
        a,                          #                       1 parameter  unit a
        b,                          #                       1 parameter  unit b
        c,                          #                       1 parameter  unit c
        x,                          # f32[8, 4]
        ya,                         # f32[8, 4]                          a
        yb,                         # f32[8, 4]                          b
        dy,                         # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)    # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                      #                       -128 B
    c_reduce = all_reduce(c, [gc])  #                                    c
    del gc
    c_grads = wait(c_reduce)        #                                    c
    da, gb = region_1(b, db, ya)    # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                      #                       -256 B
    b_reduce = all_reduce(b, [gb])  #                                    b
    del gb
    b_grads = wait(b_reduce)        #                                    b
    ga = region_2(da, x)            # f32[4, 4]             +64 B        a.lin
    del x, da                       #                       -128 B
    a_reduce = all_reduce(a, [ga])  #                                    a
    del ga
    a_grads = wait(a_reduce)        #                                    a
    return [None], [c_grads, b_grads, a_grads]
"""

NO_GRADIENTS = changed(
    MISSING,
    """
def backward(box):
    (
        dy,            # f32[8]         tangent
    ) = unbox(box)
    dx = region_1(dy)  # f32[8]  +32 B
    del dy
    return [dx], []
""",
)


def test_a_unit_is_reduced_as_soon_as_its_last_gradient_is_there() -> None:
    check(insert_reductions, CHAIN, OUTLINED, REDUCED)


def test_stage_0_reduces_to_all() -> None:
    check(insert_reductions, at_stage(CHAIN, 0), OUTLINED, ALL_REDUCED)


def test_parameters_without_a_gradient_are_none_and_units_without_one_are_left_out() -> None:
    check(insert_reductions, GRADIENTS_HEAD, MISSING, MISSING_REDUCED)


def test_a_gradient_that_is_used_otherwise_is_copied() -> None:
    check(insert_reductions, GRADIENTS_HEAD, USED_AGAIN, USED_AGAIN_REDUCED)


def test_a_gradient_of_two_parameters_is_copied_for_each() -> None:
    check(insert_reductions, GRADIENTS_HEAD, TWINS, TWINS_REDUCED)


def test_a_gradient_that_is_a_view_or_came_from_the_caller_is_copied() -> None:
    check(insert_reductions, GRADIENTS_HEAD, NOT_ITS_OWN, NOT_ITS_OWN_REDUCED)


def test_a_gradient_is_copied_for_views_of_it_alone() -> None:
    check(insert_reductions, GRADIENTS_HEAD, BESIDE_A_VIEW, BESIDE_A_VIEW_REDUCED)


def test_without_gradients_there_is_nothing_to_reduce() -> None:
    check(insert_reductions, GRADIENTS_HEAD, NO_GRADIENTS, NO_GRADIENTS)


OVER_BOTH = """
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
    c_shard_grads = wait(c_reduce)                       #                       -64 B        c
    c_average = all_reduce(c, c_shard_grads, replicate)  #                                    c
    c_grads = wait(c_average)                            #                                    c
    da, gb = region_1(b, db, ya)                         # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                                           #                       -256 B
    b_reduce = reduce_scatter(b, [gb])                   #                       +32 B        b
    del gb
    b_shard_grads = wait(b_reduce)                       #                       -64 B        b
    b_average = all_reduce(b, b_shard_grads, replicate)  #                                    b
    b_grads = wait(b_average)                            #                                    b
    ga = region_2(da, x)                                 # f32[4, 4]             +64 B        a.lin
    del x, da                                            #                       -128 B
    a_reduce = reduce_scatter(a, [ga])                   #                       +32 B        a
    del ga
    a_shard_grads = wait(a_reduce)                       #                       -64 B        a
    a_average = all_reduce(a, a_shard_grads, replicate)  #                                    a
    a_grads = wait(a_average)                            #                                    a
    return [None], [c_grads, b_grads, a_grads]
"""


def test_shards_that_repeat_are_averaged_over_both_axes() -> None:
    check(insert_reductions, HYBRID, OUTLINED, OVER_BOTH)
