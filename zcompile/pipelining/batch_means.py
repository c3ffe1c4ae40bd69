"""Check that the loss is a mean over samples: a pipeline averages the losses of its micro-batches."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import fx

from zcompile.errors import OptionError
from zcompile.ir.operation import data, line_of, op_of
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program
from zcompile.pipelining.guard import results_of
from zcompile.torch_internals.operators import OpOverload


def check_mean(traced: Program) -> None:
    """Raise OptionError if the loss is visibly not a mean over the batch.

    That is, one of its terms is a sum that is not divided by a number of samples, or another reduction, such as a norm.
    """
    inputs = [data(node).type for node in traced.nodes(Input) if _is_batch(op_of(node, Input))]
    shapes = [found.shape for found in inputs if found is not None and found.shape]
    rows = shapes[0][0] if shapes else 1
    for term, divisors in _terms(results_of(traced)[0]):
        if _is_mean(term) or not _is_aten(term) or not _reads_batch(term, through_means=False):
            continue
        what, fix = f"{str(term.target).split('.')[1]}() over the batch", "give a mean over the samples"
        if _is_sum(term):
            if divisors is None:
                continue
            counts = [count for count in _products([_summed(term), *shapes]) if count % rows == 0]
            if any(math.isclose(divisor, count, rel_tol=1e-6) for divisor in divisors for count in counts):
                continue
            what, fix = "a sum over the batch", f"{fix}, or divide the sum by the number of samples that loss_fn gets"
        where = ", ".join(filter(None, [data(term).source, line_of(term)]))
        problem = f"returns {what}{where and f' ({where})'}, and the losses of micro-batches are averaged"
        raise OptionError("loss_fn", problem, fix)


def _terms(loss: Any) -> Iterator[tuple[fx.Node, Sequence[float] | None]]:
    """The terms of a loss, each with its constant divisors; None if a divisor depends on the batch.

    Such a divisor may be the number of tokens that count. Divisors outside of a nonlinear function, such as a root, do
    not apply to the terms inside.
    """
    waiting: list[tuple[Any, Sequence[float] | None]] = [(loss, ())]
    while waiting:
        node, divisors = waiting.pop()
        if not isinstance(node, fx.Node):
            continue
        factors: Sequence[Any] = node.args[:2]
        if node.target in _UNSCALED or node.target is operator.getitem:
            waiting.append((factors[0], divisors))
        elif node.target in _PRODUCTS | _QUOTIENTS:
            if sum(isinstance(one, fx.Node) and _reads_batch(one) for one in factors) == 2:
                waiting += [(one, None) for one in (factors if node.target in _PRODUCTS else factors[:1])]
            elif divisors is None:
                waiting += [(one, None) for one in factors]
            else:
                numbers = [one for one in factors if isinstance(one, (int, float)) and one]
                further = [1 / one for one in numbers] if node.target in _PRODUCTS else numbers
                waiting += [(one, [*divisors, *further]) for one in factors]
        elif _is_pointwise(node):
            sources = (one for one in node.all_input_nodes if _is_real(one))
            waiting += [(one, divisors if node.target in _ADDED else ()) for one in sources]
        else:
            yield node, divisors


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_real(node: fx.Node) -> bool:
    found = data(node).type
    return found is not None and found.dtype.is_floating_point


def _products(shapes: Sequence[tuple[int, ...]]) -> set[int]:
    """Products of sizes over every subset of the dimensions of each shape: possible numbers of elements."""
    chosen = (some for shape in shapes for count in range(1, len(shape) + 1) for some in combinations(shape, count))
    return {math.prod(some) for some in chosen}


def _is_mean(node: fx.Node) -> bool:
    """True for a mean over all dimensions, or over some that include the first."""
    if node.target is _aten.mean.dim:
        dims: Sequence[int] = node.args[1] if isinstance(node.args[1], (list, tuple)) else []  # type: ignore[assignment]
        source = node.args[0]
        found = data(source).type if isinstance(source, fx.Node) else None
        return found is not None and any(dim % len(found.shape) == 0 for dim in dims)
    return node.target is _aten.mean.default or _reduction(node) == _MEAN


def _is_sum(node: fx.Node) -> bool:
    """True for a sum, including sums of products (matrix multiplication) and of absolute values."""
    absolute = node.target is _aten.linalg_vector_norm.default and node.args[1:2] == (1,)
    return node.target in _SUMS or absolute or _reduction(node) == _SUM


def _is_aten(node: fx.Node) -> bool:
    """True for ATen operations, whose effect on the batch is known, except losses with reduction="none"."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten" and _reduction(node) != _NONE


def _reduction(node: fx.Node) -> object:
    """The `reduction` argument of a loss; None for operations without it."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if schema is None or "reduction" not in names:
        return None
    place = names.index("reduction")
    default = schema.arguments[place].default_value
    return node.args[place] if place < len(node.args) else node.kwargs.get("reduction", default)


def _summed(node: fx.Node) -> tuple[int, ...]:
    """The shape of the summed tensor; for losses, of the targets."""
    source = node.args[1 if _reduction(node) == _SUM else 0]
    found = data(source).type if isinstance(source, fx.Node) else None
    return found.shape if found is not None else ()


def _is_batch(op: Input) -> bool:
    return op.kind is Kind.DATA and not op.held


def _reads_batch(node: fx.Node, *, through_means: bool = True) -> bool:
    """True if a value depends on the batch, and not only on parameters and buffers.

    Without `through_means`, dependence through a mean over samples does not count: a sum of means is not a batch sum.
    """
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        if isinstance(op := data(one).op, Input) and _is_batch(op):
            return True
        seen.add(one)
        if not through_means and _is_mean(one):
            continue
        waiting += [source for source in one.all_input_nodes if source not in seen]
    return False


_aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2
"""ATen's numbers for `reduction="none"`, `"mean"` and `"sum"`."""
_SUMS = {_aten.sum.default, _aten.sum.dim_IntList, _aten.nansum.default, _aten.trace.default, _aten.dot.default}
_SUMS |= {_aten.vdot.default, _aten.mv.default, _aten.mm.default, _aten.bmm.default}
_ADDED = {_aten.add.Tensor, _aten.sub.Tensor, _aten.add.Scalar, _aten.sub.Scalar, _aten.rsub.Scalar}
_PRODUCTS = {_aten.mul.Tensor, _aten.mul.Scalar}
_QUOTIENTS = {_aten.div.Tensor, _aten.div.Scalar}
_UNSCALED = {_aten.view.default, _aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.neg.default}
_UNSCALED |= {_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default}
_UNSCALED |= {_aten._to_copy.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default}
"""Operations that neither scale a sum nor change what it sums over."""
