"""How each configuration trains the model on a device: the recommended way.

Each builder gives a step and, of zcompile, the compiled model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zcompile
from benchmarks.configurations import Family
from benchmarks.gpu_protocol import Start
from benchmarks.peers import Step, loop
from benchmarks.workload import ADAMW
from examples.gpt import GPT

SETTINGS: dict[str, Any] = ADAMW | {"lr": 1e-4}
"""Slower than on the CPU: rounding of 16 bits is to stay rounding over all steps of a run."""
Built = tuple[Step, zcompile.CompiledModule | None]


def build(model: GPT, start: Start) -> Built:
    """The step of `start.configuration` over `model`, which lies on the device; collective."""
    return BUILDERS[start.configuration.family](model, start)


def alone(model: GPT, start: Start) -> Built:
    """One process, no communication; the optimizer is not part of what is compiled."""
    forward: Callable[..., Any] = model
    if start.configuration.graphs:
        forward = begun_anew(torch.compile(model, mode="reduce-overhead"))
    elif start.configuration.compiled:
        forward = torch.compile(model)
    return loop(mixed(forward, start), torch.optim.AdamW(model.parameters(), **SETTINGS)), None


def begun_anew(model: Callable[..., Any]) -> Callable[..., Any]:
    """`model`, which is told where a step begins: results of the step before lie in memory that is used again."""

    def forward(*args: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return model(*args)

    return forward


def wrapped(model: GPT, start: Start) -> DistributedDataParallel:
    ids = [start.rank] if start.device == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def ddp(model: GPT, start: Start) -> Built:
    """DistributedDataParallel; compiled, torch splits it at its buckets, so that it still overlaps."""
    replicated = wrapped(model, start)
    forward = torch.compile(replicated) if start.configuration.compiled else replicated
    return loop(mixed(forward, start), torch.optim.AdamW(model.parameters(), **SETTINGS)), None


def zero1(model: GPT, start: Start) -> Built:
    """DistributedDataParallel and an optimizer of which each rank runs a part and broadcasts the result."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replicated = wrapped(model, start)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **SETTINGS
    )
    return loop(mixed(replicated, start), optimizer), None


def fsdp2(model: GPT, start: Start) -> Built:
    """`fully_shard` on each block and the root; bf16 by its policy, and autocast for what must stay in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(start.device, (start.world,))
    low = start.precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    again = start.configuration.stage == 3
    for block in model.blocks:
        if start.configuration.compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if again else False, mp_policy=policy)
    return loop(mixed(model, start), torch.optim.AdamW(model.parameters(), **SETTINGS)), None


def ours(model: GPT, start: Start) -> Built:
    """Zcompile with its defaults, on Inductor."""
    cast = start.configuration.cast
    compiled = zcompile.compile(model, stage=start.configuration.stage, dtype=torch.bfloat16 if cast else None)
    forward = compiled if cast else mixed(compiled, start)
    return loop(forward, torch.optim.AdamW(compiled.parameters(), **SETTINGS)), compiled


def mixed(model: nn.Module | Callable[..., Any], start: Start) -> Callable[..., Any]:
    """`model`, called under autocast where the run is in bf16."""
    if start.precision != "bf16":
        return model

    def forward(*args: Tensor) -> Any:
        with torch.autocast(start.device, dtype=torch.bfloat16):
            return model(*args)

    return forward


BUILDERS: dict[Family, Callable[[GPT, Start], Built]] = {
    "alone": alone,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "zcompile": ours,
}
