"""Nested graphs: regions that torch has traced once and calls again, written out where they are called.

    graph_0(x, w):                                t = w.t()
        t = w.t()                                 y = x @ t
        return x @ t                     ->       t_1 = w2.t()
    y = invoke_subgraph(graph_0, x, w)            z = y @ t_1
    z = invoke_subgraph(graph_0, y, w2)

`torch.compiler.nested_compile_region` has equal blocks traced once. Passes see into all of them, as they must to gather
what each one reads, and equal regions compile once in any case.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from zcompile.torch_internals.operators import invoke_subgraph

_OF_CALLS = ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr")
"""What is known of a call, and of a graph that was traced once only for the first one."""


def written_out(module: fx.GraphModule) -> fx.GraphModule:
    """`module` without calls of nested graphs; the same, where it has none."""
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
    """Append what `module` computes, for one `call` of it, to `graph`; gives what it returns.

    `values`: what its values are in `graph`. Of a nested graph those of its placeholders are there.
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
    """What a call of a nested graph gives, written out."""
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
    """True for the attribute of a graph that is called."""
    return node.op == "get_attr" and bool(node.users) and all(user.target is invoke_subgraph for user in node.users)
