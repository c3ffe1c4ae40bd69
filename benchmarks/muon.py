"""Optimizers of whole matrices beside FSDP2: `python -m benchmarks.muon` prints a table, in two minutes.

All ways to train are in the same four processes and take turns, so their ratios are of one run. Bytes are those that
the loopback counts, of all ranks together: in the optimizer's step alone, and in the whole step. Beside
`torch.optim.Muon` on FSDP2's shards, whose products of matrices DTensor communicates, stands a Muon that gathers each
update once by `full_tensor()` and orthogonalises it on every rank, as implementations for FSDP2 do.

It needs Linux, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import zcompile
from benchmarks.protocol import Sizes
from benchmarks.workload import batch, make_model

WORLD = 4
SIZES = Sizes(blocks=6, width=256, heads=4, vocabulary=4096, sequence=128, batch=2)
WAYS = ("fsdp2, full_tensor()", "fsdp2, torch.optim.Muon", "zcompile, whole=", "zcompile, train_step, whole=")
RATE, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


class GatheringMuon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) over DTensors: every rank gathers each update and orthogonalises all of them."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - MOMENTUM)
                update = orthogonalised(param.grad.lerp(momentum, MOMENTUM).full_tensor())
                mine = distribute_tensor(update, param.device_mesh, param.placements, src_data_rank=None)
                param.mul_(1 - RATE * DECAY).add_(mine.to(param.dtype), alpha=-RATE)


def orthogonalised(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest half-orthogonal matrix, nearly, by Newton and Schulz's iteration in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class Trained:
    """Medians of a rank's steps in a round: seconds, those of the optimizer, and bytes of all ranks in both."""

    seconds: float
    optimizer: float
    step_bytes: float
    optimizer_bytes: float


def is_hidden(name: str, param: torch.Tensor) -> bool:
    """True for the matrices that Muon is for: those between embedding and head."""
    return param.ndim == 2 and name.startswith("blocks.")


def optimizers_of(model: nn.Module, kind: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]) -> list[Any]:
    """Muon for the hidden matrices, AdamW for the rest."""
    hidden = [param for name, param in model.named_parameters() if is_hidden(name, param)]
    rest = [param for name, param in model.named_parameters() if not is_hidden(name, param)]
    return [kind(hidden), torch.optim.AdamW(rest, lr=RATE)]


def torch_muon(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Torch's own."""
    return torch.optim.Muon(params, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


Step = Callable[[Any, Any], tuple[float, float]]
"""Takes a step; gives the seconds and the bytes of the optimizer's part, which a train step does not tell apart."""


def build(way: str) -> Step:
    """A way to train, with one rank's part of the model."""
    model = make_model(SIZES, 0)
    whole = [name for name, param in model.named_parameters() if is_hidden(name, param)]
    if way.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return loop(model, optimizers_of(model, GatheringMuon if "full_tensor" in way else torch_muon))
    if "train_step" in way:
        step = zcompile.train_step(model, None, optimizers_of(model, torch_muon), whole=whole)

        def stepped(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
            step(tokens, targets)
            return 0.0, 0.0

        return stepped
    compiled = zcompile.compile(model, whole=whole)
    return loop(compiled, optimizers_of(compiled, torch_muon))


def loop(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Step:
    """The loop that everyone writes."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        model(tokens, targets).backward()
        dist.barrier()
        begin, sent = time.perf_counter(), loopback()
        for optimizer in optimizers:
            optimizer.step()
        took = time.perf_counter() - begin
        dist.barrier()
        sent = loopback() - sent
        for optimizer in optimizers:
            optimizer.zero_grad()
        return took, sent

    return step


def loopback() -> int:
    """Bytes that have gone over the loopback, of all ranks."""
    return int(LOOPBACK.read_text())


def serve(rank: int, folder: str, rounds: int, steps: int, results: Any) -> None:
    """One rank: all ways, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    ways = {way: build(way) for way in WAYS}
    found: dict[str, list[Trained]] = {way: [] for way in WAYS}
    number = 0
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            rows = []
            for _ in range(steps):
                given = batch(SIZES, 0, rank, number := number + 1)
                dist.barrier()
                begin, sent = time.perf_counter(), loopback()
                optimizer = ways[way](*given)
                seconds = time.perf_counter() - begin
                dist.barrier()
                rows.append(Trained(seconds, optimizer[0], loopback() - sent, optimizer[1]))
            if turn:  # the first is to warm up
                fields = ("seconds", "optimizer", "step_bytes", "optimizer_bytes")
                found[way].append(Trained(*(statistics.median(getattr(row, one) for row in rows) for one in fields)))
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[str, list[list[Trained]]]) -> Table:
    """Of each way what the slowest rank took, as a share of the first way's in the same round."""
    result = Table(title=f"Muon on {WORLD} ranks, loopback", title_justify="left")
    for heading in ("way", "step s", "of the first", "spread", "optimizer s", "step MB", "optimizer MB"):
        result.add_column(heading, justify="left" if heading == "way" else "right")
    slowest = {way: [max(one.seconds for one in ranks) for ranks in rounds] for way, rounds in found.items()}
    for way, rounds in found.items():
        ratios = [one / base for one, base in zip(slowest[way], slowest[WAYS[0]], strict=True)]
        apart = "train_step" not in way
        optimizer = statistics.median(max(one.optimizer for one in ranks) for ranks in rounds)
        sent = statistics.median(ranks[0].step_bytes for ranks in rounds) / 1e6
        inside = statistics.median(ranks[0].optimizer_bytes for ranks in rounds) / 1e6
        result.add_row(
            way,
            f"{statistics.median(slowest[way]):.3f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{optimizer:.3f}" if apart else "",
            f"{sent:.1f}",
            f"{inside:.2f}" if apart else "",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, options.rounds, options.steps, results)
        spawned = multiprocessing.spawn(serve, given, nprocs=WORLD, join=False)
        answers = dict(results.get() for _ in range(WORLD))
        spawned.join()
    found = {way: list(zip(*(answers[rank][way] for rank in range(WORLD)), strict=True)) for way in WAYS}
    Console(width=110).print(table({way: [list(ranks) for ranks in rounds] for way, rounds in found.items()}))


if __name__ == "__main__":
    main()
