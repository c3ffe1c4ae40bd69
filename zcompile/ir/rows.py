"""Rows: where the rows of values are in a graph that treats them alike, and loops over them.

What an operation that treats rows alike makes of a part of the rows is that part of what it makes of all of them:
f(concat(a, b)) = concat(f(a), f(b)). An operation that adds up over rows gives a partial sum: f(concat(a, b)) =
f(a) + f(b). `zcompile.ir.row_axes` says which do so; all others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import data, set_data
from zcompile.ir.ops import Item
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Kept, Placement
from zcompile.ir.row_axes import (
    VIEWS,
    IndexAxis,
    MixedRowsError,
    axes_of,
    gives_several,
    operators,
    resized,
    shape_of,
    tensors_of,
)
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.sizes import FakeTensor

aten = torch.ops.aten


# -- placements -------------------------------------------------------------------------------------------------------


class Placements:
    """Where the rows of values of a graph are: from those of some values follow those of others, in both directions.

    Args:
        rows: The number of rows.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.of: dict[fx.Node, Placement] = {}
        self._several: dict[fx.Node, tuple[Placement, ...]] = {}

    def put(self, value: fx.Node, placement: Placement, by: fx.Node) -> None:
        """Record where the rows of `value` are, as the operation `by` wants or gives them.

        Raises:
            MixedRowsError: they are elsewhere.
        """
        if isinstance(placement, Divided) and not self._fits(value, placement):
            raise MixedRowsError(by, f"takes {value.name}, which does not have {self.rows} rows there")
        if self.of.setdefault(value, placement) != placement:
            raise MixedRowsError(
                by, f"takes {value.name} in another way than another operation, or makes it in another"
            )

    def _fits(self, value: fx.Node, placement: Divided) -> bool:
        shape = shape_of(value)
        return placement.dim < len(shape) and shape[placement.dim] % (placement.outer * self.rows) == 0

    def place(self, graph: fx.Graph, given: Mapping[fx.Node, Placement]) -> None:
        """Place all values of a graph, given the placements of its placeholders; what has no rows is whole.

        Raises:
            MixedRowsError: an operation mixes rows, or may do so.
        """
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        for value, placement in given.items():
            self.put(value, placement, value)
        known = -1
        while known != (known := len(self.of)):
            for node in (*nodes, *reversed(nodes)):
                self.follow(node)
        for node in nodes:
            if node not in self.of and not gives_several(node):
                self.put(node, WHOLE, node)
                self.follow(node)

    def follow(self, node: fx.Node) -> None:
        """Place what an operation reads and gives, as far as this follows from what is placed.

        Raises:
            MixedRowsError: the operation mixes rows, or may do so.
        """
        if isinstance(data(node).op, Item):
            self._item(node)
            return
        results = self._several.get(node) or ((self.of[node],) if node in self.of else ())
        given = {source: self.of[source] for source in tensors_of(node) if source in self.of}
        divided = next(((source, p) for source, p in given.items() if isinstance(p, Divided)), None)
        wanted = next(((i, p) for i, p in enumerate(results) if isinstance(p, Divided)), None)
        if divided is not None:
            self._apply(node, *divided)
        elif wanted is not None:
            self._apply(node, *wanted)
        elif PARTIAL in given.values():
            raise MixedRowsError(node, "reads a sum before all rows have been added up")

    def results(self, node: fx.Node) -> tuple[Placement, ...] | None:
        """Return where the results of an operation have their rows; None if that does not follow."""
        return self._several.get(node) or ((self.of[node],) if node in self.of else None)

    def _item(self, node: fx.Node) -> None:
        parent, index = node.all_input_nodes[0], int(str(node.args[1]))
        if parent in self._several:
            self.put(node, self._several[parent][index], parent)
        elif isinstance(placement := self.of.get(node), Divided):
            self._apply(parent, index, placement)

    def _apply(self, node: fx.Node, known: fx.Node | int, placement: Divided) -> None:
        """Place all that an operation reads and gives; `known`: the placed argument, or the number of the result."""
        if node.target in VIEWS:
            self._view(node, known, placement)
            return
        axis = next((axis for axis in axes_of(node) if _dim_of(axis, known) == placement.dim), None)
        if axis is None or {*axis.results} == {None}:
            raise MixedRowsError(node, f"{node.target} mixes rows, along dimension {placement.dim}")
        taken = Fraction(placement.outer) / (1 if isinstance(known, fx.Node) else axis.groups)
        given = taken * axis.groups
        if taken.denominator > 1 or given.denominator > 1:
            raise MixedRowsError(node, f"{node.target} parts rows, or joins them, along dimension {placement.dim}")
        for source in tensors_of(node):
            at = axis.arguments.get(source)
            self.put(source, WHOLE if at is None else Divided(at, int(taken)), node)
        self._give(node, tuple(Divided(p, int(given)) if isinstance(p, int) else PARTIAL for p in axis.results))

    def _give(self, node: fx.Node, placements: tuple[Placement, ...]) -> None:
        if gives_several(node):
            self._several[node] = placements
        else:
            self.put(node, placements[0], node)

    def _view(self, node: fx.Node, known: fx.Node | int, placement: Divided) -> None:
        source = node.all_input_nodes[0]
        one, other = (source, node) if isinstance(known, fx.Node) else (node, source)
        found = through_view(shape_of(one), placement, shape_of(other), self.rows)
        if found is None:
            raise MixedRowsError(node, f"{node.target} joins rows with other values")
        self.put(one, placement, node)
        self.put(other, found, node)


