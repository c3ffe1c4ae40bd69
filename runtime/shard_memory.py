"""The memory that a rank's shards are in."""

from __future__ import annotations

import contextlib

import torch

from zcompile.runtime.flights import Flight


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

    def before(self, unit: str) -> None:
        """A gather of `unit` is about to start."""

    def sending(self) -> contextlib.AbstractContextManager[object]:
        """What a gather copies and launches for a message runs within this."""
        return contextlib.nullcontext()

    def copied(self, arrived: torch.Tensor) -> Flight | None:
        """The flight of a message that was only copied, to `arrived`; None where the current stream copied it."""
        return None

    def home(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` where its shard is. The host may read it once `settle` has returned."""
        return gradient

    def settle(self) -> None:
        """Return when no copy is on its way: the host may read gradients and write to shards."""
