"""Optimizer state that the device has no memory for: on the host, or in a file.

While a unit is updated, the state for the next units' updates is fetched, in the order of the previous step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.errors import StateError
from zcompile.runtime.device import current_stream, is_gpu, new_stream, on_stream
from zcompile.runtime.offload.unnamed_files import MappedFile
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.torch_internals.dtensor import local_tensor

AHEAD = 2
"""Units whose state is fetched before their turn."""
Key = tuple[int, int, str]
"""A tensor of the state: the ids of optimizer and parameter, and its name."""


class _InOrder(ABC):
    """State by unit, in the order of updates, which the first step determines."""

    def __init__(self, units: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._units = units
        self._unit_of = {id(parameter): unit for unit, parameters in units.items() for parameter in parameters}
        self._order: list[str] = []
        self.ahead = AHEAD

    @abstractmethod
    def _fetch(self, unit: str) -> None: ...

    def begin(self) -> None:
        """A step begins: fetch the state for the first updates."""
        for unit in self._order[: self.ahead]:
            self._fetch(unit)

    def _turn_of(self, parameters: Sequence[nn.Parameter]) -> tuple[str, list[str]]:
        """The unit of these parameters, and the units whose state is to be fetched now."""
        unit = self._unit_of[id(parameters[0])]
        if unit not in self._order:
            self._order.append(unit)
        index = self._order.index(unit)
        return unit, self._order[index + 1 : index + 1 + self.ahead]


class HostState(_InOrder):
    """Optimizer state in host memory, for a model on a GPU: fetched for an update, and copied back.

    Copies run on a stream of their own. Hazards: a unit's state is copied back after its update, which the copying
    stream waits for, and `record_stream` keeps its memory until it is read. It is fetched later on the same stream, and
    the update waits for that. What is fetched is allocated on the copying stream, and `record_stream` keeps it while
    the update reads it. Between steps, state is on the host: the end of a step, failed or not, waits for the copies.

    Args:
        device: The model's device. Copies are made on the CPU, too, which only tests need.
        optimizers: Their state is moved once it exists, for parameters of `units` only.
        units: Parameters by unit, in any order: the first step determines that of the updates.
        slots: For each optimizer, the names of its state in the shape of a parameter.
    """

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        units: Mapping[str, Sequence[nn.Parameter]],
        slots: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        super().__init__(units)
        self.device = device
        self._slots = list(zip(optimizers, (tuple(named) for named in slots), strict=True))
        self._host: dict[Key, torch.Tensor] = {}
        self._coming: dict[Key, torch.Tensor] = {}
        """State in flight to the device, or there for an update."""
        self._arrived: dict[str, torch.Event] = {}
        """By unit: recorded after the copies to the device."""
        self._stream = new_stream(device) if is_gpu(device) else None
        self._left: torch.Event | None = None
        """Recorded after the last copy that the host has not waited for; a failed step may leave unused ones."""

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters are about to be updated: wait for their state, and fetch that of the next ones."""
        unit, following = self._turn_of(parameters)
        self._fetch(unit)
        if (arrived := self._arrived.pop(unit, None)) is not None:
            current_stream(self.device).wait_event(arrived)
        for optimizer, names in self._slots:
            for parameter in parameters:
                self._arrive(optimizer, parameter, names)
        for later in following:
            self._fetch(later)

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters have been updated: copy their state back."""
        names = next(names for one, names in self._slots if one is optimizer)
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self.device))
        with on_stream(self._stream):
            for parameter in parameters:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                for name in names:
                    self._leave((id(optimizer), id(parameter), name), state)
            if self._stream is not None:
                self._left = self._stream.record_event()

    def end(self) -> None:
        """The updates are over: wait until all state is on the host, and drop what a failed step had fetched."""
        self._coming.clear()
        self._arrived.clear()
        if self._left is not None:
            self._left.synchronize()
            self._left = None

    def _fetch(self, unit: str) -> None:
        """Start copying a unit's state from the host."""
        away = [key for key in self._keys(unit) if key not in self._coming]
        with on_stream(self._stream):
            for key in away:
                self._coming[key] = self._host[key].to(self.device, non_blocking=True, copy=True)
            if away and self._stream is not None:
                self._left = self._arrived[unit] = self._stream.record_event()

    def _keys(self, unit: str) -> Iterator[Key]:
        """A unit's state that is on the host; state loaded since, for example, may be elsewhere."""
        for optimizer, names in self._slots:
            for parameter in self._units[unit]:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                for name in names:
                    host = self._host.get((id(optimizer), id(parameter), name))
                    if host is not None and _is_at(state.get(name), host):
                        yield id(optimizer), id(parameter), name

    def _arrive(self, optimizer: Optimizer, parameter: nn.Parameter, names: Sequence[str]) -> None:
        """Put fetched tensors into the state."""
        for name in names:
            key = id(optimizer), id(parameter), name
            come = self._coming.pop(key, None)
            if come is not None and _is_at(optimizer.state[parameter].get(name), self._host[key]):
                if is_gpu(come.device):
                    come.record_stream(current_stream(self.device))
                state = optimizer.state[parameter]
                state[name] = _like(state[name], come)

    def _leave(self, key: Key, state: dict[str, Any]) -> None:
        """Copy one tensor of the state to the host, and put the copy into the state."""
        value = state.get(key[-1])
        if not isinstance(value, torch.Tensor) or not value.dim():
            return
        local = local_tensor(value)
        host = self._host.get(key)
        if host is None or host.shape != local.shape or host.dtype is not local.dtype:
            pinned = self._stream is not None
            host = self._host[key] = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=pinned)
        host.copy_(local, non_blocking=True)
        if self._stream is not None:
            local.record_stream(self._stream)
        state[key[-1]] = _like(value, host)


