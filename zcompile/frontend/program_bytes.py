"""Programs as bytes, for the cache of a machine: what `pickle` knows, and graphs, values and operators beside that.

Sizes that vary are expressions of those of the inputs, which the tracer gives the same names in every run.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.ir.ops import FUNCTIONS, region
from zcompile.torch_internals.operators import HigherOrderOperator, OpOverload, operator_named
from zcompile.torch_internals.pytree import tree_map_only
from zcompile.torch_internals.sizes import (
    FakeTensor,
    FakeTensorMode,
    expression_of,
    is_symbolic,
    no_new_guards,
    size_of_expression,
)

_STAND_INS = {**FUNCTIONS, "region": region}
_NAMES = {id(stand_in): name for name, stand_in in _STAND_INS.items()}
_KEPT = ("val", "zcompile", "partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook", "seq_nr")
"""What passes, torch's partitioner among them, read of a node; where it came from is in its data."""


class NotStorableError(Exception):
    """What a program holds cannot be kept beyond this process."""


def dumped(value: Any) -> bytes:
    """Bytes of a value made of programs, graphs, and what can be pickled.

    Raises:
        NotStorableError: something in it cannot be kept.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except NotStorableError:
        raise
    except Exception as error:  # as the parts of it have their own
        raise NotStorableError(str(error)) from error
    return stream.getvalue()


def loaded(content: bytes, mode: FakeTensorMode) -> Any:
    """The value that has these bytes, traced values made in `mode`.

    What the bytes say is executed: they must come from a folder that only this user can write.

    Raises:
        ValueError: it has sizes that are not among those that vary in this run of the tracer.
    """
    with no_new_guards(mode):
        return _Unpickler(content, mode).load()


@dataclass(frozen=True, slots=True)
class _Number:
    """A node's number in its graph, in its place."""

    number: int


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case FakeTensor():
                return _fake, _described(obj)
            case OpOverload() | HigherOrderOperator():
                return operator_named, (obj.name(),)
            case fx.Graph():
                return _graph_of, (_nodes(obj),)
            case fx.GraphModule():
                return _module_of, (obj.graph, _children(obj))
            case torch.SymInt():
                return size_of_expression, (expression_of(obj),)
            case fx.Node():
                raise NotStorableError(f"{obj} stands outside of its graph")
        if callable(obj) and (name := _NAMES.get(id(obj))):
            return _stand_in, (name,)
        if is_symbolic(obj):
            raise NotStorableError(f"{obj} is no size")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, mode: FakeTensorMode) -> None:
        super().__init__(io.BytesIO(content))
        self._mode = mode

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return functools.partial(found, mode=self._mode) if found in (_fake, size_of_expression) else found


def _stand_in(name: str) -> Any:
    return _STAND_INS[name]


def _described(value: FakeTensor) -> tuple[Any, ...]:
    shape, stride, offset = tuple(value.shape), tuple(value.stride()), value.storage_offset()
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise NotStorableError(f"a value of layout {value.layout}")
    return shape, stride, offset, value.dtype, value.device, value.requires_grad


def _fake(
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    *,
    mode: FakeTensorMode,
) -> torch.Tensor:
    with mode, torch.no_grad():
        if is_symbolic(offset) or offset:
            extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            made = torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride, offset)
        else:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return made.requires_grad_(requires_grad) if requires_grad else made


def _nodes(graph: fx.Graph) -> list[tuple[Any, ...]]:
    numbers = {node: _Number(index) for index, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        args, kwargs = tree_map_only(fx.Node, numbers.__getitem__, (node.args, node.kwargs))
        meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        rows.append((node.op, node.target, args, kwargs, node.name, meta))
    return rows


def _graph_of(rows: Sequence[tuple[Any, ...]]) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs, name, meta in rows:
        given, named = tree_map_only(_Number, lambda one: nodes[one.number], (args, kwargs))
        node = graph.create_node(op, target, given, named, name=name)
        node.meta = meta
        nodes.append(node)
    return graph


def _children(module: fx.GraphModule) -> Mapping[str, fx.GraphModule]:
    children = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    held = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if held or len(children) < len(list(module.children())):
        raise NotStorableError(f"a graph holds {held or 'modules'}")
    return children


def _module_of(graph: fx.Graph, children: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return fx.GraphModule(root, graph)
