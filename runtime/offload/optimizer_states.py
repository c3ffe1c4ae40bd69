"""Where the state of optimizers is that the device has no memory for: on the host, or in a file.

What the next units' updates need is on its way while a unit is updated, in the order of the step before.
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
"""Units whose state is on its way before their turn."""
Key = tuple[int, int, str]
"""Of a tensor of the state: the identities of optimizer and parameter, and its name."""


class _InOrder(ABC):
    """State by unit, in the order of the updates, which is learned in the first step."""

    def __init__(self, units: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._units = units
        self._unit_of = {id(parameter): unit for unit, parameters in units.items() for parameter in parameters}
        self._order: list[str] = []
        self.ahead = AHEAD

    @abstractmethod
    def _fetch(self, unit: str) -> None: ...

    def begin(self) -> None:
        """A step begins: what the first updates need sets out."""
        for unit in self._order[: self.ahead]:
            self._fetch(unit)

    def _turn_of(self, parameters: Sequence[nn.Parameter]) -> tuple[str, list[str]]:
        """The unit that these are of, and those whose state is to be on its way then."""
        unit = self._unit_of[id(parameters[0])]
        if unit not in self._order:
            self._order.append(unit)
        place = self._order.index(unit)
        return unit, self._order[place + 1 : place + 1 + self.ahead]


class HostState(_InOrder):
    """The state of optimizers in the memory of the host, for a model on a GPU: brought for an update, and taken back.

    Copies run on a stream of their own. Hazards: a unit's state goes out behind its update, which the copying stream
    waits for, and its memory is not given to others before it is read (`record_stream`). It comes back behind the way
    out, in the same stream, and the update waits for that. What comes is allocated on the copying stream, and
    `record_stream` keeps it while the update reads it. Who looks at the state between steps finds it on the host: the
    end of a step, failed or not, waits for the copies.

    Args:
        device: The model's. On the CPU copies are made all the same, which only tests want.
        optimizers: Their state moves as it comes to be, for parameters of `units` only.
        units: Parameters by unit, in no order: that of the updates is learned in the first step.
        slots: For each optimizer, the names of what it keeps in the shape of a parameter.
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
        """On its way to the device, or there for an update."""
        self._arrived: dict[str, torch.Event] = {}
        """By unit: when what is on its way is there."""
        self._stream = new_stream(device) if is_gpu(device) else None
        self._left: torch.Event | None = None
        """Behind the last copy for which the host has not waited; a step that fails leaves some that nobody needed."""

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters are about to be updated: their state comes, and that of the next ones sets out."""
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
        """These parameters have been updated: their state goes back."""
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
        """The updates are over: state is on the host when this returns, and what a failed step had fetched is void."""
        self._coming.clear()
        self._arrived.clear()
        if self._left is not None:
            self._left.synchronize()
            self._left = None

    def _fetch(self, unit: str) -> None:
        """Start bringing what is on the host of a unit's state."""
        away = [key for key in self._keys(unit) if key not in self._coming]
        with on_stream(self._stream):
            for key in away:
                self._coming[key] = self._host[key].to(self.device, non_blocking=True, copy=True)
            if away and self._stream is not None:
                self._left = self._arrived[unit] = self._stream.record_event()

    def _keys(self, unit: str) -> Iterator[Key]:
        """What of a unit's state is on the host; what has been loaded since, say, is where it was loaded."""
        for optimizer, names in self._slots:
            for parameter in self._units[unit]:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                for name in names:
                    host = self._host.get((id(optimizer), id(parameter), name))
                    if host is not None and _is_at(state.get(name), host):
                        yield id(optimizer), id(parameter), name

    def _arrive(self, optimizer: Optimizer, parameter: nn.Parameter, names: Sequence[str]) -> None:
        """Put what has come into the state."""
        for name in names:
            key = id(optimizer), id(parameter), name
            come = self._coming.pop(key, None)
            if come is not None and _is_at(optimizer.state[parameter].get(name), self._host[key]):
                if is_gpu(come.device):
                    come.record_stream(current_stream(self.device))
                state = optimizer.state[parameter]
                state[name] = _like(state[name], come)

    def _leave(self, key: Key, state: dict[str, Any]) -> None:
        """Copy one tensor of the state to its place on the host, and put that into the state."""
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
    """The state of optimizers in one file on this rank, mapped into memory, and read before a unit's update needs it.

    The tensors of the state are views of the mapping, so every optimizer works on them as they are, and what saves or
    loads a state reads or writes them as any other. The kernel keeps in memory what fits and gives up the rest: only
    what exceeds the memory that there is moves. What a unit's update has written is on its way to the disk while the
    backward goes on.

    The file has its full size before the first step, or there is an error; it has no name, so that nothing can happen
    to it and nothing is left of it.

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
        super().__init__(units)
        self._slots: dict[Key, tuple[str, int, int]] = {}
        """Of each tensor its unit, where it lies in that, and how many bytes it may take."""
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
        """These parameters are about to be updated: what the next updates need is read meanwhile."""
        _, following = self._turn_of(parameters)
        for unit in following:
            self._fetch(unit)

    def _fetch(self, unit: str) -> None:
        self._file.read(unit)

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters have been updated: their state moves into the file if it is new, and to the disk."""
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
        """The step is over: the kernel writes what is left when it pleases."""

    def _check_written(self) -> None:
        """Raise StateError if what was written has not come to the disk."""
        error = None if self._written is None else self._written.exception()
        if isinstance(error, OSError):
            fix = "look at the disk; go on from the last checkpoint"
            raise StateError(
                str(self._file.folder), f"did not take the optimizer's state: {error.strerror}", fix
            ) from error

    def _placed(self, value: Any, unit: str, offset: int, room: int) -> Any:
        """`value` in its place in the file, where it may be already; what is no plain tensor stays where it is."""
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
    """`local` in place of what this rank has of `value`."""
    return laid_out_like(value, local) if isinstance(value, DTensor) else local
