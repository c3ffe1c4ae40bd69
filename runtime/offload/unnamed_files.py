"""Files without a name: nothing can happen to them, and nothing is left of them."""

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
    """The descriptor of a new file in `folder`, which is made if it is not there.

    Raises:
        StateError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.dup(made.fileno())
    except OSError as error:
        raise StateError(str(folder), f"cannot be written: {error.strerror}", "give a folder of yours") from error


def set_aside(folder: Path, file: int, offset: int, nbytes: int, what: str) -> None:
    """Let the disk keep room for `nbytes` of `file` in `folder`: what is written there later finds it.

    Raises:
        StateError: there is none, for `what`.
    """
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        problem = f"has no room for the {human_bytes(nbytes)} of {what} of this rank: {error.strerror}"
        raise StateError(str(folder), problem, "give a folder on a larger disk, or train on more ranks") from error


class MappedFile:
    """A nameless file of this rank, which the disk has set aside, mapped into memory: the kernel keeps what fits.

    Args:
        folder: Where the file is made. It is gone from there at once.
        sizes: Bytes of each unit, which has pages of its own.
        what: What is in it.

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
            # Pages that the disk had no room for would end the process when they are written.
            set_aside(folder, self._number, 0, size := max(self.nbytes, PAGE), what)
            self._mapping = mmap.mmap(self._number, size)
        except BaseException:
            os.close(self._number)
            raise
        self._reader, self._writer = (ThreadPoolExecutor(1, f"zcompile {name}") for name in ("read", "write"))
        weakref.finalize(self, close_file, self._number, self._reader, self._writer)

    def bytes_of(self, unit: str, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """What the file has for a unit, or a part of it, uint8 [n]."""
        start, size = self._ranges[unit]
        count = size if nbytes is None else nbytes
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=start + offset)

    def read(self, unit: str) -> None:
        """Let the kernel read what a unit has. Making room can take as long as reading it, so a thread asks."""
        self._reader.submit(os.posix_fadvise, self._number, *self._ranges[unit], os.POSIX_FADV_WILLNEED)

    def write(self) -> Future[None]:
        """Let the kernel write all that has changed."""
        return self._writer.submit(os.fdatasync, self._number)


def close_file(file: int, *threads: ThreadPoolExecutor) -> None:
    """Close a file that threads work on, once they have ended."""
    for thread in threads:
        thread.shutdown()
    os.close(file)


class Room:
    """Which bytes of a file are free: the first run that is long enough is given; what comes back joins its neighbours.

    `end` is the size of the file. Threads may give back.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []
        """Runs [start, stop), sorted, none next to another."""
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Where `nbytes` are free; beyond the old `end` if need be."""
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= nbytes or stop == self.end:
                    self._free[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                    self.end = max(self.end, start + nbytes)
                    return start
            start, self.end = self.end, self.end + nbytes
            return start

    def give(self, start: int, nbytes: int) -> None:
        """These bytes are free again."""
        with self._lock:
            stop = start + nbytes
            index = bisect.bisect(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                start = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (start, stop))
