"""The axes of operations: which dimensions of their arguments and of their results stand for the same index.

As letters do in an einsum. `aten.mm.default(x, w)` has the axes i, of `x` and the result, k, over which it adds up, and
j, of `w` and the result. An operation that is not in the table has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import NoneType
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Item
from zcompile.ir.placement import PARTIAL, Kept
from zcompile.ir.side_effects import is_random
from zcompile.torch_internals.operators import OpOverload, defaults_of, writes_arguments
from zcompile.torch_internals.pytree import tree_leaves

aten = torch.ops.aten


def operators(names: str) -> frozenset[Any]:
    """Return the operators of `names`: `sum sum.dim_IntList`, without an overload the default one."""
    pairs = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(aten, packet), overload or "default") for packet, _, overload in pairs)


class MixedRowsError(Exception):
    """An operation mixes rows, or it is not known that it does not."""

    def __init__(self, node: fx.Node, problem: str) -> None:
        super().__init__(problem)
        self.node = node


@dataclass(frozen=True, slots=True)
class IndexAxis:
    """Dimensions of arguments, and for each result its dimension, PARTIAL if it adds up over them, or None."""

    arguments: Mapping[fx.Node, int]
    results: tuple[int | Kept | None, ...] = (None,)
    groups: Fraction = Fraction(1)
    """How many groups of all rows the results have for one of the arguments; see `Divided.outer`."""


Axes = Iterator[IndexAxis]


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a tensor; of any other value `()`."""
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors of which an operation reads numbers, each once."""
    return [] if node.target in _NEW else _among(node.all_input_nodes)


def _among(values: Iterable[Any]) -> list[fx.Node]:
    return [one for one in values if isinstance(one, fx.Node) and isinstance(one.meta.get("val"), torch.Tensor)]


def _pointwise(node: fx.Node) -> Axes:
    """Dimensions are aligned from the right, and those of size 1 are the same for all rows."""
    shape = shape_of(node)
    for dim, size in enumerate(shape):
        aligned = {source: dim - len(shape) + len(shape_of(source)) for source in tensors_of(node)}
        has = {source: own for source, own in aligned.items() if own >= 0 and shape_of(source)[own] != 1}
        if any(shape_of(source)[own] != size for source, own in has.items()):
            raise MixedRowsError(node, f"{node.target} takes values whose sizes do not fit")
        yield IndexAxis(has if size != 1 else {s: own for s, own in aligned.items() if own >= 0}, (dim,))


def _lettered(equation: str) -> Callable[[fx.Node], Axes]:
    """The axes of a product, in letters as for einsum."""
    *operands, result = equation.replace("->", ",").split(",")

    def axes(node: fx.Node) -> Axes:
        given = [arg for arg in node.args if isinstance(arg, fx.Node)]
        for letter in dict.fromkeys("".join(operands)):
            dims = {arg: own.index(letter) for arg, own in zip(given, operands, strict=True) if letter in own}
            yield IndexAxis(dims, (result.index(letter) if letter in result else PARTIAL,))

    return axes


def _added(node: fx.Node) -> Axes:
    """A product of matrices to which a value is added, once: what it adds up over is no partial sum."""
    bias, first, second = _among(node.args[:3])
    shape = shape_of(bias)
    for dim, (operand, size) in enumerate(((first, shape_of(first)[0]), (second, shape_of(second)[1]))):
        aligned = dim - 2 + len(shape)
        has = aligned >= 0 and shape[aligned] == size
        yield IndexAxis({operand: dim} | ({bias: aligned} if has else {}), (dim,))
    yield IndexAxis({first: 1, second: 0})


def _reduced(*, adds: bool) -> Callable[[fx.Node], Axes]:
    """A reduction over dimensions, all of them if none is given; the results are alike."""

    def axes(node: fx.Node) -> Axes:
        (source,) = tensors_of(node)
        rank = len(shape_of(source))
        dims = _argument(node, "dim", 1)
        reduced = [dims] if isinstance(dims, int) else list(dims or range(rank))
        reduced = [dim % rank for dim in reduced] if rank else []
        keeps = bool(_argument(node, "keepdim", 3 if node.target in _CORRECTED else 2))
        count = results_of(node)
        for dim in range(rank):
            if dim in reduced:
                yield IndexAxis({source: dim}, (PARTIAL if adds else None,) * count)
            else:
                now = dim if keeps else dim - sum(other < dim for other in reduced)
                yield IndexAxis({source: dim}, (now,) * count)

    return axes


def _along(node: fx.Node) -> Axes:
    """An operation along one dimension: of the others each is the same in all arguments and in the results."""
    shape = shape_of(tensors_of(node)[0])
    along = int(_argument(node, "dim", _DIMENSION.get(node.target, 1))) % max(len(shape), 1)
    for dim, size in enumerate(shape):
        fits = {source: dim for source in tensors_of(node) if len(shape_of(source)) == len(shape)}
        same = dim != along and all(shape_of(source)[dim] == size for source in fits)
        yield IndexAxis(fits, (dim,) * results_of(node) if same else (None,) * results_of(node))


def _embedded(node: fx.Node) -> Axes:
    weight, indices = tensors_of(node)[:2]
    for dim in range(rank := len(shape_of(indices))):
        yield IndexAxis({indices: dim}, (dim,))
    yield IndexAxis({weight: 1}, (rank,))


def _embedded_backward(node: fx.Node) -> Axes:
    gradient, indices = tensors_of(node)[:2]
    adds = not node.args[4]  # not scaled by how often a word is in all rows
    for dim in range(rank := len(shape_of(indices))):
        yield IndexAxis({gradient: dim, indices: dim}, (PARTIAL if adds else None,))
    yield IndexAxis({gradient: rank}, (1,))


def _loss_backward(node: fx.Node) -> Axes:
    """The gradient of a loss that adds up over rows, or has one for each (reduction 0)."""
    gradient, probabilities, targets = (_of(node, index) for index in range(3))
    if len(shape_of(probabilities)) == 2 and node.args[4] != 1:
        yield IndexAxis({probabilities: 0, targets: 0} | ({gradient: 0} if node.args[4] == 0 else {}), (0,))


def _normalized(node: fx.Node) -> Axes:
    """A normalization over the last dimensions: its statistics have one entry for each row."""
    source, over = _of(node, 0), _argument(node, "normalized_shape", 1)
    for dim in range(len(shape_of(source)) - len(over)):
        yield IndexAxis({source: dim}, (dim,) * results_of(node))


def _normalized_backward(node: fx.Node) -> Axes:
    """Its results are the gradients of what is normalized, and of weights, which add up over rows."""
    statistics = (3, 4) if node.target is aten.native_layer_norm_backward.default else (3,)
    rows, over = [_of(node, index) for index in (0, 1, *statistics)], _argument(node, "normalized_shape", 2)
    for dim in range(len(shape_of(rows[0])) - len(over)):
        yield IndexAxis(dict.fromkeys(rows, dim), (dim, *(PARTIAL,) * (results_of(node) - 1)))


def _permuted(node: fx.Node) -> Axes:
    source = _of(node, 0)
    order = list(range(rank := len(shape_of(source))))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in _argument(node, "dims", 1)]
    elif rank:
        pair = (0, rank - 1) if node.target is aten.t.default else (_argument(node, "", 1), _argument(node, "", 2))
        one, other = (dim % rank for dim in pair)
        order[one], order[other] = order[other], order[one]
    for dim, before in enumerate(order):
        yield IndexAxis({source: before}, (dim,))


def _selected(node: fx.Node) -> Axes:
    """One index of a dimension, or each by itself."""
    rank = len(shape_of(source := _of(node, 0)))
    taken = _argument(node, "dim", 1) % rank
    for dim in range(rank):
        yield IndexAxis({source: dim}, (None if dim == taken else dim - (taken < dim),) * results_of(node))


def _sliced(node: fx.Node) -> Axes:
    """A part of a dimension, or parts of it; one that is all of it, or some groups of all rows, has rows as before."""
    shape = shape_of(source := _of(node, 0))
    cut = _argument(node, "dim", 1 if node.target is aten.slice.Tensor else 2) % len(shape)
    target: Any = node.target
    at = {aten.slice.Tensor: 2, aten.slice_backward.default: 3}.get(target)
    # Not by its size: an end that is past some rows may not be past all of them.
    same = at is not None and [_argument(node, name, at + i) for i, name in enumerate(("start", "end", "step"))] in _ALL
    part: Any = node.args[1] if target is aten.split.Tensor else 0
    alike = bool(part and shape[cut]) and shape[cut] % part == 0
    same = same or alike
    for dim in range(len(shape)):
        groups = Fraction(part, shape[cut]) if dim == cut and alike else Fraction(1)
        yield IndexAxis({source: dim}, (dim if dim != cut or same else None,) * results_of(node), groups)


def _gathered(node: fx.Node) -> Axes:
    """The values of several ranks, one after the other along the first dimension."""
    ranks: Any = node.args[1]
    for dim in range(len(shape_of(source := _of(node, 0)))):
        yield IndexAxis({source: dim}, (dim,), Fraction(1 if dim else ranks))


def _joined(node: fx.Node) -> Axes:
    cut = _argument(node, "dim", 1) % len(shape := shape_of(node))
    for dim in range(len(shape)):
        yield IndexAxis(dict.fromkeys(tensors_of(node), dim), (dim if dim != cut else None,))


def _selected_backward(node: fx.Node) -> Axes:
    put = _argument(node, "dim", 2) % len(shape := shape_of(node))
    for dim in range(len(shape)):
        if dim != put:
            yield IndexAxis({_of(node, 0): dim - (put < dim)}, (dim,))


def _put(node: fx.Node) -> Axes:
    """A number in place of those at a mask; or a value for each row, in the column that an index says."""
    given: Any = node.args[1]
    source, indices, value = _of(node, 0), _among(given), _of(node, 2)
    shape, shapes, alone = shape_of(source), [shape_of(index) for index in indices], not shape_of(value)
    if len(indices) < len(given):
        return  # some dimensions are left out
    if len(indices) == 1 and indices[0].meta["val"].dtype is torch.bool and alone:
        for dim in range(len(shape)):
            yield IndexAxis({source: dim} | ({indices[0]: dim} if dim < len(shapes[0]) else {}), (dim,))
    in_rows = shapes == [shape[:1]] * len(indices) and (alone or shape_of(value)[0] == shape[0])
    if in_rows and is_row_number(indices[0], shape[0]):
        yield IndexAxis(dict.fromkeys([source, *indices, *([] if alone else [value])], 0), (0,))


def is_row_number(node: fx.Node, rows: int) -> bool:
    """Return True for the numbers of `rows` rows, if each is only the first index of a value of that row.

    Then the numbers of some rows, counted from the first of these, index the values of these rows.
    """
    puts: Any = [user for user in node.users if user.target is aten.index_put.default]
    first = len(puts) == len(node.users) and all(user.args[1][0] is node for user in puts)
    return node.target is aten.arange.default and node.args == (rows,) and first


def _counted(node: fx.Node) -> Axes:
    if is_row_number(node, *shape_of(node)):
        yield IndexAxis({}, (0,))


def _padded(node: fx.Node) -> Axes:
    rank, pads = len(shape_of(source := _of(node, 0))), list[Any](node.args[1])  # type: ignore[arg-type]
    for dim in range(rank):  # some are negative: rows may move where their number remains
        yield IndexAxis({source: dim}, (None if any(pads[2 * (rank - 1 - dim) :][:2]) else dim,))


def _made(node: fx.Node) -> Axes:
    """A value that is the same everywhere."""
    for dim in range(len(shape_of(node))):
        yield IndexAxis({}, (dim,))


def _of(node: fx.Node, index: int) -> fx.Node:
    """Return an argument that is a tensor."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node), f"{node.name} takes a tensor there"
    return argument


