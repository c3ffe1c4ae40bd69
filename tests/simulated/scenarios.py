"""What zcompile does on a GPU, in every way that has streams of its own: a few steps, watched by the checker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from tests.models import GPT, batch, make
from tests.simulated.failures import FailedStepError, failing
from tests.test_fragments import batch as broken_batch
from tests.test_fragments import make as make_broken

STEPS, FAILING = 5, 2
BATCH = 40
"""Large enough that activations are worth offloading."""
Streams = Literal["default", "forward", "alternating", "apart"]
"""Where forwards run: on the default stream, on another one, on two in turns, with the backward; or evaluations on two
that know nothing of each other."""


@dataclass(frozen=True)
class Scenario:
    """A way to train.

    Args:
        options: Of `zcompile.compile`, of `train_step` or of the backend.
        by: The loop that everyone writes, `zcompile.train_step`, or that loop around `torch.compile`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    by: Literal["loop", "train step", "torch.compile", "pipeline"] = "loop"
    accumulates: bool = False
    evaluates: bool = False
    streams: Streams = "default"
    clip: float | None = None
    scales: bool = False
    """By a `GradScaler`."""
    tensor: int = 1
    """How many ranks have parts of one layer."""
    replicas: int = 1
    """How often shards repeat."""
    fails: str = ""
    """Where the third step does, one of `FAULTS`."""
    broken: bool = False
    """The graph breaks inside the model."""
    writes: bool = False
    """Parameters are written to behind each step."""
    loads: bool = False
    """The host reads and writes the optimizer's state behind each step."""
    world: int = 0
    """How many ranks, where it matters."""

    def begin(self) -> nn.Module:
        if self.model == "large":
            torch.manual_seed(0)
            return GPT(width=128).cuda()
        return (make_broken("Own") if self.broken else make(self.model)).cuda()

    def placed(self) -> tuple[nn.Module, Mapping[str, Any]]:
        """The model, divided if it is to be, and the options with the mesh over which it is sharded."""
        if self.by == "pipeline":
            shape = (2, dist.get_world_size() // 2)
            mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp"))
            return self.begin(), {**self.options, "mesh": mesh, "microbatches": 4}
        if self.replicas > 1:
            shape, names = (self.replicas, dist.get_world_size() // self.replicas), ("replicate", "shard")
            return self.begin(), {**self.options, "mesh": init_device_mesh("cuda", shape, mesh_dim_names=names)}
        if self.tensor == 1:
            return self.begin(), self.options
        sizes = dist.get_world_size() // self.tensor, self.tensor
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("dp", "tp"))
        plan = {"blocks.*.mlp.0": ColwiseParallel(), "blocks.*.mlp.2": RowwiseParallel()}
        return parallelize_module(self.begin(), mesh["tp"], plan), {**self.options, "mesh": mesh["dp"]}

    def batch(self, step: int, rank: int = 0) -> list[torch.Tensor]:
        if self.broken:
            return [broken_batch(rank, step).cuda()]
        kind = "gpt" if self.model == "large" else self.model
        return [tensor.pin_memory().cuda(non_blocking=True) for tensor in batch(kind, rank, step, BATCH)]


HOW = {field.name for field in fields(Scenario)} - {"options", "by"}


def loop(stage: int, **given: Any) -> Scenario:
    """By the loop that everyone writes. `given`: of the scenario, and options of `zcompile.compile`."""
    options = {name: value for name, value in given.items() if name not in HOW}
    how = {name: value for name, value in given.items() if name in HOW}
    return Scenario({"stage": stage, **options}, **how)


def step(stage: int, **given: Any) -> Scenario:
    """By `zcompile.train_step`."""
    return replace(loop(stage, **given), by="train step")


def named(stage: int, **given: Any) -> Scenario:
    """By `torch.compile(backend="zcompile")`."""
    return replace(loop(stage, **given), by="torch.compile")


def pipelined(stage: int, schedule: str = "1f1b", **given: Any) -> Scenario:
    """By `zcompile.train_step` with two pipeline stages' ranks; these are there, both of them."""
    return replace(step(stage, schedule=schedule, **given), by="pipeline", world=2)


BF16 = torch.bfloat16
MATRICES = ("blocks.*.mlp.*.weight", "blocks.*.attention.*.weight")
CODED: dict[str, Any] = {"replicas": 2, "outer_gather_dtype": torch.int8}
SCENARIOS: dict[str, Scenario] = {
    "stage 0": loop(0),
    "stage 1": loop(1),
    "stage 2": loop(2),
    "stage 3": loop(3),
    "stage 3, prefetch 0": loop(3, prefetch=0),
    "stage 3, prefetch 4": loop(3, prefetch=4),
    "stage 1, bf16": loop(1, dtype=BF16),
    "stage 2, pieces": loop(2, bucket=4096),
    "stage 3, pieces": loop(3, bucket=4096),
    "stage 3, bf16, pieces": loop(3, dtype=BF16, bucket=1024),
    "stage 3, large": loop(3, model="large"),
    "stage 3, large, pieces": loop(3, model="large", bucket=65536),
    "stage 3, odd sizes": loop(3, model="mlp"),
    "stage 3, convolutions": loop(3, model="conv"),
    "stage 2, arenas, pieces": loop(2, arenas=True, bucket=4096),
    "stage 3, arenas, checkpoint": loop(3, arenas=True, checkpoint="unit"),
    "stage 3, activations": loop(3, offload_activations="cpu"),
    "stage 3, activations, checkpoint": loop(3, offload_activations="cpu", checkpoint="unit"),
    "stage 3, activations, arenas": loop(3, offload_activations="cpu", checkpoint="unit", arenas=True),
    "stage 2, parameters": loop(2, offload_parameters="cpu"),
    "stage 3, parameters": loop(3, offload_parameters="cpu"),
    "stage 3, parameters, arenas": loop(3, offload_parameters="cpu", arenas=True, prefetch=4),
    "stage 3, parameters, bf16, arenas": loop(3, offload_parameters="cpu", arenas=True, dtype=BF16),
    "stage 1, accumulating": loop(1, accumulates=True),
    "stage 3, accumulating": loop(3, accumulates=True),
    "stage 2, evaluating": loop(2, evaluates=True),
    "stage 3, evaluating": loop(3, evaluates=True),
    "stage 1, side stream": loop(1, streams="forward"),
    "stage 3, side stream": loop(3, streams="forward"),
    "stage 3, alternating": loop(3, streams="alternating"),
    "stage 3, side stream, arenas": loop(3, streams="forward", arenas=True, offload_activations="cpu"),
    "stage 3, arenas, apart": loop(3, streams="apart", arenas=True),
    "stage 3, arenas, accumulating": loop(3, arenas=True, accumulates=True),
    "stage 3, parameters, evaluating": loop(3, offload_parameters="cpu", evaluates=True, writes=True),
    "one rank, parameters": loop(3, offload_parameters="cpu", world=1),
    "stage 3, graph breaks": loop(3, broken=True),
    "stage 1, graph breaks": loop(1, broken=True),
    "stage 0, graphs": loop(0, cuda_graphs=True),
    "stage 1, graphs, accumulating": loop(1, cuda_graphs=True, accumulates=True),
    "stage 2, graphs, evaluating": loop(2, cuda_graphs=True, evaluates=True),
    "stage 3, graphs": loop(3, cuda_graphs=True),
    "stage 3, graphs, bf16, checkpoint": loop(3, cuda_graphs=True, checkpoint="unit", dtype=BF16),
    "stage 3, graphs, pieces": loop(3, cuda_graphs=True, bucket=4096),
    "stage 3, graphs, side stream": loop(3, cuda_graphs=True, streams="forward"),
    "stage 3, graphs, activations": loop(3, cuda_graphs=True, offload_activations="cpu"),
    "stage 3, graphs, chunks": loop(3, cuda_graphs=True, chunk=32, dtype=BF16),
    "stage 3, graphs, parameters": loop(3, cuda_graphs=True, offload_parameters="cpu"),
    "stage 3, graphs, graph breaks": loop(3, cuda_graphs=True, broken=True),
    "one rank, graphs": loop(3, cuda_graphs=True, world=1),
    "train step, stage 3, graphs": step(3, cuda_graphs=True),
    "train step, stage 1, one graph, clipping": step(1, cuda_graphs="step", clip=1.0),
    "train step, stage 3, one graph": step(3, cuda_graphs="step"),
    "train step, stage 2, one graph, chunks": step(2, cuda_graphs="step", chunk=32),
    "train step, stage 3, one graph, writing": step(3, cuda_graphs="step", writes=True),
    "train step, stage 3, one graph, alternating": step(3, cuda_graphs="step", streams="alternating"),
    "train step, stage 2": step(2),
    "train step, stage 3": step(3),
    "train step, stage 3, writing": step(3, writes=True),
    "train step, stage 3, bf16": step(3, dtype=BF16),
    "train step, stage 3, clipping": step(3, clip=1.0),
    "train step, stage 3, optimizer": step(3, offload_optimizer="cpu"),
    "train step, stage 3, optimizer, loading": step(3, offload_optimizer="cpu", loads=True),
    "train step, stage 3, parameters": step(3, offload_parameters="cpu"),
    "train step, stage 3, pieces, arenas": step(3, bucket=4096, arenas=True),
    "train step, stage 1, alternating": step(1, streams="alternating"),
    "train step, stage 3, alternating": step(3, streams="alternating"),
    "stage 3, memory limit": loop(3, memory_limit="1 GiB"),
    "stage 3, checkpoint auto": loop(3, checkpoint="auto"),
    "stage 2, parameters, accumulating": loop(2, offload_parameters="cpu", accumulates=True),
    "stage 3, parameters, graph breaks": loop(3, offload_parameters="cpu", broken=True, writes=True),
    "stage 3, clipping": loop(3, clip=1.0),
    "stage 3, float16, scaling, chunks": loop(3, dtype=torch.float16, scales=True, chunk=32),
    "stage 3, float16, scaling": loop(3, dtype=torch.float16, scales=True),
    "torch.compile, stage 1": named(1),
    "torch.compile, stage 3": named(3),
    "torch.compile, stage 3, evaluating": named(3, evaluates=True),
    "torch.compile, stage 3, side stream": named(3, streams="forward"),
    "torch.compile, stage 3, activations, arenas": named(3, offload_activations="cpu", arenas=True),
    "owners, stage 2": loop(2, whole=MATRICES),
    "owners, stage 3": loop(3, whole=MATRICES),
    "owners, bf16, arenas, checkpoint": loop(3, whole=MATRICES, dtype=BF16, arenas=True, checkpoint="unit"),
    "owners, accumulating, clipping": loop(1, whole=MATRICES, accumulates=True, clip=1.0),
    "owners, evaluating": loop(2, whole=MATRICES, evaluates=True),
    "owners, float16, scaling": loop(3, whole=MATRICES, dtype=torch.float16, scales=True),
    "owners, side stream": loop(3, whole=MATRICES, streams="forward"),
    "owners, parameters": loop(3, whole=MATRICES, offload_parameters="cpu"),
    "owners, graphs": loop(3, whole=MATRICES, cuda_graphs=True),
    "owners, hybrid": loop(3, whole=MATRICES, replicas=2),
    "owners, train step, alternating": step(3, whole=MATRICES, streams="alternating"),
    "owners, train step, optimizer": step(3, whole=MATRICES, offload_optimizer="cpu"),
    "hybrid, stage 2": loop(2, replicas=2),
    "hybrid, stage 3": loop(3, replicas=2),
    "hybrid, stage 3, pieces": loop(3, replicas=2, bucket=4096),
    "hybrid, bf16, arenas": loop(3, replicas=2, dtype=BF16, reduce_dtype=BF16, arenas=True),
    "hybrid, accumulation, clipped": loop(1, replicas=2, accumulates=True, clip=1.0),
    "hybrid, bf16 across": loop(2, replicas=2, outer_dtype=BF16),
    "hybrid, int8 across": loop(3, replicas=2, outer_dtype=torch.int8, arenas=True),
    "hybrid, train step, int8 across": step(3, replicas=2, outer_dtype=torch.int8, streams="alternating"),
    "hybrid, parameters": loop(3, replicas=2, offload_parameters="cpu"),
    "hybrid, broken": loop(3, replicas=2, broken=True),
    "hybrid, graphs": loop(3, replicas=2, cuda_graphs=True),
    "hybrid, train step": step(3, replicas=2),
    "hybrid, train step, alternating": step(3, replicas=2, streams="alternating"),
    "hpz, stage 3": loop(3, replicas=2, shard="hpz"),
    "hpz, bf16, arenas, checkpoint": loop(3, replicas=2, shard="hpz", dtype=BF16, arenas=True, checkpoint="unit"),
    "hpz, side stream": loop(3, replicas=2, shard="hpz", streams="forward"),
    "hpz, parameters": loop(3, replicas=2, shard="hpz", offload_parameters="cpu"),
    "hpz, activations": loop(3, replicas=2, shard="hpz", offload_activations="cpu"),
    "hpz, graphs": loop(3, replicas=2, shard="hpz", cuda_graphs=True),
    "hpz, train step, alternating": step(3, replicas=2, shard="hpz", streams="alternating"),
    "hfsdp, stage 2": loop(2, replicas=2, shard="hfsdp"),
    "hfsdp, stage 3": loop(3, replicas=2, shard="hfsdp"),
    "hfsdp, evaluating": loop(3, replicas=2, shard="hfsdp", evaluates=True),
    "hfsdp, accumulating, clipping": loop(3, replicas=2, shard="hfsdp", accumulates=True, clip=1.0),
    "hfsdp, float16, scaling": loop(3, replicas=2, shard="hfsdp", dtype=torch.float16, scales=True),
    "hfsdp, int8 across, pieces": loop(3, replicas=2, shard="hfsdp", outer_dtype=torch.int8, bucket=4096),
    "hfsdp, side stream": loop(3, replicas=2, shard="hfsdp", streams="forward"),
    "hfsdp, train step, alternating": step(3, replicas=2, shard="hfsdp", streams="alternating"),
    "hfsdp, written to": loop(3, replicas=2, shard="hfsdp", writes=True),
    "shard by the links, stage 3": loop(3, replicas=2, shard="auto"),
    "hpz, int8 gathers": loop(3, **CODED, shard="hpz", arenas=True),
    "hpz, int8 gathers, side stream": loop(3, **CODED, shard="hpz", streams="forward"),
    "hpz, int8 gathers, parameters": loop(3, **CODED, shard="hpz", offload_parameters="cpu"),
    "hpz, bf16 gathers, broken": loop(3, replicas=2, shard="hpz", outer_gather_dtype=BF16, broken=True),
    "hpz, int8 gathers, graphs": loop(3, **CODED, shard="hpz", cuda_graphs=True),
    "hpz, int8 gathers, train step": step(3, **CODED, shard="hpz", streams="alternating"),
    "hpz, int8 gathers, gather fails": loop(3, **CODED, shard="hpz", fails="gather"),
    "hfsdp, int8 gathers, alternating": loop(3, **CODED, shard="hfsdp", streams="alternating"),
    "hfsdp, int8 gathers, evaluating": loop(3, **CODED, shard="hfsdp", evaluates=True, dtype=BF16),
    "hfsdp, int8 gathers, stage 1": loop(1, **CODED, shard="hfsdp", accumulates=True, evaluates=True),
    "hfsdp, bf16 gathers, writing": step(3, replicas=2, shard="hfsdp", outer_gather_dtype=BF16, writes=True),
    "tensor parallel, stage 2": loop(2, tensor=2),
    "tensor parallel, stage 3": loop(3, tensor=2),
    "tensor parallel, parts": loop(3, tensor=2, partition_activations=True, checkpoint="unit"),
    "tensor parallel, parts, activations": loop(
        3, tensor=2, partition_activations=True, checkpoint="unit", offload_activations="cpu"
    ),
    "tensor parallel, train step": step(3, tensor=2),
    "stage 3, gather fails": loop(3, fails="gather"),
    "stage 3, activations, arenas, gather fails": loop(3, offload_activations="cpu", arenas=True, fails="gather"),
    "stage 3, activations, backward fails": loop(3, offload_activations="cpu", fails="gather of the backward"),
    "stage 3, parameters, gather fails": loop(3, offload_parameters="cpu", fails="gather", writes=True),
    "stage 3, parameters, backward fails": loop(
        3, offload_parameters="cpu", fails="gather of the backward", writes=True
    ),
    "stage 3, parameters, reduction fails": loop(3, offload_parameters="cpu", fails="reduction", writes=True),
    "stage 3, arenas, backward fails": loop(3, arenas=True, fails="gather of the backward"),
    "stage 3, graphs, gather fails": loop(3, cuda_graphs=True, fails="gather"),
    "stage 3, graphs, backward fails": loop(3, cuda_graphs=True, fails="gather of the backward"),
    "stage 1, graphs, reduction fails": loop(1, cuda_graphs=True, fails="reduction"),
    "train step, stage 3, graphs, update fails": step(3, cuda_graphs=True, fails="update"),
    "train step, stage 3, gather fails": step(3, fails="gather of the backward"),
    "train step, stage 3, optimizer, gather fails": step(3, offload_optimizer="cpu", fails="gather of the backward"),
    "train step, stage 3, optimizer, update fails": step(3, offload_optimizer="cpu", loads=True, fails="update"),
    "train step, stage 3, parameters, update fails": step(3, offload_parameters="cpu", writes=True, fails="update"),
    "pipeline, stage 0": pipelined(0),
    "pipeline, stage 1": pipelined(1),
    "pipeline, stage 2, gpipe": pipelined(2, "gpipe"),
    "pipeline, stage 3": pipelined(3),
    "pipeline, stage 1, interleaved": pipelined(1, "interleaved1f1b"),
    "pipeline, stage 3, zero bubbles": pipelined(3, "interleavedzerobubble"),
    "pipeline, stage 1, v of zero bubbles": pipelined(1, "zbvzerobubble"),
    "pipeline, stage 2, bf16, checkpoint": pipelined(2, dtype=BF16, checkpoint="unit"),
    "pipeline, stage 1, bf16": pipelined(1, dtype=BF16),
    "pipeline, prefetch 0": pipelined(3, prefetch=0),
    "pipeline, prefetch 4": pipelined(3, prefetch=4),
    "pipeline, activations": pipelined(3, "gpipe", offload_activations="cpu"),
    "pipeline, activations, checkpoint": pipelined(1, offload_activations="cpu", checkpoint="unit"),
    "pipeline, parameters": pipelined(3, offload_parameters="cpu"),
    "pipeline, parameters, gradients summed": pipelined(2, offload_parameters="cpu"),
    "pipeline, optimizer": pipelined(1, offload_optimizer="cpu"),
    "pipeline, clipping": pipelined(1, clip=1.0),
    "pipeline, float16, scaling": pipelined(1, dtype=torch.float16, scales=True),
    "pipeline, alternating": pipelined(3, streams="alternating"),
}


PACKING = ("_chunk_cat", "_foreach_copy_", "split_with_sizes_copy")


@dataclass(frozen=True)
class Report:
    """Of one scenario: what was not ordered in all its steps, and counts of the last one."""

    findings: list[str]
    waits: dict[str, int]
    launches: dict[str, int]
    calls: list[list[str]]
    """Of each group, the collectives that it was asked for in all steps."""

    @property
    def messages(self) -> int:
        return sum(count for name, count in self.launches.items() if name.startswith("nccl::"))

    @property
    def packing(self) -> int:
        """Kernels that bring what is sent, or has arrived, into another order or dtype.

        Not `cat`, which models have, too: by it gradients of queries, keys and values come together, and those of a
        message in stage 0.
        """
        return sum(self.launches.get(f"aten::{name}", 0) for name in PACKING)


def run(rank: int, name: str, more: Mapping[str, Any] | None = None) -> Report:
    """Train as the scenario says, on a simulated device; `more`: options beside its own."""
    scenario = SCENARIOS[name]
    scenario = replace(scenario, options={**scenario.options, **(more or {})})
    return _watched(scenario, _trainer(scenario))


def losses(rank: int, name: str) -> list[float]:
    """Of the steps of a pipeline, on a simulated device."""
    scenario = SCENARIOS[name]
    _, once, _ = begin(scenario)
    found: Any = [once(scenario.batch(number)) for number in range(STEPS)]
    return [float(loss) for loss in found]


def run_fsdp2(rank: int) -> Report:
    """Train the model of the scenarios by `fully_shard` on each block and the root, on a simulated device."""
    from torch.distributed.fsdp import fully_shard

    scenario = SCENARIOS["stage 3"]
    model: Any = scenario.begin()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batch: list[torch.Tensor]) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _watched(scenario, train)


