"""The memory that a rank's shards are in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from zcompile.runtime.async_work import AsyncWork


class ShardMemory:
    """Memory of the model's device, from which collectives send. Other memory is a class of its own.

    Args:
        device: Where shards are, and gradients and optimizer state beside them.
    """

    is_away = False
    """True if collectives cannot send from it: a gather copies the shard to the device first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, unit: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of zeros for shards of `unit`."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `value`, which is not sharded."""
        return value.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def before(self, unit: str) -> None:
        """A gather of `unit` is about to start."""

    def sending(self) -> contextlib.AbstractContextManager[object]:
        """What a gather copies and launches for a message runs within this."""
        return contextlib.nullcontext()

    def copied(self, arrived: torch.Tensor) -> AsyncWork | None:
        """The work of a message that was only copied, to `arrived`; None where the current stream copied it."""
        return None

    def home(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` where its shard is. The host may read it once `landed` has returned."""
        return gradient

    def landed(self) -> None:
        """Return when gradients that went home are there."""

    def settle(self) -> None:
        """Return when no copy is on its way: the host may read gradients and write to shards."""


class Reserved(ShardMemory):
    """Memory that was set aside before any shard was made, so that what can fail has failed by then.

    Args:
        device: Where it is.
        room: Bytes of each unit, uint8, as many as `runtime.shards.shard_bytes` says, zeros.
    """

    def __init__(self, device: torch.device, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(device)
        self._room = room
        self._taken = dict.fromkeys(room, 0)

    def zeros(self, unit: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not numel:
            return torch.zeros(0, dtype=dtype, device=self.device)
        start = self._taken[unit]
        self._taken[unit] = aligned_end(start, numel * dtype.itemsize)
        return self._room[unit][start : start + numel * dtype.itemsize].view(dtype)


def aligned_end(offset: int, nbytes: int) -> int:
    """Where the next tensor begins behind one of `nbytes` at `offset`."""
    return offset + -(-nbytes // 64) * 64