def results_of(node: fx.Node) -> int:
    """Return how many results an operation has; of those that are not known, the last one read counts."""
    items = [op.index for user in node.users if isinstance(op := data(user).op, Item)]
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else max(items, default=0) + 1


def gives_several(node: fx.Node) -> bool:
    """Return True for an operation with several results, which items name."""
    return isinstance(node.meta.get("val"), (tuple, list, NoneType))


def _argument(node: fx.Node, name: str, index: int) -> Any:
    """Return an argument that is given by position or name; else its default."""
    if name in node.kwargs:
        return node.kwargs[name]
    if index < len(node.args):
        return node.args[index]
    return defaults_of(node.target).get(name)  # type: ignore[arg-type]


POINTWISE = (
    "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp"
    " clamp_max clamp_min copysign cos cosh div elu eq erf erfc erfinv exp exp2 expm1 floor fmod frac ge gelu"
    " gelu_backward gt hardsigmoid hardtanh isinf isnan le leaky_relu lerp log log10 log1p log2 logaddexp logical_and"
    " logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg pow"
    " reciprocal relu remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin sinc sinh"
    " softplus sqrt sub tan tanh tanh_backward threshold threshold_backward trunc where xlogy"
)
"""Operations of which torch says by a tag, overload by overload, that they are elementwise."""
_CORRECTED = operators("var.correction std.correction var_mean.correction")
_DIMENSION: Mapping[Any, int] = dict.fromkeys(operators("_softmax_backward_data _log_softmax_backward_data"), 2)
"""Where the dimension stands among arguments, if not second."""
_ALIKE: Mapping[str, Callable[[fx.Node], Axes]] = {
    "_to_copy clone detach alias lift_fresh_copy zeros_like ones_like full_like elu_backward hardsigmoid_backward"
    " hardswish hardswish_backward hardtanh_backward leaky_relu_backward mish_backward softplus_backward": _pointwise,
    "mm": _lettered("ik,kj->ij"),
    "bmm": _lettered("bik,bkj->bij"),
    "mv": _lettered("ik,k->i"),
    "dot": _lettered("k,k->"),
    "addmm": _added,
    "sum sum.dim_IntList": _reduced(adds=True),
    "amax amin mean mean.dim logsumexp any any.dim all all.dim prod prod.dim_int argmax argmin max max.dim min min.dim"
    " var.correction std.correction var_mean.correction": _reduced(adds=False),
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum gather scatter.value scatter.src"
    " scatter_add": _along,
    "embedding": _embedded,
    "embedding_dense_backward": _embedded_backward,
    "nll_loss_backward": _loss_backward,
    "native_layer_norm _fused_rms_norm": _normalized,
    "native_layer_norm_backward _fused_rms_norm_backward": _normalized_backward,
    "t transpose.int permute": _permuted,
    "expand": _pointwise,
    "select.int unbind.int": _selected,
    "slice.Tensor split.Tensor split_with_sizes slice_backward": _sliced,
    "select_backward": _selected_backward,
    "cat": _joined,
    "constant_pad_nd": _padded,
    "index_put": _put,
    "arange": _counted,
    "full zeros ones scalar_tensor new_zeros new_ones new_full": _made,
}
_SENT = torch.ops._c10d_functional
BY_OPERATION = {operation: axes for names, axes in _ALIKE.items() for operation in operators(names)} | {
    _SENT.all_gather_into_tensor.default: _gathered,
    _SENT.all_reduce.default: _pointwise,
    _SENT.wait_tensor.default: _pointwise,
}
_ALL = [[start, end, 1] for start in (0, None) for end in (sys.maxsize, None)]
"""Start, end and step of a slice that is all of a dimension, whatever its size."""
_NEW = operators("new_zeros new_ones new_full")
"""Operations that read only the dtype of their argument."""
VIEWS = operators("view _unsafe_view reshape unsqueeze squeeze.dim squeeze.dims squeeze")
"""Operations that only change the shape."""
_SHAPES: Mapping[Any, int] = {
    **dict.fromkeys(operators("full zeros ones arange"), 0),
    **dict.fromkeys(operators("view _unsafe_view reshape expand new_zeros new_ones new_full"), 1),
    **dict.fromkeys(operators("slice_backward select_backward"), 1),
}
"""Where the shape of the result stands among arguments."""


