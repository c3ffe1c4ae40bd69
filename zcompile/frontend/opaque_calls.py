"""Calls in a traced graph of which nothing is known but that they run: their order and effects bind no program.

`@torch._dynamo.leaf_function` gives one, and so does each operation that torch orders by tokens, as a print is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from zcompile._torch import HigherOrderOperator
from zcompile.errors import CaptureError
from zcompile.ir.operation import line_of

_OPAQUE = frozenset({"invoke_leaf_function", "with_effects"})


def refuse_opaque_calls(graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
    """Refuse a graph with such a call; `source` gives the path of the module that a node comes from.

    Raises:
        CaptureError: there is one.
    """
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() in _OPAQUE:
            called = str(node.args[1]) if node.target.name() == "with_effects" else node.target.name()
            problem = f"calls {called}{where(node)}, whose effects no program can keep in order"
            fix = (
                "leave it out or unmarked (torch._dynamo.leaf_function), or call torch._dynamo.graph_break() before "
                "it, so that this module runs as plain Python"
            )
            raise CaptureError(source(node) or "the model", problem, fix)


def where(node: fx.Node) -> str:
    """The line of the model's code that a node comes from, as ` at FILE:LINE`; empty where it is not known."""
    line = line_of(node)
    return f" at {line}" if line else ""
