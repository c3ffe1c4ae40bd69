from __future__ import annotations

from dataclasses import replace

import pytest

import zcompile
from tests.passes.programs import CHAIN, HYBRID, OUTLINED, REDUCED, at_stage, check, joined, parsed
from tests.passes.test_insert_reductions import OVER_BOTH
from zcompile.errors import ProgramError
from zcompile.facts import verify
from zcompile.ir.operation import Phase
from zcompile.passes.accumulate_gradients import accumulate_gradients
from zcompile.proof.values import TracedValues

HELD = """
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
    c_grads_held = accumulate(c, [gc])  #                                    c
    del gc                              #                       -64 B
    da, gb = region_1(b, db, ya)        # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                          #                       -256 B
    b_grads_held = accumulate(b, [gb])  #                                    b
    del gb                              #                       -64 B
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    a_grads_held = accumulate(a, [ga])  #                                    a
    del ga                              #                       -64 B
    return [None], [c_grads_held, b_grads_held, a_grads_held]
"""

TRACED = TracedValues.of(parsed(at_stage(CHAIN, 1), OUTLINED))
HELD_BACK = replace(TRACED, holds_back=True).fact


def test_reductions_become_accumulations() -> None:
    held = check(accumulate_gradients, at_stage(CHAIN, 1), REDUCED, HELD)
    verify(held, [HELD_BACK], "here")


def test_a_program_that_reduces_holds_nothing_back() -> None:
    with pytest.raises(ProgramError, match=r"the gradient of a\.weight is not what was traced: .*mean.*want held_back"):
        verify(parsed(at_stage(CHAIN, 1), REDUCED), [HELD_BACK], "here")


def test_averages_over_replicas_are_held_back_with_the_rest() -> None:
    before = OUTLINED.partition("def backward")[0] + OVER_BOTH.strip()
    held = accumulate_gradients(zcompile.parse(joined(at_stage(HYBRID, 1), before)))
    assert str(held.phase(Phase.BACKWARD)).strip() == HELD.strip()
