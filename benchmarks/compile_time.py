"""Compile time against depth: `python benchmarks/compile_time.py` prints a table for GPTs of 6 to 48 equal blocks.

Every row is measured in a process of its own with empty caches, after a tiny compilation that pays for imports.
"capture" is Dynamo's and AOTAutograd's tracing; "passes" the rewriting with its checks; "regions" the compilation of
regions by Inductor.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def measure(layers: int, width: int, backend: str) -> dict[str, float]:
    """Seconds of one first step (forward and backward) of a GPT, by part, and its regions."""
    import torch

    import zcompile
    from examples.gpt import GPT, GPTConfig
    from zcompile.ops import Call

    torch.set_num_threads(1)
    first_step(zcompile.compile(torch.nn.Sequential(torch.nn.Linear(4, 4)), backend=backend), torch.randn(2, 4))
    config = GPTConfig(layers=layers, width=width, heads=4, context=64)
    compiled = zcompile.compile(GPT(config), backend=backend)
    tokens = torch.randint(0, config.vocabulary, (2, config.context))
    started = time.perf_counter()
    first_step(compiled, tokens, tokens)
    total = time.perf_counter() - started
    passes = sum(entry.seconds + entry.check_seconds for entry in compiled.journals[0].entries)
    regions = compiled._engine.regions
    return {
        "calls": len(compiled._engine.steps[0].program.nodes(Call)),
        "regions": len(regions.compiled),
        "regions s": regions.seconds,
        "passes s": passes,
        "capture s": total - passes - regions.seconds,
    }


def first_step(compiled: Callable[..., Any], *batch: Any) -> None:
    """One forward and backward."""
    compiled(*batch).mean().backward()


def measured(layers: int, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own, with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--one", str(layers), "--width", str(options.width)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [*command, "--backend", options.backend], env=environment, capture_output=True, text=True, check=True
        )
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--one", type=int, help="measure one depth and print it as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.width, options.backend)))
        return
    rounds = [{layers: measured(layers, options) for layers in options.layers} for _ in range(options.rounds)]
    columns = list(rounds[0][options.layers[0]])
    print("| blocks | " + " | ".join(columns) + " | regions + passes, to the first row |")
    print("|---" * (len(columns) + 2) + "|")
    for layers in options.layers:
        medians = {column: statistics.median(found[layers][column] for found in rounds) for column in columns}
        ratios = [ours(found[layers]) / ours(found[options.layers[0]]) for found in rounds]
        cells = [f"{medians[column]:.3g}" for column in columns]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {layers} | " + " | ".join(cells) + f" | {spread} |")


def ours(row: dict[str, float]) -> float:
    """Compile time, capture aside."""
    return row["regions s"] + row["passes s"]


if __name__ == "__main__":
    main()