def _watched(scenario: Scenario, train: Callable[[list[torch.Tensor]], object]) -> Report:
    from tests.simulated import nccl
    from tests.simulated.device import checker

    checker.findings.clear()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if scenario.streams == "alternating" else [None, None]
    for number in range(STEPS):
        batch = scenario.batch(number)
        checker.begin_step()
        with _beside(streams[number % 2]):
            with failing(scenario.fails) if scenario.fails and number == FAILING else nullcontext():
                train(batch)
            _busy(streams[1 - number % 2])
    waits, launches = dict(checker.waits), dict(checker.launches)
    findings = [str(finding) for finding in checker.findings.values()]
    return Report(findings, waits, launches, nccl.calls())


def _trainer(scenario: Scenario) -> Callable[[list[torch.Tensor]], object]:
    """A step, and what is done to the model behind it, whether it has failed or not."""
    model, once, optimizer = begin(scenario)

    def train(batch: list[torch.Tensor]) -> None:
        with suppress(FailedStepError):
            once(batch)
        if scenario.writes:
            _shrink(model)
        for state in optimizer.state.values() if scenario.loads else ():
            state["exp_avg"].to_local().mul_(0.99)

    return train


Steps = tuple[nn.Module, Callable[[list[torch.Tensor]], object]]
"""What is trained, and a step of it."""


