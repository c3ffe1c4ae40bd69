"""Memory of rank 0 in worlds of up to 1024 ranks, on one GPU: `python -m benchmarks.gpu.memory`.

One real rank of a fake process group: its shards, gathers and programs are real, what would come from other ranks is
not. A GPT without dropout, made on meta, takes two steps of `loss.backward(); optimizer.step()` with AdamW, stage 3, in
bfloat16 over float32 shards, on one short sequence. "state" is what torch has allocated behind the second step, the
gradients included; the paper's is (2 + 2 + 12)Ψ/N (Rajbhandari et al. 2020, figure 1, table 1). GB are 10^9 bytes.

What a GPU has no room for is left out. Without one, `--cpu` counts the tensors of the state alone; it takes the memory
of two layers beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zcompile
from benchmarks.common.models import rank_0_of
from benchmarks.common.ranks import TeamError, call_alone
from benchmarks.gpu.machine import machine, refusal
from examples.gpt import GPT, GPTConfig
from zcompile.cost.memory import model_state, peak_bytes

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A model of the paper's size, and the world in which it gives a figure for it."""

    layers: int
    width: int
    heads: int
    world: int
    paper: float
    """GB of model state on a rank."""
    vocabulary: int = 1024

    @property
    def least(self) -> float:
        """GB that a step takes at least: the state, and one layer whole with its gradient, in bfloat16."""
        return self.paper + 2 * 2 * 12 * self.width**2 / GB


SHAPES = {
    "7.5B": Shape(37, 4096, 32, 64, 1.9),
    "128B": Shape(101, 10240, 80, 1024, 2.0),
    "1T": Shape(127, 25600, 160, 1024, 15.6),
    "small": Shape(3, 256, 4, 8, 0.0),
}


@dataclass(frozen=True)
class Found:
    """What rank 0 took, in bytes."""

    parameters: int
    predicted_state: int
    state: int
    predicted_peak: int
    """Beside the state."""
    peak: int
    seconds: float
    """Of the second step."""


def measure(shape: Shape, tokens: int, prefetch: int) -> Found:
    """Two steps as rank 0 of the world."""
    with rank_0_of(shape.world):
        return stepped(shape, tokens, prefetch)


def stepped(shape: Shape, tokens: int, prefetch: int) -> Found:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = GPT(GPTConfig(shape.vocabulary, tokens, shape.layers, shape.heads, shape.width))
    mesh = dist.device_mesh.init_device_mesh(device.type, (shape.world,))
    options = {"prefetch": prefetch, "dtype": torch.bfloat16, "checkpoint": "unit", "backend": "eager"}
    compiled = zcompile.compile(model, mesh=mesh, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    given = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    started = 0.0
    for _ in range(2):
        optimizer.zero_grad()
        started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        compiled(given, given).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    moments = (value for state in optimizer.state.values() for value in state.values())
    parameters = list(compiled.parameters())
    kept = bytes_of((*parameters, *(p.grad for p in parameters if p.grad is not None), *moments))
    layout, program = compiled.layout, compiled._engine.runtime.steps[0].program
    return Found(
        sum(param.numel for param in layout.params),
        model_state(layout).nbytes,
        torch.cuda.memory_allocated() if device.type == "cuda" else kept,
        peak_bytes(program),
        torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        seconds,
    )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind `tensors`, of this rank, each counted once."""
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({s._cdata: s.nbytes() for tensor in locals_ if (s := tensor.untyped_storage())}.values())


def row(name: str, shape: Shape, found: Found) -> str:
    peak = f"{found.peak / GB:7.2f}" if found.peak else "      -"
    return (
        f"{name:6} {found.parameters / GB:8.2f} {shape.world:6} {shape.paper:6.1f} {found.predicted_state / GB:9.3f}"
        f" {found.state / GB:8.3f} {found.predicted_peak / GB:9.2f} {peak} {found.seconds:6.1f}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in SHAPES if name != "small"]
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=names, help=f"which ({' '.join(names)})")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: the state alone")
    parser.add_argument("--tokens", type=int, default=128, help="length of the sequence (128)")
    parser.add_argument("--prefetch", type=int, default=0, help="units gathered ahead (0)")
    options = parser.parse_args(arguments)
    free, device = float("inf"), "cpu" if options.cpu else "cuda"
    if not options.cpu:
        found = machine()
        if reason := refusal(found):
            print(f"{reason}; --cpu counts the state alone, in the host's memory", file=sys.stderr)
            return 2
        free = found.cards[0].free / GB
    print("model  billions  world  paper  explain()    state  peak-state     peak  seconds    (GB; explain() predicts)")
    failed = False
    for name in options.models:
        shape = SHAPES[name]
        if shape.least > free:
            print(f"{name:6} left out: a step takes more than {shape.least:.0f} GB, of which {free:.0f} are free")
            continue
        try:
            found_there = call_alone(measure, shape, options.tokens, options.prefetch, device=device)
            print(row(name, shape, found_there), flush=True)
        except TeamError as error:
            failed = True
            print(f"{name:6} FAILED: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
