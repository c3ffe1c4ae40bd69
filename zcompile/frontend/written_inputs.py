"""Refuses forwards that programs cannot represent: writes to parameters and `.data`, newly overlapping arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from zcompile.errors import CaptureError
from zcompile.ir.operation import line_of
from zcompile.torch_internals.autograd import version_of
from zcompile.torch_internals.operators import HigherOrderOperator


def refuse_new_data(graph: fx.Graph, names: Mapping[fx.Node, str], parameters: Mapping[fx.Node, str]) -> None:
    """Raise CaptureError for `tensor.data = value` in a Dynamo graph, which AOTAutograd cannot trace.

    `names`: the names of the graph's inputs. `parameters`: the names of inputs that are parameters.
    """
    for node in graph.nodes:
        target = node.args[0] if node.args and node.target in (torch.Tensor.set_, "set_") else None
        if not isinstance(target, fx.Node):
            continue
        if target in parameters:
            refuse_written_parameter(parameters[target], where(node))
        if target in names:
            problem = f"the model's forward assigns to its .data{where(node)}, which no program can"
            raise CaptureError(names[target], problem, "write to it in place: tensor.copy_(value)")


def refuse_written_parameter(name: str, place: str) -> NoReturn:
    """Raise CaptureError for a write to a parameter; `place`: ` at FILE:LINE`, or ""."""
    fix = "keep what changes in a buffer, or change parameters between steps, as in a method that is called then"
    raise CaptureError(name, f"the model's forward writes to this parameter{place}", fix)


_OPAQUE = frozenset({"invoke_leaf_function", "with_effects"})


def refuse_opaque_calls(graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
    """Raise CaptureError for a call with unknown effects and order, such as of a `@torch._dynamo.leaf_function`.

    `source` returns the path of the module that a node comes from.
    """
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() in _OPAQUE:
            called = str(node.args[1]) if node.target.name() == "with_effects" else node.target.name()
            problem = f"calls {called}{where(node)}, whose effects no program can keep in order"
            fix = (
                "leave it out or unmarked (torch._dynamo.leaf_function), or call torch._dynamo.graph_break() before "
                "it, so that this module runs as plain Python"
            )
            raise CaptureError(source(node) or "the model", problem, fix)


def where(node: fx.Node) -> str:
    """Return the line of the model's code that a node comes from, as ` at FILE:LINE`; "" if unknown."""
    line = line_of(node)
    return f" at {line}" if line else ""


# -- arguments that share memory --------------------------------------------------------------------------------------
#
# A graph that writes to an argument is correct only for arguments that overlap as they did when it was traced.
# AOTAutograd looks at these overlaps while it traces, but does not guard on them (torch 2.11 to 2.15).


Overlap = tuple[int, int, Any]
"""The positions of two arguments, and the memory layout of the second relative to the first."""


def check_overlaps(compiled: Callable[..., Any], names: Mapping[int, str]) -> Callable[..., Any]:
    """Return `compiled`, refusing arguments whose overlap with a written argument differs from that in the first call.

    `names`: the names of the arguments, by position.
    """
    if len(names) < 2:
        return compiled
    written: set[int] | None = None
    traced: set[Overlap] = set()

    def run(*args: Any) -> Any:
        nonlocal written, traced
        given = {index: args[index] for index in names if _has_memory(args[index])} if written != set() else {}
        if written is None:
            before, traced = {index: version_of(value) for index, value in given.items()}, _overlaps(given)
            result = compiled(*args)
            written = {index for index, value in given.items() if version_of(value) != before[index]}
            return result
        for first, second, _ in _overlaps(given) ^ traced:
            if first in written or second in written:
                problem = f"overlaps with {names[first]} otherwise than in the first call, and the forward writes there"
                fix = "give a .clone() of one of them, or call torch.compiler.reset() in between"
                raise CaptureError(names[second], problem, fix)
        return compiled(*args)

    return run


def _has_memory(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor or value.layout is not torch.strided:
        return False
    return bool(value.numel()) and not value.is_inference()


def _overlaps(given: Mapping[int, torch.Tensor]) -> set[Overlap]:
    """Return the pairs of arguments whose byte ranges in the same storage overlap."""
    overlaps, seen = set[Overlap](), defaultdict[int, list[int]](list)
    for index, value in given.items():
        group = seen[value.untyped_storage().data_ptr()]
        for other in group:
            before = given[other]
            (start, end), (low, high) = _span(value), _span(before)
            if start < high and low < end:
                shapes = before.shape, before.stride(), value.shape, value.stride()
                overlaps.add((other, index, (start - low, *shapes)))
        group.append(index)
    return overlaps


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range [start, stop) of a tensor in its storage."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + int(steps + 1) * tensor.itemsize
