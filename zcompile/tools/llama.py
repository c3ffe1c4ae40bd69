"""Llama-shaped models of well-known sizes, for plans, with a tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from zcompile.tools.choices import shape_named

VOCABULARY = 128256
BASE = 500_000.0
"""Base (theta) of rotary embeddings."""


@dataclass(frozen=True)
class LlamaShape:
    """Layers, channels, channels within an MLP, query heads, and key/value heads."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int


SHAPES = {
    "8b": LlamaShape(32, 4096, 14336, 32, 8),
    "70b": LlamaShape(80, 8192, 28672, 64, 8),
    "405b": LlamaShape(126, 16384, 53248, 128, 8),
}
"""Shapes of Llama 3 (Grattafiori et al. 2024, table 3)."""


class Llama(nn.Module):
    """A decoder with RMS norm, rotary embeddings, grouped-query attention and gated MLPs; forward returns the loss."""

    tp_plan: Mapping[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.*_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    """Tensor and sequence parallelism (Korthikanti et al. 2022, section 4.2.2), for `parallelize_module`."""

    def __init__(self, shape: LlamaShape, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, float32 scalar. `tokens` and `targets`: int64 [batch, length]."""
        x = self.tokens(tokens)
        rotation = _rotation(tokens.shape[1], self.head_width, tokens.device)
        for layer in self.layers:
            x = layer(x, *rotation)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


class _Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = _Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = _MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        keys = shape.key_heads * self.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = (_rotated(one, cos, sin) for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _rotation(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, float32 [length, width / 2]."""
    frequencies = BASE ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., length, width]: rotates pairs of its first and second halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def shape_of(name: str) -> LlamaShape:
    """The shape called `name`: a size such as "8b", or layers x width such as "4x512", with heads of 64 channels.

    Raises:
        OptionError: `name` is neither.
    """

    def made(layers: int, width: int) -> LlamaShape:
        return LlamaShape(layers, width, 7 * width // 2, width // 64, width // 128)

    return shape_named("llama", name, SHAPES, made, multiple=128, example="16x2048")
