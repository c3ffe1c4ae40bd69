"""What the planner foretells beside what is measured: `python -m benchmarks.predictions`, as root for a limited link.

Time: on each link two ranks first measure the machine and the link (`zcompile.tools.doctor`), then train the GPT of
`make bench` in every stage; the step is that of the loop, with AdamW. Memory: the bytes of one more run that counts
what is allocated, beside shards and optimizer state. Predictions are those of `zcompile.plan`.
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
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zcompile
from benchmarks.links import LINKS, End, LinkError, opened
from benchmarks.live_bytes import LiveBytes, build
from benchmarks.protocol import Sizes
from benchmarks.team import ROOT, on_two_ends
from benchmarks.workload import ADAMW, batch, make_model
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import MemoryKind
from zcompile.tools.doctor import profile_of_ranks

SIZES = Sizes()
STAGES = (0, 1, 2, 3)
CHECKPOINTS = (None, "unit")
STEPS = 15
WARMUP = 4
PATIENCE = timedelta(minutes=5)


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


def rank(place: int, store: str, *, counts: bool) -> list[Found]:
    """One of two ranks: all configurations, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=place, world_size=2, timeout=PATIENCE)
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
    dist.destroy_process_group()
    return result


def run(ends: tuple[End, End], *, counts: bool) -> list[Found]:
    """Both ranks in processes of their own; what the first has found."""
    with tempfile.TemporaryDirectory(prefix="predictions") as home:
        preload = {"LD_PRELOAD": str(build(Path(home)))} if counts else {}
        processes = [
            subprocess.Popen(
                [
                    *end.prefix,
                    sys.executable,
                    "-m",
                    "benchmarks.predictions",
                    "--rank",
                    str(place),
                    "--store",
                    f"{home}/store",
                ]
                + (["--counts"] if counts else []),
                cwd=ROOT,
                env={**on_two_ends(os.environ, place, end), **preload},
                stdout=subprocess.PIPE,
                text=True,
            )
            for place, end in enumerate(ends)
        ]
        answers = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a rank has failed: see above")
    return [Found(**one) for one in json.loads(answers[0].splitlines()[-1])]


def table(title: str, found: Sequence[Found], unit: float, name: str) -> Table:
    """Predicted beside measured, the quartiles of the measured in brackets."""
    result = Table("stage", "checkpoint", f"predicted {name}", f"measured {name}", "predicted / measured", title=title)
    for one in found:
        low, _, high = statistics.quantiles(one.measured, n=4)
        measured = (
            f"{one.median / unit:.3f} ({low / unit:.3f} to {high / unit:.3f}, at most {max(one.measured) / unit:.3f})"
        )
        ratio = f"{one.predicted / one.median:.3f}"
        result.add_row(str(one.stage), one.checkpoint or "", f"{one.predicted / unit:.3f}", measured, ratio)
    return result


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=["loopback", "1gbit"], choices=list(LINKS))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        print(json.dumps([asdict(one) for one in rank(options.rank, options.store, counts=options.counts)]), flush=True)
        return 0
    console = Console(width=110)
    for name in options.links:
        try:
            with opened(LINKS[name]) as ends:
                console.print(table(f"a step over {name}", run(ends, counts=False), 1.0, "s"))
        except LinkError as error:
            console.print(f"{name}: {error}")
    with opened(LINKS["loopback"]) as ends:
        console.print(table("peak beside shards and optimizer state", run(ends, counts=True), 1e6, "MB"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
