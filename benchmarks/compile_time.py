"""Compile time against depth: `python benchmarks/compile_time.py` prints a table for GPTs of 6 to 96 equal blocks.

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
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcompile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

WAYS = ("zcompile", "whole", "blocks")
STATES = ("cold", "warm")
Row = dict[str, Any]


# -- one measurement --------------------------------------------------------------------------------------------------


def measure(way: str, layers: int, width: int) -> Row:
    """Seconds of the first step of a GPT in this process, by part where it is known, and peak memory in MiB."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=os.environ["MEET"], rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    model = GPT(config := GPTConfig(layers=layers, width=width, heads=4, context=64))
    tokens = torch.randint(0, config.vocabulary, (2, config.context))
    dist.barrier()
    started = time.perf_counter()
    compiled = MAKE[way](model)
    compiled(tokens, tokens).backward()
    seconds = time.perf_counter() - started
    parts = of_zcompile(compiled, seconds) if way == "zcompile" else {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    dist.barrier()
    dist.destroy_process_group()
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [start(way, layers, cache, rank, folder, options) for rank in range(options.ranks)]
        for rank in wait(ranks, options.timeout):
            said = (folder / f"{rank}.err").read_text().strip().splitlines()
            return {"failed": f"rank {rank} ended with {ranks[rank].returncode}: {said[-1] if said else 'no word'}"}
        rows: list[Row] = [json.loads((folder / f"{rank}.out").read_text()) for rank in range(options.ranks)]
    slowest = max(rows, key=lambda row: float(row["seconds"]))
    return {**slowest, "peak": max(row["peak"] for row in rows)}


def wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Wait for all ranks; one that fails, or the deadline, ends the others. Those that failed, the first first."""
    deadline = time.monotonic() + seconds
    failed: list[int] = []
    while any(process.poll() is None for process in ranks) and not failed and time.monotonic() < deadline:
        time.sleep(0.1)
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    for process in ranks:
        process.kill()
        process.wait()
    return failed + [rank for rank, process in enumerate(ranks) if process.returncode and rank not in failed]


def start(
    way: str, layers: int, cache: str, rank: int, folder: Path, options: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """One rank of a measurement; what it prints goes to files in `folder`."""
    command = [sys.executable, __file__, "--one", way, "--blocks", str(layers), "--width", str(options.width)]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "MEET": f"file://{folder}/store",
    }
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err)


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
            ratio(index, rounds),
            f"{median(found, 'peak'):.0f}",
            " + ".join(parts),
        ]
        lines.append(f"{label} {' | '.join(cells)} |")
    return "\n".join(lines)


def median(rows: Sequence[Row], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows)


def ratio(index: int, rounds: Sequence[Sequence[Row]]) -> str:
    """Seconds of one row to those of `whole` at its depth and state, round by round; empty where that is missing."""
    ratios = []
    for rows in rounds:
        same = (rows[index]["blocks"], rows[index]["state"], "whole")
        whole = [row for row in rows if (row["blocks"], row["state"], row["way"]) == same and "seconds" in row]
        ratios += [rows[index]["seconds"] / row["seconds"] for row in whole]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


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
    parser.add_argument("--one", choices=WAYS, help="measure in this process, which is a rank, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.blocks[0], options.width)))
        return
    rounds: list[list[Row]] = []
    for _ in range(options.rounds):
        rounds.append([])
        for row in one_round(options):
            rounds[-1].append(row)
            if options.json:
                options.json.write_text(json.dumps(rounds, indent=1))
    print(table(rounds))


if __name__ == "__main__":
    main()
