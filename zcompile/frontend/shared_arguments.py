"""Arguments that share memory: a graph that writes to one is right for the way in which they did when it was traced.

AOTAutograd looks then which of them overlap with what is written to, and guards on nothing of it (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zcompile.errors import CaptureError
from zcompile.torch_internals.autograd import version_of

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
