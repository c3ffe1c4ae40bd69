"""Files without a name: nothing can happen to them, and nothing is left of them."""

from __future__ import annotations

import bisect
import mmap
import os
import tempfile
import threading
from pathlib import Path

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


def mapped(folder: Path, size: int, what: str) -> tuple[int, mmap.mmap]:
    """The descriptor of a nameless file of `size` bytes in `folder`, all of which the disk has set aside; its mapping.

    Raises:
        StateError: it cannot be made, or there is no room.
    """
    file = nameless(folder)
    try:
        # Pages that the disk had no room for would end the process when they are written.
        set_aside(folder, file, 0, size, what)
        return file, mmap.mmap(file, size)
    except BaseException:
        os.close(file)
        raise


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
