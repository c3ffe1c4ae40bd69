"""Floats of plain Python that a graph gives back: computed as tensors, so that each call has its own.

Dynamo takes a float that varies for a tensor of one float64, reads it by `item()`, and hands back what code makes of it
by `torch.scalar_tensor`. AOTAutograd knows floats in arithmetic with tensors alone: such a result would become the
number of the call that is traced, and each other one would be traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_SAME_BITS: dict[Any, Callable[..., Any]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.neg: torch.neg,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
}
"""Operations on tensors of float64 that give what these give of Python's floats, to the last bit."""


def varying_floats(graph: fx.Graph) -> list[fx.Node]:
    """Where a graph of Dynamo's reads floats that vary between its calls."""
    return [node for node in graph.find_nodes(op="call_method", target="item") if _is_float(node)]


def give_floats_as_tensors(module: fx.GraphModule) -> None:
    """Compute floats that are handed back as tensors of float64 are, where that gives the same bits."""
    given = module.graph.find_nodes(op="call_function", target=torch.scalar_tensor)
    for node in given if varying_floats(module.graph) else ():
        with module.graph.inserting_before(node):
            handed_back = _is_float(node.args[0]) and node.kwargs == {"dtype": torch.float64}
            if handed_back and (made := _as_tensor(module.graph, node.args[0])) is not None:
                node.replace_all_uses_with(made)
                module.graph.erase_node(node)
    module.recompile()


def _is_float(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.SymFloat)


def _as_tensor(graph: fx.Graph, value: Any) -> fx.Node | None:
    """A number as a tensor of one float64; None where bits could be others."""
    if not _is_float(value):
        return _float64(graph, torch.scalar_tensor, value)
    if value.target == "item":  # in arithmetic that AOTAutograd knows, or it would take the number for a constant
        return graph.call_function(torch.mul, (_float64(graph, torch.ones, ()), value))
    if value.target not in _SAME_BITS:
        return None
    args = [_as_tensor(graph, arg) for arg in value.args]
    return None if None in args else graph.call_function(_SAME_BITS[value.target], tuple(args))


def _float64(graph: fx.Graph, function: Callable[..., Any], of: Any) -> fx.Node:
    return graph.call_function(function, (of,), {"dtype": torch.float64, "device": torch.device("cpu")})
