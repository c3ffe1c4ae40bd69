"""Divided sequences beside models rewritten for them: `python -m benchmarks.speed.sequences`, ten minutes.

Two ranks train a GPT on one sequence at a time, by DDP or in stage 0; all ways take turns in the same processes, so
their ratios are of one run. zcompile is given the plain model and the whole batch. The peers' model is rewritten: it is
given a part of the tokens, and its attention is DeepSpeed's Ulysses (`DistributedAttention`, where DeepSpeed is
installed), or the loop over blocks of torch's context parallel, called by its private name: `context_parallel` itself
has no CPU kernel. Both are compiled but for attention. Limited links need Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zcompile
from benchmarks.common import turns
from benchmarks.common.configurations import Sizes
from benchmarks.common.links import LINKS, opened
from benchmarks.common.models import ADAMW, batch, make_model
from benchmarks.common.ranks import started

OURS: dict[str, Any] = {"zcompile ulysses": "ulysses", "zcompile ring": "ring"}
WAYS = (*OURS, "deepspeed ulysses", "torch ring")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
aten = torch.ops.aten


class Rewritten(nn.Module):
    """The GPT for a part of the tokens, with another attention."""

    def __init__(self, model: Any, attend: Attend, positions: Tensor) -> None:
        super().__init__()
        self.model, self.attend, self.at = model, torch.compiler.disable(attend), positions

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        x = model.tokens(tokens) + model.positions(self.at)
        for block in model.blocks:
            projected = block.attention.project(block.norm_attention(x))
            parts = (part.unflatten(-1, (block.attention.heads, -1)) for part in projected.chunk(3, -1))
            x = x + block.attention.out(self.attend(*parts).flatten(2))
            x = x + block.mlp(block.norm_mlp(x))
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())


def ulysses() -> Attend:
    """DeepSpeed's, of (batch, tokens, heads, width)."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    def local(*parts: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous()

    deepspeed.init_distributed(dist_backend="gloo")
    attention = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda query, key, value: attention(query, key, value, 0)


class TorchRing(torch.autograd.Function):
    """The loop over blocks of torch's context parallel, with the kernel of CPUs."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, logs, *_ = _torch_ring("", 2, kernel, *parts, is_causal=True)
        ctx.save_for_backward(*parts, out, logs)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kernel, given = aten._scaled_dot_product_flash_attention_for_cpu_backward.default, ctx.saved_tensors
        return _torch_ring("_backward", 2, kernel, *gradients, "grad_out", *given, is_causal=True, dropout_p=0.0)[:3]


def _torch_ring(ending: str, *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return getattr(_attention, f"_templated_ring_attention{ending}")(dist.group.WORLD, *args, **kwargs)


def ring() -> Attend:
    def attend(*parts: Tensor) -> Tensor:
        result: Tensor = TorchRing.apply(*(part.transpose(1, 2).contiguous() for part in parts))
        return result.transpose(1, 2)

    return attend


@dataclass(frozen=True)
class Trained:
    """What came of a round on one rank."""

    seconds: Sequence[float]
    loss: float


class Ways(turns.Ways[tuple[Step, Tensor | None]]):
    """One of two ranks."""

    def __init__(self, ways: Sequence[str], warmup: int, sizes: Sizes) -> None:
        self.sizes = sizes
        super().__init__(ways, warmup)

    def build(self, way: str) -> tuple[Step, Tensor | None]:
        model, ranks, rank = make_model(self.sizes, 0), dist.get_world_size(), dist.get_rank()
        if way in OURS:
            mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "sp"))
            return _loop(zcompile.compile(model, mesh=mesh, sequence=OURS[way], stage=0)), None
        order = torch.arange(self.sizes.sequence)
        if way == "torch ring":  # in zig-zag order
            chunks = order.chunk(2 * ranks)
            own, attend = torch.cat([chunks[rank], chunks[-1 - rank]]), ring()
        else:
            own, attend = order.chunk(ranks)[rank], ulysses()
        return _loop(DistributedDataParallel(torch.compile(Rewritten(model, attend, own), dynamic=False))), own

    def train(self, way: str, steps: int) -> Trained:
        step, own = self.ways[way]
        seconds, loss = [], torch.zeros(())
        dist.barrier()
        for _ in range(steps):
            given = batch(self.sizes, 0, 0, self.next_step(way))
            tokens, targets = given if own is None else (part[:, own] for part in given)
            before = time.perf_counter()
            loss = step(tokens, targets)
            seconds.append(time.perf_counter() - before)
        if own is not None:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return Trained(seconds, float(loss))


def _loop(model: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(link: str, ways: Sequence[str], sizes: Sizes, rounds: int, steps: int) -> Table:
    """Train in all of these ways in turns.

    Raises:
        LinkError: this machine cannot limit a network.
        TeamError: a rank failed, died or did not answer in time.
    """
    base = next((way for way in ways if way not in OURS), ways[0])
    with opened(LINKS[link]) as ends, started(Ways, ways, 2, sizes, ends=ends) as team:
        team.hear()
        found = turns.turns(team, ways, rounds, steps)
    result = turns.table(f"{link}, {sizes.sequence} tokens", "way", "step s", f"of {base}", "spread", "loss")
    for way, rows in found.items():
        compared = turns.compared(turns.slowest(rows), turns.slowest(found[base]))
        result.add_row(way, *compared, f"{rows[-1][0].loss:.4f}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on each link, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=["loopback", "1gbit"], choices=list(LINKS))
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    options = parser.parse_args(arguments)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    ways = [way for way in options.way if has_deepspeed or way != "deepspeed ulysses"]
    for link in options.link:
        for tokens in options.tokens:
            sizes = Sizes(blocks=4, width=512, heads=8, vocabulary=1024, sequence=tokens, batch=1)
            Console(width=100).print(measure(link, ways, sizes, options.rounds, options.steps))


if __name__ == "__main__":
    main()
