"""Activation storage: in host memory, in a file on disk, or in shards on the ranks of a group."""

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
"""Activations written to the disk, or copied to the host, at once: more would fill the memory that they are to free."""


@dataclass(frozen=True)
class _Copy:
    """A copy in flight, and the device tensor that it reads or writes."""

    tensor: torch.Tensor
    ended: torch.Event
    stream: torch.Stream
    """The stream to which the tensor's memory is returned, which therefore has to wait for the copy."""

    def land(self) -> None:
        self.stream.wait_event(self.ended)


class HostStorage(ActivationStorage):
    """Pinned host memory, for a model on a GPU: copies run on a stream of their own, and the host never waits.

    Hazards: the value is complete when the current stream gets to the offload, which the copying stream waits for. It
    is held until the current stream waits for the copy before the last, so its memory is reused only by later work of
    that stream, and only a few values are held. What is fetched is allocated on the current stream, which the copying
    stream waits for before it writes; users wait for the copy. Fetches follow offloads on the same stream. A fetch that
    nobody waits for, because the backward failed, is held until the next forward.
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
            for left in behind:  # earlier on the same stream
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
    """A byte range of the file, and the work that writes it."""

    offset: int
    nbytes: int
    written: Future[None]


class _File:
    """State of the threads. They must not hold the storage: its finalizer waits for them."""

    def __init__(self, folder: Path) -> None:
        self.number = nameless(folder)
        self.room = Room()
        self.leaving: dict[int, torch.Tensor] = {}
        """Tensors that have not been written yet, by offset."""
        self.seconds = 0.0

    def write(self, offset: int) -> None:
        self._move(self.leaving[offset], offset, lambda left, at: os.pwrite(self.number, left, at))
        self.leaving.pop(offset, None)

    def read(self, extent: _Extent, back: torch.Tensor) -> None:
        extent.written.result()
        self._move(back, extent.offset, lambda left, at: os.preadv(self.number, [left], at))

    def _move(self, flat: torch.Tensor, at: int, move: Callable[[memoryview, int], int]) -> None:
        """Write or read the memory of a contiguous CPU tensor, which the caller keeps alive."""
        started, left = time.perf_counter(), flat.view(torch.uint8).numpy().data
        while left:
            done = move(left, at)
            left, at = left[done:], at + done
        self.seconds += time.perf_counter() - started

    def drop(self, extent: _Extent) -> None:
        """Free its bytes once nothing writes them."""
        if extent.written.cancel():
            self.leaving.pop(extent.offset, None)
        if extent.written.done():
            self.room.give(extent.offset, extent.nbytes)
        else:
            extent.written.add_done_callback(lambda _: self.room.give(extent.offset, extent.nbytes))


class DiskStorage(ActivationStorage):
    """An unnamed file in `folder`, written and read by threads, for a model on the CPU.

    Disk space is allocated before writing: a full disk raises in the forward, before anything is updated. An activation
    that is fetched before it was written is not written.

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
        """Size of the file in bytes."""
        return self._set_aside

    @property
    def seconds(self) -> float:
        """Time spent writing and reading, on threads."""
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
            fix = "check the disk; parameters are those of the step before, unless a train step has begun to update"
            raise StateError(str(self.folder), f"failed to keep activations: {error.strerror}", fix) from error

    def drop(self, handle: _Extent) -> None:
        self._file.drop(handle)


class DeviceStorage(ActivationStorage):
    """Keeps activations where they are."""

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def get(self, handle: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        return lambda: handle

    def drop(self, handle: torch.Tensor) -> None:
        """Does nothing: the caller holds the only reference."""


@dataclass(frozen=True)
class _Shard:
    handle: Any
    numel: int
    """Elements of the whole activation."""


class ShardStorage(ActivationStorage):
    """Keeps this rank's shard of an activation that all ranks of `group` have, in `inner`; a fetch gathers all of it.

    `get` is collective. If `inner` has the shard in device memory, the gather starts there; otherwise it starts when
    the result is waited for, which all ranks do in the order of their program. Hazards on CUDA: the shard is a copy,
    made after the value was computed on the current stream; the gather starts after that stream's work, and holds the
    shard and the result until the stream has waited for it.
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
        """Start gathering; the returned function waits for it."""
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
