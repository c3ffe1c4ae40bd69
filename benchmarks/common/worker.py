"""One rank of one configuration, which trains what it is told.

Between two messages it sleeps, so that many configurations can be alive while one of them runs.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.accelerators import Accelerator, opened
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import batch, make_model
from benchmarks.common.peers import build
from benchmarks.common.protocol import Ready, Start, Turn, Weighed


class Trainer:
    """Trains step after step; `step` counts them, and chooses the data."""

    def __init__(self, start: Start) -> None:
        self.start, self.step = replace(start, rank=int(os.environ["RANK"])), 0
        self.accelerator = opened(start.device, self.start.rank)
        join(self.start, self.accelerator)
        with self.accelerator.device:
            model = make_model(start.sizes, start.seed)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.train, self.compiled = build(model, self.start)

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """The data of the next steps, on the device."""
        start, first = self.start, self.step
        self.step += steps
        given = [batch(start.sizes, start.seed, start.rank, first + index) for index in range(steps)]
        device = self.accelerator.device
        return [(tokens.to(device), targets.to(device)) for tokens, targets in given]


class Worker(Trainer):
    """One that is timed step by step, and whose process is weighed."""

    def __init__(self, start: Start) -> None:
        self.before = counter().live() if "LD_PRELOAD" in os.environ else 0
        super().__init__(start)

    def ready(self) -> Ready:
        """Train the steps of the warm-up; the peak of memory counts anew from here."""
        result = Ready(self.run(self.start.warmup), self.parameters, versions(self.start.configuration.family))
        self.accelerator.reset_peak()
        return result

    def run(self, steps: int) -> Turn:
        """Train `steps` steps one after the other, begun together with the other rank."""
        batches, losses = self.batches(steps), []
        dist.barrier()
        cpu, marks = time.process_time(), [time.perf_counter()]
        for tokens, targets in batches:
            losses.append(self.train(tokens, targets))
            marks.append(time.perf_counter())
        cpu = time.process_time() - cpu
        seconds = [after - before for before, after in pairwise(marks)]
        return Turn(seconds, [loss.item() for loss in losses], cpu, self.accelerator.peak()[0])

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


def counter() -> LiveBytes:
    """Of this process, once nothing waits to be collected."""
    gc.collect()
    return LiveBytes()


def versions(family: str) -> dict[str, str]:
    """Of torch, and of the distribution that this family comes from if it is another one."""
    names = {"torch"} | ({family} & {"deepspeed", "zcompile"})
    return {name: importlib.metadata.version(name) for name in names}


def join(start: Start, accelerator: Accelerator) -> None:
    """Join the process group of all ranks. A world of one makes its own where it wants one."""
    if start.world > 1 or (start.configuration.communicates and not start.configuration.ours):
        dist.init_process_group(
            accelerator.backend,
            init_method=f"file://{start.store}",
            rank=start.rank,
            world_size=start.world,
            timeout=timedelta(seconds=start.timeout),
            device_id=accelerator.device if start.device == "cuda" else None,
        )
