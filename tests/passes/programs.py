"""Printed programs that several tests of passes begin with, and the comparison of what a pass makes of one.

A program is given as two strings: its head (axes, stage, units, regions) and its phases. What a pass makes of one says only
the phases that it changes; what has functions of another text says only the others (`changed`). After a change of the printed form, `ZCOMPILE_UPDATE=1 pytest tests/passes` rewrites the
expectations in the test files: read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import zcompile
from zcompile import Program

UPDATE = bool(os.environ.get("ZCOMPILE_UPDATE"))


def parsed(head: str, phases: str) -> Program:
    """The program of two strings, which must be as it is printed."""
    program = zcompile.parse(joined(head, phases))
    expect(program, head, phases)
    return program


def check(step: Callable[[Program], Program], head: str, before: str, after: str, head_after: str = "") -> Program:
    """`step` turns the phases `before` into `after`, where one left out is as before, and leaves its argument alone."""
    program = parsed(head, before)
    result = step(program)
    expect(result, head_after or head, after, before)
    assert program.text(regions=True).strip("\n") == joined(head, before), "a pass works on a copy"
    return result


def expect(program: Program, head: str, phases: str, others: str = "") -> None:
    """`program` is printed as `head` and `phases`; a phase that these leave out as in `others`."""
    text, shown = program.text(regions=True).strip("\n"), str(program).strip("\n")
    said, printed = functions(phases), functions(shown)
    if UPDATE:
        _rewrite(head.strip("\n"), text.removesuffix(shown).strip("\n"))
        _rewrite(phases.strip("\n"), "\n\n\n".join(printed[name] for name in said))
    else:
        assert text == joined(head, "\n\n\n".join((functions(others) | said).values()))


def functions(phases: str) -> dict[str, str]:
    """The functions of a text, by what they begin with."""
    return {text.partition("(")[0]: text for text in phases.strip("\n").split("\n\n\n") if text}


def joined(head: str, phases: str) -> str:
    head, phases = head.strip("\n"), phases.strip("\n")
    return f"{head}\n\n\n{phases}"


def _rewrite(old: str, new: str) -> None:
    """The text, and where it is made of several, each function."""
    before, after = functions(old), functions(new)
    pairs = [(f'"""\n{old}\n"""', f'"""\n{new}\n"""')]
    pairs += [(f"\n{before[name]}\n", f"\n{after[name]}\n") for name in before if name in after]
    for file in Path(__file__).parent.glob("*.py"):
        text = file.read_text()
        for pair in pairs:
            text = text.replace(*pair)
        file.write_text(text)


def at_stage(head: str, stage: int) -> str:
    return head.replace("stage = 3", f"stage = {stage}")


def changed(phases: str, by: str) -> str:
    """The phases or regions of a text, where those that `by` has are as they are there."""
    return "\n\n\n".join((functions(phases) | functions(by)).values())


def head_of(*units: str) -> str:
    """Of units of one weight each, before regions are outlined."""
    lines = "".join(f'    "{unit}": [\n        "{unit}.weight f32[4, 4]",\n    ],\n' for unit in units)
    return f'axes = {{"dp": "shard 2"}}\nstage = 3\nunits = {{\n{lines}}}\npacked = {{\n}}'


PAIR = head_of("a", "b")
REGIONS = """
def region_0(box):
    (
        w,                     # f32[4, 4]          argument 0 item 0
        x,                     # f32[8, 4]          argument 1
    ) = unbox(box)
    y = aten.mm.default(x, w)  # f32[8, 4]  +128 B  a
    return [y]


def region_1(box):
    (
        w,                        # f32[4, 4]           argument 0 item 0
        dy,                       # f32[8, 4]           argument 1
        x,                        # f32[8, 4]           argument 2
    ) = unbox(box)
    wt = aten.t.default(w)        # &f32[4, 4]          c
    dx = aten.mm.default(dy, wt)  # f32[8, 4]   +128 B  c
    xt = aten.t.default(x)        # &f32[4, 8]          c
    dw = aten.mm.default(xt, dy)  # f32[4, 4]   +64 B   c
    return [dx, dw]


def region_2(box):
    (
        dy,                       # f32[8, 4]          argument 0
        x,                        # f32[8, 4]          argument 1
    ) = unbox(box)
    xt = aten.t.default(x)        # &f32[4, 8]         a
    dw = aten.mm.default(xt, dy)  # f32[4, 4]   +64 B  a
    return [dw]
