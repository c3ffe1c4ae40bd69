"""Delivery of gradients: reduced shards into `.grad`, all of a backward at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile._torch import local_tensor, post_accumulate_hooks
from zcompile.runtime.executor import Gradients


@torch.no_grad()
def deliver(reduced: Sequence[Gradients]) -> None:
    """Add gradients to `.grad` of their parameters, or set it where there is none.

    Comes after the whole backward has run: a backward that fails half-way leaves every `.grad` as it was. Hooks of
    `register_post_accumulate_grad_hook` run as autograd runs them.
    """
    for gradients in reduced:
        for name, tensor in gradients.tensors.items():
            parameter = gradients.shards.parameters[name]
            if parameter.grad is None:
                parameter.grad = _like(gradients, name, tensor)
            else:
                _local(parameter.grad).add_(tensor)
            for hook in post_accumulate_hooks(parameter):
                hook(parameter)


def _like(gradients: Gradients, name: str, tensor: torch.Tensor) -> torch.Tensor:
    shards = gradients.shards
    if not isinstance(shards.parameters[name], DTensor):
        return tensor
    unit = shards.unit
    return shards.distribute(unit.params[unit.index(name)], tensor)


def _local(gradient: torch.Tensor | nn.Parameter) -> torch.Tensor:
    return local_tensor(gradient) if isinstance(gradient, DTensor) else gradient
