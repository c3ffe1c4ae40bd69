"""Compile regions with dynamic sizes for the sizes of one call: the recorded text lacks the constraints on sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zcompile.engine.region_cache import RegionCache, values_taken
from zcompile.ir.region import Region
from zcompile.torch_internals.sizes import FakeTensorMode


def for_any_size(region: Region, cache: RegionCache) -> Callable[[list[Any]], Any]:
    """Make a function that compiles `region` for the sizes of its arguments in each call, and runs it."""

    def call(box: list[Any]) -> Any:
        made = _specialised(region, values_taken(region)([*box]))
        numbers = [one for one in made.outputs if not isinstance(one, fx.Node)]
        if not numbers:
            return cache.get(made)(box)
        results = iter(_listed(cache.get(_of_tensors(made))(box)))
        return [next(results) if isinstance(one, fx.Node) else one for one in made.outputs]

    return call


def _specialised(region: Region, values: Sequence[Any]) -> Region:
    """`region` specialised to the shapes and strides of `values`: sizes become numbers, values are traced again."""
    graph = fx.Graph()
    result = graph.graph_copy(region.graph, {})
    graph.output(result).meta = dict(region.graph.output_node().meta)
    placeholders = graph.find_nodes(op="placeholder")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
            if isinstance(one, torch.Tensor)
            else one
            for one in values
        ]
        _Traced(fx.GraphModule(torch.nn.Module(), graph)).run(*fakes)
    for node in list(graph.nodes):
        if node.op != "output" and not isinstance(node.meta["val"], (torch.Tensor, list, tuple)):
            _put(node, node.meta["val"])
    kept = [take for take, node in zip(region.takes, placeholders, strict=True) if _is_tensor(node)]
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users and not isinstance(node.meta["val"], (torch.Tensor, list, tuple)):
            graph.erase_node(node)
    return replace(region, graph=graph, takes=tuple(kept))


def _of_tensors(region: Region) -> Region:
    """`region` without results that have become numbers."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(region.graph, copied)
    values = tuple(copied[one] for one in region.outputs if isinstance(one, fx.Node))
    graph.output(values if len(values) > 1 else values[0]).meta = dict(region.graph.output_node().meta)
    return replace(region, graph=graph)


def _listed(results: Any) -> list[Any]:
    return results if isinstance(results, list) else [results]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _put(node: fx.Node, value: Any) -> None:
    """Replace a size by a number in all its users."""
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda one: value if one is node else one)


class _Traced(fx.Interpreter):
    """Stores the value of each node in `node.meta["val"]`."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = result
        return result
