"""Operations of ATen as they are run for all ranks of a step at once: values are lists, with a tensor for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

Lanes = list[Any]
"""A value by rank: `data rank * parts + tensor-parallel rank`."""
_RANDOM = torch.Tag.nondeterministic_seeded
_SAVE, _REPLAY = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state


class Operations:
    """What runs operations, in their order: the n-th one that may draw random numbers has a seed of its own.

    Args:
        lanes: The number of ranks.
        parts: How many of them, beside each other, have a part each of what one would have.
        seed: Of random numbers; those of ranks that are parts of one are the same.
    """

    def __init__(self, lanes: int, parts: int, seed: int) -> None:
        self.lanes, self.parts, self.seed = lanes, parts, seed
        self._draws = 0

    def run(self, node: fx.Node, values: Mapping[fx.Node, Lanes]) -> Lanes:
        """What `node` gives, of the values before it."""
        target = node.target
        if (name := str(target)).startswith("_c10d_functional."):
            return self._collective(name.split(".")[1], values[node.all_input_nodes[0]], node.args)
        self._draws += (drawing := _draws(target, node.args))
        result = []
        for lane in range(self.lanes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: values[given][lane])  # noqa: B023
            if drawing:
                torch.manual_seed(hash((self.seed, lane // self.parts, self._draws)))
            result.append(_run(target, args, kwargs))
        return result

    def _collective(self, name: str, given: Lanes, args: Sequence[Any]) -> Lanes:
        """The collectives of tensor parallelism, among the parts of each data rank."""
        if name == "wait_tensor":
            return given
        groups = range(0, self.lanes, self.parts)
        whole = [self._whole(name, given[start : start + self.parts], args) for start in groups]
        return [value.clone() for value in whole for _ in range(self.parts)]

    def _whole(self, name: str, values: Lanes, args: Sequence[Any]) -> torch.Tensor:
        if name == "all_reduce":
            return _REDUCTIONS[args[1]](torch.stack(values))
        if name == "all_gather_into_tensor":
            return torch.cat(values)
        raise NotImplementedError(name)


_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


def _draws(target: Any, args: Sequence[Any]) -> bool:
    """True for an operation that may draw random numbers; what draws again what was drawn does not."""
    return _RANDOM in getattr(args[0] if target is _SAVE else target, "tags", ())


def _run(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if target is _SAVE:
        called, *given = args
        return torch.get_rng_state(), called(*given, **kwargs)
    if target is _REPLAY:
        state, called, *given = args
        torch.set_rng_state(state)
        return called(*given, **kwargs)
    return target(*args, **kwargs)


def evaluate(
    graph: fx.Graph, given: Sequence[Lanes], modules: Mapping[str, Any], operations: Operations
) -> list[Lanes | Any]:
    """The results of a graph of operations, of the values of its placeholders."""
    values: dict[fx.Node, Lanes] = {}
    inputs = iter(given)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = [modules[str(node.target)]] * operations.lanes
        elif node.op == "call_function":
            values[node] = operations.run(node, values)
    (results,) = graph.output_node().args
    every = results if isinstance(results, (tuple, list)) else (results,)
    return [values[result] if isinstance(result, fx.Node) else result for result in every]
