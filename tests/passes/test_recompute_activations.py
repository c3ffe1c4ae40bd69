from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import PAIR, check, expect, parsed
from zcompile import OptionError, Program
from zcompile.cost.memory import peak_bytes
from zcompile.passes.assign_units import assign_units
from zcompile.passes.outline_regions import outline_regions
from zcompile.passes.recompute_activations import recompute_activations

BEFORE = """
def forward(box):
    (
        a_weight,                       # f32[4, 4]          parameter a.weight
        b_weight,                       # f32[4, 4]          parameter b.weight
        x,                              # f32[8, 4]
    ) = unbox(box)
    ha = aten.mm.default(x, a_weight)   # f32[8, 4]  +128 B  a
    ya = aten.sin.default(ha)           # f32[8, 4]  +128 B  a
    hb = aten.mm.default(ya, b_weight)  # f32[8, 4]  +128 B  b
    yb = aten.sin.default(hb)           # f32[8, 4]  +128 B  b
    return [yb], [x, ha, ya, hb]


def backward(box):
    (
        a_weight,                   # f32[4, 4]           parameter a.weight
        b_weight,                   # f32[4, 4]           parameter b.weight
        x,                          # f32[8, 4]
        ha,                         # f32[8, 4]           a
        ya,                         # f32[8, 4]           a
        hb,                         # f32[8, 4]           b
        dy,                         # f32[8, 4]           tangent
    ) = unbox(box)
    cb = aten.cos.default(hb)       # f32[8, 4]   +128 B  b
    del hb                          #             -128 B
    dhb = aten.mul.Tensor(dy, cb)   # f32[8, 4]   +128 B  b
    del dy, cb                      #             -128 B
    tya = aten.t.default(ya)        # &f32[4, 8]          b
    del ya
    gb = aten.mm.default(tya, dhb)  # f32[4, 4]   +64 B   b
    del tya                         #             -128 B
    tb = aten.t.default(b_weight)   # &f32[4, 4]          b
    dya = aten.mm.default(dhb, tb)  # f32[8, 4]   +128 B  b
    del dhb, tb                     #             -128 B
    ca = aten.cos.default(ha)       # f32[8, 4]   +128 B  a
    del ha                          #             -128 B
    dha = aten.mul.Tensor(dya, ca)  # f32[8, 4]   +128 B  a
    del dya, ca                     #             -256 B
    tx = aten.t.default(x)          # &f32[4, 8]          a
    del x
    ga = aten.mm.default(tx, dha)   # f32[4, 4]   +64 B   a
    del tx
    ta = aten.t.default(a_weight)   # &f32[4, 4]          a
    dx = aten.mm.default(dha, ta)   # f32[8, 4]   +128 B  a
    del dha, ta                     #             -128 B
    return [dx], {'b.weight': gb, 'a.weight': ga}
"""
"""Two units that each multiply and apply a sine; all is saved."""

