"""A region: a run of compute between communications, as one ATen graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import op_of
from zcompile.ir.ops import Item, is_part
from zcompile.torch_internals.pytree import tree_map_only


@dataclass(frozen=True)
class Region:
    """A run of compute between communications: an ATen graph compiled as one.

    `takes` says for each placeholder of `graph` where it comes from: (argument of the call, item of that argument), the
    item None when the argument itself is taken. Arguments that are units' full parameters come first.
    Equal regions of a program are one Region, called several times.
    """

    name: str
    graph: fx.Graph
    takes: tuple[tuple[int, int | None], ...]
    modules: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    """Graphs that higher-order operations in `graph` call, by attribute name."""
    fuses: bool = True
    """False if operations run one by one, each writing its result to memory."""
    fixed: frozenset[int] | None = None
    """Of a region that is captured as a CUDA graph: the numbers of the placeholders that lie at the same place in each
    step. None of one that is not."""

    @property
    def outputs(self) -> tuple[Any, ...]:
        (result,) = self.graph.output_node().args
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def printed_nodes(self) -> Iterator[fx.Node]:
        """The values that its text names, in the order of the text: the same in a region that was parsed from it."""
        for node in self.graph.nodes:
            if node.op == "placeholder" or (node.op == "call_function" and not is_part(node)):
                yield node
                yield from sorted(filter(is_part, node.users), key=lambda item: op_of(item, Item).index)

    def key(self) -> str:
        """Equal for regions that compile to the same code: operations, arguments, types and strides, names left out."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        lines = [str(self.takes)]
        for node in self.graph.nodes:
            args, kwargs = tree_map_only(fx.Node, lambda source: _Number(number[source]), (node.args, node.kwargs))
            target = graph_text(self.modules[str(node.target)]) if node.op == "get_attr" else node.target
            lines.append(f"{node.op} {'' if node.op == 'placeholder' else target} {args} {kwargs} {_memory(node)}")
        return "\n".join(lines)


def graph_text(module: fx.GraphModule) -> str:
    """All that a graph computes which a higher-order operation calls, with the graphs that it calls itself."""
    called = ((name, child) for name, child in module.named_children() if isinstance(child, fx.GraphModule))
    # Of the graph, not of `module.code`, which is what the graph was when it was compiled last.
    code = module.graph.python_code("self").src
    return "\n".join([code, *(f"{name}: {graph_text(child)}" for name, child in called)])


@dataclass(frozen=True, slots=True)
class _Number:
    """A value's number, where its name would stand."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


def _memory(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()} {value.device}"
