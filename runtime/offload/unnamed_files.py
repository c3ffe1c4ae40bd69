"""Unnamed files: they cannot be changed by others, and nothing is left of them."""

from __future__ import annotations

import bisect
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from zcompile.errors import StateError
from zcompile.ir.tensor_type import human_bytes

PAGE = mmap.PAGESIZE


def nameless(folder: Path) -> int:
    """The descriptor of a new file in `folder`, which is created if it is missing.

    Raises:
        StateError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.dup(made.fileno())
    except OSError as error:
        raise StateError(
            str(folder), f"cannot be written: {error.strerror}", "give a folder that you may write to"
        ) from error


def set_aside(folder: Path, file: int, offset: int, nbytes: int, what: str) -> None:
    """Allocate disk space for `nbytes` of `file` in `folder`, so that later writes there cannot run out of it.

    Raises:
        StateError: there is no room, for `what`.
    """
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        problem = f"has no room for the {human_bytes(nbytes)} of {what} of this rank: {error.strerror}"
        raise StateError(str(folder), problem, "give a folder on a larger disk, or train on more ranks") from error


class MappedFile:
    """An unnamed file of this rank with allocated disk space, mapped into memory, in which the kernel keeps what fits.

    Args:
        folder: The folder of the file, which is unlinked at once.
        sizes: Bytes of each unit, which starts on a page of its own.
        what: Names its content, for errors.

    Raises:
        StateError: the folder cannot be written, or has no room for all of it.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], what: str) -> None:
        self.folder, self.nbytes = folder, 0
        self._ranges: dict[str, tuple[int, int]] = {}
        for unit, nbytes in sizes.items():
            self._ranges[unit] = self.nbytes, nbytes
            self.nbytes += -(-nbytes // PAGE) * PAGE
        self._number = nameless(folder)
        try:
            # Writing a page that the disk has no room for would kill the process (SIGBUS).
            set_aside(folder, self._number, 0, size := max(self.nbytes, PAGE), what)
            self._mapping = mmap.mmap(self._number, size)
        except BaseException:
            os.close(self._number)
            raise
        self._reader, self._writer = (ThreadPoolExecutor(1, f"zcompile {name}") for name in ("read", "write"))
        weakref.finalize(self, close_file, self._number, self._reader, self._writer)

    def bytes_of(self, unit: str, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """The bytes of a unit, or a range of them, uint8 [n]; a view of the mapping."""
        start, size = self._ranges[unit]
        count = size if nbytes is None else nbytes
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=start + offset)

    def read(self, unit: str) -> None:
        """Ask the kernel to read a unit ahead, on a thread: making room can take as long as reading."""
        self._reader.submit(os.posix_fadvise, self._number, *self._ranges[unit], os.POSIX_FADV_WILLNEED)

    def write(self) -> Future[None]:
        """Ask the kernel to write all changes to the disk."""
        return self._writer.submit(os.fdatasync, self._number)


def close_file(file: int, *threads: ThreadPoolExecutor) -> None:
    """Close a file once the threads that use it have ended."""
    for thread in threads:
        thread.shutdown()
    os.close(file)


class Room:
    """The free byte ranges of a file: first fit; ranges that are given back are merged with their neighbours.

    `end` is the size of the file. Threads may give back.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []
        """Ranges [start, stop), sorted, not adjacent to each other."""
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` free bytes; extends `end` if needed."""
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= nbytes or stop == self.end:
                    self._free[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                    self.end = max(self.end, start + nbytes)
                    return start
            start, self.end = self.end, self.end + nbytes
            return start

    def give(self, start: int, nbytes: int) -> None:
        """Mark these bytes as free."""
        with self._lock:
            stop = start + nbytes
            index = bisect.bisect(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                start = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (start, stop))
