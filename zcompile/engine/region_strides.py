"""Regions whose values keep the strides that were recorded when the step was traced, whatever Inductor decomposes.

Inductor decomposes some operations before it compiles, and the result may have other strides: `cat` of one tensor
becomes a clone, which keeps strides that `cat` does not. A view that was traced of the value may then be impossible,
and a region that reads it is compiled for the recorded strides.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from zcompile.torch_internals.aot_autograd import tracing_again
from zcompile.torch_internals.inductor import force_stride_order, inductor_decompositions
from zcompile.torch_internals.operators import OpOverload
from zcompile.torch_internals.sizes import is_symbolic, untraced_sizes

Order = tuple[int, ...]
"""Dimensions from the one with the largest stride to the one with the smallest."""


def keep_strides(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Copy, in the graph of `module`, values that Inductor would give other strides; it fuses such copies."""
    found = _Decomposed(module)
    with tracing_again([node.meta.get("val") for node in module.graph.nodes]):
        make_fx(found.run, decomposition_table=inductor_decompositions())(*inputs)
    for node, order in found.differing.items():
        _replace(node, functools.partial(reordered, node, order, torch.ops.aten.clone.default))
    for node, order in _seen_in_part(module.graph):
        _replace(node, functools.partial(_forced, node, order))
    module.recompile()


def _seen_in_part(graph: fx.Graph) -> Iterator[tuple[fx.Node, Order]]:
    """Values of which the graph returns non-dense views, with their recorded orders.

    Inductor gives results the recorded strides only if they are dense: it chooses the layout of a convolution, and of a
    fused value it computes only the part that is returned.
    """
    results = [node for node in graph.output_node().all_input_nodes if isinstance(node.meta.get("val"), Tensor)]
    for base in dict.fromkeys(_base(node) for node in results if order_of(node.meta["val"]) is None):
        value = base.meta.get("val")  # nodes inserted here have none, and the right strides
        if base.op == "call_function" and value is not None and (order := order_of(value)) is not None:
            yield base, order


def _base(node: fx.Node) -> fx.Node:
    """The base of a view, through views of views."""
    while True:
        viewing = node.args[0] if node.target is operator.getitem else node  # such as one part of a split
        if not isinstance(viewing, fx.Node) or not isinstance(viewing.target, OpOverload) or not viewing.target.is_view:
            return node
        node = viewing.all_input_nodes[0]


class _Decomposed(fx.Interpreter):
    """Finds values that get other strides than recorded, assuming that all values before have theirs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.differing: dict[fx.Node, Order] = {}

    def run_node(self, n: fx.Node) -> Any:
        result, recorded = super().run_node(n), n.meta.get("val")
        if not isinstance(result, Tensor) or not isinstance(recorded, Tensor):
            return result
        with untraced_sizes():  # recorded sizes are not values of the graph that is traced here
            order = None if _same_strides(result, recorded) else order_of(recorded)
        if order is None:
            return result
        self.differing[n] = order
        return result.permute(order).clone(memory_format=torch.contiguous_format).permute(_inverse(order))


def _same_strides(one: Tensor, other: Tensor) -> bool:
    """True if certain for all sizes; the stride of a dimension of size one does not matter."""
    return all(
        statically_known_true(size == 1) or statically_known_true(mine == theirs)
        for size, mine, theirs in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def order_of(value: Tensor) -> Order | None:
    """The order of a traced value; None if it is not dense.

    Varying sizes count as traced, which gives the same order as any others: the strides of a dense tensor are products
    of its sizes, and if a size of one makes two of them equal, the order of the dimensions decides.
    """
    shape, strides = _traced(value.shape), _traced(value.stride())
    if shape is None or strides is None:
        return None
    order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
    expected = [math.prod(shape[dim] for dim in order[i + 1 :]) for i in range(len(order))]
    dense = all(shape[dim] == 1 or strides[dim] == stride for dim, stride in zip(order, expected, strict=True))
    return order if dense else None


def _traced(sizes: Sequence[Any]) -> list[int] | None:
    """Sizes as traced, without guards on those that vary; None if one depends on data."""
    if not all(size.node.has_hint() for size in sizes if is_symbolic(size)):
        return None
    return [int(size.node.hint) if is_symbolic(size) else size for size in sizes]


def _inverse(order: Order) -> Order:
    return tuple(order.index(dim) for dim in range(len(order)))


def _replace(node: fx.Node, make: Callable[[], fx.Node]) -> None:
    """Let the users of `node` read the result of `make`, which is inserted after it."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        made = make()
    for user in users:
        user.replace_input_with(node, made)


def _forced(node: fx.Node, order: Order) -> fx.Node:
    """`node` dense in `order`; Inductor would drop a clone, which changes nothing given the recorded strides."""
    graph, last = node.graph, [node]

    def put(target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        with graph.inserting_after(last[-1]):
            last.append(graph.call_function(target, args))
        last[-1].meta["val"] = value
        return last[-1]

    strides = dict[int, Any]()
    stride: Any = 1
    value: Any = 1
    for dim in reversed(order):
        strides[dim], size = stride, node.meta["val"].shape[dim]
        value = value * size
        if is_symbolic(size):
            size = put(torch.ops.aten.sym_size.int, (node, dim), size)
        stride = put(operator.mul, (stride, size), value) if is_symbolic(value) else stride * size
    forced = put(force_stride_order(), (node, [strides[dim] for dim in range(len(order))]), node.meta["val"])
    forced.meta = dict(node.meta)
    return forced


def reordered(node: fx.Node, order: Order, how: OpOverload) -> fx.Node:
    """`node` dense in `order`, made contiguous by `how`: operations are inserted where its graph inserts."""
    graph = node.graph
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    first = graph.call_function(torch.ops.aten.permute.default, (node, order))
    with graph.inserting_after(first):
        dense = graph.call_function(how, (first,), kwargs)
    with graph.inserting_after(dense):
        last = graph.call_function(torch.ops.aten.permute.default, (dense, _inverse(order)))
    last.meta = dict(node.meta)
    return last
