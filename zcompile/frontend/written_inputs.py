"""What a forward does that a program cannot: writes to parameters and to `.data`, or arguments that overlap anew."""

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
    """Raise CaptureError for `tensor.data = value` in a graph of Dynamo's, of which AOTAutograd makes no graph.

    `names`: of the graph's inputs. `parameters`: names of those that are parameters.
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
    """Raise CaptureError for a write to a parameter; `place` is where, as ` at FILE:LINE`."""
    fix = "keep what changes in a buffer, or change parameters between steps, as in a method that is called then"
    raise CaptureError(name, f"the model's forward writes to this parameter{place}", fix)


_OPAQUE = frozenset({"invoke_leaf_function", "with_effects"})


def refuse_opaque_calls(graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
    """Raise CaptureError for a call of unknown order and effects, such as `@torch._dynamo.leaf_function` gives.

    `source` gives the path of the module that a node comes from.
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
    """The line of the model's code that a node comes from, as ` at FILE:LINE`; empty where it is not known."""
    line = line_of(node)
    return f" at {line}" if line else ""


# -- arguments that share memory --------------------------------------------------------------------------------------
#
# A graph that writes to one is right for the way in which they did when it was traced. AOTAutograd looks then which of
# them overlap with what is written to, and guards on nothing of it (torch 2.11 to 2.15).


Overlap = tuple[int, int, Any]
"""The places of two arguments, and where in memory the second one lies beside the first."""


def check_overlaps(compiled: Callable[..., Any], names: Mapping[int, str]) -> Callable[..., Any]:
    """`compiled`, which refuses arguments that overlap otherwise than in the first call with one that it writes to.

    `names`: of the arguments, by their places.
    """
    if len(names) < 2:
        return compiled
    written: set[int] | None = None
    traced: set[Overlap] = set()

    def run(*args: Any) -> Any:
        nonlocal written, traced
        given = {place: args[place] for place in names if _has_memory(args[place])} if written != set() else {}
        if written is None:
            before, traced = {place: version_of(one) for place, one in given.items()}, _overlaps(given)
            result = compiled(*args)
            written = {place for place, one in given.items() if version_of(one) != before[place]}
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
    """Those arguments of which one begins before the other's memory ends."""
    found, seen = set[Overlap](), defaultdict[int, list[int]](list)
    for place, one in given.items():
        group = seen[one.untyped_storage().data_ptr()]
        for other in group:
            before = given[other]
            (start, end), (low, high) = _span(one), _span(before)
            if start < high and low < end:
                shapes = before.shape, before.stride(), one.shape, one.stride()
                found.add((other, place, (start - low, *shapes)))
        group.append(place)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """From its first to behind its last element, in bytes of its storage."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + int(steps + 1) * tensor.itemsize