BY_UNIT = """
def forward(box):
    (
        a_weight,                       # f32[4, 4]          parameter a.weight
        b_weight,                       # f32[4, 4]          parameter b.weight
        x,                              # f32[8, 4]
    ) = unbox(box)
    ha = aten.mm.default(x, a_weight)   # f32[8, 4]  +128 B  a
    ya = aten.sin.default(ha)           # f32[8, 4]  +128 B  a
    del ha                              #            -128 B
    hb = aten.mm.default(ya, b_weight)  # f32[8, 4]  +128 B  b
    yb = aten.sin.default(hb)           # f32[8, 4]  +128 B  b
    return [yb], [x, ya, hb]


def backward(box):
    (
        a_weight,                        # f32[4, 4]           parameter a.weight
        b_weight,                        # f32[4, 4]           parameter b.weight
        x,                               # f32[8, 4]
        ya,                              # f32[8, 4]           a
        hb,                              # f32[8, 4]           b
        dy,                              # f32[8, 4]           tangent
    ) = unbox(box)
    cb = aten.cos.default(hb)            # f32[8, 4]   +128 B  b
    del hb                               #             -128 B
    dhb = aten.mul.Tensor(dy, cb)        # f32[8, 4]   +128 B  b
    del dy, cb                           #             -128 B
    tya = aten.t.default(ya)             # &f32[4, 8]          b
    del ya
    gb = aten.mm.default(tya, dhb)       # f32[4, 4]   +64 B   b
    del tya                              #             -128 B
    tb = aten.t.default(b_weight)        # &f32[4, 4]          b
    dya = aten.mm.default(dhb, tb)       # f32[8, 4]   +128 B  b
    del dhb, tb                          #             -128 B
    ha_1 = aten.mm.default(x, a_weight)  # f32[8, 4]   +128 B  a
    ca = aten.cos.default(ha_1)          # f32[8, 4]   +128 B  a
    del ha_1                             #             -128 B
    dha = aten.mul.Tensor(dya, ca)       # f32[8, 4]   +128 B  a
    del dya, ca                          #             -256 B
    tx = aten.t.default(x)               # &f32[4, 8]          a
    del x
    ga = aten.mm.default(tx, dha)        # f32[4, 4]   +64 B   a
    del tx
    ta = aten.t.default(a_weight)        # &f32[4, 4]          a
    dx = aten.mm.default(dha, ta)        # f32[8, 4]   +128 B  a
    del dha, ta                          #             -128 B
    return [dx], {'b.weight': gb, 'a.weight': ga}
"""

RANDOM = """
def forward(box):
    (
        a_weight,                       # f32[4, 4]          parameter a.weight
        b_weight,                       # f32[4, 4]          parameter b.weight
        x,                              # f32[8, 4]
    ) = unbox(box)
    ha = aten.mm.default(x, a_weight)   # f32[8, 4]  +128 B  a
    ra = aten.rand_like.default(ha)     # f32[8, 4]  +128 B  a
    ya = aten.mul.Tensor(ha, ra)        # f32[8, 4]  +128 B  a
    del ha                              #            -128 B
    yb = aten.mm.default(ya, b_weight)  # f32[8, 4]  +128 B  b
    return [yb], [x, ra, ya]


def backward(box):
    (
        a_weight,                   # f32[4, 4]           parameter a.weight
        b_weight,                   # f32[4, 4]           parameter b.weight
        x,                          # f32[8, 4]
        ra,                         # f32[8, 4]           a
        ya,                         # f32[8, 4]           a
        dy,                         # f32[8, 4]           tangent
    ) = unbox(box)
    tya = aten.t.default(ya)        # &f32[4, 8]          b
    del ya
    gb = aten.mm.default(tya, dy)   # f32[4, 4]   +64 B   b
    del tya                         #             -128 B
    tb = aten.t.default(b_weight)   # &f32[4, 4]          b
    dya = aten.mm.default(dy, tb)   # f32[8, 4]   +128 B  b
    del dy, tb
    dha = aten.mul.Tensor(dya, ra)  # f32[8, 4]   +128 B  a
    del ra, dya                     #             -256 B
    tx = aten.t.default(x)          # &f32[4, 8]          a
    del x
    ga = aten.mm.default(tx, dha)   # f32[4, 4]   +64 B   a
    del tx
    ta = aten.t.default(a_weight)   # &f32[4, 4]          a
    dx = aten.mm.default(dha, ta)   # f32[8, 4]   +128 B  a
    del dha, ta                     #             -128 B
    return [dx], {'b.weight': gb, 'a.weight': ga}
"""