_ADDITIVE = VIEWS | operators("t transpose.int permute clone add.Tensor")


def is_additive(node: fx.Node) -> bool:
    """Return True for an operation that gives, of shares of sums, shares of what it gives of the sums.

    A number is no share: each rank would add it.
    """
    return node.target in _ADDITIVE and (node.target is not aten.add.Tensor or isinstance(node.args[1], fx.Node))


def is_attention(node: fx.Node) -> bool:
    """Return True for a kernel of scaled dot-product attention, which computes each head by itself, or its backward."""
    return isinstance(node.target, OpOverload) and "scaled_dot_product" in node.target.overloadpacket.__name__


def attended(node: fx.Node) -> list[fx.Node]:
    """Return the values of attention that have all heads: queries, keys and values, and the gradient that arrives."""
    backward = "backward" in str(node.target)
    return _among(node.args[: 4 if backward else 3])


def is_pointwise(operation: OpOverload) -> bool:
    """Return True for an elementwise operation of the table that writes to no argument."""
    tagged = torch.Tag.pointwise in operation.tags and not writes_arguments(operation)
    return operation.namespace == "aten" and tagged and operation.overloadpacket.__name__ in POINTWISE.split()


def axes_of(node: fx.Node) -> Axes:
    """Yield the axes of an operation.

    Raises:
        MixedRowsError: it is not in the table, or draws random numbers, each row others than alone.
    """
    target = node.target
    if isinstance(target, OpOverload) and not is_random(node):
        axes = BY_OPERATION.get(target) or (_pointwise if is_pointwise(target) else None)
        if axes is not _pointwise and len(_among(node.all_input_nodes)) < len(_among(tree_leaves(node.args))):
            raise MixedRowsError(node, f"{target} takes a value twice, in places that may be divided differently")
        if axes is not None:
            return axes(node)
    problem = "draws random numbers" if is_random(node) else "is not known to treat rows alike"
    raise MixedRowsError(node, f"{target} {problem}")


def is_same_in_parts(node: fx.Node) -> bool:
    """Return True for a value that is made of nothing, and of some rows as of all of them."""
    if node.target is aten.arange.default:
        return is_row_number(node, *shape_of(node))
    return node.target in BY_OPERATION and not node.all_input_nodes


def resized(node: fx.Node, dim: int | None, now: int, then: int) -> tuple[Any, ...]:
    """Return the arguments of an operation for another number of rows; `dim`: the dimension of its result with rows.

    Raises:
        MixedRowsError: the arguments say a shape that has other rows.
    """
    at = _SHAPES.get(node.target)
    if node.target is aten.split.Tensor and dim == _argument(node, "dim", 2) % len(shape_of(_of(node, 0))):
        at, dim = 1, 0
    if at is None or dim is None:
        return tuple(node.args)
    said: Any = node.args[at]
    shape = [said] if isinstance(said, int) else [*said]
    if shape[dim] != -1:
        if shape[dim] % now:
            raise MixedRowsError(node, f"{node.target} is given a shape that does not have {now} rows")
        shape[dim] = shape[dim] // now * then
    return (*node.args[:at], shape[0] if isinstance(said, int) else shape, *node.args[at + 1 :])
