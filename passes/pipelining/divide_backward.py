"""divide_backward: compute the gradients that other pipeline stages wait for first, and weight gradients after them.

    db = aten.mm.default(dy, c)                  db = aten.mm.default(dy, c)
    gc = aten.mm.default(yb_t, dy)               da = aten.mm.default(db, b)
    da = aten.mm.default(db, b)           ->     gc = aten.mm.default(yb_t, dy)     # left for later
    gb = aten.mm.default(ya_t, db)               gb = aten.mm.default(ya_t, db)     # left for later
    return [da], {"b.weight": gb, ...}           return [da], {"b.weight": gb, ...}

So a schedule can run the second half when the rank would otherwise idle ("Zero Bubble Pipeline Parallelism", Qi et al.
2023, section 2: B and W). Values that both halves read are held until then. The order of random draws is unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from zcompile.ir.operation import Phase, data, set_data
from zcompile.ir.ops import Results, called
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_random


def divide_backward(program: Program, *, sent: int | None = None) -> Program:
    """Move operations that the gradients of inputs do not need to the end of the backward, and mark them as deferred.

    `sent`: how many of these gradients, counted from the first, other stages wait for; None for all.
    """
    program = program.copy()
    body, derived = program.body(Phase.BACKWARD), derived_values(program)
    needed = {value for value in program.results.input_gradients[:sent] if isinstance(value, fx.Node)}
    if not needed:
        return program
    for node in reversed(body):
        if node in needed or is_random(node):
            needed |= {node, *node.all_input_nodes}
    (end,) = program.nodes(Results)
    for node in body:
        if called(node) not in needed and node not in derived:
            end.prepend(node)
            set_data(node, replace(data(node), deferred=True))
    return program
