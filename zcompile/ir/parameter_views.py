"""Values cheaply derived from full parameters: views, transposes and casts.

They are recomputed wherever they are needed and never passed from one region to another: each of them would keep the
full parameter alive past its release.
"""

from __future__ import annotations

import torch
from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Compute, Item, Parameter
from zcompile.ir.program import Program
from zcompile.torch_internals.operators import OpOverload
from zcompile.torch_internals.sizes import is_symbolic

aten = torch.ops.aten
_CASTS = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default}
)


def is_view(node: fx.Node) -> bool:
    """Return True for an operation whose result is a view of its first argument."""
    return isinstance(node.target, OpOverload) and bool(node.target.is_view)


def is_cheap(node: fx.Node) -> bool:
    """Return True for a view, a transpose, a cast or a clone, and for an item of several views."""
    if isinstance(data(node).op, Item):
        return is_cheap(node.all_input_nodes[0])
    return isinstance(data(node).op, Compute) and (is_view(node) or node.target in _CASTS)


def derived_values(program: Program) -> set[fx.Node]:
    """Return all nodes cheaply derived from parameters and sizes alone, except results of the step."""
    result: set[fx.Node] = set()
    returned = {*program.results.outputs, *program.results.backward_nodes()}
    for node in program.graph.nodes:
        sources = [source for source in node.all_input_nodes if not is_symbolic(source.meta.get("val"))]
        from_parameters = all(source in result or isinstance(data(source).op, Parameter) for source in sources)
        if sources and from_parameters and node not in returned and is_cheap(node):
            result.add(node)
    return result


def parameters_read(node: fx.Node, derived: set[fx.Node]) -> list[fx.Node]:
    """Return the parameter placeholders that `node` reads, directly or through derived values, in argument order."""
    result: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        if isinstance(data(source).op, Parameter):
            result[source] = None
        elif source in derived:
            result |= dict.fromkeys(parameters_read(source, derived))
    return list(result)
