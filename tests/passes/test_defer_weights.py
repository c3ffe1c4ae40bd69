from __future__ import annotations

from tests.passes.programs import PAIR, changed, check
from zcompile import Program
from zcompile.passes.assign_units import assign_units
from zcompile.passes.defer_weights import defer_weights

IN_ORDER = """
def forward(box):
    (
        a_weight,                  # f32[4, 4]           parameter a.weight
        b_weight,                  # f32[4, 4]           parameter b.weight
        x,                         # f32[8, 4]
    ) = unbox(box)
    ta = aten.t.default(a_weight)  # &f32[4, 4]          a
    ya = aten.mm.default(x, ta)    # f32[8, 4]   +128 B  a
    del ta
    tb = aten.t.default(b_weight)  # &f32[4, 4]          b
    yb = aten.mm.default(ya, tb)   # f32[8, 4]   +128 B  b
    del tb
    return [yb], [x, ya]


def backward(box):
    (
        b_weight,                       # f32[4, 4]           parameter b.weight
        x,                              # f32[8, 4]
        ya,                             # f32[8, 4]           a
        dy,                             # f32[8, 4]           tangent
    ) = unbox(box)
    td = aten.t.default(dy)             # &f32[4, 8]          b
    gb = aten.mm.default(td, ya)        # f32[4, 4]   +64 B   b
    del ya, td                          #             -128 B
    db = aten.mm.default(dy, b_weight)  # f32[8, 4]   +128 B  b
    del dy
    dt = aten.t.default(db)             # &f32[4, 8]          a
    del db
    ga = aten.mm.default(dt, x)         # f32[4, 4]   +64 B   a
    del x, dt                           #             -128 B
    return [None], {'b.weight': gb, 'a.weight': ga}
"""

DEFERRED = changed(
    IN_ORDER,
    """
def backward(box):
    (
        b_weight,                       # f32[4, 4]           parameter b.weight
        x,                              # f32[8, 4]
        ya,                             # f32[8, 4]           a
        dy,                             # f32[8, 4]           tangent
    ) = unbox(box)
    db = aten.mm.default(dy, b_weight)  # f32[8, 4]   +128 B  b
    dt = aten.t.default(db)             # &f32[4, 8]          a
    del db
    ga = aten.mm.default(dt, x)         # f32[4, 4]   +64 B   a
    del x, dt                           #             -128 B
    td = aten.t.default(dy)             # &f32[4, 8]          b
    del dy
    gb = aten.mm.default(td, ya)        # f32[4, 4]   +64 B   b
    del ya, td                          #             -128 B
    return [None], {'b.weight': gb, 'a.weight': ga}
""",
)

RANDOM = """
def forward(box):
    (
        a_weight,                  # f32[4, 4]           parameter a.weight
        b_weight,                  # f32[4, 4]           parameter b.weight
        x,                         # f32[8, 4]
    ) = unbox(box)
    ta = aten.t.default(a_weight)  # &f32[4, 4]          a
    ya = aten.mm.default(x, ta)    # f32[8, 4]   +128 B  a
    del ta
    tb = aten.t.default(b_weight)  # &f32[4, 4]          b
    yb = aten.mm.default(ya, tb)   # f32[8, 4]   +128 B  b
    del ya, tb                     #             -128 B
    return [yb], [x]


def backward(box):
    (
        b_weight,                          # f32[4, 4]           parameter b.weight
        x,                                 # f32[8, 4]
        dy,                                # f32[8, 4]           tangent
    ) = unbox(box)
    td = aten.t.default(dy)                # &f32[4, 8]          b
    del td
    gb = aten.rand_like.default(b_weight)  # f32[4, 4]   +64 B   b
    db = aten.mm.default(dy, b_weight)     # f32[8, 4]   +128 B  b
    del dy
    dt = aten.t.default(db)                # &f32[4, 8]          a
    del db
    ga = aten.mm.default(dt, x)            # f32[4, 4]   +64 B   a
    del x, dt                              #             -128 B
    return [None], {'b.weight': gb, 'a.weight': ga}
"""


def assigned(program: Program) -> Program:
    return defer_weights(assign_units(program), large=64)


def test_weights_of_the_unit_before_the_last_come_after_it() -> None:
    check(assigned, PAIR, IN_ORDER, DEFERRED)


def test_deferring_twice_changes_nothing() -> None:
    check(assigned, PAIR, DEFERRED, DEFERRED)


def test_small_gradients_are_not_worth_a_region() -> None:
    check(lambda program: defer_weights(assign_units(program), large=65), PAIR, IN_ORDER, IN_ORDER)


def test_alone_there_is_nothing_to_hide() -> None:
    check(assigned, PAIR.replace("shard 2", "shard 1"), IN_ORDER, IN_ORDER)


def test_random_numbers_are_drawn_in_the_order_in_which_they_were() -> None:
    check(assigned, PAIR, RANDOM, RANDOM)
