"""Calls of a model: checks that a backward finds the state that its forward has left."""

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
    """One forward, as long as its graph lives."""

    version: Callable[[], int]
    """Returns a number that grows with every change of a parameter."""
    delivery: Delivery
    returned: Callable[[], None]
    """Called when the model has returned."""
    late: list[Callable[[], Sequence[Gradients]]] = field(default_factory=list)
    """Reductions to make at the end of a backward of this call, the same ones on every rank."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes that get gradients for `late`, kept until the model has returned: from then on the graph holds them."""
    may_overflow: bool = False
    """True if gradients are float16 and may be scaled."""
    of_method: bool = False
    """True if a method is called, not a forward: it may write to parameters."""
    seen: int = field(init=False)
    """The version at the start of the call."""
    _begun: int | None = None

    def __post_init__(self) -> None:
        self.seen = self.version()

    def watch(self, result: Any, given: Any) -> None:
        """Let a later backward of a compiled graph raise if it would be wrong: a second one, or one after an update.

        `given`: the graph's arguments, which may depend on other graphs.
        """
        ends = _nodes_of(result)
        for node in _compiled_nodes(ends, _nodes_of(given)) if ends else ():
            kinds = kinds_left_undefined(node, self.delivery.results)
            node.register_prehook(_Check(self, _accumulator(node), kinds).before)
            mark(node)

    def reduce_later(self, leaves: Iterable[torch.Tensor], reduce: Callable[[], Sequence[Gradients]]) -> None:
        """Call `reduce` at the end of a backward of this call, even of one that reaches only some of `leaves`."""
        self.late.append(reduce)
        for leaf in leaves:
            if leaf.requires_grad:
                # On the node, which does not refer to the leaf: a hook on the leaf would keep the leaf alive.
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
        """Runs before the first part of a backward of this call.

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
    """A check of one compiled part of a call."""

    call: ModelCall
    accumulator: Node | None
    """A node that a backward runs only if it wants gradients of all parameters."""
    kinds: Sequence[Any] | None
    """What autograd knows of its results, if the program gets nothing for results without a gradient."""
    freed: Sequence[bool] | None = None
    """Which results had a gradient in the backward that freed the graph; None until then."""

    def before(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Runs before this part's backward.

        Raises:
            BackwardError: the graph was freed by an earlier backward, or the backward is to create a graph, or
                gradients of some parameters only are asked for.
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
            fix = "do not pass create_graph=True; compute what needs gradients of gradients in plain PyTorch"
            raise BackwardError("backward", "compiled programs have no gradients of gradients", fix)
        self.call.begin(grads)
        self.call.delivery.flowing, self.call.delivery.kinds = flowing, None if all(flowing) else self.kinds
        if self.accumulator is not None and not wants_gradient(self.accumulator):
            self.call.delivery.discard()  # torch.autograd.grad, or backward(inputs=...)
        self.freed = None if keeps_graph() else flowing


def tensors_in(result: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in a model's arguments or results: containers, dataclasses and other objects with attributes."""
    if isinstance(result, torch.Tensor):
        yield result
        return
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (type, nn.Module, str, bytes)):
            yield from tensors_in(_parts(leaf), depth - 1)


def _parts(value: Any) -> list[Any]:
    """The members of a set or mapping, or an object's attributes, with or without `__slots__`."""
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
    """The first nodes of compiled functions on each path from `ends` to `begins`."""
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
