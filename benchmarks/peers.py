"""How each family of configurations trains the model: the recommended way, with the settings that suit it best.

Each builder takes the model with its initial values and gives a step: tokens and targets in, this rank's loss out, the
parameters updated. Peers are imported where they are used, so that a missing one fails its own configurations only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import zcompile
from benchmarks.configurations import Configuration, Family
from benchmarks.workload import ADAMW
from examples.gpt import GPT

Step = Callable[[Tensor, Tensor], Tensor]
BUCKET = 6_553_600  # elements: 25 MiB, DistributedDataParallel's default


def build(model: GPT, configuration: Configuration) -> Step:
    """The step of `configuration` over `model`; collective."""
    if configuration.checkpoint and not configuration.ours:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    return BUILDERS[configuration.family](model, configuration)


def alone(model: GPT, configuration: Configuration) -> Step:
    """One process, no communication."""
    forward = torch.compile(model) if configuration.compiled else model
    return loop(forward, torch.optim.AdamW(model.parameters(), **ADAMW))


def ddp(model: GPT, configuration: Configuration) -> Step:
    """DistributedDataParallel; compiled, torch splits it at its buckets (`optimize_ddp`), so that it still overlaps."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    forward = torch.compile(wrapped) if configuration.compiled else wrapped
    return loop(forward, torch.optim.AdamW(model.parameters(), **ADAMW))


def zero1(model: GPT, configuration: Configuration) -> Step:
    """DistributedDataParallel and an optimizer of which each rank runs a part and broadcasts the result."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return loop(wrapped, optimizer)


def fsdp2(model: GPT, configuration: Configuration) -> Step:
    """`fully_shard` on each block and on the root; compiled block by block.

    On the CPU its own prefetching gathers in the foreground; `ahead` names the next two blocks, to gather meanwhile.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    again = configuration.stage == 3
    for block in model.blocks:
        if configuration.compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if again else False)  # None: kept at the turn, the default
    if configuration.ahead:
        _gather_ahead(model)
    return loop(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def _gather_ahead(model: Any, count: int = 2) -> None:
    blocks = list(model.blocks)
    forward, backward = [model, *blocks], [model, *blocks[::-1]]
    for index in range(len(forward)):
        following = slice(index + 1, index + 1 + count)
        forward[index].set_modules_to_forward_prefetch(forward[following])
        backward[index].set_modules_to_backward_prefetch(backward[following])
    model._set_unshard_async_op(True)


def deepspeed(model: GPT, configuration: Configuration) -> Step:
    """DeepSpeed's engine around torch's AdamW, its buckets 25 MiB: 2 GB, the default, would hold the whole model."""
    import deepspeed as peer

    peer.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {
        "stage": configuration.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
    }
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its own default is 1.0, which trains to other losses
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = peer.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def ours(model: GPT, configuration: Configuration) -> Step:
    """Zcompile with its defaults."""
    compiled = zcompile.compile(model, stage=configuration.stage, checkpoint=configuration.checkpoint)
    optimizer = torch.optim.AdamW(compiled.parameters(), **ADAMW)
    return zcompile.train_step(compiled, None, optimizer) if configuration.updates else loop(compiled, optimizer)


def loop(model: nn.Module | Callable[..., Any], optimizer: torch.optim.Optimizer) -> Step:
    """The step that everyone writes."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


BUILDERS: dict[Family, Callable[[GPT, Configuration], Step]] = {
    "alone": alone,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "zcompile": ours,
}
