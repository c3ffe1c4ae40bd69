"""Memory that the allocator holds over steps of many shapes, with arenas and without: `python -m benchmarks.arenas`.

Two ranks train a GPT with checkpoint="unit" on sequences of a new length at each step. Printed is what the allocator
has taken from the system and not given back, fragments included: glibc's heap and mappings, on a GPU what torch has
reserved. The last line is of arenas over the most bytes alive at once in them, for several worlds, sizes and depths.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zcompile
from benchmarks.memory import MIB
from benchmarks.protocol import Sizes
from benchmarks.team import ROOT
from benchmarks.workload import ADAMW, make_model
from zcompile.cost.memory import arena_bytes
from zcompile.ir.arena_places import placeable
from zcompile.ir.packing import most_alive

SIZES = Sizes(blocks=6, width=256, heads=4, vocabulary=4096, sequence=256, batch=2)
SHOWN = (1, 25, 50, 100, 150, 200)


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def reserved() -> int:
    """Bytes that the allocator has taken from the system, or from the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.arena + found.hblkhd)


def measure(*, arenas: bool, steps: int) -> None:
    """On one rank of two: what is reserved after some of the steps."""
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    compiled = zcompile.compile(make_model(SIZES, 0).to(device), checkpoint="unit", arenas=arenas)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    lengths, found = random.Random(0), dict[int, float]()
    for step in range(1, steps + 1):
        tokens = torch.randint(0, SIZES.vocabulary, (SIZES.batch, lengths.randint(16, SIZES.sequence)), device=device)
        compiled(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in SHOWN:
            found[step] = reserved() / MIB
    if dist.get_rank() == 0:
        text = "".join(f"{nbytes:9.1f}" for nbytes in found.values())
        print(f"{'arenas' if arenas else 'without':10}{text}", flush=True)
    dist.destroy_process_group()


def packings() -> None:
    """Arenas over the most bytes alive at once, in worlds that are not there."""
    found: list[float] = []
    for world, blocks, prefetch in product((2, 8, 64), (6, 48), (0, 1, 2, 4)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        sizes = Sizes(blocks=blocks, width=64, heads=2, vocabulary=999, sequence=16, batch=1)
        options = {"prefetch": prefetch, "arenas": True, "dtype": torch.bfloat16, "backend": "eager"}
        compiled = zcompile.compile(make_model(sizes, 0), **options)  # type: ignore[arg-type]
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        compiled(tokens, tokens)
        program = compiled._engine.runtime.steps[0].program
        bound = most_alive(list(placeable(program).values()))
        print(
            f"world {world:2}, {blocks:2} blocks, prefetch {prefetch}: {arena_bytes(program) / bound:.3f}", flush=True
        )
        dist.destroy_process_group()
        torch.compiler.reset()
    print(f"arena / most bytes alive at once: {min(found):.3f} to {max(found):.3f} in {len(found)} programs")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=("with", "without"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=SHOWN[-1], help=f"({SHOWN[-1]})")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(arenas=options.measure == "with", steps=options.steps)
        return 0
    print(f"MiB at step{''.join(f'{step:9}' for step in SHOWN if step <= options.steps)[1:]}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for kind in ("without", "with"):
        command = [*launch, "-m", "benchmarks.arenas", "--measure", kind, "--steps", str(options.steps)]
        ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=False)
        if ended.returncode:
            return ended.returncode
    packings()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
