"""Calibration: what this rank's device and its group reach, measured in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from zcompile._torch import real_tensors
from zcompile.hardware import Hardware, Link
from zcompile.runtime.groups import Communicator


@dataclass(frozen=True)
class _Sizes:
    """What is run to measure a device: enough for its full rate, little enough to be done soon."""

    side: int
    """Of the square matrices that are multiplied."""
    touched: int
    """Bytes read and written to measure the memory: more than the caches."""
    sent: int
    """Bytes gathered to measure the line."""


_SIZES = {"cpu": _Sizes(768, 32 * 2**20, 4 * 2**20), "cuda": _Sizes(4096, 256 * 2**20, 64 * 2**20)}


@torch.no_grad()
def measure(communicator: Communicator, dtype: torch.dtype = torch.float32) -> Hardware:
    """The rates of the device, which computes in `dtype`, and of the group. Collective: every rank must measure.

    What a tracer would make of tensors, if one is at work, is kept away.
    """
    with real_tensors():
        return _measure(communicator, dtype)


def _measure(communicator: Communicator, dtype: torch.dtype) -> Hardware:
    communicator = Communicator(communicator.mesh, communicator.device)  # with a meter of its own
    device, sizes = communicator.device, _SIZES.get(communicator.device.type, _SIZES["cpu"])
    # Ones, not random numbers: the user's generators stay as they are.
    factor = torch.ones(sizes.side, sizes.side, dtype=dtype, device=device)
    wide = torch.zeros(sizes.touched // 4, device=device)
    flops = 2 * sizes.side**3 / best_seconds(lambda: factor @ factor, device)
    memory_bandwidth = 2 * wide.nbytes / best_seconds(lambda: wide.add_(1), device)
    hardware = Hardware.of(flops=flops, memory_bandwidth=memory_bandwidth)
    if device.type == "cuda":
        host = torch.zeros(sizes.sent, dtype=torch.uint8, pin_memory=True)
        hardware = replace(hardware, host_bandwidth=sizes.sent / best_seconds(lambda: host.to(device), device))
    if communicator.size == 1:
        return hardware
    latency = best_seconds(lambda: _gather(communicator, 1), device)
    share = sizes.sent // communicator.size
    seconds = best_seconds(lambda: _gather(communicator, share), device)
    bandwidth = share * (communicator.size - 1) / max(seconds - latency, 1e-9)
    return replace(hardware, links=(Link("between ranks", latency, bandwidth),))


def _gather(communicator: Communicator, nbytes: int) -> None:
    shard = torch.zeros(nbytes, dtype=torch.uint8, device=communicator.device)
    communicator.all_gather(shard.new_empty(nbytes * communicator.size), shard).wait()


def best_seconds(run: Callable[[], object], device: torch.device, times: int = 3) -> float:
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
