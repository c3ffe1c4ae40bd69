"""What a worker asks of the device it trains on: to be done, what time it is there, and how much memory was used."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common.configurations import Device


class Accelerator:
    """The device of one rank: the processor, on which everything can be tried without another."""

    backend = "gloo"
    """Of its process groups."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(1)

    @property
    def name(self) -> str:
        return "CPU"

    @property
    def memory(self) -> int:
        """Bytes of it."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def synchronize(self) -> None:
        """Return when it has nothing to do any more."""

    def mark(self) -> torch.cuda.Event | None:
        """This moment in its stream."""
        return None

    def between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None) -> float | None:
        """Seconds between two marks that have passed; None where there are none."""
        return None

    def reset_peak(self) -> None:
        """Let the peak of memory count from here."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> tuple[int, int]:
        """Bytes since then: in tensors, and held by the allocator; on the CPU resident ones, and none."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0

    def rest(self) -> None:
        """Give back the memory that the allocator holds and nothing uses."""


class Cuda(Accelerator):
    """A CUDA device."""

    backend = "nccl"

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event | None, end: torch.cuda.Event | None) -> float | None:
        assert start is not None
        assert end is not None
        return float(start.elapsed_time(end)) / 1e3

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def rest(self) -> None:
        torch.cuda.empty_cache()


def opened(device: Device, rank: int) -> Accelerator:
    """The device of this rank."""
    return Cuda(rank) if device == "cuda" else Accelerator()


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
