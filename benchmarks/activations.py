"""What it takes to keep activations in parts or on a disk: `python -m benchmarks.activations`.

Two ranks train a GPT with checkpoint="unit": data-parallel, with what is saved in memory and on a disk; and
tensor-parallel, with all of it on both ranks, in parts, and in parts on a disk. Printed are medians of the seconds of a
step and of live bytes (`benchmarks/live_bytes.c`) beside the state, at the peak and between forward and backward; also,
of the first disk, the share of the time of writing and reading by which steps did not become longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from benchmarks.live_bytes import LiveBytes, build
from benchmarks.memory import MIB, SIZES
from benchmarks.team import ROOT
from benchmarks.workload import ADAMW, batch, make_model
from zcompile.ir.ops import OffloadStore
from zcompile.runtime.offload.activation_storage import DiskStorage

STEPS = 5


@dataclass(frozen=True)
class Found:
    """What rank 0 tells."""

    seconds: list[float]
    losses: list[float]
    peaks: list[int]
    """Bytes at the peak of each step, less those between two."""
    turns: list[int]
    """Bytes between its forward and its backward, less those between two steps."""
    moved: float
    """Seconds of writing and reading in a step."""


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


def compiled_for(way: Way, folder: str) -> tuple[zcompile.CompiledModule, int]:
    """The model, and this rank among those with batches of their own."""
    model: nn.Module = make_model(SIZES, 0)
    shape = (1, 2) if way.tensor_parallel else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if way.tensor_parallel:
        model = parallelize_module(model, mesh["tp"], PLAN)
    place = f"disk:{folder}" if way.disk else None
    compiled = zcompile.compile(
        model, mesh=mesh["dp"], checkpoint="unit", offload_activations=place, partition_activations=way.parts
    )
    return compiled, mesh["dp"].get_local_rank()


def train(way: Way, folder: str) -> None:
    """On one rank of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compiled, place = compiled_for(way, folder)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    counter, seconds, losses, peaks, turns, moved = LiveBytes(), [], [], [], [], 0.0
    for number in range(STEPS + 2):
        offload = compiled._engine.runtime.offloads.get(OffloadStore())
        disk = offload.storage if offload is not None and isinstance(offload.storage, DiskStorage) else None
        moved = disk.seconds if disk is not None else 0.0
        state, _ = counter.live(), counter.peak()
        before = time.perf_counter()
        loss = compiled(*batch(SIZES, 0, place, number))
        turns.append(counter.live() - state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - before)
        peaks.append(counter.peak() - state)
        moved = (disk.seconds if disk is not None else 0.0) - moved
    if dist.get_rank() == 0:
        print(json.dumps(asdict(Found(seconds[2:], losses, peaks[2:], turns[2:], moved))), flush=True)
    dist.destroy_process_group()


def run(way: Way, folder: Path) -> Found:
    """Train in processes of their own that count their bytes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with tempfile.TemporaryDirectory(prefix="activations") as home:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(build(Path(home)))}
        ended = subprocess.run(
            [*command, "benchmarks.activations", "--way", str(WAYS.index(way)), "--folder", str(folder)],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return Found(**json.loads(ended.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/zcompile_activations"), help="on the disk to measure")
    parser.add_argument("--way", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way is not None:
        train(WAYS[options.way], options.folder)
        return 0
    found = {way: run(way, options.folder) for way in WAYS}
    times = {way: statistics.median(one.seconds) for way, one in found.items()}
    for way, one in found.items():
        peak, turn = (statistics.median(found) / MIB for found in (one.peaks, one.turns))
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
