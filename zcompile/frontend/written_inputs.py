"""What a forward does that a program cannot: writes to parameters and to `.data` of its inputs, and opaque calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import fx

from zcompile.errors import CaptureError
from zcompile.ir.operation import line_of
from zcompile.torch_internals.operators import HigherOrderOperator


def refuse_new_data(graph: fx.Graph, names: Mapping[fx.Node, str], parameters: Mapping[fx.Node, str]) -> None:
    """Refuse what `tensor.data = value` is in a graph of Dynamo's, of which AOTAutograd makes no graph.

    Args:
        graph: Of Dynamo's.
        names: What its inputs are called.
        parameters: Those of them that are parameters.

    Raises:
        CaptureError: there is one.
    """
    for node in graph.nodes:
        target = node.args[0] if node.args and node.target in (torch.Tensor.set_, "set_") else None
        if not isinstance(target, fx.Node):
            continue
        if target in parameters:
            refuse_written_parameter(parameters[target], where(node))
        if target in names:
            problem = f"the model's forward assigns to its .data{where(node)}, which no program can"
            raise CaptureError(names[target], problem, "write to it in place: tensor.copy_(value)")


def refuse_written_parameter(name: str, place: str) -> NoReturn:
    """Refuse a write to a parameter; `place` is where, as ` at FILE:LINE`.

    Raises:
        CaptureError: always.
    """
    fix = "keep what changes in a buffer, or change parameters between steps, as in a method that is called then"
    raise CaptureError(name, f"the model's forward writes to this parameter{place}", fix)


_OPAQUE = frozenset({"invoke_leaf_function", "with_effects"})


def refuse_opaque_calls(graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
    """Refuse a graph with a call whose order and effects are unknown, such as `@torch._dynamo.leaf_function` gives.

    `source` gives the path of the module that a node comes from.

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
