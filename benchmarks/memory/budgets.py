"""Budgets of memory kept, and what they cost beside torch's own partitioner: `python -m benchmarks.memory.budgets`.

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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import fx, nn

import zcompile
from benchmarks.common.configurations import LONG, MIB, Sizes, add_sizes, sizes_of
from benchmarks.common.figures import write_json
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import batch, make_model
from benchmarks.common.ranks import LOCAL, call_alone
from benchmarks.common.turns import print_to, table
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


# -- in processes of their own, which count their bytes ---------------------------------------------------------------


def measure(series: str, given: float | None, sizes: Sizes) -> Point:
    """Train three steps and count the last."""
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


def least(sizes: Sizes) -> int:
    """The smallest budget in bytes, as the refusal of one byte says it."""
    try:
        measure("budget", 1, sizes)
    except zcompile.ZcompileError as error:
        return int(str(error).partition("give at least ")[2].split()[0])
    raise RuntimeError("a budget of one byte was kept")


# -- all of them ------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, LONG)
    parser.add_argument("--output", type=Path, default=LOCAL, help="folder of the results (benchmarks/results/local)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(options)

    def measured(series: str, given: float | None) -> Point:
        print(f"{series} {given if given is not None else 'without a budget'}", file=sys.stderr, flush=True)
        return call_alone(measure, series, given, sizes, counted=True)

    free, smallest = measured("budget", None), call_alone(least, sizes, counted=True)
    step = (free.peak - smallest) / (BUDGETS - 1)
    ours = [measured("budget", smallest + int(index * step)) for index in range(BUDGETS)]
    theirs = [measured("torch", share) for share in SHARES]
    equal = [measured("budget", max(point.peak, smallest)) for point in theirs]
    found = {"free": free, "least": smallest, "budget": ours, "torch": theirs, "equal": equal}
    write_json(found, options.output / "budgets.json")
    print_to([options.output / "budgets.txt"], *tables(free, ours, theirs, equal))
    return 0


def tables(free: Point, ours: Sequence[Point], theirs: Sequence[Point], equal: Sequence[Point]) -> tuple[Table, Table]:
    forward = free.flops / 3  # the backward multiplies twice for each multiplication of the forward

    def shown(point: Point) -> tuple[str, str]:
        return f"{point.peak / MIB:.1f}", f"{(point.flops - free.flops) / forward:.1%}"

    columns = ("budget MiB", "peak MiB", "peak / budget", "computed again")
    budgets = table("zcompile, ten budgets", *columns, ruled=False)
    for point in ours:
        peak, again = shown(point)
        budgets.add_row(f"{point.given / MIB:.1f}", peak, f"{point.peak / point.given:.3f}", again)
    beside = ("activation_memory_budget", "peak MiB", "computed again", "zcompile: peak MiB", "computed again")
    pairs = table("beside torch at its peak", *beside, ruled=False)
    for other, own in zip(theirs, equal, strict=True):
        pairs.add_row(f"{other.given:.1f}", *shown(other), *shown(own))
    return budgets, pairs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
