"""The ZeRO paper's super-linear scaling out of the simulator: `python -m benchmarks.speed.superlinear`, some minutes.

60 billion parameters on 64 to 400 V100s of DGX-2 nodes, as the paper has them (Rajbhandari et al. 2020, section 10.3,
figure 3): each model is divided over the 16 GPUs of a node by tensor parallelism, stage 2 over the nodes, checkpoints
partitioned (P_a), float16 with Adam. One rank's part is traced on meta, for batches of growing size; on each number of
GPUs the largest that fits is simulated, over two networks: the 800 Gbit/s of a node that the paper names, and one of
its eight links, 100 Gbit/s. A fake process group stands for the ranks: nothing is sent.

FLOPs are those of the device, what is computed again included. Writes superlinear.svg and superlinear.json; wants
matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.common.figures import write_json
from benchmarks.common.models import rank_0_of
from benchmarks.common.ranks import LOCAL
from zcompile.cost.hardware import Hardware, load_profile
from zcompile.cost.memory import live_by_kind, model_state
from zcompile.cost.roofline import flops_of
from zcompile.cost.simulator import simulate
from zcompile.engine.tensor_parallel_group import digests, mark_replicated
from zcompile.ir.layout import STAGES
from zcompile.ir.program import Program
from zcompile.model.tensor_parallel import divided_parameters
from zcompile.model.units import axes_over, make_layout
from zcompile.schedule.options import Options
from zcompile.tools.gpt import SHAPES, VOCABULARY, GPTShape
from zcompile.tools.planner import RESERVED
from zcompile.tools.tracing import trace

GPUS = (64, 128, 256, 400)
PARTS = 16
"""GPUs of a node, over which the model is divided."""
CONTEXT = 1024
STEP = 8
"""What batches grow by."""
LARGEST = 64
PAPER = {64: 25e12, 400: 38e12}
"""FLOP/s of a GPU: the paper prints 38 TFLOP/s for 400; that for 64 is read off its figure, to about 2."""
LINKS = 8
"""Of a node, InfiniBand EDR of 100 Gbit/s each."""
OPTIONS = Options(
    stage=2, prefetch=2, dtype=torch.float16, reduce_dtype=torch.float16, checkpoint="unit", partition_activations=True
)


class Block(nn.Module):
    """A layer whose linear maps `parallelize_module` divides as Megatron does."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.head_width = width // shape.heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        normed = self.norm(x)
        query, key, value = (
            given(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for given in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return result


class GPT(nn.Module):
    """Its head is divided over the vocabulary, and so, within `loss_parallel`, is the loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, shape.width), nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Both [batch, length], int64; gives the mean cross entropy."""
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


@dataclass(frozen=True)
class Point:
    """One step on so many GPUs."""

    gpus: int
    batch: int
    """Samples that the GPUs of a node have together."""
    nbytes: int
    """The peak of a GPU."""
    rates: dict[str, float]
    """FLOP/s of a GPU, by how it is simulated."""


def program_of(shape: GPTShape, batch: int, tensor_parallel: DeviceMesh) -> Program:
    """The finished program of one rank's part, laid out for two nodes."""
    with torch.device("meta"):
        model = parallelize_module(GPT(shape), tensor_parallel, PLAN)
        tokens = torch.empty(batch, CONTEXT, dtype=torch.int64)
    with loss_parallel():
        traced = trace(model, (tokens, tokens), dtype=OPTIONS.dtype, reduce_dtype=OPTIONS.reduce_dtype)
    # All ranks trace the same model with the same shapes: they know the same digests.
    known = digests(traced, tensor_parallel.get_group().group_name, divided_parameters(model))
    layout = make_layout(model, STAGES[OPTIONS.stage], axes_over(model, 2), None, OPTIONS.precision)
    return OPTIONS.pipeline().run(replace(mark_replicated(traced, known), layout=layout))


def networks() -> dict[str, Hardware]:
    """The profile, and the same with one link of a node."""
    whole = load_profile("v100-dgx2")
    inside, between = whole.links
    return {
        "800 Gbit/s": whole,
        "100 Gbit/s": replace(whole, links=(inside, replace(between, bandwidth=between.bandwidth / LINKS))),
    }


def rates(program: Program) -> Iterator[tuple[str, float]]:
    """FLOP/s of a step as the program overlaps it and, which is longer, if nothing overlapped."""
    flops = sum(flops_of(node, program.regions) for node in program.graph.nodes)
    for name, hardware in networks().items():
        timeline = simulate(program, hardware, steps=True)
        sent = sum(message.end - message.start for message in timeline.messages or ())
        yield name, flops / timeline.seconds
        yield f"{name}, blocking", flops / (timeline.compute + timeline.optimizer + sent)


def peak(program: Program) -> int:
    """Bytes of a GPU."""
    state = model_state(program.layout)
    return state.parameters + state.moments + max(sum(held.values()) for held in live_by_kind(program).values())


def measure(shape: GPTShape, largest: int, console: Console) -> list[Point]:
    """For each number of GPUs the largest batch that fits, in steps of STEP."""
    room = (1 - RESERVED) * load_profile("v100-dgx2").memory
    found: dict[int, Point] = {}
    with rank_0_of(2 * PARTS):
        mesh = init_device_mesh("cpu", (2, PARTS), mesh_dim_names=("dp", "tp"))
        for batch in range(STEP, largest + 1, STEP):
            traced = program_of(shape, batch, mesh["tp"])
            programs = {gpus: replace(traced, layout=traced.layout.over(gpus // PARTS)) for gpus in GPUS}
            fitting = {gpus: program for gpus, program in programs.items() if peak(program) <= room}
            for gpus, program in fitting.items():
                found[gpus] = Point(gpus, batch, peak(program), dict(rates(program)))
            console.print(f"batch {batch} fits on {', '.join(map(str, fitting)) or 'none'}", style="dim")
            if not fitting:
                break
    return [found[gpus] for gpus in GPUS if gpus in found]


def table(points: Sequence[Point]) -> Table:
    result = Table("GPUs", "batch of a node", "GB", *points[0].rates, "the paper", title="TFLOP/s of a GPU")
    for one in points:
        said = f"{PAPER[one.gpus] / 1e12:.0f}" if one.gpus in PAPER else ""
        simulated = (f"{rate / 1e12:.1f}" for rate in one.rates.values())
        result.add_row(str(one.gpus), str(one.batch), f"{one.nbytes / 1e9:.1f}", *simulated, said)
    return result


def plot(points: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zcompile"  # the same drawing from the same figures
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 4))
    gpus = [one.gpus for one in points]
    for name in points[0].rates:
        style = "s--" if "blocking" in name else "o-"
        axis.plot(gpus, [one.rates[name] / 1e12 for one in points], style, label=f"simulated, {name}")
    axis.plot(list(PAPER), [rate / 1e12 for rate in PAPER.values()], "k^:", label="ZeRO paper, figure 3")
    for one in points:
        place = (one.gpus, max(one.rates.values()) / 1e12)
        axis.annotate(f"batch {one.batch}", place, (0, 7), ha="center", size=8, textcoords="offset points")
    axis.set(xlabel="V100s", ylabel="TFLOP/s of a GPU", ylim=(0, 70), title="60 billion parameters")
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=SHAPES["60b"].layers)
    parser.add_argument("--largest", type=int, default=LARGEST, help="batch to try at most")
    parser.add_argument("--output", type=Path, default=LOCAL)
    given = parser.parse_args(arguments)
    console = Console(width=120)
    points = measure(replace(SHAPES["60b"], layers=given.layers), given.largest, console)
    if not points:
        console.print(f"a batch of {STEP} fits nowhere: give fewer --layers, or a --largest of at least {STEP}")
        return 1
    given.output.mkdir(parents=True, exist_ok=True)
    write_json(points, given.output / "superlinear.json")
    console.print(table(points))
    plot(points, given.output / "superlinear.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
