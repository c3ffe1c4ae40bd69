"""Pipelines beside torch's own and DeepSpeed's: `python -m benchmarks.speed.pipelines` prints a table for each link.

The ranks are processes, two, each with a core, or four; over a link that is limited, the first half and the second half
are in network namespaces joined by a cable of that rate. All ways to train are in the same processes and take turns,
so their ratios are of one run. With `--memory` each way has processes of its own, which count what they allocate.

torch's stages are cut by hand (`PipelineStage`, `Schedule1F1B`), DeepSpeed's are layers (`PipelineModule`), both where
zcompile is told to cut; "balanced" lets it choose. Limited links need Linux, root, `ip` and `tc`; DeepSpeed is left out
where it is not installed (`make bench` has an environment with it).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zcompile
from benchmarks.common import turns
from benchmarks.common.configurations import Sizes
from benchmarks.common.links import LINKS, LOOPBACK, opened
from benchmarks.common.live_bytes import LiveBytes
from benchmarks.common.models import ADAMW, batch, make_model
from benchmarks.common.peers import BUCKET
from benchmarks.common.ranks import started

SIZES = Sizes(blocks=8, width=256, heads=4, vocabulary=1024, sequence=128, batch=16)
PEERS = ("torch 1f1b", "torch 1f1b, compiled", "deepspeed")
OURS: dict[str, dict[str, Any]] = {
    "zcompile 1f1b, eager": {"backend": "eager"},
    "zcompile 1f1b": {},
    "zcompile 1f1b, balanced": {},
    "zcompile interleaved1f1b": {"schedule": "interleaved1f1b"},
    "zcompile interleavedzerobubble": {"schedule": "interleavedzerobubble"},
    "zcompile zbvzerobubble": {"schedule": "zbvzerobubble"},
}
WAYS = (*PEERS, *OURS)
Step = Callable[[Tensor, Tensor], Tensor | None]


def _parts() -> int:
    """How many micro-batches a batch is cut into: what `--microbatches` says, in the environment of all ranks."""
    return int(os.environ.get("MICROBATCHES", "8"))


def compiled_step(way: str) -> Step:
    """Ours: a plain model and its loss."""
    from torch.distributed.device_mesh import init_device_mesh

    model = make_model(SIZES, 0)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    made = {"schedule": "1f1b", "microbatches": _parts(), "stage": 1, **OURS[way]}
    if way in ("zcompile 1f1b, eager", "zcompile 1f1b"):
        made["split"] = [f"blocks.{stage * SIZES.blocks // world}" for stage in range(1, world)]
    return zcompile.train_step(model, lambda model, x, y: model(x, y), optimizer, mesh=mesh, **made)


class Part(nn.Module):
    """One of torch's stages: some blocks, with the embeddings in front of the first and the head behind the last."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        world = dist.get_world_size()
        each = SIZES.blocks // world
        self.first, self.last = stage == 0, stage == world - 1
        self.blocks = nn.ModuleList(list(model.blocks)[stage * each : (stage + 1) * each])
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or the residual stream, to the residual stream, or logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_step(way: str) -> Step:
    """torch.distributed.pipelining, over a stage that was cut by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    module: Any = Part(make_model(SIZES, 0), rank)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    if "compiled" in way:
        module.compile()
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, _parts(), loss_fn=cross_entropy)

    def step(tokens: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        elif rank == world - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def deepspeed_step(way: str) -> Step:
    """DeepSpeed's pipeline engine with ZeRO-1, over the same layers."""
    import deepspeed as peer
    from deepspeed.pipe import LayerSpec, PipelineModule

    peer.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model, world = make_model(SIZES, 0), dist.get_world_size()
    module = PipelineModule(
        [LayerSpec(Part, model, stage) for stage in range(world)],
        num_stages=world,
        loss_fn=cross_entropy,
        partition_method="uniform",
    )
    settings = {
        "train_batch_size": SIZES.batch,
        "train_micro_batch_size_per_gpu": SIZES.batch // _parts(),
        "gradient_accumulation_steps": _parts(),
        "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    engine, *_ = peer.initialize(model=module, optimizer=optimizer, config=settings)

    def step(tokens: Tensor, targets: Tensor) -> Tensor | None:
        loss: Tensor = engine.train_batch(iter(zip(tokens.chunk(_parts()), targets.chunk(_parts()), strict=True)))
        return loss.detach()

    return step


@dataclass(frozen=True)
class Trained:
    """What came of a round: seconds of each step, the last loss where it is known, and the peak of memory.

    The peak is in bytes, and counts from before the model was made; 0 where nothing counts.
    """

    seconds: list[float]
    loss: float | None
    peak: int = 0


class Ways(turns.Ways[Step]):
    """One rank."""

    def __init__(self, ways: Sequence[str], warmup: int) -> None:
        self.counter = LiveBytes() if "LD_PRELOAD" in os.environ else None
        self.before = self.counter.live() if self.counter else 0
        super().__init__(ways, warmup)

    def build(self, way: str) -> Step:
        if way in OURS:
            return compiled_step(way)
        return deepspeed_step(way) if way == "deepspeed" else torch_step(way)

    def train(self, way: str, steps: int) -> Trained:
        dist.barrier()
        if self.counter:
            self.counter.peak()
        seconds, loss = [], None
        for _ in range(steps):
            given = batch(SIZES, 0, 0, self.next_step(way))
            dist.barrier()
            start = time.perf_counter()
            loss = self.ways[way](*given)
            seconds.append(time.perf_counter() - start)
        peak = self.counter.peak() - self.before if self.counter else 0
        return Trained(seconds, None if loss is None else float(loss), peak)


def table(link: str, ranks: int, rounds: turns.Rounds[Trained], memory: Mapping[str, Sequence[int]]) -> Table:
    """Times, their ratios to the faster peer in each round, and peaks of memory."""
    seconds = {way: turns.slowest(rows) for way, rows in rounds.items()}
    peers = [way for way in rounds if way in PEERS]
    best = min(peers or list(rounds), key=lambda way: statistics.median(seconds[way]))
    title = f"{link}: {ranks} ranks, {_parts()} micro-batches"
    result = turns.table(title, "way", "step s", f"of {best}", "spread", "loss", "peak MB of ranks")
    for way, rows in rounds.items():
        losses = [one.loss for one in rows[-1] if one.loss is not None]
        peaks = " ".join(f"{peak / 1e6:.1f}" for peak in memory.get(way, ()))
        result.add_row(way, *turns.compared(seconds[way], seconds[best]), f"{losses[-1]:.4f}", peaks)
    return result


def measure(
    link: str, ranks: int, ways: Sequence[str], rounds: int, steps: int, warmup: int
) -> dict[str, list[list[Trained]]]:
    """Train in all of these ways in turns.

    Raises:
        LinkError: this machine cannot limit a network.
        TeamError: a rank failed, died or did not answer in time.
    """
    with opened(LINKS[link]) as nodes:
        ends = [nodes[2 * rank // ranks] for rank in range(ranks)]
        with started(Ways, ways, warmup, ends=ends) as team:
            team.hear()
            return turns.turns(team, ways, rounds, steps)


def weigh(ranks: int, ways: Sequence[str], warmup: int) -> dict[str, list[int]]:
    """The peak of each rank's memory, each way in processes of its own."""
    result = {}
    for way in ways:
        with started(Ways, [way], warmup, ends=[LOOPBACK] * ranks, counted=True) as team:
            team.hear()
            result[way] = [one.peak for one in team.ask("train", way, 2)]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on each link, and print the tables."""
    there = [way for way in WAYS if way != "deepspeed" or importlib.util.find_spec("deepspeed")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=["loopback", "1gbit"], choices=list(LINKS))
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4], help="2: a core for each")
    parser.add_argument("--microbatches", type=int, default=8, choices=[2, 4, 8, 16])
    parser.add_argument("--way", nargs="+", default=there, choices=WAYS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="count what each rank allocates, too")
    options = parser.parse_args(arguments)
    os.environ["MICROBATCHES"] = str(options.microbatches)
    memory = weigh(options.ranks, options.way, options.warmup) if options.memory else {}
    for link in options.link:
        found = measure(link, options.ranks, options.way, options.rounds, options.steps, options.warmup)
        Console(width=140).print(table(link, options.ranks, found, memory))


if __name__ == "__main__":
    main()
