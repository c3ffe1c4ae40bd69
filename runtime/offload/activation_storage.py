"""Where activations are kept: in the memory of the host, in a file on a disk, or in shards on the ranks of a group."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zcompile.errors import StateError
from zcompile.runtime.device import current_stream, new_stream, on_stream
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.unnamed_files import Room, close_file, nameless, set_aside
from zcompile.runtime.offloaded_activations import ActivationStorage

PENDING = 2
"""Activations that are on their way to the disk at once: more would fill the memory that they are to leave."""


@dataclass(frozen=True)
class _Copy:
    """A copy on its way, and the device's tensor that it reads or writes."""

    tensor: torch.Tensor
    ended: torch.Event
    stream: torch.Stream
    """That the tensor's memory goes back to, and so the one that has to wait."""

    def land(self) -> None:
        self.stream.wait_event(self.ended)


class HostStorage(ActivationStorage):
    """Pinned memory of the host, for a model on a GPU: copies run on a stream of their own, and the host never waits.

    Hazards: the value is complete when the current stream gets to the offload, which the copying stream waits for. It
    is held until the current stream waits for the copy before the last, so its memory is free for later work of that
    stream only, and no more than a few of them are alive. What comes back is allocated on the current stream, for which
    the copying stream waits before it writes; who uses it waits for the copy. The way back is behind the way out in the
    same stream. An arrival that nobody waits for, because the backward failed, is held until the next forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._leaving: deque[_Copy] = deque()
        self._coming: dict[int, _Copy] = {}

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        if len(self._leaving) >= PENDING:
            self._leaving.popleft().land()
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        self._leaving.append(self._copied(host, flat, flat))
        return host

    def get(self, handle: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        back = torch.empty(handle.shape, dtype=handle.dtype, device=self._stream.device)
        coming = self._coming[id(back)] = self._copied(back, handle, back)
        behind = list(self._leaving)

        def land() -> torch.Tensor:
            current_stream(self._stream.device).wait_event(coming.ended)
            for left in behind:  # before it in the same stream
                if self._leaving and self._leaving[0] is left:
                    self._leaving.popleft().land()
            self._coming.pop(id(back), None)
            return coming.tensor

        return land

    def _copied(self, to: torch.Tensor, source: torch.Tensor, held: torch.Tensor) -> _Copy:
        current = current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with on_stream(self._stream):
            to.copy_(source, non_blocking=True)
        return _Copy(held, self._stream.record_event(), current)

    def sweep(self) -> None:
        while self._coming:
            self._coming.popitem()[1].land()

    def drop(self, handle: torch.Tensor) -> None:
        """Torch keeps pinned memory until the copies from and to it have ended."""


@dataclass(frozen=True)
class _Extent:
    """Bytes of the file, and the work that writes them."""

    offset: int
    nbytes: int
    written: Future[None]


class _File:
    """What the threads work on. They must not hold the storage: its end waits for them."""

    def __init__(self, folder: Path) -> None:
        self.number = nameless(folder)
        self.room = Room()
        self.leaving: dict[int, torch.Tensor] = {}
        """What has not been written yet, by its offset."""
        self.seconds = 0.0

    def write(self, offset: int) -> None:
        self._move(self.leaving[offset], offset, lambda left, at: os.pwrite(self.number, left, at))
        self.leaving.pop(offset, None)

    def read(self, extent: _Extent, back: torch.Tensor) -> None:
        extent.written.result()
        self._move(back, extent.offset, lambda left, at: os.preadv(self.number, [left], at))

    def _move(self, flat: torch.Tensor, at: int, move: Callable[[memoryview, int], int]) -> None:
        """Write or read the memory of a contiguous tensor on the CPU, which the caller keeps."""
        started, left = time.perf_counter(), flat.view(torch.uint8).numpy().data
        while left:
            done = move(left, at)
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


class DiskStorage(ActivationStorage):
    """A nameless file in `folder`, written and read by threads, for a model on the CPU.

    The disk has set aside what is written before it is: a full disk is an error of the forward, when nothing has been
    updated. What has not been written yet when it is wanted again is not written.

    Raises:
        StateError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = _File(folder)
        self._set_aside = 0
        self._waiting: deque[_Extent] = deque()
        self._writer, self._reader = (ThreadPoolExecutor(1, f"zcompile {name}") for name in ("offload", "fetch"))
        weakref.finalize(self, close_file, self._file.number, self._writer, self._reader)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._set_aside

    @property
    def seconds(self) -> float:
        """Of writing and of reading, on threads of their own."""
        return self._file.seconds

    def put(self, flat: torch.Tensor) -> _Extent:
        while len(self._waiting) >= PENDING:
            if not (extent := self._waiting.popleft()).written.cancelled():
                self._checked(extent.written)
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

    def get(self, handle: _Extent, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        if handle.written.cancel():
            flat = self._file.leaving[handle.offset]
            if last:
                self._file.drop(handle)
            return lambda: flat
        back = torch.empty(handle.nbytes, dtype=torch.uint8, device="cpu")
        reading = self._reader.submit(self._file.read, handle, back)
        if last:
            file = self._file
            reading.add_done_callback(lambda _: file.drop(handle))

        def land() -> torch.Tensor:
            self._checked(reading)
            return back.view(dtype)

        return land

    def _checked(self, work: Future[None]) -> None:
        try:
            work.result()
        except OSError as error:
            fix = "look at the disk; parameters are those of the step before, unless a train step has begun to update"
            raise StateError(str(self.folder), f"failed to keep activations: {error.strerror}", fix) from error

    def drop(self, handle: _Extent) -> None:
        self._file.drop(handle)


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
        work = self.group.collectives.all_gather(whole, shard)

        def land() -> torch.Tensor:
            work.wait()
            return whole[:numel]

        return land

    def drop(self, handle: _Shard) -> None:
        self.inner.drop(handle.handle)

    def sweep(self) -> None:
        self.inner.sweep()
