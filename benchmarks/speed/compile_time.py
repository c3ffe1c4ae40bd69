"""Compile time against depth: `python -m benchmarks.speed.compile_time` prints a table for GPTs of 6 to 96 blocks.

What is measured is the first step (forward and backward) and, for zcompile, `zcompile.compile` itself: cold, with empty
caches, and warm, in a second process with the caches of the first. The ways take turns within a round:

    zcompile    zcompile.compile, stage 3
    whole       torch.compile of the whole model, the measure of the others
    blocks      torch.compile of each block in place, under FSDP2's fully_shard of each block

Each measurement has a process of its own for each rank; ranks share caches and cores. A first step takes as long as the
slowest rank's. With several ranks `whole` is compiled on each, without any communication.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcompile
from benchmarks.common.figures import spread, write_json
from benchmarks.common.links import LOOPBACK
from benchmarks.common.ranks import TeamError, call
from examples.gpt import GPT, GPTConfig

WAYS = ("zcompile", "whole", "blocks")
STATES = ("cold", "warm")
Row = dict[str, Any]


# -- one measurement --------------------------------------------------------------------------------------------------


def measure(way: str, layers: int, width: int) -> Row:
    """Seconds of the first step of a GPT in this process, by part where it is known, and peak memory in MiB."""
    model = GPT(config := GPTConfig(layers=layers, width=width, heads=4, context=64))
    tokens = torch.randint(0, config.vocabulary, (2, config.context))
    dist.barrier()
    started = time.perf_counter()
    compiled = MAKE[way](model)
    compiled(tokens, tokens).backward()
    seconds = time.perf_counter() - started
    parts = of_zcompile(compiled, seconds) if way == "zcompile" else {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "peak": peak, **parts}


def sharded_blocks(model: GPT) -> Callable[..., Any]:
    """What users of FSDP2 do: every block compiled in place and sharded."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile()
        fully_shard(block)
    fully_shard(model)
    return model


MAKE: dict[str, Callable[[GPT], Callable[..., Any]]] = {
    "zcompile": lambda model: zcompile.compile(model, stage=3),
    "whole": torch.compile,
    "blocks": sharded_blocks,
}


def of_zcompile(compiled: Any, seconds: float) -> Row:
    """How a first step divides: compiling regions, passes with their checks, and capture, which is the rest."""
    regions = compiled._engine.runtime.regions
    made = [step.rewritten for step in compiled._engine.runtime.steps if not step.rewritten.is_from_cache]
    passes = sum(entry.seconds + entry.check_seconds for one in made for entry in one.journal.entries)
    return {
        "regions": len(regions.compiled),
        "regions_seconds": regions.seconds,
        "passes_seconds": passes,
        "capture_seconds": seconds - passes - regions.seconds,
    }


# -- many of them -----------------------------------------------------------------------------------------------------


def measured(way: str, layers: int, cache: str, options: argparse.Namespace) -> Row:
    """`measure` in fresh processes; of the ranks, the slowest one's seconds and the largest peak."""
    compilers = str(len(os.sched_getaffinity(0)))  # as many as Inductor takes by itself
    seen = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": compilers}
    ends = [LOOPBACK] * options.ranks
    try:
        rows = call(measure, way, layers, options.width, ends=ends, timeout=options.timeout, environment=seen)
    except TeamError as error:
        return {"failed": str(error)}
    slowest = max(rows, key=lambda row: float(row["seconds"]))
    return {**slowest, "peak": max(row["peak"] for row in rows)}


def one_round(options: argparse.Namespace) -> Iterator[Row]:
    """Every way at every depth, cold and then warm."""
    for layers in options.blocks:
        for way in options.ways:
            with tempfile.TemporaryDirectory() as cache:
                for state in options.states:
                    row = {"blocks": layers, "way": way, "state": state, **measured(way, layers, cache, options)}
                    print(row, file=sys.stderr, flush=True)
                    yield row


# -- the table --------------------------------------------------------------------------------------------------------


def table(rounds: Sequence[Sequence[Row]]) -> str:
    """A line for each depth, state and way: medians, and ratios to `whole` with their spread over rounds."""
    lines = ["| blocks | caches | way | first step, s | to whole | peak, MiB | capture + passes + regions, s |"]
    lines.append("|---" * 7 + "|")
    for index, row in enumerate(rounds[0]):
        label = f"| {row['blocks']} | {row['state']} | {row['way']} |"
        found = [one[index] for one in rounds]
        if failed := [one["failed"] for one in found if "failed" in one]:
            lines.append(f"{label} failed: {failed[0]} | | | |")
            continue
        parts = [
            f"{median(found, f'{part}_seconds'):.1f}" for part in ("capture", "passes", "regions") if "regions" in row
        ]
        cells = [
            f"{median(found, 'seconds'):.1f}",
            to_whole(index, rounds),
            f"{median(found, 'peak'):.0f}",
            " + ".join(parts),
        ]
        lines.append(f"{label} {' | '.join(cells)} |")
    return "\n".join(lines)


def median(rows: Sequence[Row], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def to_whole(index: int, rounds: Sequence[Sequence[Row]]) -> str:
    """Seconds of one row to those of `whole` at its depth and state, round by round; empty where that is missing."""
    ratios = []
    for rows in rounds:
        same = (rows[index]["blocks"], rows[index]["state"], "whole")
        whole = [row for row in rows if (row["blocks"], row["state"], row["way"]) == same and "seconds" in row]
        ratios += [rows[index]["seconds"] / row["seconds"] for row in whole]
    return str(spread(ratios) or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[6, 12, 24, 48, 96])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES, help="warm needs cold before it")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", type=Path, help="a file for every round's rows")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one measurement")
    options = parser.parse_args()
    rounds: list[list[Row]] = []
    for _ in range(options.rounds):
        rounds.append([])
        for row in one_round(options):
            rounds[-1].append(row)
            if options.json:
                write_json(rounds, options.json)
    print(table(rounds))


if __name__ == "__main__":
    main()
