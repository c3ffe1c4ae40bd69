"""Shards in the memory of the host, for a model on a GPU: copied there to be gathered, and updated where they are.

A copy sets out with its gather, `prefetch` units ahead of their use; gradients come back once they are reduced. Both
run beside the compute, on streams of their own. Hazards:

- What a gather is given was allocated, and may still be read, on the current stream, which the sending stream waits for
  before it copies. The collective is launched on the sending stream, so it waits for the copy; who waits for the
  collective has waited for both.
- A gradient is complete when the current stream gets here, which the returning stream waits for; `record_stream` keeps
  its memory until it is read.
- The host writes to shards, and reads gradients, without asking any stream. So it waits for all copies before gradients
  are delivered or used for an update, and whenever a call of the model returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zcompile.runtime.flights import Flight, StreamFlight
from zcompile.runtime.shard_memory import ShardMemory


class HostShards(ShardMemory):
    """Pinned memory of the host.

    Args:
        model: The device that the model computes on. On the CPU copies are made all the same, which only tests want.
    """

    is_away = True

    def __init__(self, model: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._model = model
        on_gpu = model.type == "cuda"
        self._sending = torch.cuda.Stream(model) if on_gpu else None
        self._returning = torch.cuda.Stream(model) if on_gpu else None

    def zeros(self, unit: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self._sending is not None)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        if self._sending is None:
            yield
            return
        self._sending.wait_stream(torch.cuda.current_stream(self._model))
        with torch.cuda.stream(self._sending):
            yield

    def copied(self, arrived: torch.Tensor) -> Flight | None:
        if self._sending is None:
            return None
        done = self._sending.record_event()
        return StreamFlight(lambda: torch.cuda.current_stream(self._model).wait_event(done), (arrived,))

    def home(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._returning is None:
            return gradient.to(self.device, copy=True)
        host = torch.empty(gradient.shape, dtype=gradient.dtype, device=self.device, pin_memory=True)
        self._returning.wait_stream(torch.cuda.current_stream(self._model))
        with torch.cuda.stream(self._returning):
            host.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._returning)
        return host

    def settle(self) -> None:
        for stream in (self._sending, self._returning):
            if stream is not None:
                stream.synchronize()
