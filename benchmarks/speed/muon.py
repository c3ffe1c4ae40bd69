"""Optimizers of whole matrices beside FSDP2: `python -m benchmarks.speed.muon` prints a table, in two minutes.

All ways to train are in the same four processes and take turns, so their ratios are of one run. Bytes are those that
the loopback counts, of all ranks together: in the optimizer's step alone, and in the whole step. Beside
`torch.optim.Muon` on FSDP2's shards, whose products of matrices DTensor communicates, stands a Muon that gathers each
update once by `full_tensor()` and orthogonalises it on every rank, as implementations for FSDP2 do.

It needs Linux, and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import zcompile
from benchmarks.common import turns
from benchmarks.common.configurations import SMALL
from benchmarks.common.links import LOOPBACK
from benchmarks.common.models import batch, make_model
from benchmarks.common.ranks import started

WORLD = 4
WAYS = ("fsdp2, full_tensor()", "fsdp2, torch.optim.Muon", "zcompile, whole=", "zcompile, train_step, whole=")
RATE, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LOOPBACK_BYTES = Path("/sys/class/net/lo/statistics/tx_bytes")


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
    """A rank's steps in a round: seconds, those of the optimizer, and bytes of all ranks in both."""

    seconds: list[float]
    optimizer: list[float]
    step_bytes: list[int]
    optimizer_bytes: list[int]


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


Step = Callable[[Any, Any], tuple[float, int]]
"""Takes a step; gives the seconds and the bytes of the optimizer's part, which a train step does not tell apart."""


def loop(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Step:
    """The loop that everyone writes."""

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
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
    return int(LOOPBACK_BYTES.read_text())


class Ways(turns.Ways[Step]):
    """One rank of four."""

    def build(self, way: str) -> Step:
        model = make_model(SMALL, 0)
        whole = [name for name, param in model.named_parameters() if is_hidden(name, param)]
        if way.startswith("fsdp2"):
            mesh = init_device_mesh("cpu", (WORLD,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return loop(model, optimizers_of(model, GatheringMuon if "full_tensor" in way else torch_muon))
        if "train_step" in way:
            step = zcompile.train_step(model, None, optimizers_of(model, torch_muon), whole=whole)

            def stepped(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
                step(tokens, targets)
                return 0.0, 0

            return stepped
        compiled = zcompile.compile(model, whole=whole)
        return loop(compiled, optimizers_of(compiled, torch_muon))

    def train(self, way: str, steps: int) -> Trained:
        found = Trained([], [], [], [])
        for _ in range(steps):
            given = batch(SMALL, 0, dist.get_rank(), self.next_step(way))
            dist.barrier()
            begin, sent = time.perf_counter(), loopback()
            seconds, inside = self.ways[way](*given)
            found.seconds.append(time.perf_counter() - begin)
            dist.barrier()
            found.step_bytes.append(loopback() - sent)
            found.optimizer.append(seconds)
            found.optimizer_bytes.append(inside)
        return found


def table(rounds: turns.Rounds[Trained]) -> Table:
    """Of each way what the slowest rank took, as a share of the first way's in the same round."""
    headings = ("way", "step s", "of the first", "spread", "optimizer s", "step MB", "optimizer MB")
    result = turns.table(f"Muon on {WORLD} ranks, loopback", *headings)
    for way, rows in rounds.items():
        optimizer = statistics.median(max(statistics.median(one.optimizer) for one in ranks) for ranks in rows)
        sent = statistics.median(statistics.median(ranks[0].step_bytes) for ranks in rows) / 1e6
        inside = statistics.median(statistics.median(ranks[0].optimizer_bytes) for ranks in rows) / 1e6
        apart = "train_step" not in way
        cells = [f"{optimizer:.3f}" if apart else "", f"{sent:.1f}", f"{inside:.2f}" if apart else ""]
        result.add_row(way, *turns.compared(turns.slowest(rows), turns.slowest(rounds[WAYS[0]])), *cells)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    options = parser.parse_args(arguments)
    with started(Ways, WAYS, options.steps, ends=[LOOPBACK] * WORLD) as team:
        team.hear()
        Console(width=110).print(table(turns.turns(team, WAYS, options.rounds, options.steps)))


if __name__ == "__main__":
    main()