REPLAYED = """
def forward(box):
    (
        a_weight,                       # f32[4, 4]                        parameter a.weight
        b_weight,                       # f32[4, 4]                        parameter b.weight
        x,                              # f32[8, 4]
    ) = unbox(box)
    ha = aten.mm.default(x, a_weight)   # f32[8, 4]            +128 B      a
    ra_state, ra_drawn, *_ = ops.higher_order.run_and_save_rng_state(  # u8[5056], f32[8, 4]  +5.062 KiB  a
            aten.rand_like.default, ha)
    ya = aten.mul.Tensor(ha, ra_drawn)  # f32[8, 4]            +128 B      a
    del ha, ra_drawn                    #                      -256 B
    yb = aten.mm.default(ya, b_weight)  # f32[8, 4]            +128 B      b
    return [yb], [x, ra_state, ya]


def backward(box):
    (
        a_weight,                                             # f32[4, 4]               parameter a.weight
        b_weight,                                             # f32[4, 4]               parameter b.weight
        x,                                                    # f32[8, 4]
        ra_state,                                             # u8[5056]                a
        ya,                                                   # f32[8, 4]               a
        dy,                                                   # f32[8, 4]               tangent
    ) = unbox(box)
    tya = aten.t.default(ya)                                  # &f32[4, 8]              b
    del ya
    gb = aten.mm.default(tya, dy)                             # f32[4, 4]   +64 B       b
    del tya                                                   #             -128 B
    tb = aten.t.default(b_weight)                             # &f32[4, 4]              b
    dya = aten.mm.default(dy, tb)                             # f32[8, 4]   +128 B      b
    del dy, tb
    ha_1 = aten.mm.default(x, a_weight)                       # f32[8, 4]   +128 B      a
    ra_again = ops.higher_order.run_with_rng_state(ra_state,  # f32[8, 4]   +128 B      a
            aten.rand_like.default, ha_1)
    del ra_state, ha_1                                        #             -5.062 KiB
    dha = aten.mul.Tensor(dya, ra_again)                      # f32[8, 4]   +128 B      a
    del dya, ra_again                                         #             -256 B
    tx = aten.t.default(x)                                    # &f32[4, 8]              a
    del x
    ga = aten.mm.default(tx, dha)                             # f32[4, 4]   +64 B       a
    del tx
    ta = aten.t.default(a_weight)                             # &f32[4, 4]              a
    dx = aten.mm.default(dha, ta)                             # f32[8, 4]   +128 B      a
    del dha, ta                                               #             -128 B
    return [dx], {'b.weight': gb, 'a.weight': ga}
"""

INFERENCE = """
def forward(box):
    (
        a_weight,                     # f32[4, 4]          parameter a.weight
        b_weight,                     # f32[4, 4]          parameter b.weight
        x,                            # f32[8, 4]
    ) = unbox(box)
    y = aten.mm.default(x, a_weight)  # f32[8, 4]  +128 B  a
    del x
    z = aten.mm.default(y, b_weight)  # f32[8, 4]  +128 B  b
    del y                             #            -128 B
    return [z], []
"""


def placed(program: Program, **options: object) -> Program:
    return recompute_activations(assign_units(program), **options)  # type: ignore[arg-type]


def outlined(program: Program) -> Program:
    return outline_regions(program, fuses=False)


def test_by_unit_all_but_the_input_of_each_unit_is_computed_again_except_in_the_last() -> None:
    check(partial(placed, checkpoint="unit"), PAIR, BEFORE, BY_UNIT)


def test_random_numbers_are_drawn_again_from_the_state_that_they_were_drawn_from() -> None:
    check(partial(placed, checkpoint="unit"), PAIR, RANDOM, REPLAYED)


def test_a_budget_takes_what_it_needs_and_no_more() -> None:
    program = parsed(PAIR, BEFORE)
    most = peak_bytes(outlined(assign_units(program)))
    budgeted = partial(placed, checkpoint=most - 1, finish=outlined, fuses=False)
    result = check(budgeted, PAIR, BEFORE, BY_UNIT)
    assert peak_bytes(outlined(result)) < most
    expect(placed(program, checkpoint=most, finish=outlined, fuses=False), PAIR, BEFORE)


def test_what_no_choice_can_meet_is_refused_with_the_least() -> None:
    with pytest.raises(OptionError, match="give at least") as refused:
        placed(parsed(PAIR, BEFORE), checkpoint=1, finish=outlined, fuses=False)
    least = int(str(refused.value).partition("at least ")[2].split("at least ")[-1].split()[0])
    placed(parsed(PAIR, BEFORE), checkpoint=least, finish=outlined, fuses=False)


def test_without_a_backward_nothing_is_saved() -> None:
    check(partial(placed, checkpoint="unit"), PAIR, INFERENCE, INFERENCE)
