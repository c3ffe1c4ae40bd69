from __future__ import annotations

from functools import partial

import pytest

from tests.passes.programs import AHEAD, CHAIN, GATHERED, OUTLINED, at_stage, changed, check, parsed
from zcompile.facts import units_bounded
from zcompile.passes.insert_gathers import insert_gathers
from zcompile.passes.schedule_prefetch import schedule_prefetch

AHEAD_2 = changed(
    AHEAD,
    """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    c_gather = all_gather(c)   #            +64 B        c
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    release(b_full)            #            -64 B        b
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    return [yc], [c_full, x, ya, yb]
""",
)


def test_no_prefetch_leaves_gathers_where_they_are() -> None:
    check(partial(schedule_prefetch, prefetch=0), CHAIN, GATHERED, GATHERED)


def test_the_next_unit_is_gathered_while_one_computes_but_not_over_the_turn() -> None:
    check(partial(schedule_prefetch, prefetch=1), CHAIN, GATHERED, AHEAD)


def test_the_next_two_units_are_gathered_while_one_computes() -> None:
    check(partial(schedule_prefetch, prefetch=2), CHAIN, GATHERED, AHEAD_2)


def test_a_prefetch_beyond_the_units_gathers_all_at_the_start_of_the_phase() -> None:
    check(partial(schedule_prefetch, prefetch=9), CHAIN, GATHERED, AHEAD_2)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_one_unit_beyond_the_prefetch_would_break_the_bound(prefetch: int) -> None:
    program = parsed(CHAIN, GATHERED)
    assert not list(units_bounded(prefetch).violations(schedule_prefetch(program, prefetch=prefetch)))
    if prefetch < 2:
        assert list(units_bounded(prefetch).violations(schedule_prefetch(program, prefetch=prefetch + 1)))


@pytest.mark.parametrize("stage", [1, 2])
def test_kept_units_are_gathered_ahead_in_the_forward_only(stage: int) -> None:
    program = schedule_prefetch(insert_gathers(parsed(at_stage(CHAIN, stage), OUTLINED)), prefetch=1)
    before, after = str(program).split("def backward")
    lines = [line.split("#")[0].strip() for line in before.splitlines()]
    assert [line for line in lines if "all_gather" in line or "region" in line] == [
        "a_gather = all_gather(a, keep=True)",
        "b_gather = all_gather(b, keep=True)",
        "ya = region_0(a_full, x)",
        "c_gather = all_gather(c, keep=True)",
        "yb = region_0(b_full, ya)",
        "yc = region_0(c_full, yb)",
    ]
    assert "all_gather" not in after
