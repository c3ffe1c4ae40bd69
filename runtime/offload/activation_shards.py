"""Parts: activations that all ranks of a model-parallel mesh have, of which each keeps one part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.runtime.groups import Communicator
from zcompile.runtime.offloaded_activations import Keeper


class MemoryKeeper(Keeper):
    """Where they are."""

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def get(self, held: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        return lambda: held

    def drop(self, held: torch.Tensor) -> None:
        """Nobody else holds it."""


@dataclass(frozen=True)
class _Part:
    held: Any
    numel: int
    """Of the whole."""


class ShardKeeper(Keeper):
    """Keeps this rank's shard of what every rank of `group` has, by `inner`; all of it is gathered when it is wanted.

    `get` is collective. With the part in memory the gather starts there; where it has to be fetched first, when it is
    waited for: that is when all ranks have come so far, in the order of their program. Hazards on CUDA: the part is a
    copy, made behind what computes the value in the current stream; the gather starts behind that stream, and its
    work holds the part and what arrives until the stream has waited for it.
    """

    def __init__(self, group: Communicator, inner: Keeper) -> None:
        self.group, self.inner = group, inner

    def put(self, flat: torch.Tensor) -> _Part:
        each = -(-flat.numel() // self.group.size)
        mine = flat[self.group.rank * each : (self.group.rank + 1) * each]
        part = flat.new_empty(each)
        part[: mine.numel()].copy_(mine)
        part[mine.numel() :].zero_()
        return _Part(self.inner.put(part), flat.numel())

    def get(self, held: _Part, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        arrive = self.inner.get(held.held, dtype, last=last)
        if isinstance(self.inner, MemoryKeeper):
            return self._gathered(arrive(), held.numel)
        return lambda: self._gathered(arrive(), held.numel)()

    def _gathered(self, part: torch.Tensor, numel: int) -> Callable[[], torch.Tensor]:
        """Start gathering; what is returned waits for it."""
        whole = part.new_empty(part.numel() * self.group.size)
        work = self.group.all_gather(whole, part)

        def land() -> torch.Tensor:
            work.wait()
            return whole[:numel]

        return land

    def drop(self, held: _Part) -> None:
        self.inner.drop(held.held)
