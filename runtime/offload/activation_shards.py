"""Activations that all ranks of a model-parallel mesh have, of which each keeps a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.runtime.groups import Communicator
from zcompile.runtime.offloaded_activations import ActivationStorage


class DeviceStorage(ActivationStorage):
    """Where they are."""

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def get(self, handle: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        return lambda: handle

    def drop(self, handle: torch.Tensor) -> None:
        """Nobody else holds it."""


@dataclass(frozen=True)
class _Shard:
    handle: Any
    numel: int
    """Of the whole."""


class ShardStorage(ActivationStorage):
    """Keeps this rank's shard of what every rank of `group` has, by `inner`; all of it is gathered when it is wanted.

    `get` is collective. With the shard in memory the gather starts there; where it has to be fetched first, when it is
    waited for: that is when all ranks have come so far, in the order of their program. Hazards on CUDA: the shard is a
    copy, made behind what computes the value in the current stream; the gather starts behind that stream, and its
    work holds the shard and what arrives until the stream has waited for it.
    """

    def __init__(self, group: Communicator, inner: ActivationStorage) -> None:
        self.group, self.inner = group, inner

    def put(self, flat: torch.Tensor) -> _Shard:
        each = -(-flat.numel() // self.group.size)
        mine = flat[self.group.rank * each : (self.group.rank + 1) * each]
        shard = flat.new_empty(each)
        shard[: mine.numel()].copy_(mine)
        shard[mine.numel() :].zero_()
        return _Shard(self.inner.put(shard), flat.numel())

    def get(self, handle: _Shard, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        arrive = self.inner.get(handle.handle, dtype, last=last)
        if isinstance(self.inner, DeviceStorage):
            return self._gathered(arrive(), handle.numel)
        return lambda: self._gathered(arrive(), handle.numel)()

    def _gathered(self, shard: torch.Tensor, numel: int) -> Callable[[], torch.Tensor]:
        """Start gathering; what is returned waits for it."""
        whole = shard.new_empty(shard.numel() * self.group.size)
        work = self.group.all_gather(whole, shard)

        def land() -> torch.Tensor:
            work.wait()
            return whole[:numel]

        return land

    def drop(self, handle: _Shard) -> None:
        self.inner.drop(handle.handle)

    def sweep(self) -> None:
        self.inner.sweep()
