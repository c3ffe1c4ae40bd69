"""The order of a region that exchanges values: it computes while the ranks of a model do.

    q = aten.mm.default(x, a)                                  q = aten.mm.default(x, a)
    k = aten.mm.default(x, b)                                  q_sent = ops.zcompile.start_all_to_all.default(q, ...)
    q_exchanged = ops.zcompile.all_to_all.default(q, ...)  ->  k = aten.mm.default(x, b)
    k_exchanged = ops.zcompile.all_to_all.default(k, ...)      k_sent = ops.zcompile.start_all_to_all.default(k, ...)
    y = aten.bmm.default(q_exchanged, k_exchanged)             q_exchanged = ops.zcompile.wait_all_to_all.default(...)
                                                               k_exchanged = ops.zcompile.wait_all_to_all.default(...)
                                                               y = aten.bmm.default(q_exchanged, k_exchanged)

What a collective sends is computed first, and what needs no result that is still awaited before the wait: in the
backward, mostly gradients of weights, as Megatron-LM overlaps those with tensor-parallel all-reduces (Korthikanti et
al., 2022). Collectives are those of `divide_sequence`, and pairs of functional collectives and their waits. They start
in the order in which they were traced, as random draws keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from zcompile.ir.operation import data, set_data
from zcompile.ir.ops import Item
from zcompile.ir.rows import fake_value
from zcompile.ir.side_effects import is_collective, is_pure, is_random, is_wait
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.operators import OpOverload, writes_arguments

_OWN = torch.ops.zcompile


def overlapped(graph: fx.Graph) -> fx.Graph:
    """Return the graph of a region that starts collectives as soon, and waits for them as late, as it can."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    waits = any(is_wait(node) or node.target is _OWN.all_to_all.default for node in nodes)
    if not waits or any(isinstance(node.target, OpOverload) and writes_arguments(node.target) for node in nodes):
        return graph
    result, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _Order(_apart(graph)).found:
        copies[node] = result.node_copy(node, copies.__getitem__)
    return result


def _apart(graph: fx.Graph) -> fx.Graph:
    """Return a graph in which starts and waits are operations of their own."""
    result, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made = result.node_copy(node, copies.__getitem__)
        if node.target is _OWN.all_to_all.default:
            made.target = _OWN.wait_all_to_all.default
            with result.inserting_before(made):
                args, name = made.args, f"{node.args[0].name}_sent"
                sent = result.create_node("call_function", _OWN.start_all_to_all.default, args, name=name)
            sent.meta = {**node.meta, "val": (value := fake_value(sent))}
            set_data(sent, replace(data(node), type=TensorType.of(value)))
            made.args = (sent, *made.args[1:])
    return result


def _kind(node: fx.Node) -> str:
    """Return of which kind an operation is that must keep its place among others of it; "" if it need not."""
    if is_collective(node):
        return "collective"
    computes = node.op == "call_function" and not isinstance(data(node).op, Item) and not is_wait(node)
    return "effect" if computes and (is_random(node) or not is_pure(node)) else ""


class _Order:
    """An order of a graph's nodes in which little waits for collectives."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        """What comes before each node."""
        self.awaits: dict[fx.Node, frozenset[fx.Node]] = {}
        """The waits for collectives among all that comes before each node, and itself."""
        self.found: dict[fx.Node, None] = {}
        last = dict[str, fx.Node]()
        for node in self.nodes:
            self.needs[node] = [*node.all_input_nodes, *([last[kind]] if (kind := _kind(node)) in last else [])]
            last |= {kind: node} if kind else {}
            self.awaits[node] = frozenset({node} if is_wait(node) else ()).union(
                *(self.awaits[one] for one in self.needs[node])
            )
        *inside, end = self.nodes
        self._give(node for node in inside if node.op != "call_function")
        for start in filter(is_collective, inside):
            self._give(self._all_before(start))
        self._give(inside)
        self.found[end] = None

    def _all_before(self, node: fx.Node) -> set[fx.Node]:
        """Return what has to be computed for a node, and is not yet, and itself."""
        result, left = {node}, [node]
        while left:
            new = {one for one in self.needs[left.pop()] if one not in self.found} - result
            result |= new
            left += new
        return result

    def _give(self, wanted: Iterable[fx.Node]) -> None:
        """Append nodes in order; before a wait, all that waits for nothing."""
        chosen = {*wanted}
        for node in self.nodes:
            if node in chosen and node not in self.found:
                if is_wait(node):
                    self._give_ready()
                self._append(node)

    def _give_ready(self) -> None:
        for node in self.nodes[:-1]:
            if node not in self.found and self.awaits[node] <= self.found.keys():
                self._append(node)

    def _append(self, node: fx.Node) -> None:
        self.found |= dict.fromkeys([node, *(user for user in node.users if isinstance(data(user).op, Item))])
