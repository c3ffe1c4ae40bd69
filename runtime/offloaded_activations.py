"""Offloaded activations: where they wait for the backward if the device has no memory for them.

What stands for an activation meanwhile is a tensor of one number, that of its slot: autograd saves it like any other.
When it is gone without having been fetched, the graph was dropped, and the slot is free again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile.errors import StateError
from zcompile.torch_internals.autograd import keeps_graph


@dataclass(frozen=True)
class Arrival:
    """An activation on its way back."""

    land: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        return self.land()


@dataclass(frozen=True)
class _Kept:
    """What is kept of one activation: its `handle` in the storage, for a tensor laid out like this."""

    handle: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ActivationStorage(ABC):
    """Keeps flat tensors elsewhere."""

    @abstractmethod
    def put(self, flat: torch.Tensor) -> Any:
        """Start moving a 1-D tensor away; gives what finds it again."""

    @abstractmethod
    def get(self, handle: Any, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        """Start bringing it back; what is returned waits for it. `last`: nobody will ask again."""

    @abstractmethod
    def drop(self, handle: Any) -> None:
        """Nobody will ask for it."""

    def sweep(self) -> None:  # noqa: B027  (only some have anything to let go of)
        """Let go of what was brought back for nobody: the backward that asked for it has failed."""


class OffloadedActivations:
    """Slots for activations of one model, which `storage` keeps."""

    def __init__(self, storage: ActivationStorage) -> None:
        self.storage = storage
        self._slots: dict[int, _Kept] = {}
        self._tokens: dict[int, StorageWeakRef] = {}
        self._number = 0

    def offload(self, value: torch.Tensor) -> torch.Tensor:
        """Start moving `value` away; gives what stands for it.

        Raises:
            StateError: there is no room for it, or what was moved before has not arrived.
        """
        self.sweep()
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        handle = self.storage.put(value.as_strided((last + 1,), (1,)))
        self._number += 1
        self._slots[self._number] = _Kept(handle, value.shape, value.stride(), value.dtype)
        token = torch.tensor(self._number, device="cpu")
        self._tokens[self._number] = StorageWeakRef(token.untyped_storage())
        return token

    def fetch(self, token: torch.Tensor) -> Arrival:
        """Start bringing back what `token` stands for. Its slot is free then, unless another backward is to come.

        Raises:
            StateError: it has been brought back before, or its slot was given up.
        """
        number = int(token)
        if number not in self._slots:
            problem = "stands for an activation that is gone: hooks on saved tensors copy, or a backward failed before"
            raise StateError(
                "offload_activations", problem, "leave it out, or torch.autograd.graph.saved_tensors_hooks"
            )
        kept = self._slots[number]
        arrive = self.storage.get(kept.handle, kept.dtype, last=not keeps_graph())
        if not keeps_graph():
            self._forget(number)
        return Arrival(lambda: arrive().as_strided(kept.shape, kept.stride))

    def sweep(self) -> None:
        """Give up what stands for nothing any more: its graph was dropped."""
        for number in [number for number, token in self._tokens.items() if token.expired()]:
            self.storage.drop(self._slots[number].handle)
            self._forget(number)
        self.storage.sweep()

    def _forget(self, number: int) -> None:
        del self._slots[number], self._tokens[number]
