"""What the planner foretells beside what is measured: `python -m benchmarks.speed.predictions`.

Time: on each link two ranks first measure the machine and the link (`zcompile.tools.doctor`), then train the GPT of
`make bench` in every stage; the step is that of the loop, with AdamW. Memory: the bytes of one more run that counts
what is allocated, beside shards and optimizer state. Predictions are those of `zcompile.plan`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zcompile
from benchmarks.common.configurations import Sizes
from benchmarks.common.figures import quartiles
from benchmarks.common.links import LINKS, LinkError, opened
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import ADAMW, batch, make_model
from benchmarks.common.ranks import call
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import MemoryKind
from zcompile.tools.doctor import profile_of_ranks

SIZES = Sizes()
STAGES = (0, 1, 2, 3)
CHECKPOINTS = (None, "unit")
STEPS = 15
WARMUP = 4


@dataclass(frozen=True)
class Found:
    """A figure of one configuration, foretold and measured: seconds of a step, or bytes."""

    stage: int
    checkpoint: str | None
    predicted: float
    measured: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.measured)


def forecast(stage: int, checkpoint: str | None, hardware: Hardware) -> zcompile.Forecast:
    """What `zcompile plan` says, of two ranks."""
    model, given = make_model(SIZES, 0), batch(SIZES, 0, 0, 0)
    plan = zcompile.plan(
        model,
        given,
        worlds=[2],
        hardware=hardware,
        stages=[stage],
        prefetches=[2],
        checkpoints=[checkpoint],
        dtypes=[None],
    )
    return plan.forecasts[0]


def trained(stage: int, checkpoint: str | None, counter: LiveBytes | None) -> list[float]:
    """Seconds of each step; with a counter, the most bytes of each beside shards and optimizer state."""
    compiled = zcompile.compile(make_model(SIZES, 0), stage=stage, checkpoint=checkpoint)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    found = []
    for step in range(WARMUP + STEPS):
        given = batch(SIZES, 0, dist.get_rank(), step)
        dist.barrier()
        state = counter.live() if counter else 0
        if counter:
            counter.peak()
        before = time.perf_counter()
        compiled(*given).backward()
        peak = counter.peak() if counter else 0
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(peak - state) if counter else time.perf_counter() - before)
    return found[WARMUP:]


def measure(counts: bool) -> list[Found]:
    """On one of two ranks: all configurations, one after the other."""
    hardware = zcompile.load_profile("h100") if counts else profile_of_ranks("this machine and link")
    counter = LiveBytes() if counts else None
    result = []
    for stage in STAGES:
        for checkpoint in CHECKPOINTS if counts else CHECKPOINTS[:1]:
            told = forecast(stage, checkpoint, hardware)
            # What stages 1 and 2 keep full is there before a step, whose counting begins behind it.
            kept = told.held[MemoryKind.FULL] if stage in (1, 2) else 0
            predicted = float(sum(told.held.values()) - kept) if counts else told.seconds
            result.append(Found(stage, checkpoint, predicted, trained(stage, checkpoint, counter)))
    return result


def table(title: str, found: Sequence[Found], unit: float, name: str) -> Table:
    """Predicted beside measured, the quartiles of the measured in brackets."""
    result = Table("stage", "checkpoint", f"predicted {name}", f"measured {name}", "predicted / measured", title=title)
    for one in found:
        measured = f"{quartiles(one.measured).times(1 / unit):.3f}"[:-1] + f", at most {max(one.measured) / unit:.3f})"
        ratio = f"{one.predicted / one.median:.3f}"
        result.add_row(str(one.stage), one.checkpoint or "", f"{one.predicted / unit:.3f}", measured, ratio)
    return result


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=["loopback", "1gbit"], choices=list(LINKS))
    options = parser.parse_args(arguments)
    console = Console(width=110)
    for name in options.links:
        try:
            with opened(LINKS[name]) as ends:
                found = call(measure, False, ends=ends)[0]
                console.print(table(f"a step over {name}", found, 1.0, "s"))
        except LinkError as error:
            console.print(f"{name}: {error}")
    found = call(measure, True, counted=True)[0]
    console.print(table("peak beside shards and optimizer state", found, 1e6, "MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
