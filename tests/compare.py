"""What models have, as plain tensors that stay as they are, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, whole where it is in shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def differing(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same bit for bit."""
    assert list(got) == list(want)
    return [name for name in want if not torch.equal(got[name], want[name])]
