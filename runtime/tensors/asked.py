"""Gradients that `torch.autograd.grad` asks for: what a model gives of a parameter stands in `.grad` alone.

Programs reduce gradients and deliver them when the backward has ended, and tell autograd of none. So autograd would
take a parameter for one that was not used, and give None, or zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from zcompile.errors import BackwardError
from zcompile.torch_internals.pytree import tree_leaves

_MARK = "zcompile"


def mark(node: Node) -> None:
    """Say that gradients of parameters that come by this node are delivered to `.grad`."""
    _notes_of(node)[_MARK] = True


def check_asked(name: str, outputs: Any) -> None:
    """Let `torch.autograd.grad` go on to what does not come from a model: the `full_tensor()` of a parameter, say.

    Raises:
        BackwardError: there is a model's call behind `outputs`.
    """
    if any(_MARK in _notes_of(node) for node in _backward_nodes(outputs)):
        raise single_gradient_error(name)


def single_gradient_error(name: str) -> BackwardError:
    """The refusal to give the gradient of one parameter apart from those of the others."""
    problem = (
        "torch.autograd.grad, or backward(inputs=...), asks for its gradient, which comes to .grad alone, averaged"
    )
    fix = "call loss.backward(retain_graph=True), read .grad and set it to None, for one loss after the other"
    return BackwardError(name, problem, fix)


def _backward_nodes(outputs: Any) -> Iterator[Node]:
    left = [one.grad_fn for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
    seen = set[Node]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def _notes_of(node: Any) -> dict[str, Any]:
    notes: dict[str, Any] = node.metadata  # torch's own stub takes it for a method
    return notes
