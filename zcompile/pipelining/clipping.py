"""Clipping by the norm of all gradients, of which each rank along a pipeline axis has those of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.runtime.executor import Gradients, InsideAverages
from zcompile.runtime.gradients.delivery import run_hooks
from zcompile.runtime.stage_links import StageLinks


def deliver(gradients: Sequence[Gradients | InsideAverages]) -> list[nn.Parameter]:
    """Put averaged gradients into `.grad`; gives the parameters that have one now."""
    found, home = [], [one if isinstance(one, Gradients) else one.gradients() for one in gradients]
    for memory in {one.shards.memory for one in home}:
        memory.landed()
    for one in home:
        for name, tensor in one.tensors.items():
            parameter = one.shards.parameters[name]
            parameter.grad = one.shards.gradient(name, tensor)
            run_hooks(parameter)
            found.append(parameter)
    return found


@torch.no_grad()
def clip_together(parameters: Sequence[nn.Parameter], links: StageLinks, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that they have at most the norm `max_norm` together. Collective.

    Gives their 2-norm before, a tensor without dimensions on the device, the same on all ranks.
    """
    # Beside tensor parallelism some are plain tensors, and torch takes these and DTensors apart.
    kinds = [[one for one in parameters if isinstance(one.grad, DTensor) is kind] for kind in (True, False)]
    total = torch.zeros((), device=links.device)
    for some in filter(None, kinds):  # the norm of none is a number on the host
        norm = nn.utils.get_total_norm([one.grad for one in some if one.grad is not None])
        own = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total += own.to(links.device, torch.float32).square()
    if links.size > 1:
        with links.waits.explained("the norm of all gradients"):
            dist.all_reduce(total, group=links.group)
    total = total.sqrt_()
    for some in filter(None, kinds):
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total