def begin(
    scenario: Scenario, **options: Any
) -> tuple[nn.Module, Callable[[list[torch.Tensor]], object], torch.optim.Optimizer]:
    """What is trained as the scenario says, a step of it, and its optimizer; `options`: of this one, AdamW."""
    model, given = scenario.placed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    ready = _steps if scenario.by in ("train step", "pipeline") else _loop
    return *ready(scenario, model, optimizer, {"backend": "eager", **given}), optimizer


def _steps(scenario: Scenario, model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> Steps:
    scaler = torch.amp.GradScaler("cuda") if scenario.scales else None
    whole = zcompile.train_step(model, None, optimizer, clip_grad_norm=scenario.clip, grad_scaler=scaler, **options)
    return whole.model, lambda batch: whole(*batch)


def _loop(scenario: Scenario, model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> Steps:
    side = torch.cuda.Stream() if scenario.streams == "forward" else None
    scaler = torch.amp.GradScaler("cuda", enabled=scenario.scales)
    compiled: Any = (
        torch.compile(model, backend=zcompile.backend(**options))
        if scenario.by == "torch.compile"
        else zcompile.compile(model, optimizer=optimizer, **options)
    )

    def forward(batch: list[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = compiled(*batch)
        return result.square().mean() if scenario.broken else result

    def update(batch: list[torch.Tensor]) -> None:
        if scenario.accumulates:
            with compiled.no_sync():
                forward(batch).backward()
        with _beside(side):
            loss = forward(batch)
        for tensor in batch if side is not None else ():
            tensor.record_stream(side)
        scaler.scale(loss).backward()
        del loss
        if scenario.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
        scaler.step(optimizer)
        scaler.update()

    def one(batch: list[torch.Tensor]) -> None:
        try:
            update(batch)
        finally:
            optimizer.zero_grad()
        _busy(side)
        with torch.no_grad():
            if scenario.evaluates:
                forward(batch)
                forward(batch)
            if scenario.streams == "apart":
                _apart([lambda: forward(batch)] * 2)

    return compiled, one


def _busy(stream: torch.Stream | None) -> None:
    """Take and write memory there without waiting for anything, as what prepares the next batch would."""
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.zeros(1024, device="cuda").add_(1)


@torch.no_grad()
def _shrink(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.99)


def _apart(runs: list[Callable[[], object]]) -> None:
    """Each on a stream of its own, which knows of what was before."""
    current, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in runs]
    for stream in streams:
        stream.wait_stream(current)
    for run, stream in zip(runs, streams, strict=True):
        with torch.cuda.stream(stream):
            run()
    for stream in streams:
        current.wait_stream(stream)


@contextmanager
def _beside(stream: torch.Stream | None) -> Iterator[None]:
    """Inside, kernels go to `stream`, which is joined with the current one before and behind."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
