"""What it takes to keep activations in parts or on a disk: `python -m benchmarks.memory.activations`.

Two ranks train a GPT with checkpoint="unit": data-parallel, with what is saved in memory and on a disk; and
tensor-parallel, with all of it on both ranks, in parts, and in parts on a disk. Printed are medians of the seconds of a
step and of live bytes (`benchmarks.common.live_bytes`) beside the state, at the peak and between forward and
backward; also, of the first disk, the share of the time of writing and reading by which steps did not become longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from benchmarks.common.configurations import LONG, MIB
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import ADAMW, batch, make_model
from benchmarks.common.ranks import call
from zcompile.ir.ops import OffloadStore
from zcompile.runtime.offload.activation_storage import DiskStorage

STEPS, WARMUP = 5, 2


@dataclass
class Found:
    """What a rank tells, of each step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Bytes at the peak, less those between two steps."""
    turns: list[int] = field(default_factory=list)
    """Bytes between its forward and its backward, less those between two steps."""
    moved: float = 0.0
    """Seconds of writing and reading in the last one."""


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    tensor_parallel: bool = False
    parts: bool = False
    disk: bool = False


WAYS = (
    Way("data-parallel"),
    Way("data-parallel, on disk", disk=True),
    Way("tensor-parallel", tensor_parallel=True),
    Way("tensor-parallel, in parts", tensor_parallel=True, parts=True),
    Way("tensor-parallel, in parts on disk", tensor_parallel=True, parts=True, disk=True),
)
PLAN = {
    "blocks.*.mlp.widen": ColwiseParallel(),
    "blocks.*.mlp.out": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def compiled_for(way: Way, folder: Path) -> tuple[zcompile.CompiledModule, int]:
    """The model, and this rank among those with batches of their own."""
    model: nn.Module = make_model(LONG, 0)
    shape = (1, 2) if way.tensor_parallel else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if way.tensor_parallel:
        model = parallelize_module(model, mesh["tp"], PLAN)
    place = f"disk:{folder}" if way.disk else None
    compiled = zcompile.compile(
        model, mesh=mesh["dp"], checkpoint="unit", offload_activations=place, partition_activations=way.parts
    )
    return compiled, mesh["dp"].get_local_rank()


def train(way: Way, folder: Path) -> Found:
    """On one rank of two."""
    compiled, place = compiled_for(way, folder)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    counter, found = LiveBytes(), Found()
    for number in range(WARMUP + STEPS):
        offload = compiled._engine.runtime.offloads.get(OffloadStore())
        disk = offload.storage if offload is not None and isinstance(offload.storage, DiskStorage) else None
        moved = disk.seconds if disk is not None else 0.0
        state, _ = counter.live(), counter.peak()
        before = time.perf_counter()
        loss = compiled(*batch(LONG, 0, place, number))
        turn = counter.live() - state
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        if number >= WARMUP:
            found.seconds.append(time.perf_counter() - before)
            found.peaks.append(counter.peak() - state)
            found.turns.append(turn)
        found.moved = (disk.seconds if disk is not None else 0.0) - moved
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/zcompile_activations"), help="on the disk to measure")
    options = parser.parse_args(arguments)
    found = {way: call(train, way, options.folder, counted=True)[0] for way in WAYS}
    times = {way: statistics.median(one.seconds) for way, one in found.items()}
    for way, one in found.items():
        peak, turn = (statistics.median(figures) / MIB for figures in (one.peaks, one.turns))
        beside = f"peak {peak:6.1f} MiB, between forward and backward {turn:6.1f} MiB"
        print(f"{way.name:34} {times[way]:6.2f} s a step, {beside}")
    memory, disk, *tensor_parallel = WAYS
    hidden = 1 - max(times[disk] - times[memory], 0) / found[disk].moved
    kinds = ((memory, disk), tensor_parallel)
    same = all(found[way].losses == found[first].losses for first, *others in kinds for way in others)
    print(f"moved in {found[disk].moved:.2f} s a step, hidden {hidden:.0%}; losses {'equal' if same else 'DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
