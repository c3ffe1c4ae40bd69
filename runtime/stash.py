"""Stashes: where activations wait for the backward if the device has no memory for them.

What stands for an activation meanwhile is a tensor of one number, that of its slot: autograd saves it like any other.
When it is gone without having been fetched, the graph was dropped, and the slot is free again.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zcompile._torch import keeps_graph
from zcompile.errors import StateError
from zcompile.runtime.files import Room, nameless, set_aside

PENDING = 2
"""Activations that are on their way to the disk at once: more would fill the memory that they are to leave."""


@dataclass(frozen=True)
class Arrival:
    """An activation on its way back."""

    land: Callable[[], torch.Tensor]

    def wait(self) -> torch.Tensor:
        return self.land()


@dataclass(frozen=True)
class _Kept:
    """What is kept of one activation: `held` by its kind of stash, for a tensor laid out like this."""

    held: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def laid_out(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.stride)


class Stash(ABC):
    """Slots for activations of one model."""

    def __init__(self) -> None:
        self._slots: dict[int, _Kept] = {}
        self._tokens: dict[int, StorageWeakRef] = {}
        self._number = 0

    def stash(self, value: torch.Tensor) -> torch.Tensor:
        """Start moving `value` away; gives what stands for it.

        Raises:
            StateError: there is no room for it, or what was moved before has not arrived.
        """
        self._sweep()
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        held = self._put(value.as_strided((last + 1,), (1,)))
        self._number += 1
        self._slots[self._number] = _Kept(held, value.shape, value.stride(), value.dtype)
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
            found = "stands for an activation that is gone: hooks on saved tensors copy, or a backward failed before"
            raise StateError("offload_activations", found, "leave it out, or torch.autograd.graph.saved_tensors_hooks")
        kept = self._slots[number]
        arrive = self._get(kept.held, kept.dtype, last=not keeps_graph())
        if not keeps_graph():
            self._forget(number)
        return Arrival(lambda: kept.laid_out(arrive()))

    def _sweep(self) -> None:
        for number in [number for number, token in self._tokens.items() if token.expired()]:
            self._drop(self._slots[number].held)
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._slots[number], self._tokens[number]

    @abstractmethod
    def _put(self, flat: torch.Tensor) -> Any:
        """Start moving a 1-D tensor away; gives what finds it again."""

    @abstractmethod
    def _get(self, held: Any, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        """Start bringing it back; what is returned waits for it. `last`: nobody will ask again."""

    @abstractmethod
    def _drop(self, held: Any) -> None:
        """Nobody will ask for it."""


class HostStash(Stash):
    """Pinned memory of the host, for a model on a GPU: copies run on a stream of their own.

    Hazards: the value is complete when the current stream gets to the stash, which the copying stream waits for; it
    must not be freed for other work before it is read, which `record_stream` sees to. The way back is behind the way
    out in the same stream. What comes back is allocated on the copying stream, and used on the one that waits. The host
    waits for the copy before the last, so that what has been freed by name is not alive in great numbers.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)
        self._leaving: deque[torch.cuda.Event] = deque()

    def _put(self, flat: torch.Tensor) -> torch.Tensor:
        if len(self._leaving) >= PENDING:
            self._leaving.popleft().synchronize()
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
            self._leaving.append(self._stream.record_event())
        flat.record_stream(self._stream)
        return host

    def _get(self, held: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        with torch.cuda.stream(self._stream):
            back = held.to(self._stream.device, non_blocking=True)
            arrived = self._stream.record_event()

        def land() -> torch.Tensor:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(arrived)
            back.record_stream(current)
            return back

        return land

    def _drop(self, held: torch.Tensor) -> None:
        """Torch keeps pinned memory until the copies from and to it have ended."""


@dataclass(frozen=True)
class _Extent:
    """Bytes of the file, and the work that writes them."""

    offset: int
    nbytes: int
    written: Future[None]


class _File:
    """What the threads work on. They must not hold the stash: its end waits for them."""

    def __init__(self, folder: Path) -> None:
        self.number = nameless(folder)
        self.room = Room()
        self.leaving: dict[int, torch.Tensor] = {}
        """What has not been written yet, by its offset."""
        self.seconds = 0.0

    def write(self, offset: int) -> None:
        started, flat = time.perf_counter(), self.leaving[offset]
        left, at = _bytes_of(flat), offset
        while left:
            done = os.pwrite(self.number, left, at)
            left, at = left[done:], at + done
        self.leaving.pop(offset, None)
        self.seconds += time.perf_counter() - started

    def read(self, extent: _Extent, back: torch.Tensor) -> None:
        extent.written.result()
        started, left, at = time.perf_counter(), _bytes_of(back), extent.offset
        while left:
            done = os.preadv(self.number, [left], at)
            left, at = left[done:], at + done
        self.seconds += time.perf_counter() - started

    def drop(self, extent: _Extent) -> None:
        """Its bytes are free, once nothing writes them."""
        if extent.written.cancel():
            self.leaving.pop(extent.offset, None)
        if extent.written.done():
            self.room.give(extent.offset, extent.nbytes)
        else:
            extent.written.add_done_callback(lambda _: self.room.give(extent.offset, extent.nbytes))


class DiskStash(Stash):
    """A nameless file in `folder`, written and read by threads, for a model on the CPU.

    The disk has set aside what is written before it is: a full disk is an error of the forward, when nothing has been
    updated. What has not been written yet when it is wanted again is not written.

    Raises:
        StateError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file = _File(folder)
        self._set_aside = 0
        self._waiting: deque[_Extent] = deque()
        self._writer, self._reader = (ThreadPoolExecutor(1, f"zcompile {name}") for name in ("stash", "fetch"))
        weakref.finalize(self, _close, self._writer, self._reader, self._file.number)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._set_aside

    @property
    def seconds(self) -> float:
        """Of writing and of reading, on threads of their own."""
        return self._file.seconds

    def _put(self, flat: torch.Tensor) -> _Extent:
        while len(self._waiting) >= PENDING:
            self._ended(self._waiting.popleft())
        offset = self._file.room.take(flat.nbytes)
        try:
            if (more := self._file.room.end - self._set_aside) > 0:
                set_aside(self.folder, self._file.number, self._set_aside, more, "activations")
                self._set_aside += more
        except StateError:
            self._file.room.give(offset, flat.nbytes)
            raise
        self._file.leaving[offset] = flat
        extent = _Extent(offset, flat.nbytes, self._writer.submit(self._file.write, offset))
        self._waiting.append(extent)
        return extent

    def _get(self, held: _Extent, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        if held.written.cancel():
            flat = self._file.leaving[held.offset]
            if last:
                self._file.drop(held)
            return lambda: flat
        back = torch.empty(held.nbytes, dtype=torch.uint8, device="cpu")
        reading = self._reader.submit(self._file.read, held, back)
        if last:
            file = self._file
            reading.add_done_callback(lambda _: file.drop(held))

        def land() -> torch.Tensor:
            self._checked(reading)
            return back.view(dtype)

        return land

    def _ended(self, extent: _Extent) -> None:
        if not extent.written.cancelled():
            self._checked(extent.written)

    def _checked(self, work: Future[None]) -> None:
        try:
            work.result()
        except OSError as error:
            fix = "look at the disk; parameters are those of the step before, unless a train step has begun to update"
            raise StateError(str(self.folder), f"failed to keep activations: {error.strerror}", fix) from error

    def _drop(self, held: _Extent) -> None:
        self._file.drop(held)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which the caller keeps."""
    return flat.view(torch.uint8).numpy().data


def _close(writer: ThreadPoolExecutor, reader: ThreadPoolExecutor, file: int) -> None:
    for thread in (writer, reader):
        thread.shutdown()
    os.close(file)
