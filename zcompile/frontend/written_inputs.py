"""Writes of a forward to what programs only read: parameters; and the `.data` of any tensor that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import fx

from zcompile.errors import CaptureError
from zcompile.frontend.opaque_calls import where


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
