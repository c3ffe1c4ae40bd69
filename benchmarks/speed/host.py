"""What a step costs the host, without a GPU: `python -m benchmarks.speed.host`, `--blocks 6 24 96`.

A GPU waits for whoever launches its kernels. Here tensors are so small that this is all there is to a step: calls of
Python and of torch's functions, which are the same in every run, and milliseconds, by turns in one process, as ratios
to torch.compile of the whole model in the same round.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common.configurations import BY_NAME, COMPUTE, Configuration, Sizes
from benchmarks.common.models import batch, make_model
from benchmarks.common.peers import build
from benchmarks.common.protocol import Start
from benchmarks.common.turns import compared, print_to, table

WAYS = [BY_NAME[name] for name in (COMPUTE, "ddp-compiled", "fsdp2-3-compiled")]
WAYS += [BY_NAME[f"zcompile-{stage}"] for stage in range(4)]
WAYS += [Configuration(f"zcompile-{stage}, train_step", "zcompile", stage, updates=True) for stage in (0, 3)]
WARMUP = 6
"""Steps that compile, and make the optimizer's state."""


class Way:
    """A model of its own that is trained in one way."""

    def __init__(self, configuration: Configuration, sizes: Sizes, store: Path) -> None:
        self.sizes, self.steps = sizes, itertools.count()
        start = Start(configuration, 1, sizes, 0, store, 60.0, precision="bf16")
        self._step: Callable[[Tensor, Tensor], Tensor] = build(make_model(sizes, 0), start)[0]
        self.train(WARMUP)

    def train(self, steps: int) -> list[float]:
        """Milliseconds of each step."""
        batches = [batch(self.sizes, 0, 0, number) for number in itertools.islice(self.steps, steps)]
        marks = [time.perf_counter()]
        for tokens, targets in batches:
            self._step(tokens, targets)
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]

    def calls(self, steps: int) -> float:
        """Calls of a step, those of functions that are no Python included."""
        with cProfile.Profile() as profile:
            self.train(steps)
        total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        return total / steps


def measure(blocks: int, ways: Sequence[Configuration], rounds: int, steps: int, store: Path) -> Table:
    """A table of all ways with a model of so many blocks."""
    sizes = Sizes(blocks=blocks, width=64, heads=2, vocabulary=256, sequence=16, batch=1)
    built = {one.name: Way(one, sizes, store) for one in ways}
    found: dict[str, list[float]] = {name: [] for name in built}
    for number in range(rounds):
        for name in built if number % 2 == 0 else reversed(built):
            found[name].append(statistics.median(built[name].train(steps)))
    return shown(blocks, found, {name: way.calls(steps) for name, way in built.items()})


def shown(blocks: int, found: Mapping[str, Sequence[float]], calls: Mapping[str, float]) -> Table:
    """The table of what was found, in milliseconds by round, and of calls."""
    result = table(f"{blocks} blocks", "way", "calls a step", "ms a step", "of torch.compile's", "spread")
    for name, milliseconds in found.items():
        result.add_row(name, f"{calls[name]:,.0f}", *compared(milliseconds, found[COMPUTE]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 24, 96], help="of the models (6 24 96)")
    parser.add_argument("--ways", nargs="+", choices=[one.name for one in WAYS], help=f"beside {COMPUTE} (all)")
    parser.add_argument("--rounds", type=int, default=8, help="in which all ways take turns (8)")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (5)")
    parser.add_argument("--output", type=Path, action="append", default=[], help="a file for the tables, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = [one for one in WAYS if options.ways is None or one.name in (COMPUTE, *options.ways)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        print_to(
            options.output, *(measure(blocks, ways, options.rounds, options.steps, store) for blocks in options.blocks)
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
