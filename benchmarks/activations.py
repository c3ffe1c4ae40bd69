"""What it takes to keep activations on a disk: `python -m benchmarks.activations`.

Two ranks train a GPT with checkpoint="unit", in memory and with `offload_activations="disk:FOLDER"`. Printed are the
median seconds of a step, the peak beside the state in live bytes (`benchmarks/live_bytes.c`), and the share of the time
of writing and reading by which steps did not become longer.
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

import zcompile
from benchmarks.live_bytes import LiveBytes, build
from benchmarks.memory import MIB, SIZES
from benchmarks.team import ROOT
from benchmarks.workload import ADAMW, batch, make_model
from zcompile.runtime.stash import DiskStash

STEPS = 5


@dataclass(frozen=True)
class Found:
    """What rank 0 tells."""

    seconds: list[float]
    losses: list[float]
    beside: int
    """Bytes at the peak of the last step, less those between two."""
    moved: float
    """Seconds of writing and reading in a step."""


def train(folder: str | None) -> None:
    """On one rank of two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = None if folder is None else f"disk:{folder}"
    compiled = zcompile.compile(make_model(SIZES, 0), checkpoint="unit", offload_activations=place)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    counter, seconds, losses, state, moved = LiveBytes(), [], [], 0, 0.0
    for number in range(STEPS + 2):
        stash = compiled._engine._session.stash
        moved = stash.seconds if isinstance(stash, DiskStash) else 0.0
        state, _ = counter.live(), counter.peak()
        before = time.perf_counter()
        loss = compiled(*batch(SIZES, 0, dist.get_rank(), number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - before)
        moved = (stash.seconds if isinstance(stash, DiskStash) else 0.0) - moved
    if dist.get_rank() == 0:
        print(json.dumps(asdict(Found(seconds[2:], losses, counter.peak() - state, moved))), flush=True)
    dist.destroy_process_group()


def run(folder: Path | None) -> Found:
    """Train in processes of their own that count their bytes."""
    place = [] if folder is None else ["--folder", str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with tempfile.TemporaryDirectory(prefix="activations") as home:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(build(Path(home)))}
        ended = subprocess.run(
            [*command, "benchmarks.activations", "--train", *place],
            env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return Found(**json.loads(ended.stdout.splitlines()[-1]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (in /tmp)")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(options.folder)
        return 0
    memory, disk = run(None), run(options.folder or Path("/tmp/zcompile_activations"))
    times = [statistics.median(found.seconds) for found in (memory, disk)]
    for name, found, seconds in zip(("in memory", "on disk"), (memory, disk), times, strict=True):
        print(f"{name:10} {seconds:6.2f} s a step, peak beside state {found.beside / MIB:6.1f} MiB")
    hidden = 1 - max(times[1] - times[0], 0) / disk.moved
    same = memory.losses == disk.losses
    print(f"moved in {disk.moved:.2f} s a step, hidden {hidden:.0%}; losses {'equal' if same else 'DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
