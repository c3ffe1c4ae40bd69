"""Regions as single operations: adjusted where kernels differ from the fake tensors that a step is traced with.

A kernel's result may have another layout than recorded: batch normalization follows the layout of its input, its fake
does not. A traced view of such a result then has to be a copy. And some kernels refuse a mix of dtypes that their fakes
accept: a normalization in float32 whose weights are gathered in bfloat16.

Operations that tracing decomposes, and eager autograd runs as one kernel, are joined again: nothing fuses them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.engine.region_strides import order_of, reordered
from zcompile.torch_internals.operators import suggest_memory_format

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default}
_STRICT = {
    _aten.as_strided.default,
    _aten.view_as_complex.default,
    _aten.view.dtype,
}
"""Operations that read memory by its layout, or refuse some layouts."""
_GROUP_NORMS: dict[Any, int] = {_aten.native_group_norm.default: 1, _aten.native_group_norm_backward.default: 2}
"""How many of their first arguments have the size of what is normalized; that is the last of these."""
_NORMALIZATIONS = {
    _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default,
    _aten.native_group_norm.default,
    _aten.native_group_norm_backward.default,
    _aten.native_batch_norm.default,
    _aten.native_batch_norm_backward.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
}


def fit_kernels(graph: fx.Graph) -> None:
    """Rewrite a region's graph so that its operations accept the results of the kernels before them."""
    _stack_slices(graph)
    for node in list(graph.nodes):
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
        if node.target in _NORMALIZATIONS:
            _widen(node)
        if node.target in _STRICT:
            _lay_out(node)
        if node.target in _GROUP_NORMS:
            _follow_normalized(node)


def _stack_slices(graph: fx.Graph) -> None:
    """Stack the gradients of all slices of a tensor, which tracing pads with zeros and adds up.

    This happens for `q, k, v = tensor` in the forward, which Dynamo turns into a select of each.
    """
    sums: dict[fx.Node, tuple[tuple[Any, ...], dict[int, fx.Node]]] = {}
    for node in list(graph.nodes):
        if node.target is _aten.select_backward.default:
            gradient, size, dim, index = node.args
            if isinstance(size[dim], int) and isinstance(index, int):
                sums[node] = (*size, dim % len(size), _dtype(gradient)), {index % size[dim]: gradient}
        elif node.target is _aten.add.Tensor and not node.kwargs and all(_is_of_one(arg, sums) for arg in node.args):
            (kind, slices), (other, more) = (sums[arg] for arg in node.args)
            if kind == other and not slices.keys() & more.keys():
                sums[node] = kind, slices | more
    for node, ((*size, dim, _), slices) in sums.items():
        if len(slices) > 1 and len(slices) == size[dim]:
            with graph.inserting_before(node):
                stacked = graph.call_function(_aten.stack.default, ([slices[i] for i in range(size[dim])], dim))
            stacked.meta = dict(node.meta)
            node.replace_all_uses_with(stacked)
    for node in reversed(sums):
        if not node.users:
            graph.erase_node(node)


def _is_of_one(node: Any, sums: Mapping[fx.Node, Any]) -> bool:
    """True for one of `sums` that nothing else reads."""
    return isinstance(node, fx.Node) and node in sums and len(node.users) == 1


def _lay_out(node: fx.Node) -> None:
    """Give `node` its arguments in the recorded layout; those that have it are not copied."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        order = order_of(value) if isinstance(value, Tensor) else None
        if order is not None:
            with node.graph.inserting_before(node):
                node.replace_input_with(source, reordered(source, order, _aten.contiguous.default))


def _follow_normalized(node: fx.Node) -> None:
    """Give a group normalization its arguments in eager mode's layout, whatever was recorded.

    Tracing omits copies that eager mode makes, or adds some, because of the layouts of fakes.
    """
    arguments = [arg for arg in node.args[: _GROUP_NORMS[node.target]] if isinstance(arg, fx.Node)]
    for source in arguments:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(laid_out_as_normalized, (source, arguments[-1]))
        made.meta = dict(source.meta)
        node.replace_input_with(source, made)


def laid_out_as_normalized(tensor: Tensor, normalized: Tensor) -> Tensor:
    """`tensor` as `torch.group_norm` and its derivative take it: on CPUs in the memory format of what is normalized."""
    on_cpu = tensor.device.type == "cpu"
    return tensor.contiguous(memory_format=suggest_memory_format(normalized) if on_cpu else torch.contiguous_format)


def _widen(node: fx.Node) -> None:
    """Give a float32 normalization its weights in float32, too; its results have the recorded dtypes."""
    arguments = [arg for arg in node.args if isinstance(arg, fx.Node)]
    normalized = arguments["backward" in str(node.target)]  # after the gradient of its result
    narrow = [arg for arg in arguments if _dtype(arg) in (torch.bfloat16, torch.float16)]
    if _dtype(normalized) != torch.float32 or not narrow:
        return
    for source in narrow:
        with node.graph.inserting_before(node):
            node.replace_input_with(source, _cast(source, torch.float32))
    for item in list(node.users):
        dtype, users = _dtype(item), list(item.users)
        if dtype in (torch.bfloat16, torch.float16):
            with node.graph.inserting_after(item):
                cast = _cast(item, dtype)
            for user in users:
                user.replace_input_with(item, cast)


def _cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node.graph.call_function(_aten._to_copy.default, (node,), {"dtype": dtype})


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None