class StateFile(_InOrder):
    """Optimizer state in one file on this rank, mapped into memory, and read before a unit's update needs it.

    The tensors of the state are views of the mapping, so every optimizer works on them unchanged, and saving and
    loading treat them as any others. The kernel keeps in memory what fits, so only what exceeds the memory is moved.
    What a unit's update has written goes to the disk while the backward goes on.

    The file has its full size before the first step, or an error is raised; it has no name, so that it cannot be
    changed and nothing is left of it.

    Args:
        folder: The folder of the file, which is unlinked at once.
        optimizers: Their state is moved into the file once it exists, for parameters of `units` only.
        units: Parameters by unit, in any order: the first step determines that of the updates.
        slots: For each optimizer, the names and dtypes of its state in the shape of a parameter.

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
        super().__init__(units)
        self._slots: dict[Key, tuple[str, int, int]] = {}
        """For each tensor its unit, its offset there, and the most bytes that it may take."""
        sizes = dict.fromkeys(units, 0)
        for unit, parameters in units.items():
            for optimizer, named in zip(optimizers, slots, strict=True):
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for parameter in (one for one in parameters if id(one) in held):
                    local = local_tensor(parameter)
                    for name, dtype in named.items():
                        nbytes = local.numel() * max(dtype.itemsize, local.itemsize)
                        self._slots[id(optimizer), id(parameter), name] = unit, sizes[unit], nbytes
                        sizes[unit] += -(-nbytes // 64) * 64
        self._file = MappedFile(folder, sizes, "optimizer state")
        self.nbytes = self._file.nbytes
        self._written: Future[None] | None = None

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters are about to be updated: read what the next updates need."""
        _, following = self._turn_of(parameters)
        for unit in following:
            self._fetch(unit)

    def _fetch(self, unit: str) -> None:
        self._file.read(unit)

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters have been updated: move new state into the file, and write it to the disk."""
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state.items():
                slot = self._slots.get((id(optimizer), id(parameter), name))
                if slot is not None:
                    state[name] = self._placed(value, *slot)
        if self._written is None or self._written.done():
            self._check_written()
            self._written = self._file.write()

    def end(self) -> None:
        """The step is over: the kernel writes the rest in its own time."""

    def _check_written(self) -> None:
        """Raise StateError if the last write to the disk has failed."""
        error = None if self._written is None else self._written.exception()
        if isinstance(error, OSError):
            fix = "check the disk; go on from the last checkpoint"
            raise StateError(
                str(self._file.folder), f"did not take the optimizer's state: {error.strerror}", fix
            ) from error

    def _placed(self, value: Any, unit: str, offset: int, room: int) -> Any:
        """`value` at its place in the file, where it may already be; anything but a plain tensor stays where it is."""
        local = local_tensor(value) if isinstance(value, torch.Tensor) else value
        if type(local) is not torch.Tensor or not 0 < local.nbytes <= room:
            return value
        place = self._file.bytes_of(unit, offset, local.nbytes)
        if local.data_ptr() == place.data_ptr():
            return value
        held = place.view(local.dtype).view(local.shape)
        held.copy_(local)
        return _like(value, held)


def _is_at(value: Any, host: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    local = local_tensor(value)
    return local.device == host.device and local.data_ptr() == host.data_ptr()


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a tensor like `value`."""
    return laid_out_like(value, local) if isinstance(value, DTensor) else local
