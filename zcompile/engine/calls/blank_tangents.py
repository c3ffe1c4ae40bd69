"""Blank tangents: zero gradients of results that a loss does not use, without memory.

Autograd would give zeros to a backward: gigabytes for the logits of a language model, which are written, read and added
to the loss's gradients. A `Blank` replaces them, and a region that gets one runs without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.engine.region_strides import Order, order_of
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Call, Input, Kind
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.torch_internals.operators import OpOverload
from zcompile.torch_internals.sizes import is_symbolic

_aten = torch.ops.aten
_KEEPS = {_aten._to_copy.default, _aten.clone.default, _aten.neg.default, _aten._unsafe_view.default}
"""Operations, in addition to views, that map zeros to zeros."""


@dataclass(frozen=True)
class Blank:
    """A tangent of zeros."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    traced: Any
    """The value for it when the step was traced."""

    def zeros(self) -> Tensor:
        """The zeros in memory, with the strides that were traced."""
        order = order_of(self.traced)
        if order is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        made = torch.zeros([self.shape[dim] for dim in order], dtype=self.dtype, device=self.device)
        return made.permute([order.index(dim) for dim in range(len(order))])


class Tangents:
    """The gradients of results that a program's backward takes."""

    def __init__(self, program: Program) -> None:
        nodes = [node for node in program.nodes(Input) if op_of(node, Input).kind is Kind.TANGENT]
        self._nodes = [(op_of(node, Input).result, node.meta.get("val")) for node in nodes]
        self._may_be_blank = [all(_is_compute(user, program) for user in node.users) for node in nodes]
        known = all(result is not None and isinstance(value, Tensor) for result, value in self._nodes)
        self.results = len(program.results.outputs) if known else None
        """Number of results of the forward; None if it is not known to which of them tangents belong."""
        calls = (user for node in nodes for user in node.users if isinstance(data(user).op, Call))
        self.readers = {op_of(user, Call).region for user in calls}
        """The regions that read them."""

    def filled(self, tangents: Sequence[Tensor | None], kinds: Sequence[Any], *, blank: bool) -> list[Tensor | Blank]:
        """All tangents: those that autograd leaves out as zeros, or with `blank` as `Blank` if only regions read them.

        `kinds`: what autograd knows of the results.
        """
        found = list[Tensor | Blank]()
        for tangent, (result, traced), can in zip(tangents, self._nodes, self._may_be_blank, strict=True):
            if tangent is None:
                kind = kinds[result or 0]
                left_out = Blank(tuple(kind.shape), kind.dtype, kind.device, traced)
                found.append(left_out if blank and can else left_out.zeros())
            else:
                found.append(tangent)
        return found


def _is_compute(user: fx.Node, program: Program) -> bool:
    """True for a call of a region outside of CUDA graphs, whose arguments must have fixed addresses."""
    meta = data(user)
    return isinstance(meta.op, Call) and meta.phase is Phase.BACKWARD and program.regions[meta.op.region].fixed is None


def without(region: Region, blanks: Sequence[int]) -> Region | None:
    """`region` for a call in which these placeholders are zeros; None if their sizes are not known.

    A sum with zeros is its other operand, if nothing else aliases that; in other places zeros are made within.
    """
    graph, made, zero = fx.Graph(), dict[fx.Node, fx.Node](), set[fx.Node]()
    placeholders = region.graph.find_nodes(op="placeholder")
    sizes = {str(node.meta["val"]): node for node in placeholders if is_symbolic(node.meta.get("val"))}
    given = iter(range(len(region.takes)))
    for node in region.graph.nodes:
        if (node.op == "placeholder" and next(given) in blanks) or _is_zero(node, zero):
            zero.add(node)
        elif (other := _added(node, zero)) is not None:
            made[node] = made[other]
        else:
            for source in node.all_input_nodes:
                if source in zero and source not in made:
                    shape, order = _shape(source, sizes, made), order_of(source.meta["val"])
                    if shape is None or order is None:
                        return None
                    made[source] = _zeros(graph, shape, order, source)
            made[node] = graph.node_copy(node, made.__getitem__)
    takes = tuple(itertools.compress(region.takes, [index not in blanks for index in range(len(region.takes))]))
    return replace(region, graph=graph, takes=takes)


def _is_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    target, sources = node.target, node.all_input_nodes
    keeps = target in _KEEPS or (isinstance(target, OpOverload) and target.is_view)
    return keeps and node.op == "call_function" and bool(sources) and sources[0] in zero and node.args[0] is sources[0]


def _added(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """The other operand of a sum with zeros, if it may replace the sum."""
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    rest: list[Any] = [arg for arg in node.args if not (isinstance(arg, fx.Node) and arg in zero)]
    if len(rest) != 1 or not isinstance(other := rest[0], fx.Node):
        return None
    return other if _alike(other.meta.get("val"), node.meta.get("val")) and _is_sole(other) else None


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (str(one.shape), str(one.stride()), one.dtype) == (str(other.shape), str(other.stride()), other.dtype)


def _is_sole(node: fx.Node) -> bool:
    """True if nothing else reads the value or its base, and it is computed in the region."""
    while len(node.users) == 1 and node.op == "call_function":
        target = node.target
        if not isinstance(target, OpOverload) or (not target.is_view and target not in _REUSES):
            return isinstance(target, OpOverload)
        node = node.all_input_nodes[0]
    return False


_REUSES = {_aten._unsafe_view.default, _aten.reshape.default, _aten._to_copy.default}
"""Operations, in addition to views, that may return their argument's memory."""


def _shape(node: fx.Node, sizes: Mapping[str, fx.Node], made: Mapping[fx.Node, fx.Node]) -> list[Any] | None:
    """The sizes of a value as arguments: numbers, and placeholders for varying ones."""
    given = {size: made[placeholder] for size, placeholder in sizes.items() if placeholder in made}
    found = [given.get(str(size)) if is_symbolic(size) else int(size) for size in node.meta["val"].shape]
    return None if None in found else found


def _zeros(graph: fx.Graph, shape: Sequence[Any], order: Order, node: fx.Node) -> fx.Node:
    """Zeros in place of `node`, with the strides that were traced."""
    value = node.meta["val"]
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    dense = graph.call_function(_aten.full.default, ([shape[dim] for dim in order], 0), kwargs)
    dense.meta["val"] = value.permute(order)
    made = graph.call_function(_aten.permute.default, (dense, [order.index(dim) for dim in range(len(order))]))
    made.meta["val"] = value
    return made