def _dim_of(axis: IndexAxis, known: fx.Node | int) -> int | Kept | None:
    if isinstance(known, fx.Node):
        return axis.arguments.get(known)
    return axis.results[known]


def through_view(shape: Sequence[int], placement: Divided, other: Sequence[int], rows: int) -> Divided | None:
    """Return where rows are after a change of shape that keeps the order of elements; None if they are in no dimension.

    The elements before the rows, and after them, are as many in both shapes.
    """
    before = math.prod(shape[: placement.dim]) * placement.outer
    passed = 1
    for dim, size in enumerate(other):
        if before % passed == 0 and size % (before // passed * rows) == 0:
            return Divided(dim, before // passed)
        passed *= size
    return None


def dimension(results: Sequence[Placement] | None) -> int | None:
    """Return the dimension of an operation's first result that has rows."""
    return results[0].dim if results and isinstance(results[0], Divided) else None


# -- graphs -----------------------------------------------------------------------------------------------------------


def with_rows(graph: fx.Graph, takes: Iterable[Placement], now: int, then: int) -> fx.Graph:
    """Return a graph that computes `then` rows as `graph` computes `now`; `takes`: the placements of its placeholders.

    Placeholders with rows are contiguous in the new graph.

    Raises:
        MixedRowsError: an operation mixes rows, or may do so, or fails with so many.
    """
    placed, made, inside = Placements(now), fx.Graph(), dict[fx.Node, fx.Node]()
    placed.place(graph, dict(zip(graph.find_nodes(op="placeholder"), takes, strict=True)))
    for node in graph.nodes:
        if node.op == "output":
            set_data(made.output(fx.map_arg(node.args[0], inside.__getitem__)), data(node))
            break
        dim = dimension(placed.results(node))
        args, kwargs = fx.map_arg((resized(node, dim, now, then), node.kwargs), inside.__getitem__)
        copied = inside[node] = made.create_node(node.op, node.target, args, kwargs, name=node.name)
        copied.meta = dict(node.meta)
        copied.meta["val"] = value = _given(node, dim, now, then) if node.op == "placeholder" else fake_value(copied)
        set_data(copied, replace(data(node), type=TensorType.of(value)))
    return made


def _given(placeholder: fx.Node, dim: int | None, now: int, then: int) -> Any:
    value = placeholder.meta["val"]
    if dim is None:
        return value
    shape = [*value.shape]
    shape[dim] = shape[dim] // now * then
    with value.fake_mode:
        return torch.empty(shape, dtype=value.dtype, device=value.device)


def fake_value(node: fx.Node) -> Any:
    """Return the fake value of an operation with those of its arguments. Raises MixedRowsError: it fails."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    mode = next(v.fake_mode for n in node.graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor))
    try:
        with mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError, IndexError) as error:
        raise MixedRowsError(node, f"fails with fewer rows: {str(error).partition(chr(10))[0]}") from error


# -- linear operations ------------------------------------------------------------------------------------------------

_PRODUCTS = operators("mul.Tensor mm bmm mv dot")
_SUMS = operators("add.Tensor sub.Tensor cat")
_IN_FIRST = VIEWS | operators(
    "sum sum.dim_IntList _to_copy clone neg xlogy.Tensor mul.Scalar div.Scalar div.Tensor gather"
    " embedding_dense_backward alias detach _softmax_backward_data _log_softmax_backward_data gelu_backward"
    " nll_loss_backward silu_backward tanh_backward sigmoid_backward threshold_backward native_layer_norm_backward"
    " _fused_rms_norm_backward leaky_relu_backward elu_backward hardtanh_backward softplus_backward mish_backward t"
    " transpose.int permute expand select.int unbind.int slice.Tensor split.Tensor split_with_sizes slice_backward"
    " select_backward"
)
"""Operations that are linear in their first argument, with all others fixed."""


def is_scaled(nodes: Iterable[fx.Node], factor: fx.Node, results: Iterable[fx.Node]) -> bool:
    """Return True if each of `results` is linear in `factor`, a number, without a constant: f(s) = s f(1).

    Args:
        nodes: The operations between them, in order; what they read of others does not depend on the factor.
        factor: The number.
        results: Some of `nodes`.
    """
    scaled, others = {factor}, set[fx.Node]()
    for node in nodes:
        known = [source for source in node.all_input_nodes if source in scaled or source in others]
        if not any(source in scaled for source in known):
            others |= {node} if known and not _is_zero(node) else set()
        elif _is_zero(node) or (others.isdisjoint(known) and _is_linear(node, scaled)):
            scaled.add(node)
        else:
            others.add(node)
    return scaled.issuperset(results)


def _is_linear(node: fx.Node, scaled: set[fx.Node]) -> bool:
    """Return True if an operation that reads scaled values is linear in them, all together."""
    given, target = [arg for arg in _flat(node.args) if isinstance(arg, fx.Node)], node.target
    dtype: Any = node.kwargs.get("dtype") or torch.float32
    if not dtype.is_floating_point:
        return False  # it rounds to integers
    if isinstance(data(node).op, Item) or target in _IN_FIRST:
        return given[0] in scaled and scaled.isdisjoint(given[1:])
    if target in _PRODUCTS:
        return sum(arg in scaled for arg in given) == 1
    if target is aten.masked_fill.Scalar:
        return given[0] in scaled and given[1] not in scaled and bool(node.args[2] == 0)
    chooses = target is aten.where.self
    terms = given[1:] if chooses else given
    if chooses and given[0] in scaled:
        return False
    adds_number = target in _SUMS and target is not aten.cat.default and len(given) < 2
    return (chooses or target in _SUMS) and not adds_number and all(term in scaled or _is_zero(term) for term in terms)


def _is_zero(node: fx.Node) -> bool:
    """Return True for a value that is zero everywhere."""
    match node.target:
        case aten.zeros_like.default | aten.new_zeros.default | aten.zeros.default:
            return True
        case aten.scalar_tensor.default:
            return bool(node.args[0] == 0)
        case aten.full.default | aten.full_like.default:
            return bool(node.args[1] == 0)
    return False


def _flat(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg)
        else:
            yield arg
