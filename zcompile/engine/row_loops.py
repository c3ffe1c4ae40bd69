"""Loops over rows: a compiled graph that runs for some rows of its arguments after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.placement import Divided, Placement, RowLoop
from zcompile.ir.region import Region
from zcompile.ir.rows import with_rows

Run = Callable[[list[Any]], Sequence[Any]]


def looped(loop: RowLoop, compiled: Callable[[int], Run]) -> Callable[[list[Any]], list[Any]]:
    """A loop as a function of all rows, in a list that it empties; returns its results.

    `compiled`: the graph for a number of rows, as a function of such a list.
    """
    left = loop.rows % loop.size
    run, last = compiled(loop.size), compiled(left) if left else None

    def call(box: list[Any]) -> list[Any]:
        given, results = [*box], [_Result(loop.rows, placement) for placement in loop.gives]
        box.clear()
        for start, count, taken in turns(loop, given):
            rows = [*(run if last is None or count == loop.size else last)(taken)]
            for result in results:
                result.take(rows.pop(0), start, count)  # nothing of a turn is alive in the next one
        return [result.finished() for result in results]

    return call


def turns(loop: RowLoop | None, given: Sequence[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """For each turn of a loop with these arguments: its first row, how many it has, and what it takes.

    Without a loop there is one turn, which takes all.
    """
    if loop is None:
        yield 0, 0, list(given)
        return
    for start in range(0, loop.rows, loop.size):
        count = min(loop.size, loop.rows - start)
        yield start, count, [_rows(*one, loop.rows, start, count) for one in zip(given, loop.takes, strict=True)]


def turn_of(region: Region, rows: int) -> Region:
    """What a loop runs in a turn with this number of rows, as a region that runs once."""
    loop = region.rows
    if loop is None or rows == loop.size:
        return replace(region, rows=None)
    return replace(region, graph=with_rows(region.graph, loop.takes, loop.size, rows), rows=None)


def _rows(value: Any, placement: Placement, rows: int, start: int, count: int) -> Any:
    """What a turn takes of an argument: some rows, contiguous as the graph was compiled for, or all of it."""
    if not isinstance(placement, Divided):
        return value
    some = _divided(value, placement, rows).narrow(placement.dim + 1, start, count)
    return some.flatten(placement.dim, placement.dim + 2).contiguous()


def _divided(value: Tensor, placement: Divided, rows: int) -> Tensor:
    """A view with the groups of all rows, the rows, and what is between them as dimensions."""
    shape = value.shape
    return value.view(*shape[: placement.dim], placement.outer, rows, -1, *shape[placement.dim + 1 :])


class _Result:
    """A result of a loop, to which each turn adds, or puts its rows."""

    def __init__(self, rows: int, placement: Placement) -> None:
        self._rows, self._placement = rows, placement
        self._whole: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def take(self, value: Tensor, start: int, count: int) -> None:
        """Take what a turn has computed."""
        if isinstance(place := self._placement, Divided):
            if self._whole is None:
                shape = [*value.shape]
                shape[place.dim] = shape[place.dim] // count * self._rows
                self._whole = value.new_empty(shape)
            some = _divided(self._whole, place, self._rows).narrow(place.dim + 1, start, count)
            some.copy_(_divided(value, place, count))
        elif self._whole is None:
            self._dtype = value.dtype
            narrow = value.dtype in (torch.float16, torch.bfloat16)
            # Memory of its own: a turn may give what the next one writes to, as a captured graph does.
            self._whole = value.to(torch.float32) if narrow else value.clone()
        else:
            self._whole += value

    def finished(self) -> Tensor:
        """The result, in the dtype of the turns'."""
        assert self._whole is not None, "a loop has turns"
        return self._whole if self._dtype is None else self._whole.to(self._dtype)
