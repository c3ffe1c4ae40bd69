"""Offloaded activations: kept outside of the device's memory until the backward.

Meanwhile a token, a tensor with the number of its slot, stands for an activation: autograd saves it like any other. If
it is freed without having been fetched, the graph was dropped, and the slot is free again.
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
    """An activation that is being fetched."""

    land: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        return self.land()


@dataclass(frozen=True)
class _Kept:
    """An offloaded activation: its `handle` in the storage, and its layout."""

    handle: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ActivationStorage(ABC):
    """Stores flat tensors outside of the device's memory."""

    @abstractmethod
    def put(self, flat: torch.Tensor) -> Any:
        """Start moving a 1-D tensor away; returns its handle."""

    @abstractmethod
    def get(self, handle: Any, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        """Start bringing it back; the returned function waits for it. `last`: it is not fetched again."""

    @abstractmethod
    def drop(self, handle: Any) -> None:
        """Free a tensor that will not be fetched."""

    def sweep(self) -> None:  # noqa: B027  (only some have anything to free)
        """Free what was brought back for a backward that has failed."""


class OffloadedActivations:
    """Slots for activations of one model, kept in `storage`."""

    def __init__(self, storage: ActivationStorage) -> None:
        self.storage = storage
        self._slots: dict[int, _Kept] = {}
        self._tokens: dict[int, StorageWeakRef] = {}
        self._number = 0

    def offload(self, value: torch.Tensor) -> torch.Tensor:
        """Start moving `value` away; returns its token.

        Raises:
            StateError: there is no room for it, or an earlier one has failed to arrive.
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
        """Start bringing back the activation of `token`; frees its slot, unless another backward may follow.

        Raises:
            StateError: it was fetched before, or its slot was freed.
        """
        number = int(token)
        if number not in self._slots:
            problem = "stands for an activation that is gone: a saved-tensor hook copied it, or a backward failed"
            raise StateError(
                "offload_activations", problem, "leave it out, or torch.autograd.graph.saved_tensors_hooks"
            )
        kept = self._slots[number]
        arrive = self.storage.get(kept.handle, kept.dtype, last=not keeps_graph())
        if not keeps_graph():
            self._forget(number)
        return Arrival(lambda: arrive().as_strided(kept.shape, kept.stride))

    def sweep(self) -> None:
        """Free the slots of tokens that are gone: their graphs were dropped."""
        for number in [number for number, token in self._tokens.items() if token.expired()]:
            self.storage.drop(self._slots[number].handle)
            self._forget(number)
        self.storage.sweep()

    def _forget(self, number: int) -> None:
        del self._slots[number], self._tokens[number]
