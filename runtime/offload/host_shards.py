"""Shards in host memory or in a file: copied to the device to be gathered, and updated where they are.

A copy starts with its gather, `prefetch` units ahead of their use; gradients are copied back once they are reduced.
Both run in parallel with compute, on streams of their own. Hazards:

- A gather's buffer was allocated on the current stream, which may still read it, so the sending stream waits for that
  stream before it copies. The collective is launched on the sending stream, so it waits for the copy; whoever waits for
  the collective has waited for both.
- A gradient is complete when the current stream gets here, which the returning stream waits for; `record_stream` keeps
  its memory until it is read.
- The host writes to shards, and reads gradients, without synchronizing with streams. So it waits for gradients before
  they are delivered or used for an update, and for all copies whenever a call of the model, or the backward of a
  program, has ended or failed; not twice for the same ones. An update within the backward follows every gather of its
  unit in that step, which its gradients have waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from zcompile.errors import StateError
from zcompile.runtime.async_work import AsyncWork, StreamWork
from zcompile.runtime.device import HOST, current_stream, is_gpu, new_stream, on_stream
from zcompile.runtime.offload.unnamed_files import MappedFile
from zcompile.runtime.shards import Reserved


class HostShards(Reserved):
    """Pinned host memory.

    Args:
        model: The device that the model computes on. Copies are made on the CPU, too, which only tests need.
        sizes: Bytes of each unit's shards.

    Raises:
        StateError: the host has no room for them.
    """

    is_away = True

    def __init__(self, model: torch.device, sizes: Mapping[str, int]) -> None:
        on_gpu = is_gpu(model)
        try:
            room = {u: torch.zeros(n, dtype=torch.uint8, pin_memory=on_gpu) for u, n in sizes.items()}
        except RuntimeError as error:
            fix = "take more ranks, or PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1, or leave it out"
            raise StateError("offload_parameters", f"the host has no pinned memory for it: {error}", fix) from error
        super().__init__(torch.device(HOST), room)
        self._model = model
        self._sending = new_stream(model) if on_gpu else None
        self._returning = new_stream(model) if on_gpu else None
        self._sent: torch.Event | None = None
        """Recorded after copies to the device that the host has not waited for."""
        self._returned: torch.Event | None = None
        """Recorded after copies of gradients that the host has not waited for; they follow earlier copies to the
        device."""

    def own(self, value: torch.Tensor) -> torch.Tensor:
        copy = super().own(value)
        return copy if self._sending is None else copy.pin_memory()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        if self._sending is None:
            yield
            return
        self._sending.wait_stream(current_stream(self._model))
        try:
            with on_stream(self._sending):
                yield
        finally:  # what was copied before an error is in flight, too
            self._sent = self._sending.record_event()

    def copied(self, arrived: torch.Tensor) -> AsyncWork | None:
        if self._sending is None:
            return None
        done = self._sending.record_event()
        return StreamWork(lambda: current_stream(self._model).wait_event(done), (arrived,))

    def home(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._home(gradient) for name, gradient in gradients.items()}

    def _home(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._returning is None:
            return gradient.to(self.device, copy=True)
        host = torch.empty(gradient.shape, dtype=gradient.dtype, device=self.device, pin_memory=True)
        self._returning.wait_stream(current_stream(self._model))
        if self._sent is not None:
            self._returning.wait_event(self._sent)
            self._sent = None
        with on_stream(self._returning):
            host.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._returning)
        self._returned = self._returning.record_event()
        return host

    def landed(self) -> None:
        if self._returned is not None:
            self._returned.synchronize()
            self._returned = None

    def settle(self) -> None:
        self.landed()
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None


AHEAD = 2
"""Units that are read before their gather starts, in addition to those that are prefetched."""


class ShardFile(Reserved):
    """A model's shards on this rank, in one unnamed file that is mapped into memory.

    Gathers send from the mapping, and optimizers write to it. The kernel keeps what fits. Units that will be gathered
    next, according to the order of the last time, are read in advance.

    Args:
        folder: The folder of the file, which is unlinked at once.
        sizes: Bytes of each unit's shards.

    Raises:
        StateError: the folder cannot be written, or has no room for all of them.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._file = MappedFile(folder, sizes, "parameters")
        self.nbytes = self._file.nbytes
        super().__init__(torch.device(HOST), {unit: self._file.bytes_of(unit) for unit in sizes})
        self._next: dict[tuple[str, str], str] = {}
        """The unit that was gathered after two others: by pairs, because forward and backward use different orders."""
        self._last = "", ""

    def before(self, unit: str) -> None:
        """Read the next units."""
        first, second = self._last
        self._next[first, second] = unit
        pair = self._last = second, unit
        for _ in range(AHEAD):
            if (coming := self._next.get(pair)) is None:
                return
            self._file.read(coming)
            pair = pair[1], coming
