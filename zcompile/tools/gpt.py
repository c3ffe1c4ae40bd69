"""GPT-shaped models of well-known sizes, for plans: built from torch's own layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zcompile.tools.choices import shape_named

VOCABULARY = 50304
"""Vocabulary size of GPT-2, rounded up to a multiple of 128."""


@dataclass(frozen=True)
class GPTShape:
    """Layers, channels and attention heads."""

    layers: int
    width: int
    heads: int


SHAPES = {
    "124m": GPTShape(12, 768, 12),
    "350m": GPTShape(24, 1024, 16),
    "774m": GPTShape(36, 1280, 20),
    "1.5b": GPTShape(48, 1600, 25),
    "2.7b": GPTShape(32, 2560, 32),
    "6.7b": GPTShape(32, 4096, 32),
    "7.5b": GPTShape(36, 4096, 32),
    "13b": GPTShape(40, 5120, 40),
    "60b": GPTShape(75, 8192, 64),
    "128b": GPTShape(101, 10240, 80),
    "175b": GPTShape(96, 12288, 96),
    "1t": GPTShape(127, 25600, 160),
}


class GPT(nn.Module):
    """A decoder without dropout; its forward returns the loss."""

    def __init__(self, shape: GPTShape, context: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(context, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, a scalar. `tokens` and `targets`: int64 [batch, length]."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = nn.functional.linear(self.norm(x), self.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _block(shape: GPTShape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def shape_of(name: str) -> GPTShape:
    """The shape called `name`: a size such as "7.5b", or layers x width such as "48x1600".

    Raises:
        OptionError: `name` is neither.
    """
    return shape_named(
        "gpt", name, SHAPES, lambda layers, width: GPTShape(layers, width, width // 64), multiple=64, example="48x1600"
    )
