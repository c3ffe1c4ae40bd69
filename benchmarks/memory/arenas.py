"""Memory that the allocator holds over steps of many shapes: `python -m benchmarks.memory.arenas`.

Two ranks train a GPT with checkpoint="unit" on sequences of a new length at each step, with and without arenas. Printed
is what the allocator has taken from the system and not given back, fragments included: glibc's heap and mappings, on a
GPU what torch has reserved. The last line is of arenas over the most bytes alive at once in them, for several worlds,
sizes and depths.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist

import zcompile
from benchmarks.common.configurations import MIB, SMALL, Sizes
from benchmarks.common.models import ADAMW, make_model, rank_0_of
from benchmarks.common.ranks import call
from zcompile.cost.memory import arena_bytes
from zcompile.ir.arena_places import placeable
from zcompile.ir.packing import most_alive

SIZES = replace(SMALL, sequence=256)
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


def measure(arenas: bool, steps: int) -> dict[int, float]:
    """On one rank of two: MiB that are reserved after some of the steps."""
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
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
    return found


def packings() -> None:
    """Arenas over the most bytes alive at once, in worlds that are not there."""
    found: list[float] = []
    for world, blocks, prefetch in product((2, 8, 64), (6, 48), (0, 1, 2, 4)):
        with rank_0_of(world):
            model = make_model(Sizes(blocks=blocks, width=64, heads=2, vocabulary=999, sequence=16, batch=1), 0)
            compiled = zcompile.compile(model, prefetch=prefetch, arenas=True, dtype=torch.bfloat16, backend="eager")
            tokens = torch.zeros(1, 16, dtype=torch.int64)
            compiled(tokens, tokens)
            program = compiled._engine.runtime.steps[0].program
            found.append(arena_bytes(program) / most_alive(list(placeable(program).values())))
            print(f"world {world:2}, {blocks:2} blocks, prefetch {prefetch}: {found[-1]:.3f}", flush=True)
        torch.compiler.reset()
    print(f"arena / most bytes alive at once: {min(found):.3f} to {max(found):.3f} in {len(found)} programs")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SHOWN[-1], help=f"({SHOWN[-1]})")
    options = parser.parse_args(arguments)
    print(f"MiB at step{''.join(f'{step:9}' for step in SHOWN if step <= options.steps)[1:]}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for kind in ("without", "arenas"):
        found = call(measure, kind == "arenas", options.steps, device=device)[0]
        print(f"{kind:10}{''.join(f'{mib:9.1f}' for mib in found.values())}", flush=True)
    packings()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
