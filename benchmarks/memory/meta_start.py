"""Peak host memory of a start on meta: `python -m benchmarks.memory.meta_start` prints a table for GPT-2 XL, world 64.

One real rank of a fake process group: its shards, units and programs are real, what would come from other ranks is not.
Each row is a process of its own. "own" is what the same run holds of a model of the same depth without width: torch,
the modules, the programs and their compiler. The bound is own + shards + the two largest units; in a training step
gradients and AdamW's state are shards too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import zcompile
from benchmarks.common.configurations import MIB
from benchmarks.common.models import rank_0_of
from benchmarks.common.ranks import call_alone
from examples.gpt import GPT, GPTConfig

TINY = {"width": 32, "heads": 2, "vocabulary": 64}


def resident(field: str) -> int:
    """Bytes of this process: VmHWM is the peak, VmRSS what is held now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of(phase: Any) -> tuple[Any, dict[str, float]]:
    """What `phase()` gives, its peak and its seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    started = time.perf_counter()
    result = phase()
    return result, {"peak": resident("VmHWM"), "held": resident("VmRSS"), "seconds": time.perf_counter() - started}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build on meta, compile, and take one training step as rank 0 of the world."""
    torch.set_num_threads(1)
    with rank_0_of(options.world):
        return started(options)


def started(options: argparse.Namespace) -> dict[str, Any]:
    config = GPTConfig(options.vocabulary, 1024, options.layers, options.heads, options.width)
    with torch.device("meta"):
        model = GPT(config)
        if options.tied:
            model.head.weight = model.tokens.weight
    tokens = torch.randint(0, config.vocabulary, (1, options.tokens))
    torch.manual_seed(0)
    choices = {"prefetch": options.prefetch, "backend": options.backend}
    with tempfile.TemporaryDirectory() as folder:
        weights = zeros(model, Path(folder) / "zeros.safetensors") if options.weights else None
        compiled, start = peak_of(lambda: zcompile.compile(model, weights=weights, **choices))
    units = sorted((unit.nbytes for unit in compiled.layout.units), reverse=True)
    shards = sum(param.shard_numel * param.dtype.itemsize for param in compiled.layout.params)

    def step() -> None:
        optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
        compiled(tokens, tokens).backward()
        optimizer.step()

    phases = {"start": start}
    if not options.start_only:
        phases["first step"] = peak_of(step)[1]
    parameters = sum(param.numel for param in compiled.layout.params)
    return {"parameters": parameters, "shards": shards, "units": units[:2], "phases": phases}


def zeros(model: Any, path: Path) -> Path:
    """A safetensors file of zeros for `model`, which takes no room on the disk."""
    header, end = {}, 0
    for name, value in model.named_parameters():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, path.stat().st_size + end)
    return path


def table(options: argparse.Namespace) -> None:
    """Print the peaks beside the bound."""
    tiny = call_alone(measure, argparse.Namespace(**{**vars(options), **TINY}))
    found = call_alone(measure, options)
    print(
        f"{found['parameters'] / 1e9:.3f} billion parameters{' (tied)' if options.tied else ''}, world {options.world},"
    )
    print(f"stage 3, prefetch {options.prefetch}, {options.backend}, {options.tokens} tokens; MiB\n")
    print("| phase | own | shards | two units | bound | peak | peak / bound | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for phase, row in found["phases"].items():
        own = tiny["phases"][phase]["peak"]
        shards = found["shards"] * (1 if phase == "start" else 4)
        bound = own + shards + sum(found["units"])
        cells = [own, shards, sum(found["units"]), bound, row["peak"]]
        numbers = " | ".join(f"{cell / MIB:.0f}" for cell in cells)
        print(f"| {phase} | {numbers} | {row['peak'] / bound:.3f} | {row['seconds']:.0f} |")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, value in (("layers", 48), ("width", 1600), ("heads", 25), ("vocabulary", 50257)):
        add(f"--{name}", type=int, default=value)
    for name, value in (("world", 64), ("prefetch", 0), ("tokens", 8)):
        add(f"--{name}", type=int, default=value)
    add("--tied", action="store_true", help="let the head be the embedding")
    add("--backend", default="eager")
    add("--weights", action="store_true", help="start from a safetensors file, not from the model's code")
    add("--start-only", action="store_true", help="leave the training step out")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    table(parse())
