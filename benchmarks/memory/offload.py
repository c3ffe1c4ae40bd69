"""Optimizer state on disk under a limit of memory: `python -m benchmarks.memory.offload`, as root.

Two ranks train a GPT with AdamW and amsgrad (12 bytes of state a parameter) by `train_step`: in memory without a
limit; from a file within a limit smaller than the state; and the same without reading ahead. The limit is a control
group's and counts all that the ranks hold, cached pages of the file too. Prints seconds of a step, and the share of the
transfer that is hidden: of what it costs where nothing is read ahead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcompile
from benchmarks.common.configurations import MIB, Sizes
from benchmarks.common.links import LOOPBACK, End
from benchmarks.common.models import batch, make_model
from benchmarks.common.ranks import call
from zcompile.runtime.offload import optimizer_states as offload
from zcompile.runtime.offload.optimizer_states import StateFile

SIZES = Sizes(blocks=24, width=1024, heads=8, vocabulary=1024, sequence=64, batch=1)
STEPS = 4
GROUPS = (Path("/sys/fs/cgroup/memory/zcompile"), Path("/sys/fs/cgroup/zcompile"))
"""Where a control group is made: version 1, version 2."""


@dataclass(frozen=True)
class Found:
    """What rank 0 tells."""

    parameters: int
    losses: list[float]
    seconds: list[float]
    """Of each step but the first."""


def train(folder: Path | None, ahead: int) -> Found:
    """On one rank of two."""
    with torch.device("meta"):  # its values come unit by unit
        model = make_model(SIZES, 0)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, amsgrad=True)
    place = None if folder is None else f"disk:{folder}"
    step: Any = zcompile.train_step(model, None, optimizer, backend="eager", offload_optimizer=place)
    if isinstance(step.states, StateFile):
        step.states.ahead = ahead
    losses, seconds = [], []
    for number in range(STEPS + 1):
        before = time.perf_counter()
        losses.append(step(*batch(SIZES, 0, dist.get_rank(), number)).item())
        seconds.append(time.perf_counter() - before)
    return Found(count, losses, seconds[1:])


@contextmanager
def limited(nbytes: int | None) -> Iterator[End]:
    """Where ranks live in a control group of at most `nbytes` bytes of memory; None for no limit.

    Raises:
        PermissionError: Only root makes one.
    """
    if nbytes is None:
        yield LOOPBACK
        return
    group, limit = (GROUPS[0], "memory.limit_in_bytes") if GROUPS[0].parent.exists() else (GROUPS[1], "memory.max")
    group.mkdir(exist_ok=True)
    try:
        (group / limit).write_text(str(nbytes))
        yield replace(LOOPBACK, prefix=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"))
    finally:
        group.rmdir()


def run(folder: Path | None, ahead: int, limit: int | None) -> Found:
    """Train in processes of their own."""
    # By itself glibc keeps twice as much as is alive, in pieces between what lives on.
    environment = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    with limited(limit) as end:
        return call(train, folder, ahead, ends=(end, end), environment=environment)[0]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/zcompile_offload"), help="on the disk to measure")
    parser.add_argument("--limit", type=int, default=2800, help="MiB for both ranks together (2800)")
    options = parser.parse_args(arguments)
    memory = run(None, 0, None)
    disk, behind = (run(options.folder, ahead, options.limit * MIB) for ahead in (offload.AHEAD, 0))
    state = f"{12 * memory.parameters / MIB:.0f} MiB of state"
    print(f"{memory.parameters / 1e6:.0f} million parameters, {state}, limit {options.limit} MiB")
    times = [statistics.median(found.seconds) for found in (memory, disk, behind)]
    for name, seconds in zip(("in memory, no limit", "on disk", "on disk, not read ahead"), times, strict=True):
        print(f"{name:24} {seconds:6.2f} s a step")
    same = memory.losses == disk.losses == behind.losses
    print(f"hidden: {1 - (times[1] - times[0]) / (times[2] - times[0]):.0%}; losses {'equal' if same else 'DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
