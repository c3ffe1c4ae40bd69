from __future__ import annotations

from functools import partial

import pytest
from torch import fx

import zcompile
from tests.passes.programs import CHAIN, OUTLINED, check, joined, parsed
from zcompile import ProgramError, verify
from zcompile.cost.memory import live_bytes, peak_bytes
from zcompile.ir.ops import Offload
from zcompile.ir.program import Program
from zcompile.passes.offload_activations import LEAST, offload_activations
from zcompile.proof.values import TracedValues

MOVED = """
def forward(box):
    (
        a,                            #            1 parameter  unit a
        b,                            #            1 parameter  unit b
        c,                            #            1 parameter  unit c
        away,                         #                         away
        x,                            # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)               # f32[8, 4]  +128 B       a
    ya_offloaded = offload(ya, away)  # i64[]      +8 B         a
    yb = region_0(b, ya)              # f32[8, 4]  +128 B       b
    del ya                            #            -128 B
    yc = region_0(c, yb)              # f32[8, 4]  +128 B       c
    return [yc], [x, ya_offloaded, yb]


def backward(box):
    (
        b,                                #                       1 parameter  unit b
        c,                                #                       1 parameter  unit c
        away,                             #                                    away
        x,                                # f32[8, 4]
        ya_offloaded,                     # i64[]                              a
        yb,                               # f32[8, 4]                          b
        dy,                               # f32[8, 4]                          tangent
    ) = unbox(box)
    ya_fetch = fetch(ya_offloaded, away)  # f32[8, 4]             +128 B       a
    del ya_offloaded                      #                       -8 B
    db, gc = region_1(c, dy, yb)          # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                            #                       -128 B
    ya_again = wait(ya_fetch)             # &f32[8, 4]                         a
    del ya_fetch
    da, gb = region_1(b, db, ya_again)    # f32[8, 4], f32[4, 4]  +192 B       b
    del db, ya_again                      #                       -256 B
    ga = region_2(da, x)                  # f32[4, 4]             +64 B        a.lin
    del x, da                             #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
move = partial(offload_activations, least=1)


def test_what_is_saved_goes_away_and_comes_back_before_it_is_read() -> None:
    check(move, CHAIN, OUTLINED, MOVED)


def test_what_is_small_stays() -> None:
    assert offload_activations(parsed(CHAIN, OUTLINED)).nodes(Offload) == []
    assert LEAST == 64 * 1024


def test_what_is_returned_stays() -> None:
    program = move(zcompile.parse(joined(CHAIN, OUTLINED.replace("return [yc]", "return [yc, ya]"))))
    assert program.nodes(Offload) == []


@pytest.mark.parametrize(("ahead", "before"), [(1, "db, gc"), (3, "db, gc"), (0, "da, gb")])
def test_it_is_fetched_as_many_regions_early(ahead: int, before: str) -> None:
    lines = [line.strip() for line in str(move(parsed(CHAIN, OUTLINED), ahead=ahead)).splitlines()]
    (fetched,) = [index for index, line in enumerate(lines) if line.startswith("ya_fetch")]
    assert next(line for line in lines[fetched:] if "region_" in line).startswith(before)


def test_memory_is_predicted_without_what_is_away() -> None:
    before, after = parsed(CHAIN, OUTLINED), move(parsed(CHAIN, OUTLINED))
    turn = [nbytes for node, nbytes in live_bytes(before).items() if node.name == "yc"]
    away = [nbytes for node, nbytes in live_bytes(after).items() if node.name == "yc"]
    assert away[0] == turn[0] - 128 + 8
    assert peak_bytes(after) <= peak_bytes(before) + 8


VALUES = TracedValues.of(parsed(CHAIN, OUTLINED)).fact


def moved() -> Program:
    program = move(parsed(CHAIN, OUTLINED))
    verify(program, [VALUES], "here")
    return program


def reader(program: Program) -> fx.Node:
    (user,) = program.node("ya_again").users
    return user


@pytest.mark.parametrize("given", ["ya_offloaded", "ya_fetch"])
def test_what_is_on_its_way_is_not_read(given: str) -> None:
    program = moved()
    reader(program).replace_input_with(program.node("ya_again"), program.node(given))
    with pytest.raises(ProgramError, match=rf"with {given} \(no value\) in place of mm\(x, a\.weight\)"):
        verify(program, [VALUES], "here")


def test_what_was_not_offloaded_is_not_fetched() -> None:
    program = moved()
    program.node("ya_fetch").replace_input_with(program.node("ya_offloaded"), program.node("yb"))
    with pytest.raises(ProgramError, match=r"with ya_again \(no value\) in place of mm"):
        verify(program, [VALUES], "here")


def test_another_activation_is_not_what_was_traced() -> None:
    program = moved()
    program.node("ya_offloaded").replace_input_with(program.node("ya"), program.node("x"))
    with pytest.raises(
        ProgramError, match=r"region_1 of b computes .*, with t\(x\) in place of t\(mm\(x, a\.weight\)\)"
    ):
        verify(program, [VALUES], "here")


def test_it_is_fetched_from_where_it_was_offloaded() -> None:
    program = moved()
    place = program.node("away")
    with program.graph.inserting_after(place):
        other = program.graph.node_copy(place)
    program.node("ya_fetch").replace_input_with(place, other)
    with pytest.raises(ProgramError, match=r"with ya_again \(no value\) in place of mm"):
        verify(program, [VALUES], "here")
