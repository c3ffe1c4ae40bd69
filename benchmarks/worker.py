"""One rank of one configuration: `python -m benchmarks.worker FD` trains what the pipe at that descriptor says.

Between two messages it sleeps, so that many configurations can be alive while one of them runs.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.live_bytes import LiveBytes
from benchmarks.peers import build
from benchmarks.protocol import Failed, Ready, Run, Start, Trace, Turn, Weigh, Weighed
from benchmarks.workload import batch, make_model


class Worker:
    """Trains step after step; `step` counts them, and chooses the data."""

    def __init__(self, start: Start) -> None:
        self.before = counter().live() if "LD_PRELOAD" in os.environ else 0
        model = make_model(start.sizes, start.seed)
        self.start, self.step = start, 0
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.train = build(model, start.configuration)

    def ready(self) -> Ready:
        """Train the steps of the warm-up; the peak of memory counts anew from here."""
        found = Ready(self.run(self.start.warmup), self.parameters, versions(self.start.configuration.family))
        Path("/proc/self/clear_refs").write_text("5")
        return found

    def run(self, steps: int) -> Turn:
        """Train `steps` steps one after the other, begun together with the other rank."""
        start = self.start
        batches = [batch(start.sizes, start.seed, start.rank, self.step + index) for index in range(steps)]
        self.step += steps
        losses = []
        dist.barrier()
        cpu, marks = time.process_time(), [time.perf_counter()]
        for tokens, targets in batches:
            losses.append(self.train(tokens, targets))
            marks.append(time.perf_counter())
        cpu = time.process_time() - cpu
        seconds = [after - before for before, after in pairwise(marks)]
        return Turn(seconds, [loss.item() for loss in losses], cpu, peak())

    def trace(self, path: Path) -> Turn:
        """Train one step under torch's profiler, and write the trace of rank 0 for Perfetto."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            turn = self.run(1)
        if self.start.rank == 0:
            profile.export_chrome_trace(str(path))
        return turn

    def weigh(self, steps: int) -> Weighed:
        """Live bytes of the last of some steps."""
        self.run(steps - 1)
        found = counter()
        state = found.live()
        found.peak()
        self.run(1)
        return Weighed(state - self.before, found.peak() - self.before)

    def answer(self, message: Any) -> Turn | Weighed:
        match message:
            case Run(steps):
                return self.run(steps)
            case Trace(path):
                return self.trace(path)
            case Weigh(steps):
                return self.weigh(steps)
        raise TypeError(f"a worker does not know what to do with {message!r}")


def counter() -> LiveBytes:
    """Of this process, once nothing waits to be collected."""
    gc.collect()
    return LiveBytes()


def peak() -> int:
    """Bytes: the largest resident memory of this process since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def versions(family: str) -> dict[str, str]:
    """Of torch, and of the distribution that this family comes from if it is another one."""
    names = {"torch"} | ({family} & {"deepspeed", "zcompile"})
    return {name: importlib.metadata.version(name) for name in names}


@contextmanager
def joined(start: Start) -> Iterator[None]:
    """Join the process group of both ranks, over gloo."""
    deadline = timedelta(seconds=start.timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{start.store}", rank=start.rank, world_size=start.world, timeout=deadline
    )
    yield
    dist.destroy_process_group()


def serve(connection: Connection) -> None:
    """Answer message after message until the other end closes."""
    start = connection.recv()
    torch.set_num_threads(1)
    with joined(start):
        worker = Worker(start)
        connection.send(worker.ready())
        while True:
            connection.send(worker.answer(connection.recv()))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection)
    except EOFError:
        return  # the command has what it wanted, or is gone
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        connection.send(Failed(f"{type(error).__name__}: {lines[0]}"))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
