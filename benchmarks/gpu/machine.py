"""The GPUs of this machine, their free memory, and the versions that figures depend on.

They are asked in a process of its own, as one that has asked a GPU for its free memory holds some of it as long as it
lives.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from benchmarks.common.ranks import call_alone

FREE = 0.75  # the share of a GPU's memory that must be free: beside other processes, figures are not its own
GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One GPU; sizes are in bytes."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class Machine:
    """What torch finds to run on."""

    torch: str
    cuda: str | None = None
    """The version that torch is built with; None for a build without."""
    driver: str | None = None
    nccl: str | None = None
    cards: tuple[Card, ...] = ()
    error: str = ""
    """Why there are no cards, where CUDA itself gives a reason."""


def inspect() -> Machine:
    """What there is, asked in this process."""
    import torch

    versions = torch.__version__, torch.version.cuda, driver()
    try:
        if not torch.cuda.is_available():
            return Machine(*versions)
        cards = [card(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a GPU that only one process may use, say, and another one has it
        return Machine(*versions, error=str(error).splitlines()[0])
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return Machine(*versions, nccl, tuple(cards))


def card(index: int) -> Card:
    import torch

    free, memory = torch.cuda.mem_get_info(index)
    return Card(torch.cuda.get_device_name(index), memory, free)


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout.split("\n")[0].strip() or None if ended.returncode == 0 else None


def machine() -> Machine:
    """What there is, asked in a process that has ended when this returns."""
    return call_alone(inspect, device="cuda")


def refusal(found: Machine) -> str | None:
    """Why nothing can be measured here, in a sentence; None where it can be."""
    if not found.cards:
        unusable = f"cannot use its device: {found.error}" if found.error else "finds no device that it can use"
        return f"no GPU: torch {found.torch} {unusable if found.cuda else 'is built without CUDA'}"
    for index, one in enumerate(found.cards):
        if one.free < FREE * one.memory:
            taken = (one.memory - one.free) / GIB
            return (
                f"GPU {index} ({one.name}) is busy: {taken:.1f} of its {one.memory / GIB:.1f} GiB are taken; end the "
                "processes that nvidia-smi lists, or choose other GPUs by CUDA_VISIBLE_DEVICES"
            )
    return None
