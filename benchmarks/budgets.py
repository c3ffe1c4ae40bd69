"""Budgets of memory kept, and what they cost beside torch's own partitioner: `python -m benchmarks.budgets`.

One process, no communication. Three series of training steps of the same model:

    budget    zcompile with ten budgets from the least that is possible to what a step takes without any
    torch     torch.compile under torch's `activation_memory_budget` of 0 to 1
    equal     zcompile with the peak that torch was found to take as its budget

Each step's peak is counted at the allocator, beside what is alive between steps, and FLOPs from the graphs that are
compiled: what is over those of a step without checkpoints is computed again. Writes budgets.txt and budgets.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import zcompile
from benchmarks.live_bytes import LiveBytes, build
from benchmarks.memory import MIB, OUTPUT, SIZES
from benchmarks.protocol import Sizes
from benchmarks.team import ROOT
from benchmarks.workload import batch, make_model
from zcompile.cost.roofline import FORMULAS, flops_of
from zcompile.torch_internals.aot_autograd import partitioner_budget
from zcompile.torch_internals.pytree import tree_map_only

BUDGETS = 10
SHARES = tuple(share / 10 for share in range(11))


@dataclass(frozen=True)
class Point:
    """One training step."""

    given: float
    """The budget: bytes for zcompile, a share for torch."""
    peak: int
    """Bytes, counted."""
    flops: int
    """Of the whole step."""


# -- one measurement, in a process of its own -------------------------------------------------------------------------


def measure(series: str, given: float | None, sizes: Sizes) -> Point:
    """Train three steps and count the last."""
    torch.set_num_threads(1)
    model = make_model(sizes, 0)
    flops: list[int] = []
    if series == "torch":
        with partitioner_budget(given or 0.0):
            train = torch.compile(model, options={"post_grad_custom_pre_pass": lambda graph: flops.append(_of(graph))})
            peak = weigh(model, train, sizes)
    else:
        compiled = zcompile.compile(model, checkpoint=None if given is None else int(given))
        peak = weigh(compiled, compiled, sizes)
        flops = [flops_of(node, p.regions) for p in compiled.programs[:1] for node in p.graph.nodes]
    return Point(given or 0.0, peak, sum(flops))


def weigh(model: nn.Module, train: Callable[..., Any], sizes: Sizes) -> int:
    """Bytes of the third step beside what is alive before it."""
    counter = LiveBytes()
    for step in range(3):
        inputs = batch(sizes, 0, 0, step)
        gc.collect()
        before, _ = counter.live(), counter.peak()
        train(*inputs).backward()
        result = counter.peak() - before
        model.zero_grad()
    return result


def _of(graph: fx.Graph) -> int:
    """FLOPs of an ATen graph."""
    total = 0
    for node in graph.nodes:
        formula = FORMULAS.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            shapes = [_shape(value) for value in (node.args, node.kwargs, node.meta.get("val"))]
            total += int(formula(*shapes[0], **shapes[1], out_val=shapes[2]))
    return total


def _shape(value: Any) -> Any:
    values = fx.map_arg(value, lambda node: node.meta.get("val"))
    return tree_map_only(torch.Tensor, lambda tensor: tuple(tensor.shape), values)


# -- all of them ------------------------------------------------------------------------------------------------------


class Measurer:
    """Measures in processes that count their bytes."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.library, self.sizes = build(folder), sizes

    def __call__(self, series: str, given: float | None) -> Point:
        """One point.

        Raises:
            RuntimeError: the process failed; the text is its last line.
        """
        print(f"{series} {given if given is not None else 'without a budget'}", file=sys.stderr, flush=True)
        asked = json.dumps({"series": series, "given": given, "sizes": asdict(self.sizes)})
        environment = {**os.environ, "LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.budgets", "--measure", asked]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(ended.stderr.strip())
        return Point(**json.loads(ended.stdout.splitlines()[-1]))

    def least(self) -> int:
        """The smallest budget in bytes, as the refusal of one byte says it.

        Raises:
            RuntimeError: there was another error.
        """
        try:
            self("budget", 1)
        except RuntimeError as error:
            if "give at least " in (text := str(error)):
                return int(text.partition("give at least ")[2].split()[0])
            raise
        raise RuntimeError("a budget of one byte was kept")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in fields(Sizes):
        default = getattr(SIZES, size.name)
        parser.add_argument(f"--{size.name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the results (benchmarks/results/local)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.measure:
        asked = json.loads(options.measure)
        point = measure(asked["series"], asked["given"], Sizes(**asked["sizes"]))
        print(json.dumps(asdict(point)))
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(**{size.name: getattr(options, size.name) for size in fields(Sizes)})
    with tempfile.TemporaryDirectory(prefix="budgets") as folder:
        measured = Measurer(Path(folder), sizes)
        free, least = measured("budget", None), measured.least()
        step = (free.peak - least) / (BUDGETS - 1)
        ours = [measured("budget", least + int(index * step)) for index in range(BUDGETS)]
        theirs = [measured("torch", share) for share in SHARES]
        equal = [measured("budget", max(point.peak, least)) for point in theirs]
    found = {"free": free, "least": least, "budget": ours, "torch": theirs, "equal": equal}
    (options.output / "budgets.json").write_text(json.dumps(found, default=asdict, indent=1) + "\n")
    with (options.output / "budgets.txt").open("w") as file:
        for out in (file, sys.stdout):
            _print(Console(file=out, width=110), free, ours, theirs, equal)
    return 0


def _print(
    console: Console, free: Point, ours: Sequence[Point], theirs: Sequence[Point], equal: Sequence[Point]
) -> None:
    forward = free.flops / 3  # the backward multiplies twice for each multiplication of the forward
    budgets = Table(title="zcompile, ten budgets", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("budget MiB", "peak MiB", "peak / budget", "computed again"):
        budgets.add_column(column, justify="right")
    for point in ours:
        row = (f"{point.given / MIB:.1f}", f"{point.peak / MIB:.1f}", f"{point.peak / point.given:.3f}")
        budgets.add_row(*row, f"{(point.flops - free.flops) / forward:.1%}")
    console.print(budgets)
    pairs = Table(title="beside torch at its peak", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("activation_memory_budget", "peak MiB", "computed again", "zcompile: peak MiB", "computed again"):
        pairs.add_column(column, justify="right")
    for other, own in zip(theirs, equal, strict=True):
        figures = [text for p in (other, own)
                   for text in (f"{p.peak / MIB:.1f}", f"{(p.flops - free.flops) / forward:.1%}")]  # fmt: skip
        pairs.add_row(f"{other.given:.1f}", *figures)
    console.print(pairs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
