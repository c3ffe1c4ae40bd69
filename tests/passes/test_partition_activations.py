from __future__ import annotations

import re
from functools import partial

import pytest

import zcompile
from tests.passes.programs import OUTLINED, TENSOR_PARALLEL, TRACED, check, joined, parsed
from zcompile import OptionError, ProgramError, verify
from zcompile.cost.memory import live_bytes
from zcompile.ir.ops import Offload
from zcompile.passes.offload_activations import offload_activations
from zcompile.passes.partition_activations import partition_activations
from zcompile.proof.values import TracedValues

SAME = """
def forward(box):
    (
        a,                #             1 parameter  unit a
        b,                #             1 parameter  unit b
        c,                #             1 parameter  unit c
        x,                # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)   # =f32[8, 4]  +128 B       a
    yb = region_0(b, ya)  # f32[8, 4]   +128 B       b
    yc = region_0(c, yb)  # f32[8, 4]   +128 B       c
    return [yc], [x, ya, yb]


def backward(box):
    (
        b,                        #                       1 parameter  unit b
        c,                        #                       1 parameter  unit c
        x,                        # f32[8, 4]
        ya,                       # =f32[8, 4]                         a
        yb,                       # f32[8, 4]                          b
        dy,                       # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)  # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                    #                       -128 B
    da, gb = region_1(b, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                    #                       -256 B
    ga = region_2(da, x)          # f32[4, 4]             +64 B        a.lin
    del x, da                     #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
PARTED = """
def forward(box):
    (
        a,                          #             1 parameter  unit a
        b,                          #             1 parameter  unit b
        c,                          #             1 parameter  unit c
        tp,                         #                          group tp
        x,                          # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)             # =f32[8, 4]  +128 B       a
    ya_offloaded = offload(ya, tp)  # i64[]@44    +44 B        a
    yb = region_0(b, ya)            # f32[8, 4]   +128 B       b
    del ya                          #             -128 B
    yc = region_0(c, yb)            # f32[8, 4]   +128 B       c
    return [yc], [x, ya_offloaded, yb]


def backward(box):
    (
        b,                              #                       1 parameter  unit b
        c,                              #                       1 parameter  unit c
        tp,                             #                                    group tp
        x,                              # f32[8, 4]
        ya_offloaded,                   # i64[]@44                           a
        yb,                             # f32[8, 4]                          b
        dy,                             # f32[8, 4]                          tangent
    ) = unbox(box)
    ya_fetch = fetch(ya_offloaded, tp)  # f32[8, 4]             +128 B       a
    del ya_offloaded                    #                       -44 B
    db, gc = region_1(c, dy, yb)        # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                          #                       -128 B
    ya_again = wait(ya_fetch)           # &f32[8, 4]                         a
    del ya_fetch
    da, gb = region_1(b, db, ya_again)  # f32[8, 4], f32[4, 4]  +192 B       b
    del db, ya_again                    #                       -256 B
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
part = partial(partition_activations, least=1)


def test_of_what_all_ranks_have_each_keeps_a_shard() -> None:
    check(part, TENSOR_PARALLEL, SAME, PARTED)


def test_what_is_not_known_to_be_the_same_stays_whole() -> None:
    with pytest.raises(OptionError, match=r"partition_activations: has no effect: nothing of 1 B that is saved"):
        part(parsed(TENSOR_PARALLEL, OUTLINED))
    assert part(parsed(TENSOR_PARALLEL, OUTLINED), whole=False).nodes(Offload) == []


def test_what_is_small_stays_whole() -> None:
    with pytest.raises(OptionError, match="nothing of 64 KiB"):
        partition_activations(parsed(TENSOR_PARALLEL, SAME))


def test_the_part_counts_as_memory_unless_it_is_moved_away() -> None:
    def at_the_turn(moved: bool) -> int:
        lines = live_bytes(part(parsed(TENSOR_PARALLEL, SAME), moved=moved))
        return next(nbytes for node, nbytes in lines.items() if node.name == "yc")

    assert at_the_turn(moved=False) - at_the_turn(moved=True) == 11 * 4 - 8


def test_what_is_partitioned_is_not_moved_as_a_whole() -> None:
    program = offload_activations(part(parsed(TENSOR_PARALLEL, SAME)), least=1)
    assert [node.name for node in program.nodes(Offload)] == ["ya_offloaded"]


@pytest.mark.parametrize("replicated", [True, False])
def test_parts_of_different_values_are_refused(replicated: bool) -> None:
    """What the program marks as the same on all ranks is found out from what the traced step begins with."""
    marked = re.sub(r"# (.*) (parameter a|x)", r"# =\1 \2", TRACED).replace("x,                     # ", "x,   # =")
    step = zcompile.parse(joined(TENSOR_PARALLEL, marked if replicated else TRACED))
    program, values = part(parsed(TENSOR_PARALLEL, SAME)), TracedValues.of(step).fact
    if replicated:
        verify(program, [values], "here")
    else:
        with pytest.raises(ProgramError, match="ya is not known to be the same on all ranks, of which each keeps a sh"):
            verify(program, [values], "here")
