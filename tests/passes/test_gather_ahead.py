from __future__ import annotations

import pytest

import zcompile
from tests.passes.programs import AHEAD, CHAIN, GATHERED, OUTLINED, at_stage, changed, expect, joined, parsed
from zcompile import Program, ProgramError, facts, verify
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather, GatherAhead, WaitReduce
from zcompile.passes.gather_ahead import gather_ahead, parameter_peak
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.insert_updates import insert_updates
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.passes.sink_waits import sink_waits

UPDATED = changed(
    AHEAD,
    """
def backward(box):
    (
        a,                               #                       1 parameter  unit a
        b,                               #                       1 parameter  unit b
        c,                               #                       1 parameter  unit c
        c_full,                          #                                    full unit c
        x,                               # f32[8, 4]
        ya,                              # f32[8, 4]                          a
        yb,                              # f32[8, 4]                          b
        dy,                              # f32[8, 4]                          tangent
    ) = unbox(box)
    b_gather_1 = all_gather(b)           #                       +64 B        b
    db, gc = region_1(c_full, dy, yb)    # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                           #                       -128 B
    release(c_full)                      #                       -64 B        c
    c_reduce = reduce_scatter(c, [gc])   #                       +32 B        c
    del gc
    b_full_1 = wait(b_gather_1)          #                                    b
    da, gb = region_1(b_full_1, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                           #                       -256 B
    release(b_full_1)                    #                       -64 B        b
    c_grads = wait(c_reduce)             #                       -64 B        c
    b_reduce = reduce_scatter(b, [gb])   #                       +32 B        b
    del gb
    update(c, c_grads)                   #                       -32 B        c
    ga = region_2(da, x)                 # f32[4, 4]             +64 B        a.lin
    del x, da                            #                       -128 B
    b_grads = wait(b_reduce)             #                       -64 B        b
    a_reduce = reduce_scatter(a, [ga])   #                       +32 B        a
    del ga
    update(b, b_grads)                   #                       -32 B        b
    gather_ahead(b)                      #                       +64 B        b
    a_grads = wait(a_reduce)             #                       -64 B        a
    update(a, a_grads)                   #                       -32 B        a
    gather_ahead(a)                      #                       +64 B        a
    return [None], []
""",
)
AGAIN = """
def forward(box):
    (
        a,                #            1 parameter  unit a
        b,                #            1 parameter  unit b
        x,                # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)   # f32[8, 4]  +128 B       a
    yb = region_0(b, ya)  # f32[8, 4]  +128 B       b
    yc = region_0(a, yb)  # f32[8, 4]  +128 B       a
    return [yc], [x, ya, yb]


def backward(box):
    (
        a,                        #                       1 parameter  unit a
        b,                        #                       1 parameter  unit b
        x,                        # f32[8, 4]
        ya,                       # f32[8, 4]                          a
        yb,                       # f32[8, 4]                          b
        dy,                       # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(a, dy, yb)  # f32[8, 4], f32[4, 4]  +192 B       a
    del yb, dy                    #                       -192 B
    da, gb = region_1(b, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                    #                       -256 B
    ga = region_2(da, x)          # f32[4, 4]             +64 B        a.lin
    del x, da                     #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb}
"""


def updated(head: str = CHAIN, phases: str = GATHERED, prefetch: int = 1) -> Program:
    """A train step up to this pass."""
    program = parsed(head, phases)
    if not program.nodes(AllGather):
        program = insert_gathers(program)
    program = schedule_prefetch(insert_reductions(program), prefetch=prefetch)
    return insert_updates(sink_waits(program, depth=1, consumed=True))


def test_what_the_forward_begins_with_is_gathered_at_the_end_of_the_step_before() -> None:
    before = updated()
    text = before.text(regions=True)
    after = gather_ahead(before)
    expect(after, CHAIN, UPDATED)
    assert before.text(regions=True) == text, "a pass works on a copy"
    verify(after, (facts.UPDATED_ONCE, facts.GATHERED_AHEAD, facts.VOLUME_RIGHT), "here")
    assert after.volume() == before.volume(), "what is gathered ahead is not gathered again"
    assert after.digest() != before.digest(), "ranks must agree on it"


def test_the_peak_is_never_raised() -> None:
    for prefetch in range(4):
        before = updated(prefetch=prefetch)
        assert parameter_peak(gather_ahead(before)) == parameter_peak(before)


def test_a_gather_that_would_raise_the_peak_stays() -> None:
    """The gradient of a large first unit is in flight when the second one is updated: the peak of the step."""
    large = GATHERED.replace(
        "f32[4, 4]             +64 B         a.lin", "f32[4000, 4]             +64 B         a.lin"
    )
    program = insert_reductions(zcompile.parse(joined(CHAIN.replace("f32[4, 4]", "f32[4000, 4]", 1), large)))
    before = insert_updates(sink_waits(schedule_prefetch(program, prefetch=1), depth=1))
    assert [op_of(node, AllGather).unit for node in before.nodes(AllGather)][:2] == ["a", "b"]
    after = gather_ahead(before)
    assert [op_of(node, GatherAhead).unit for node in after.nodes(GatherAhead)] == ["a"]
    assert parameter_peak(after) == parameter_peak(before)


def test_a_unit_that_the_forward_uses_again_is_gathered_ahead_once() -> None:
    """With two gathers of it before the first region the second is the forward's own, as its copy is another one."""
    before = updated(phases=AGAIN, prefetch=2)
    assert [op_of(node, AllGather).unit for node in before.nodes(AllGather)][:3] == ["a", "b", "a"]
    after = gather_ahead(before)
    verify(after, (facts.UPDATED_ONCE, facts.GATHERED_AHEAD, facts.VOLUME_RIGHT), "here")
    assert sorted(op_of(node, GatherAhead).unit for node in after.nodes(GatherAhead)) == ["a", "b"]


def test_a_wait_for_the_averages_of_another_unit_is_refused() -> None:
    """The runtime would hand them to the parameters of the unit that the wait names."""
    program = updated()
    one, other = program.nodes(WaitReduce)[:2]
    other.args = one.args
    with pytest.raises(ProgramError, match=f"{other.name} is of b, and waits for c_reduce"):
        verify(program, (facts.WELL_FORMED,), "here")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_copy_that_is_kept_is_renewed_in_its_own_memory(stage: int) -> None:
    before = updated(at_stage(CHAIN, stage), OUTLINED)
    after = gather_ahead(before)
    assert [op_of(node, GatherAhead) for node in after.nodes(GatherAhead)] == [
        GatherAhead("b", keep=True),
        GatherAhead("a", keep=True),
    ]
    assert parameter_peak(after) == parameter_peak(before)
    verify(after, (facts.UPDATED_ONCE, facts.GATHERED_AHEAD, facts.VOLUME_RIGHT), "here")


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (3, 1)])
def test_where_nothing_is_gathered_nothing_is_gathered_ahead(stage: int, world: int) -> None:
    before = updated(at_stage(CHAIN, stage).replace("shard 2", f"shard {world}"), OUTLINED)
    assert gather_ahead(before) is before
