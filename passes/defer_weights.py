"""defer_weights: compute the weight gradients of the second-to-last unit of the backward after the last unit.

    da = aten.mm.default(dy, w)      # unit b          da = aten.mm.default(dy, w)      # unit b
    gb = aten.mm.default(t, ya)      # unit b    ->    ga = aten.mm.default(da_t, x)    # unit a
    ga = aten.mm.default(da_t, x)    # unit a          gb = aten.mm.default(t, ya)      # unit b

Otherwise no compute is left to hide the last reduction, often that of a large embedding. No other unit needs a unit's
weight gradients, so they can be computed while the last unit's gradients are reduced (the split of B and W in "Zero
Bubble Pipeline Parallelism", Qi et al. 2023, section 2). This costs one more region to compile, so it is done for large
gradients only.
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
"""Least size of the last unit's gradients at which hiding their reduction is worth compiling one more region."""


def defer_weights(program: Program, *, large: int = LARGE_BYTES) -> Program:
    """Move operations of the second-to-last unit that the last unit does not need to the end of the backward.

    `large`: the least bytes of the last unit's gradients for which this is done.
    """
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
    """Return the operations of the last two runs of the backward, or two empty lists if it has only one."""
    derived = derived_values(program)
    all_runs = runs([node for node in program.body(Phase.BACKWARD) if node not in derived])
    return all_runs[-2:] if len(all_runs) > 1 else [[], []]


def _gradient_bytes(program: Program, nodes: list[fx.Node]) -> int:
    gradients = set(program.results.gradients.values())
    types = (data(node).type for node in nodes if node in gradients)
    return sum(type_.nbytes for type_ in types if type_)


def _not_needed(before: list[fx.Node], last: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes of `before` that `last` does not need, if it needs any; random draws keep their order."""
    needed = {source for node in last for source in node.all_input_nodes}
    if needed.isdisjoint(before):
        return []
    for node in reversed(before):
        if node in needed or is_random(node):
            needed |= {node, *node.all_input_nodes}
    return [node for node in before if called(node) not in needed]
