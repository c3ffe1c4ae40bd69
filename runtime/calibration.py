"""Calibration: what this rank's device and its group reach, measured in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zcompile.cost import Hardware
from zcompile.runtime.groups import Communicator

_SIDE = 768
"""Of the matrices multiplied: large enough for a core's full rate, small enough for 20 ms of it."""
_TOUCHED = 32 * 2**20
"""Bytes read and written to measure the memory: more than a core's caches."""
_SENT = 4 * 2**20
"""Bytes gathered to measure the line."""


@torch.no_grad()
def measure(communicator: Communicator) -> Hardware:
    """The rates of the device in float32, and of the group. Collective: every rank must measure."""
    communicator = Communicator(communicator.mesh, communicator.device)  # with a meter of its own
    device = communicator.device
    a = torch.randn(_SIDE, _SIDE, device=device)
    wide = torch.zeros(_TOUCHED // 4, device=device)
    flops = 2 * _SIDE**3 / _best(lambda: a @ a, device)
    memory_bandwidth = 2 * wide.nbytes / _best(lambda: wide.add_(1), device)
    if communicator.size == 1:
        return Hardware(flops, memory_bandwidth, latency=0.0, bandwidth=float("inf"))
    latency = _best(lambda: _gather(communicator, 1), device)
    seconds = _best(lambda: _gather(communicator, _SENT // communicator.size), device)
    sent = _SENT // communicator.size * (communicator.size - 1)
    return Hardware(flops, memory_bandwidth, latency, sent / max(seconds - latency, 1e-9))


def _gather(communicator: Communicator, nbytes: int) -> None:
    shard = torch.zeros(nbytes, dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(shard.new_empty(nbytes * communicator.size), shard).wait()


def _best(run: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """The least seconds of `run`, after one run that is not counted; the device is waited for."""
    least = float("inf")
    for count in range(times + 1):
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if count:
            least = min(least, time.perf_counter() - before)
    return least
