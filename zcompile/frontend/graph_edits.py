"""Edits of traced graphs before a program is read: floats as tensors, dense gradients, nested graphs inlined."""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zcompile.torch_internals.operators import invoke_subgraph

# -- Python floats ----------------------------------------------------------------------------------------------------
#
# Dynamo represents a dynamic float as a float64 tensor, reads it by `item()`, and returns results computed from it by
# `torch.scalar_tensor`. AOTAutograd supports floats only in arithmetic with tensors: it would specialize such a result
# to its value in the traced call, and every other value would be traced again.

_SAME_BITS: dict[Any, Callable[..., Any]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.neg: torch.neg,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
}
"""For functions of Python floats, the operations on float64 tensors that give the same bits."""


def varying_floats(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a Dynamo graph that read dynamic floats."""
    return [node for node in graph.find_nodes(op="call_method", target="item") if _is_float(node)]


def give_floats_as_tensors(module: fx.GraphModule) -> None:
    """Compute returned floats with float64 tensors, where that gives the same bits."""
    scalars = module.graph.find_nodes(op="call_function", target=torch.scalar_tensor)
    for node in scalars if varying_floats(module.graph) else ():
        with module.graph.inserting_before(node):
            is_returned = _is_float(node.args[0]) and node.kwargs == {"dtype": torch.float64}
            if is_returned and (made := _as_tensor(module.graph, node.args[0])) is not None:
                node.replace_all_uses_with(made)
                module.graph.erase_node(node)
    module.recompile()


def _is_float(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.SymFloat)


def _as_tensor(graph: fx.Graph, value: Any) -> fx.Node | None:
    """Return a number as a float64 scalar tensor; None if its bits could differ."""
    if not _is_float(value):
        return _float64(graph, torch.scalar_tensor, value)
    if value.target == "item":  # multiplied by ones, or AOTAutograd would specialize the number to a constant
        return graph.call_function(torch.mul, (_float64(graph, torch.ones, ()), value))
    if value.target not in _SAME_BITS:
        return None
    args = [_as_tensor(graph, arg) for arg in value.args]
    return None if None in args else graph.call_function(_SAME_BITS[value.target], tuple(args))


def _float64(graph: fx.Graph, function: Callable[..., Any], argument: Any) -> fx.Node:
    return graph.call_function(function, (argument,), {"dtype": torch.float64, "device": torch.device("cpu")})


def make_dense(module: fx.GraphModule, names: Mapping[fx.Node, str]) -> None:
    """Make sparse embeddings compute dense gradients, which can be averaged and sharded; warn for each."""
    for node in module.graph.nodes:
        if not callable(node.target) or getattr(node.target, "__name__", "") not in ("embedding", "embedding_bag"):
            continue
        try:
            called = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            continue  # not the function of torch.nn.functional
        if called.arguments.get("sparse"):
            called.arguments["sparse"] = False
            node.args, node.kwargs = called.args, called.kwargs
            name = names.get(called.arguments["weight"], "an embedding")
            warnings.warn(f"{name}: sparse=True asks for a sparse gradient; zcompile gives a dense one", stacklevel=2)
    module.recompile()


def repeat_key_heads(module: fx.GraphModule, ranks: int) -> None:
    """Repeat heads of keys and values that queries share, where `ranks`, which divide heads, cannot divide them."""

    def repeated(source: fx.Node, queries: int, user: fx.Node) -> fx.Node:
        heads = source.meta["example_value"].shape[-3]
        wanted = math.lcm(heads, ranks)
        if wanted == heads or queries % wanted:
            return source
        with module.graph.inserting_before(user):
            return module.graph.call_function(torch.repeat_interleave, (source, wanted // heads, -3))

    for node in module.graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
        if node.kwargs.get("enable_gqa"):
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            queries = given["query"].meta["example_value"].shape[-3]
            given |= {name: repeated(given[name], queries, node) for name in ("key", "value")}
            node.args, node.kwargs = (), given
    module.recompile()


# -- nested graphs ----------------------------------------------------------------------------------------------------
#
#     graph_0(x, w):                                t = w.t()
#         t = w.t()                                 y = x @ t
#         return x @ t                     ->       t_1 = w2.t()
#     y = invoke_subgraph(graph_0, x, w)            z = y @ t_1
#     z = invoke_subgraph(graph_0, y, w2)
#
# `torch.compiler.nested_compile_region` traces equal blocks once. Passes need all of them inlined, to gather what each
# one reads; equal regions are compiled once in any case.


_OF_CALLS = ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr")
"""Meta that differs between calls of a nested graph; nodes of the graph have it only for the first call."""


def written_out(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module` with nested graphs inlined; `module` itself if it has none."""
    calls = module.graph.find_nodes(op="call_function", target=invoke_subgraph)
    if not calls:
        return module
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    end = _append(graph, module, values, None)
    made = graph.output(end)
    made.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def _append(graph: fx.Graph, module: fx.GraphModule, values: dict[fx.Node, Any], call: fx.Node | None) -> Any:
    """Append the nodes of `module`, for one `call` of it, to `graph`; return its results.

    `values`: maps nodes of `module` to nodes of `graph`; for a nested graph it has its placeholders.
    """
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        if node in values:
            continue
        if node.target is invoke_subgraph:
            values[node] = tuple(_called(graph, module, node, values, call))
        elif node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple):
            values[node] = values[node.args[0]][node.args[1]]
        elif not _is_nested(node):
            values[node] = copied = graph.node_copy(node, values.__getitem__)
            copied.meta = {**node.meta, **_of_call(call)}
    raise AssertionError("a graph ends in its output")


def _called(
    graph: fx.Graph, module: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any], call: fx.Node | None
) -> Sequence[Any]:
    """Inline a call of a nested graph; return its results."""
    attribute, _, *given = node.args
    assert isinstance(attribute, fx.Node), "the graph is an attribute"
    nested = module.get_submodule(str(attribute.target))
    assert isinstance(nested, fx.GraphModule), "a graph"
    arguments = fx.map_arg(tuple(given), values.__getitem__)
    entries = nested.graph.find_nodes(op="placeholder")
    inside = dict(zip(entries, arguments, strict=True))
    results: Sequence[Any] = _append(graph, nested, inside, call or node)
    return results


def _of_call(call: fx.Node | None) -> dict[str, Any]:
    return {} if call is None else {key: call.meta[key] for key in _OF_CALLS if key in call.meta}


def _is_nested(node: fx.Node) -> bool:
    """Return True for the attribute that holds a nested graph."""
    return node.op == "get_attr" and bool(node.users) and all(user.target is invoke_subgraph for user in node.users)
