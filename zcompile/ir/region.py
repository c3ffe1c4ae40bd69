"""A region: a run of compute between communications, as one ATen graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Item, is_part
from zcompile.ir.placement import RowLoop
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.pytree import tree_map_only


@dataclass(frozen=True)
class Region:
    """A run of compute between communications: an ATen graph compiled as one.

    `takes` gives the source of each placeholder of `graph`: (argument of the call, item of that argument), with item
    None for the argument itself. Arguments that are full parameters of units come first.
    Equal regions of a program are a single Region, called several times.
    """

    name: str
    graph: fx.Graph
    takes: tuple[tuple[int, int | None], ...]
    modules: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    """Graphs that higher-order operations in `graph` call, by attribute name."""
    fuses: bool = True
    """False if operations run one by one, each writing its result to memory."""
    fixed: frozenset[int] | None = None
    """For a region captured as a CUDA graph, the numbers of the placeholders with the same address in each step; else
    None."""
    rows: RowLoop | None = None
    """The loop that runs the graph, with some rows of its arguments in each turn; None if it runs once."""

    @property
    def outputs(self) -> tuple[Any, ...]:
        (result,) = self.graph.output_node().args
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    @property
    def turns(self) -> float:
        """How often a loop runs the graph; the last turn counts by its rows. 1 without a loop."""
        return 1.0 if self.rows is None else self.rows.rows / self.rows.size

    def result_type(self, index: int) -> TensorType | None:
        """Return the type of a result, for all rows if a loop runs the graph."""
        output = self.outputs[index]
        type_ = data(output).type if isinstance(output, fx.Node) else None
        return type_ if self.rows is None else self.rows.whole(type_, self.rows.gives[index])

    def printed_nodes(self) -> Iterator[fx.Node]:
        """Yield the values named in the region's text, in its order, which parsing preserves."""
        for node in self.graph.nodes:
            if node.op == "placeholder" or (node.op == "call_function" and not is_part(node)):
                yield node
                yield from sorted(filter(is_part, node.users), key=lambda item: op_of(item, Item).index)

    def key(self) -> str:
        """Return a key that is equal for regions that compile to the same code: all but the names of values."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        lines = [str(self.takes), *([str(self.rows)] if self.rows else [])]
        for node in self.graph.nodes:
            args, kwargs = tree_map_only(fx.Node, lambda source: _Number(number[source]), (node.args, node.kwargs))
            target = graph_text(self.modules[str(node.target)]) if node.op == "get_attr" else node.target
            lines.append(f"{node.op} {'' if node.op == 'placeholder' else target} {args} {kwargs} {_memory(node)}")
        return "\n".join(lines)


def region_name(number: int, loop: RowLoop | None) -> str:
    """Return the name of a region, which says if a loop over rows runs it."""
    return f"region_{number}" if loop is None else f"region_{number}_in_chunks"


def graph_text(module: fx.GraphModule) -> str:
    """Return the code of a graph that a higher-order operation calls, and of the graphs that it calls in turn."""
    called = ((name, child) for name, child in module.named_children() if isinstance(child, fx.GraphModule))
    # Not `module.code`, which is stale if the graph was edited after its last `recompile()`.
    code = module.graph.python_code("self").src
    return "\n".join([code, *(f"{name}: {graph_text(child)}" for name, child in called)])


@dataclass(frozen=True, slots=True)
class _Number:
    """A value's number, printed in place of its name."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


def _memory(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()} {value.device}"
