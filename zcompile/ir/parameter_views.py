"""Values cheaply derived from full parameters: views, transposes and casts.

They are computed again wherever they are needed and never cross from one region to another: each of them would keep
the full parameter alive past its release.
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
    """True for an operation whose result shares the memory of its first argument."""
    return isinstance(node.target, OpOverload) and bool(node.target.is_view)


def is_cheap(node: fx.Node) -> bool:
    """True for a view, a transpose or a cast, and for one of several views."""
    if isinstance(data(node).op, Item):
        return is_cheap(node.all_input_nodes[0])
    return isinstance(data(node).op, Compute) and (is_view(node) or node.target in _CASTS)


def derived_values(program: Program) -> set[fx.Node]:
    """All nodes cheaply derived from parameters, and sizes, alone; what the step hands back is left out."""
    result: set[fx.Node] = set()
    returned = {*program.results.outputs, *program.results.backward_nodes()}
    for node in program.graph.nodes:
        sources = [source for source in node.all_input_nodes if not is_symbolic(source.meta.get("val"))]
        from_parameters = all(source in result or isinstance(data(source).op, Parameter) for source in sources)
        if sources and from_parameters and node not in returned and is_cheap(node):
            result.add(node)
    return result


def parameters_read(node: fx.Node, derived: set[fx.Node]) -> list[fx.Node]:
    """The parameter placeholders that `node` reads, itself or through derived values, in order of its arguments."""
    result: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        if isinstance(data(source).op, Parameter):
            result[source] = None
        elif source in derived:
            result |= dict.fromkeys(parameters_read(source, derived))
    return list(result)
