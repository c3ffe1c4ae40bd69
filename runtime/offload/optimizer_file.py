"""Offload: the state of an optimizer in a file, mapped into memory, and read before a unit's update needs it.

The tensors of the state are views of the mapping, so every optimizer works on them as they are, and what saves or loads
a state reads or writes them as any other. The kernel keeps in memory what fits and gives up the rest: only what exceeds
the memory that there is moves. What a unit's update has written is on its way to the disk while the backward goes on,
and what the next ones need is read meanwhile.

The file has its full size before the first step, or there is an error; it has no name, so that nothing can happen to it
and nothing is left of it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.errors import StateError
from zcompile.runtime.offload.unnamed_files import PAGE, mapped
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.torch_internals.dtensor import local_tensor

AHEAD = 2
"""Units whose state is read before their turn."""


@dataclass(frozen=True)
class _Slot:
    """Where one tensor of a parameter's state lies in the file."""

    offset: int
    nbytes: int


class StateFile:
    """The state of optimizers in one file on this rank.

    Args:
        folder: Where the file is made. It is gone from there at once.
        optimizers: Their state moves into the file as it comes to be, for parameters of `units` only.
        units: Parameters by unit, in no order: that of the updates is learned in the first step.
        slots: For each optimizer, the names and dtypes of what it keeps in the shape of a parameter.

    Raises:
        StateError: the folder cannot be written, or has no room for all of the state.
    """

    def __init__(
        self,
        folder: Path,
        optimizers: Sequence[Optimizer],
        units: Mapping[str, Sequence[nn.Parameter]],
        slots: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        self._unit_of = {id(parameter): unit for unit, parameters in units.items() for parameter in parameters}
        self._slots: dict[tuple[int, int, str], _Slot] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        size = 0
        for unit, parameters in units.items():
            start = size
            for optimizer, named in zip(optimizers, slots, strict=True):
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for parameter in (one for one in parameters if id(one) in held):
                    local = local_tensor(parameter)
                    for name, dtype in named.items():
                        nbytes = local.numel() * max(dtype.itemsize, local.itemsize)
                        self._slots[id(optimizer), id(parameter), name] = _Slot(size, nbytes)
                        size += -(-nbytes // 64) * 64
            size = -(-size // PAGE) * PAGE
            self._ranges[unit] = start, size - start
        self.nbytes = size
        self.folder = folder
        self._file, self._map = mapped(folder, max(size, PAGE), "optimizer state")
        self.ahead = AHEAD
        self._order: list[str] = []
        self._reader, self._writer = (ThreadPoolExecutor(1, f"zcompile {name}") for name in ("read", "write"))
        self._written: Future[None] | None = None
        weakref.finalize(self, _close, self._reader, self._writer, self._file)

    def begin(self) -> None:
        """A step begins: what the first updates need is read."""
        for unit in self._order[: self.ahead]:
            self._read(unit)

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters are about to be updated: what the next updates need is read meanwhile."""
        unit = self._unit_of[id(parameters[0])]
        if unit not in self._order:
            self._order.append(unit)
            return
        place = self._order.index(unit)
        for later in self._order[place + 1 : place + 1 + self.ahead]:
            self._read(later)

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters have been updated: their state moves into the file if it is new, and to the disk."""
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state.items():
                slot = self._slots.get((id(optimizer), id(parameter), name))
                if slot is not None:
                    state[name] = self._placed(value, slot)
        if self._written is None or self._written.done():
            self._check_written()
            self._written = self._writer.submit(os.fdatasync, self._file)

    def end(self) -> None:
        """The step is over: the kernel writes what is left when it pleases."""

    def _check_written(self) -> None:
        """Raise StateError if what was written has not come to the disk."""
        error = None if self._written is None else self._written.exception()
        if isinstance(error, OSError):
            fix = "look at the disk; go on from the last checkpoint"
            raise StateError(str(self.folder), f"did not take the optimizer's state: {error.strerror}", fix) from error

    def _placed(self, value: Any, slot: _Slot) -> Any:
        """`value` in its place in the file, where it may be already; what is no plain tensor stays where it is."""
        local = local_tensor(value) if isinstance(value, torch.Tensor) else value
        if type(local) is not torch.Tensor or not 0 < local.nbytes <= slot.nbytes:
            return value
        place = torch.frombuffer(self._map, dtype=torch.uint8, count=local.nbytes, offset=slot.offset)
        if local.data_ptr() == place.data_ptr():
            return value
        held = place.view(local.dtype).view(local.shape)
        held.copy_(local)
        return laid_out_like(value, held) if isinstance(value, DTensor) else held

    def _read(self, unit: str) -> None:
        """Let the kernel read; making room for it can take as long, so a thread asks."""
        self._reader.submit(os.posix_fadvise, self._file, *self._ranges[unit], os.POSIX_FADV_WILLNEED)


def _close(reader: ThreadPoolExecutor, writer: ThreadPoolExecutor, file: int) -> None:
    for thread in (reader, writer):
        thread.shutdown()
    os.close(file)
