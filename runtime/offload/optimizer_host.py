"""Optimizer state in the memory of the host, for a model on a GPU: brought for a unit's update, and taken back.

What the next units need is on its way while this one is updated, in the order of the step before. Copies run on a
stream of their own. Hazards: a unit's state goes out behind its update, which the copying stream waits for, and its
memory is not given to others before it is read (`record_stream`). It comes back behind the way out, in the same stream,
and the update waits for that. What comes is allocated on the copying stream, and `record_stream` keeps it while the
update reads it. Who looks at the state between steps finds it on the host: the end of a step, failed or not, waits for
the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.runtime.device import current_stream, is_gpu, new_stream, on_stream
from zcompile.runtime.tensors.explained import laid_out_like
from zcompile.torch_internals.dtensor import local_tensor

AHEAD = 2
"""Units whose state is on its way before their turn."""
Key = tuple[int, int, str]
"""Of a tensor of the state: the identities of optimizer and parameter, and its name."""


class HostState:
    """The state of optimizers in the memory of the host.

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
        self.device = device
        self._units = units
        self._unit_of = {id(parameter): unit for unit, parameters in units.items() for parameter in parameters}
        self._slots = list(zip(optimizers, (tuple(named) for named in slots), strict=True))
        self._order: list[str] = []
        self._host: dict[Key, torch.Tensor] = {}
        self._coming: dict[Key, torch.Tensor] = {}
        """On its way to the device, or there for an update."""
        self._arrived: dict[str, torch.Event] = {}
        """By unit: when what is on its way is there."""
        self._stream = new_stream(device) if is_gpu(device) else None
        self._left: torch.Event | None = None
        """Behind the last copy for which the host has not waited; a step that fails leaves some that nobody needed."""

    def begin(self) -> None:
        """A step begins: what the first updates need is fetched."""
        for unit in self._order[:AHEAD]:
            self._fetch(unit)

    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters are about to be updated: their state comes, and that of the next ones sets out."""
        unit = self._unit_of[id(parameters[0])]
        if unit not in self._order:
            self._order.append(unit)
        self._fetch(unit)
        if (arrived := self._arrived.pop(unit, None)) is not None:
            current_stream(self.device).wait_event(arrived)
        for optimizer, names in self._slots:
            for parameter in parameters:
                self._arrive(optimizer, parameter, names)
        place = self._order.index(unit)
        for later in self._order[place + 1 : place + 1 + AHEAD]:
            self._fetch(later)

    def after(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters have been updated: their state goes back."""
        names = next(names for one, names in self._slots if one is optimizer)
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self.device))
        with self._copying():
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

    def _copying(self) -> contextlib.AbstractContextManager[Any]:
        return on_stream(self._stream)

    def _fetch(self, unit: str) -> None:
        """Start bringing what is on the host of a unit's state."""
        away = [key for key in self._keys(unit) if key not in self._coming]
        with self._copying():
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


def _is_at(value: Any, host: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    local = local_tensor(value)
    return local.device == host.device and local.data_ptr() == host.data_ptr()


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` in place of what this rank has of `value`."""
    return laid_out_like(value, local) if isinstance(value, DTensor) else local
