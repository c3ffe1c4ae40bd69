"""Shards in a file: parameters that a rank has no memory for, mapped into it, and read before they are gathered.

Shards are views of the mapping, so gathers send from it and optimizers write to it as to memory. The kernel keeps what
fits and gives up the rest. What is gathered next is what was gathered next the last time: it is read meanwhile.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from zcompile.runtime.offload.unnamed_files import PAGE, mapped
from zcompile.runtime.shard_memory import Reserved

AHEAD = 2
"""Units that are read before their gather starts, beside those that are gathered ahead themselves."""


class ShardFile(Reserved):
    """The shards of a model in one nameless file on this rank.

    Args:
        folder: Where the file is made. It is gone from there at once.
        sizes: Bytes of each unit's shards.

    Raises:
        StateError: the folder cannot be written, or has no room for all of them.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for unit, nbytes in sizes.items():
            self._ranges[unit] = end, nbytes
            end += -(-nbytes // PAGE) * PAGE
        self.nbytes = end
        self._file, mapping = mapped(folder, max(end, PAGE), "parameters")
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        room = {unit: whole[start : start + nbytes] for unit, (start, nbytes) in self._ranges.items()}
        super().__init__(torch.device("cpu"), room)
        self._next: dict[tuple[str, str], str] = {}
        """The unit that was gathered behind two others, of which a unit has one order forward and one backward."""
        self._last = "", ""
        self._reader = ThreadPoolExecutor(1, "zcompile read")
        weakref.finalize(self, _close, self._reader, self._file)

    def before(self, unit: str) -> None:
        """Read the units that come next."""
        first, second = self._last
        self._next[first, second] = unit
        pair = self._last = second, unit
        for _ in range(AHEAD):
            if (coming := self._next.get(pair)) is None:
                return
            # Making room for what the kernel reads can take as long as reading it, so a thread asks.
            self._reader.submit(os.posix_fadvise, self._file, *self._ranges[coming], os.POSIX_FADV_WILLNEED)
            pair = pair[1], coming


def _close(reader: ThreadPoolExecutor, file: int) -> None:
    reader.shutdown()
    os.close(file)
