"""Calls of a model: what a backward must find as its forward left it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from zcompile._torch import backward_number, keeps_graph, tree_leaves
from zcompile.errors import BackwardError
from zcompile.runtime.executor import Gradients
from zcompile.runtime.gradients import Delivery


@dataclass
class ModelCall:
    """One forward, until its graph is gone."""

    version: Callable[[], int]
    """Grows with every change of a parameter."""
    delivery: Delivery
    late: list[Callable[[], Sequence[Gradients]]] = field(default_factory=list)
    """Reductions to make once a backward of this call has come to its end, the same ones on every rank."""
    scaled: bool = False
    """True if gradients are float16, and may be scaled."""
    _seen: int = field(init=False)
    _begun: int | None = None

    def __post_init__(self) -> None:
        self._seen = self.version()

    def watch(self, result: Any) -> None:
        """Refuse, when it comes, a backward that would be wrong: a second one, or one after parameters changed."""
        ends = [tensor.grad_fn for tensor in _tensors_in(result) if tensor.grad_fn is not None]
        for node in _compiled_nodes(ends, all_of_them=bool(self.late)):
            node.register_prehook(_Check(self).before)
        if self.late:
            for node in set(ends):
                node.register_prehook(self.begin)

    def begin(self, _: object) -> None:
        """Runs before the first parts of a backward of this call.

        Raises:
            BackwardError: a parameter changed since the forward.
        """
        number = backward_number()
        if self._begun == number:
            return
        self._begun = number
        if self.version() != self._seen:
            fix = "call backward before optimizer.step(), once for each forward"
            raise BackwardError("backward", "parameters changed since the forward whose graph this is", fix)
        if self.scaled:
            self.delivery.expect_overflow()
        for reduce in self.late:
            self.delivery.at_end(reduce)


@dataclass
class _Check:
    """One compiled part of a call."""

    call: ModelCall
    freed: bool = False

    def before(self, grads: object) -> None:
        """Runs before this part's backward.

        Raises:
            BackwardError: the graph was freed by an earlier backward.
        """
        if self.freed:
            fix = "call the model again, or the first backward with retain_graph=True"
            raise BackwardError("backward", "the graph of this forward was freed by an earlier backward", fix)
        self.call.begin(grads)
        self.freed = not keeps_graph()


def _tensors_in(result: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in what a model returns: containers, dataclasses and other objects with attributes."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            yield from _tensors_in(list(vars(leaf).values()), depth - 1)


def _compiled_nodes(ends: Sequence[Node], *, all_of_them: bool) -> Iterator[Node]:
    """Nodes of compiled functions in the graph behind `ends`; unless all are wanted, none behind another one."""
    seen: set[Node] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        compiled = "CompiledFunction" in node.name()
        if compiled:
            yield node
        if not compiled or all_of_them:
            left += [following for following, _ in node.next_functions if following is not None]
