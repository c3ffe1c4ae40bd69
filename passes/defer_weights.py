"""defer_weights: at the end of the backward, leave the weights of the unit before the last for after the last.

    da = aten.mm.default(dy, w)      # unit b          da = aten.mm.default(dy, w)      # unit b
    gb = aten.mm.default(t, ya)      # unit b    ->    ga = aten.mm.default(da_t, x)    # unit a
    ga = aten.mm.default(da_t, x)    # unit a          gb = aten.mm.default(t, ya)      # unit b

Nothing is left that could hide the last reduction, often that of a large embedding. A unit's gradients with respect to
its weights are needed by no other unit, so they can wait until the last unit's are on their way (the split of B and W
in "Zero Bubble Pipeline Parallelism", Qi et al. 2023, section 2). It costs a region more to compile, so it is done for
large gradients only.
"""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Results, called
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_random
from zcompile.passes.common.recompute import runs

LARGE_BYTES = 1024 * 1024
"""Gradients of the last unit from which the exchange takes longer than a region more is worth."""


def defer_weights(program: Program, *, large: int = LARGE_BYTES) -> Program:
    """Move what the last unit of the backward does not need, of the unit before it, to the end."""
    program = program.copy()
    before, last = _last_two(program)
    if program.layout.world == 1 or _gradient_bytes(program, last) < large:
        return program
    deferred = _not_needed(before, last)
    if _gradient_bytes(program, deferred):
        (end,) = program.nodes(Results)
        for node in deferred:
            end.prepend(node)
    return program


def _last_two(program: Program) -> list[list[fx.Node]]:
    """What the backward computes for its last two units: what are to be its last two regions."""
    derived = derived_values(program)
    found = runs([node for node in program.body(Phase.BACKWARD) if node not in derived])
    return found[-2:] if len(found) > 1 else [[], []]


def _gradient_bytes(program: Program, nodes: list[fx.Node]) -> int:
    gradients = set(program.results.gradients.values())
    types = (data(node).type for node in nodes if node in gradients)
    return sum(type_.nbytes for type_ in types if type_)


def _not_needed(before: list[fx.Node], last: list[fx.Node]) -> list[fx.Node]:
    """Those of `before` that `last` does not depend on, if it depends on any; random numbers keep their order."""
    needed = {source for node in last for source in node.all_input_nodes}
    if needed.isdisjoint(before):
        return []
    for node in reversed(before):
        if node in needed or is_random(node):
            needed |= {node, *node.all_input_nodes}
    return [node for node in before if called(node) not in needed]
