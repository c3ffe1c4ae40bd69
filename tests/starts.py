"""Models that start on meta, and the values that they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile

Values = dict[str, torch.Tensor]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def compiled_from_meta(build: Callable[[], nn.Module], seed: int = 0, **options: Any) -> zcompile.CompiledModule:
    model = on_meta(build)
    torch.manual_seed(seed)
    return zcompile.compile(model, backend="eager", **options)


def values_of(module: nn.Module) -> Values:
    """Full values of all parameters and buffers."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in named}


def assert_equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """A unit between blocks, three blocks, a unit between blocks."""

    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.layers = nn.ModuleList(type(self).layer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()
