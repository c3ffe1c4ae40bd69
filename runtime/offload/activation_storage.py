"""Where activations are kept: the memory of the host, and a file on a disk."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from zcompile.errors import StateError
from zcompile.runtime.device import current_stream, new_stream, on_stream
from zcompile.runtime.offload.unnamed_files import Room, nameless, set_aside
from zcompile.runtime.offloaded_activations import ActivationStorage

PENDING = 2
"""Activations that are on their way to the disk at once: more would fill the memory that they are to leave."""


class HostStorage(ActivationStorage):
    """Pinned memory of the host, for a model on a GPU: copies run on a stream of their own.

    Hazards: the value is complete when the current stream gets to the offload, which the copying stream waits for; it
    must not be freed for other work before it is read, which `record_stream` sees to. The way back is behind the way
    out in the same stream. What comes back is allocated on the copying stream, and used on the one that waits. The host
    waits for the copy before the last, so that what has been freed by name is not alive in great numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._leaving: deque[torch.Event] = deque()

    def put(self, flat: torch.Tensor) -> torch.Tensor:
        if len(self._leaving) >= PENDING:
            self._leaving.popleft().synchronize()
        self._stream.wait_stream(current_stream(flat.device))
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        with on_stream(self._stream):
            host.copy_(flat, non_blocking=True)
            self._leaving.append(self._stream.record_event())
        flat.record_stream(self._stream)
        return host

    def get(self, handle: torch.Tensor, dtype: torch.dtype, *, last: bool) -> Callable[[], torch.Tensor]:
        with on_stream(self._stream):
            back = handle.to(self._stream.device, non_blocking=True)
            arrived = self._stream.record_event()

        def land() -> torch.Tensor:
            current = current_stream(self._stream.device)
            current.wait_event(arrived)
            back.record_stream(current)
            return back

        return land

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
        weakref.finalize(self, _close, self._writer, self._reader, self._file.number)

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

    def _ended(self, extent: _Extent) -> None:
        if not extent.written.cancelled():
            self._checked(extent.written)

    def _checked(self, work: Future[None]) -> None:
        try:
            work.result()
        except OSError as error:
            fix = "look at the disk; parameters are those of the step before, unless a train step has begun to update"
            raise StateError(str(self.folder), f"failed to keep activations: {error.strerror}", fix) from error

    def drop(self, handle: _Extent) -> None:
        self._file.drop(handle)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which the caller keeps."""
    return flat.view(torch.uint8).numpy().data


def _close(writer: ThreadPoolExecutor, reader: ThreadPoolExecutor, file: int) -> None:
    for thread in (writer, reader):
        thread.shutdown()
    os.close(file)
