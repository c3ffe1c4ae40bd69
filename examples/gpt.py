"""A byte-level GPT in plain PyTorch: it knows nothing of ranks, shards or compilers."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make 3.3 million parameters."""

    vocabulary: int = 256  # one token per byte value
    context: int = 128  # longest sequence, in tokens
    layers: int = 4
    heads: int = 4
    width: int = 256  # channels of the residual stream

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not split over {self.heads} heads: make it a multiple of them")


class Attention(nn.Module):
    """Causal self-attention of `heads` heads, width / heads channels each."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width); position i looks at positions 0..i."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear maps around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, 4 * config.width, bias=False)
        self.out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width), each position by itself."""
        return self.out(F.gelu(self.widen(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer: attention, then MLP, each behind its norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Token and position embeddings, a stack of blocks, a norm, and an untied linear head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's: N(0, 0.02) for every matrix, smaller where a block writes to the residual stream."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=residual if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the next token at every position.

        tokens: (batch, length) int64, length at most config.context.
        targets: (batch, length) int64, the token that follows each position.
        Returns the mean cross-entropy in nats per token, a scalar, when targets are given;
        otherwise the logits, (batch, length, vocabulary).
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
