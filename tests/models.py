"""Small models that tests train, and batches for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(
        self, layers: int = 3, width: int = 32, heads: int = 4, vocabulary: int = 64, context: int = 16
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TiedGPT(GPT):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.head.weight = self.tokens.weight


class OddMLP(nn.Module):
    """Sizes that no world divides, a dimension smaller than most worlds, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 1)])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.scale * self.layers[-1](x), y)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in ((3, 6), (6, 10), (10, 9))
        )
        self.head = nn.Linear(9, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), y)


MODELS = {"tied": TiedGPT, "gpt": GPT, "mlp": OddMLP, "conv": ConvNet}


def make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def batch(kind: str, rank: int, step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of `rank` at `step`: the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind in ("gpt", "tied"):
        tokens = torch.randint(0, 64, (size, 17), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if kind == "mlp":
        return torch.randn(size, 7, generator=generator), torch.randn(size, 1, generator=generator)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.randint(0, 11, (size,), generator=generator)


def update(*optimizers: torch.optim.Optimizer) -> None:
    """Step, and let the gradients go."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Train one step on each of `batches`; gives the losses."""
    losses = []
    for given in batches:
        loss = model(*given)
        loss.backward()
        update(optimizer)
        losses.append(loss.detach())
    return losses
