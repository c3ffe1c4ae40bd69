"""Calls of a model: what a backward must find as its forward left it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from zcompile.errors import BackwardError
from zcompile.frontend.links import Witness
from zcompile.runtime.executor import Gradients
from zcompile.runtime.gradients.delivery import Delivery, refuse_compiled_autograd
from zcompile.runtime.tensors.parameter import mark
from zcompile.torch_internals.aot_autograd import kinds_left_undefined
from zcompile.torch_internals.autograd import backward_number, keeps_graph, wants_gradient
from zcompile.torch_internals.pytree import tree_leaves


@dataclass
class ModelCall:
    """One forward, until its graph is gone."""

    version: Callable[[], int]
    """Grows with every change of a parameter."""
    delivery: Delivery
    returned: Callable[[], None]
    """Called when the model has returned."""
    late: list[Callable[[], Sequence[Gradients]]] = field(default_factory=list)
    """Reductions to make once a backward of this call has come to its end, the same ones on every rank."""
    nodes: list[Node] = field(default_factory=list)
    """Where autograd brings gradients of `late`, kept until the model has returned: then the graph has them."""
    may_overflow: bool = False
    """True if gradients are float16, and may be scaled."""
    of_method: bool = False
    """True if it is a method that is called, not a forward: it may write to parameters."""
    seen: int = field(init=False)
    """The version at its beginning."""
    _begun: int | None = None

    def __post_init__(self) -> None:
        self.seen = self.version()

    def watch(self, result: Any, given: Any) -> None:
        """Refuse, when it comes, a backward of a compiled graph that would be wrong: a second one, or a late one.

        `given`: the graph's arguments, behind which other graphs lie.
        """
        for node in _compiled_nodes(_nodes_of(result), _nodes_of(given)):
            kinds = kinds_left_undefined(node, self.delivery.results)
            node.register_prehook(_Check(self, _accumulator(node), kinds).before)
            mark(node)

    def reduce_later(self, leaves: Iterable[torch.Tensor], reduce: Callable[[], Sequence[Gradients]]) -> None:
        """Call `reduce` at the end of a backward of this call, also of one that reaches only some of `leaves`."""
        self.late.append(reduce)
        for leaf in leaves:
            if leaf.requires_grad:
                # By the node: it does not hang on the leaf, which would be kept by a hook of its own that knows it.
                node = get_gradient_edge(leaf).node
                node.register_prehook(self.begin)
                mark(node)
                self.nodes.append(node)

    def end(self, result: Any) -> None:
        """The model has returned `result`: a backward of it makes the late reductions."""
        if self.late:
            for node in _nodes_of(result):
                node.register_prehook(self.begin)
                mark(node)
        self.returned()

    def begin(self, _: object) -> None:
        """Runs before the first parts of a backward of this call.

        Raises:
            BackwardError: a parameter changed since the forward; or torch's compiled autograd runs the backward.
        """
        refuse_compiled_autograd()
        number = backward_number()
        if self._begun == number:
            return
        self._begun = number
        if self.version() != self.seen:
            fix = "call backward before optimizer.step(), once for each forward"
            raise BackwardError("backward", "parameters changed since the forward whose graph this is", fix)
        if self.may_overflow:
            self.delivery.expect_overflow()
        for reduce in self.late:
            self.delivery.at_end(reduce)


@dataclass
class _Check:
    """One compiled part of a call."""

    call: ModelCall
    accumulator: Node | None
    """What a backward runs if it wants gradients of all parameters, behind one of them."""
    kinds: Sequence[Any] | None
    """What autograd knows of its results, where it gives the program nothing for those that no gradient comes to."""
    freed: Sequence[bool] | None = None
    """Which results had a gradient in the backward that has freed the graph, once one has."""

    def before(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Runs before this part's backward.

        Raises:
            BackwardError: the graph was freed by an earlier backward, or a graph of the backward is asked for, or
                gradients of some parameters alone.
        """
        flowing = [gradient is not None for gradient in grads]
        if self.freed is not None:
            problem = "the graph of this forward was freed by an earlier backward"
            fix = "call the model again, or the first backward with retain_graph=True"
            if not any(now and before for now, before in zip(flowing, self.freed, strict=True)):
                problem += " of another result: compiled, results share one graph"
                fix = "call backward once, on the sum of the losses, or the first time with retain_graph=True"
            raise BackwardError("backward", problem, fix)
        if torch.is_grad_enabled():
            fix = "leave create_graph=True out; compute what needs gradients of gradients in plain PyTorch"
            raise BackwardError("backward", "compiled programs have no gradients of gradients", fix)
        self.call.begin(grads)
        self.call.delivery.flowing, self.call.delivery.kinds = flowing, None if all(flowing) else self.kinds
        if self.accumulator is not None and not wants_gradient(self.accumulator):
            self.call.delivery.discard()  # torch.autograd.grad, or backward(inputs=...)
        self.freed = None if keeps_graph() else flowing


def tensors_in(result: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in what a model takes or returns: containers, dataclasses and other objects with attributes."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (type, nn.Module, str, bytes)):
            yield from tensors_in(_parts(leaf), depth - 1)


def _parts(value: Any) -> list[Any]:
    """What an object holds: the members of a set or mapping, its attributes, with or without `__slots__`."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    slots = [slot for kind in type(value).__mro__ for slot in _names(getattr(kind, "__slots__", ()))]
    attributes = list(getattr(value, "__dict__", {}).values())
    return attributes + [getattr(value, slot) for slot in slots if hasattr(value, slot)]


def _names(slots: str | Sequence[str]) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else slots


def _nodes_of(value: Any) -> set[Node]:
    return {tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None}


def _compiled_nodes(ends: set[Node], begins: set[Node]) -> Iterator[Node]:
    """The nodes of compiled functions that are met first on the way from `ends` to `begins`."""
    seen = set(begins)
    left = list(ends)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            yield node
        else:
            left += [following for following, _ in node.next_functions if following is not None]


def _accumulator(node: Node) -> Node | None:
    for one, _ in node.next_functions:
        leaf: Any = one.next_functions[0][0] if one is not None and one.next_functions else None
        if isinstance(getattr(leaf, "variable", None), Witness):
            return leaf  # type: ignore[no-any-return]
    return None
