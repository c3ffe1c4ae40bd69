"""By hand, block by block: what arrives of numbers that travel in fewer bits."""

from __future__ import annotations

import torch

EACH = 256
"""Elements of a block."""


def rounded(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """The values as others get them."""
    if wire is torch.bfloat16:
        return values.to(wire).to(values.dtype)
    found = [values.flatten()[:0].float()]
    for block in values.flatten().split(EACH):
        scale = float((block.float().abs().max() / 127).item()) if block.numel() else 0.0
        found.append(block.float() if scale == 0 else torch.round(block.float() / scale) * torch.tensor(scale))
    return torch.cat(found).to(values.dtype).view(values.shape)