"""

CHAIN = joined(head_of("a", "b", "c"), REGIONS)
"""Three units of one weight each: `region_0` multiplies by it, `region_1` and `region_2` are the backward."""

OUTLINED = """
def forward(box):
    (
        a,                #            1 parameter  unit a
        b,                #            1 parameter  unit b
        c,                #            1 parameter  unit c
        x,                # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)   # f32[8, 4]  +128 B       a
    yb = region_0(b, ya)  # f32[8, 4]  +128 B       b
    yc = region_0(c, yb)  # f32[8, 4]  +128 B       c
    return [yc], [x, ya, yb]


def backward(box):
    (
        b,                        #                       1 parameter  unit b
        c,                        #                       1 parameter  unit c
        x,                        # f32[8, 4]
        ya,                       # f32[8, 4]                          a
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
"""The chain as `outline_regions` leaves it: no communication yet."""

GATHERED_TWICE = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    release(b_full)            #            -64 B        b
    c_gather = all_gather(c)   #            +64 B        c
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    release(c_full)            #            -64 B        c
    return [yc], [x, ya, yb]


def backward(box):
    (
        b,                               #                       1 parameter  unit b
        c,                               #                       1 parameter  unit c
        x,                               # f32[8, 4]
        ya,                              # f32[8, 4]                          a
        yb,                              # f32[8, 4]                          b
        dy,                              # f32[8, 4]                          tangent
    ) = unbox(box)
    c_gather_1 = all_gather(c)           #                       +64 B        c
    c_full_1 = wait(c_gather_1)          #                                    c
    db, gc = region_1(c_full_1, dy, yb)  # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                           #                       -128 B
    release(c_full_1)                    #                       -64 B        c
    b_gather_1 = all_gather(b)           #                       +64 B        b
    b_full_1 = wait(b_gather_1)          #                                    b
    da, gb = region_1(b_full_1, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                           #                       -256 B
    release(b_full_1)                    #                       -64 B        b
    ga = region_2(da, x)                 # f32[4, 4]             +64 B        a.lin
    del x, da                            #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
"""`OUTLINED` with gathers: each unit in the forward, and again in the backward if that reads it."""

GATHERED = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    release(b_full)            #            -64 B        b
    c_gather = all_gather(c)   #            +64 B        c
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    return [yc], [c_full, x, ya, yb]


def backward(box):
    (
        b,                               #                       1 parameter  unit b
        c_full,                          #                                    full unit c
        x,                               # f32[8, 4]
        ya,                              # f32[8, 4]                          a
        yb,                              # f32[8, 4]                          b
        dy,                              # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c_full, dy, yb)    # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                           #                       -128 B
    release(c_full)                      #                       -64 B        c
    b_gather_1 = all_gather(b)           #                       +64 B        b
    b_full_1 = wait(b_gather_1)          #                                    b
    da, gb = region_1(b_full_1, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                           #                       -256 B
    release(b_full_1)                    #                       -64 B        b
    ga = region_2(da, x)                 # f32[4, 4]             +64 B        a.lin
    del x, da                            #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
"""The same, but c, which the forward reads last and the backward first, is kept over the turn."""

KEPT = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    c_gather = all_gather(c)   #            +64 B        c
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    return [yc], [b_full, c_full, x, ya, yb]


def backward(box):
    (
        b_full,                        #                               full unit b
        c_full,                        #                               full unit c
        x,                             # f32[8, 4]
        ya,                            # f32[8, 4]                     a
        yb,                            # f32[8, 4]                     b
        dy,                            # f32[8, 4]                     tangent
    ) = unbox(box)
    db, gc = region_1(c_full, dy, yb)  # f32[8, 4], f32[4, 4]  +192 B  c
    del yb, dy                         #                       -128 B
    release(c_full)                    #                       -64 B   c
    da, gb = region_1(b_full, db, ya)  # f32[8, 4], f32[4, 4]  +192 B  b
    del ya, db                         #                       -256 B
    release(b_full)                    #                       -64 B   b
    ga = region_2(da, x)               # f32[4, 4]             +64 B   a.lin
    del x, da                          #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
"""The same, but b and c, which are gathered again at once, are kept over the turn."""

AHEAD = """
def forward(box):
    (
        a,                     #            1 parameter  unit a
        b,                     #            1 parameter  unit b
        c,                     #            1 parameter  unit c
        x,                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)   #            +64 B        a
    b_gather = all_gather(b)   #            +64 B        b
    a_full = wait(a_gather)    #                         a
    ya = region_0(a_full, x)   # f32[8, 4]  +128 B       a
    release(a_full)            #            -64 B        a
    c_gather = all_gather(c)   #            +64 B        c
    b_full = wait(b_gather)    #                         b
    yb = region_0(b_full, ya)  # f32[8, 4]  +128 B       b
    release(b_full)            #            -64 B        b
    c_full = wait(c_gather)    #                         c
    yc = region_0(c_full, yb)  # f32[8, 4]  +128 B       c
    return [yc], [c_full, x, ya, yb]


def backward(box):
    (
        b,                               #                       1 parameter  unit b
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
    b_full_1 = wait(b_gather_1)          #                                    b
    da, gb = region_1(b_full_1, db, ya)  # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                           #                       -256 B
    release(b_full_1)                    #                       -64 B        b
    ga = region_2(da, x)                 # f32[4, 4]             +64 B        a.lin
    del x, da                            #                       -128 B
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
"""`GATHERED` where the next unit is gathered while one computes."""

REDUCED = changed(
    OUTLINED,
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
    c_grads = wait(c_reduce)            #                       -64 B        c
    da, gb = region_1(b, db, ya)        # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                          #                       -256 B
    b_reduce = reduce_scatter(b, [gb])  #                       +32 B        b
    del gb
    b_grads = wait(b_reduce)            #                       -64 B        b
    ga = region_2(da, x)                # f32[4, 4]             +64 B        a.lin
    del x, da                           #                       -128 B
    a_reduce = reduce_scatter(a, [ga])  #                       +32 B        a
    del ga
    a_grads = wait(a_reduce)            #                       -64 B        a
    return [None], [c_grads, b_grads, a_grads]
""",
)
"""`OUTLINED` with reductions, and no gathers."""

TRACED = """
def forward(box):
    (
        a,                     # f32[4, 4]  parameter a.weight
        b,                     # f32[4, 4]  parameter b.weight
        c,                     # f32[4, 4]  parameter c.weight
        x,                     # f32[8, 4]
    ) = unbox(box)
    ya = aten.mm.default(x, a)   # f32[8, 4]  a
    yb = aten.mm.default(ya, b)  # f32[8, 4]  b
    yc = aten.mm.default(yb, c)  # f32[8, 4]  c
    return [yc], [a, b, c, x, ya, yb]


def backward(box):
    (
        b,                       # f32[4, 4]  parameter b.weight
        c,                       # f32[4, 4]  parameter c.weight
        x,                       # f32[8, 4]
        ya,                      # f32[8, 4]  a
        yb,                      # f32[8, 4]  b
        dy,                      # f32[8, 4]  tangent
    ) = unbox(box)
    ct = aten.t.default(c)       # &f32[4, 4]  c
    db = aten.mm.default(dy, ct)  # f32[8, 4]  c
    ybt = aten.t.default(yb)     # &f32[4, 8]  c
    gc = aten.mm.default(ybt, dy)  # f32[4, 4]  c
    bt = aten.t.default(b)       # &f32[4, 4]  b
    da = aten.mm.default(db, bt)  # f32[8, 4]  b
    yat = aten.t.default(ya)     # &f32[4, 8]  b
    gb = aten.mm.default(yat, db)  # f32[4, 4]  b
    xt = aten.t.default(x)       # &f32[4, 8]  a
    ga = aten.mm.default(xt, da)  # f32[4, 4]  a
    return [None], {'a.weight': ga, 'b.weight': gb, 'c.weight': gc}
"""
"""The step of which CHAIN and OUTLINED are the program, as it is traced."""

TENSOR_PARALLEL = CHAIN.replace('"shard 2"', '"shard 2, stride 3", "tp": "tensor 3"')
"""The same, of one of three parts of a model."""

HYBRID = CHAIN.replace('"dp": "shard 2"', '"replicate": "replicate 3, stride 2", "shard": "shard 2"')
"""Of shards that repeat."""
