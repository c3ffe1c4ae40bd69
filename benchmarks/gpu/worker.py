"""One rank of one configuration on a device.

It touches no device before the first message says what it is. After each answer the allocator's unused memory goes
back, so that what Inductor tries out while it compiles does not count as the steps' own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from benchmarks.common.accelerators import meet
from benchmarks.common.protocol import Start
from benchmarks.common.worker import Trainer, versions
from benchmarks.gpu.counts import counts, read
from benchmarks.gpu.protocol import Built, Inspection, Turn, Warm
from zcompile import CompiledModule

P = ParamSpec("P")
T = TypeVar("T")


def resting(answer: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate[Worker, P], T]:
    """Give the allocator's unused memory back behind a method."""

    def then_rest(worker: Worker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return answer(worker, *args, **kwargs)
        finally:
            worker.accelerator.rest()

    return then_rest


class Worker(Trainer):
    """One that is timed by the clocks of host and device, and looked into."""

    def __init__(self, start: Start) -> None:
        torch.set_float32_matmul_precision("highest" if start.precision == "fp32" else "high")
        super().__init__(start)
        self.accelerator.rest()

    def ready(self) -> Built:
        machine = self.accelerator
        return Built(self.parameters, machine.name, machine.memory, versions(self.start.configuration.family))

    @resting
    def warm_up(self, steps: int) -> Warm:
        """Train the first steps, each timed by itself: the first one compiles."""
        seconds, losses = [], []
        for data in self.batches(steps):
            start = time.perf_counter()
            losses.append(self.train(*data).clone())
            self.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
        return Warm(seconds, values(losses))

    @resting
    def run(self, steps: int, settle: int = 2, single: int = 2) -> Turn:
        """One turn: settle, then steps that are timed together, then steps that each begin with an idle device."""
        machine = self.accelerator
        gc.collect()
        batches = self.batches(settle + steps + single)
        losses = [self.train(*data).clone() for data in batches[:settle]]
        machine.synchronize()
        machine.reset_peak()
        meet()
        machine.synchronize()
        began, start = time.perf_counter(), machine.mark()
        # A clone: what CUDA graphs give lies in memory that the next step writes.
        losses += [self.train(*data).clone() for data in batches[settle : settle + steps]]
        end = machine.mark()
        machine.synchronize()
        seconds, on_device = time.perf_counter() - began, machine.between(start, end)
        host, whole = [], []
        for data in batches[settle + steps :]:
            began = time.perf_counter()
            losses.append(self.train(*data).clone())
            host.append(time.perf_counter() - began)
            machine.synchronize()
            whole.append(time.perf_counter() - began)
        allocated, reserved = machine.peak()
        return Turn(
            seconds=seconds / steps,
            on_device=None if on_device is None else on_device / steps,
            host=min(host),
            single=min(whole),
            losses=values(losses),
            allocated=allocated,
            reserved=reserved,
        )

    @resting
    def inspect(self, stem: Path) -> Inspection:
        """Zcompile's timelines of a step by each clock, then a step under torch's profiler."""
        found = {}
        if self.compiled is not None:
            clocks = {"host": False} | ({"device": True} if self.start.device == "cuda" else {})
            found = {clock: self.timeline(self.compiled, stem, clock, device) for clock, device in clocks.items()}
        if self.compiled is not None and self.start.rank == 0:
            Path(f"{stem}.explain.txt").write_text(self.compiled.explain())
        path = Path(f"{stem}.profile.rank{self.start.rank}.json.gz")
        self.profile(path)
        seen = counts(read(path))
        if self.start.rank:
            path.unlink()
        return Inspection(seen, found)

    def timeline(self, compiled: CompiledModule, stem: Path, clock: str, device: bool) -> dict[str, float]:
        """Where a step went by `clock`; rank 0 writes it as a page and for Perfetto."""
        compiled.record_timeline(device=device)
        self.train_all(3)
        found = compiled.timeline
        compiled.record_timeline(device=False)
        if self.start.rank == 0:
            Path(f"{stem}.timeline.{clock}.txt").write_text(str(found))
            found.save(f"{stem}.timeline.{clock}.json")
        parts = ("seconds", "compute", "exposed", "optimizer", "overhead", "idle", "overhead_per_line")
        return {part: getattr(found, part) for part in parts} | {"lines": float(len(found.lines))}

    def profile(self, path: Path) -> None:
        """A step under torch's profiler, after one in which the profiler itself warms up."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.start.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        for _ in range(2):
            batches = self.batches(1)
            meet()
            self.accelerator.synchronize()
            with torch.profiler.profile(activities=kinds) as profile:
                for data in batches:
                    self.train(*data)
                self.accelerator.synchronize()
        profile.export_chrome_trace(str(path))

    def train_all(self, steps: int) -> None:
        for data in self.batches(steps):
            self.train(*data)
        self.accelerator.synchronize()


def values(losses: list[Tensor]) -> list[float]:
    return [float(loss) for loss in losses]
