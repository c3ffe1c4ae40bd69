"""How each family of configurations trains the model: the recommended way, with the settings that suit it best.

Each builder takes the model with its initial values, on its device, and gives a step (tokens and targets in, this
rank's loss out, the parameters updated) and, of zcompile, the compiled model. Peers are imported where they are used,
so that a missing one fails its own configurations only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import zcompile
from benchmarks.common.configurations import Family
from benchmarks.common.models import ADAMW
from benchmarks.common.protocol import Start
from examples.gpt import GPT

Step = Callable[[Tensor, Tensor], Tensor]
Built = tuple[Step, zcompile.CompiledModule | None]
BUCKET = 6_553_600  # elements: 25 MiB, DistributedDataParallel's default


def build(model: GPT, start: Start) -> Built:
    """The step of `start.configuration` over `model`; collective."""
    configuration = start.configuration
    if configuration.checkpoint and not configuration.ours:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    return BUILDERS[configuration.family](model, start)


def alone(model: GPT, start: Start) -> Built:
    """One process, no communication; the optimizer is not part of what is compiled."""
    forward: Callable[..., Any] = model
    if start.configuration.graphs:
        forward = begun_anew(torch.compile(model, mode="reduce-overhead"))
    elif start.configuration.compiled:
        forward = torch.compile(model)
    return loop(forward, adamw(model, start), start), None


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
    """DistributedDataParallel; compiled, torch splits it at its buckets (`optimize_ddp`), so that it still overlaps."""
    replicated = wrapped(model, start)
    forward = torch.compile(replicated) if start.configuration.compiled else replicated
    return loop(forward, adamw(model, start), start), None


def zero1(model: GPT, start: Start) -> Built:
    """DistributedDataParallel and an optimizer of which each rank runs a part and broadcasts the result."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replicated = wrapped(model, start)
    settings = ADAMW | {"lr": start.rate}
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **settings
    )
    return loop(replicated, optimizer, start), None


def fsdp2(model: GPT, start: Start) -> Built:
    """`fully_shard` on each block and on the root; compiled block by block.

    In bf16 by its policy, and autocast for what must stay in fp32. On the CPU its own prefetching gathers in the
    foreground; `ahead` names the next two blocks, to gather meanwhile.
    """
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
    # None: kept at the turn, the default.
    fully_shard(model, mesh=mesh, reshard_after_forward=None if again else False, mp_policy=policy)
    if start.configuration.ahead:
        _gather_ahead(model)
    return loop(model, adamw(model, start), start), None


def _gather_ahead(model: Any, count: int = 2) -> None:
    blocks = list(model.blocks)
    forward, backward = [model, *blocks], [model, *blocks[::-1]]
    for index in range(len(forward)):
        following = slice(index + 1, index + 1 + count)
        forward[index].set_modules_to_forward_prefetch(forward[following])
        backward[index].set_modules_to_backward_prefetch(backward[following])
    model._set_unshard_async_op(True)


def deepspeed(model: GPT, start: Start) -> Built:
    """DeepSpeed's engine around torch's AdamW, its buckets 25 MiB: 2 GB, the default, would hold the whole model."""
    import deepspeed as peer

    peer.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {
        "stage": start.configuration.stage,
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
    engine, *_ = peer.initialize(model=model, optimizer=adamw(model, start), config=settings)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, None


def ours(model: GPT, start: Start) -> Built:
    """Zcompile with its defaults."""
    configuration = start.configuration
    compiled = zcompile.compile(
        model,
        stage=configuration.stage,
        checkpoint=configuration.checkpoint,
        dtype=torch.bfloat16 if configuration.cast else None,
        cuda_graphs=configuration.graphs if start.device == "cuda" else False,
    )
    optimizer = adamw(compiled, start)
    if configuration.updates:
        whole = zcompile.train_step(compiled, None, optimizer)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            with mixed(start):
                loss: Tensor = whole(tokens, targets)
            return loss

        return step, compiled
    return loop(compiled, optimizer, start), compiled


def adamw(model: nn.Module, start: Start) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **ADAMW | {"lr": start.rate})


def loop(model: Callable[..., Any], optimizer: torch.optim.Optimizer, start: Start) -> Step:
    """The step that everyone writes."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with mixed(start):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mixed(start: Start) -> torch.autocast:
    """Autocast to bf16, unless zcompile casts the parameters."""
    wanted = start.precision == "bf16" and not start.configuration.cast
    return torch.autocast(start.device, dtype=torch.bfloat16, enabled=wanted)


BUILDERS: dict[Family, Callable[[GPT, Start], Built]] = {
    "alone": alone,
    "ddp": ddp,
    "zero1": zero1,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "zcompile": ours,
}
