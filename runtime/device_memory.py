"""How much memory a rank may still take."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Free bytes of `device`: of a GPU what the driver has and what the allocator holds unused, of a host its share.

    Ranks of one host (torchrun's LOCAL_WORLD_SIZE) share its memory, or what the control group leaves of it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_available(), _left_of_group()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available() -> int:
    """What the kernel could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_of_group() -> int:
    """What the control group of this process may still take; all there is where it has no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        folder = Path("/sys/fs/cgroup") / path
        most = (folder / "memory.max").read_text().strip()
        return _ALL if most == "max" else int(most) - int((folder / "memory.current").read_text())
    except (OSError, StopIteration):
        return _ALL


_ALL = 2**63
