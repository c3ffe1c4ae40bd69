from __future__ import annotations

from tests.passes.programs import CHAIN, TRACED, joined
from zcompile import parse
from zcompile.ir.operation import Phase, data
from zcompile.passes.assign_units import assign_units
from zcompile.passes.common.recompute import runs
from zcompile.passes.pipelining.cut_stages import cut_stages
from zcompile.passes.pipelining.divide_backward import divide_backward

HEAD = CHAIN.partition("def ")[0]
AFTER = """
def backward(box):
    (
        b,                         # f32[4, 4]           parameter b.weight
        c,                         # f32[4, 4]           parameter c.weight
        a_out,                     # f32[8, 4]           a
        yb,                        # f32[8, 4]           b
        dy,                        # f32[8, 4]           tangent
    ) = unbox(box)
    ct = aten.t.default(c)         # &f32[4, 4]          c
    db = aten.mm.default(dy, ct)   # f32[8, 4]   +128 B  c
    del ct
    bt = aten.t.default(b)         # &f32[4, 4]          b
    da = aten.mm.default(db, bt)   # f32[8, 4]   +128 B  b
    del bt
    ybt = aten.t.default(yb)       # &f32[4, 8]          c
    del yb
    gc = aten.mm.default(ybt, dy)  # f32[4, 4]   +64 B   c
    del dy, ybt                    #             -128 B
    yat = aten.t.default(a_out)    # &f32[4, 8]          b
    del a_out
    gb = aten.mm.default(yat, db)  # f32[4, 4]   +64 B   b
    del db, yat                    #             -128 B
    return [da], {'b.weight': gb, 'c.weight': gc}
"""


def test_what_another_stage_waits_for_comes_first() -> None:
    _, second = cut_stages(parse(joined(HEAD, TRACED)), starts=["b"])
    program = assign_units(second.program)
    before = program.text(regions=True)
    result = divide_backward(program)
    assert str(result.phase(Phase.BACKWARD)).strip("\n") == AFTER.strip("\n")
    assert program.text(regions=True) == before, "a pass works on a copy"
    parts = runs(result.body(Phase.BACKWARD))
    assert [[data(node).deferred for node in part] for part in parts] == [
        [False] * 2,
        [False] * 2,
        [True] * 2,
        [True] * 2,
    ]


def test_a_first_stage_has_nothing_that_others_wait_for() -> None:
    first, _ = cut_stages(parse(joined(HEAD, TRACED)), starts=["b"])
    program = assign_units(first.program)
    assert divide_backward(program).text(regions=True) == program.text(regions=True)
