"""What a model family is: how its small model is made from random weights, its batches, and what it is trained on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Models = Mapping[str, nn.Module]
Draw = Callable[[torch.Generator], Tensor]

ROWS = 4
"""Rows of a batch on each rank."""
STEPS = 3
MODULES = {
    "plain_models": "torch",
    "several_losses": "torch",
    "transformers_models": "transformers",
    "timm_models": "timm",
    "diffusers_models": "diffusers",
    "peft_models": "peft",
}
"""Which library each module of models needs: it is imported when a family of it is asked for."""


@dataclass(frozen=True)
class Phase:
    """A part of a step: a loss, and the model whose optimizer then makes a step."""

    model: str
    loss: Callable[[Models, Batch], Tensor]


@dataclass(frozen=True)
class Family:
    """One row of the matrix. Most have one model, "model", and one phase; a GAN has two of both."""

    name: str
    library: str
    make: Callable[[], dict[str, nn.Module]]
    batch: Callable[[torch.Generator], Batch]
    phases: tuple[Phase, ...]
    trainer: bool = False
    """Whether the Trainer of Transformers can train it: its model takes the batch and gives a loss."""

    def models(self) -> dict[str, nn.Module]:
        """The models, the same on every call, in training mode with all dropout switched off."""
        torch.manual_seed(0)
        models = self.make()
        for model in models.values():
            for module in model.train().modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
        return models

    def batches(self, rank: int) -> list[Batch]:
        """The batches of a rank, the same in every run."""
        return [self.batch(torch.Generator().manual_seed(1000 * step + rank)) for step in range(STEPS)]


def single(
    name: str,
    library: str,
    make: Callable[[], nn.Module],
    batch: Callable[[torch.Generator], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
) -> Family:
    """A family of one model and one loss."""
    phase = Phase("model", lambda models, given: loss(models["model"], given))
    return Family(name, library, lambda: {"model": make()}, batch, (phase,))


def drawn(**values: Draw) -> Callable[[torch.Generator], Batch]:
    """What draws a batch of these values, in their order."""
    return lambda generator: {name: draw(generator) for name, draw in values.items()}


def normal(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator)


def uniform(*shape: int) -> Draw:
    return lambda generator: torch.rand(shape, generator=generator)


def integers(low: int, high: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(low, high, shape, generator=generator)


@functools.cache
def _of(module: str) -> dict[str, Family]:
    return {family.name: family for family in importlib.import_module(f"benchmarks.families.{module}").FAMILIES}


def _installed() -> list[str]:
    return [module for module, library in MODULES.items() if importlib.util.find_spec(library) is not None]


def families() -> dict[str, Family]:
    """Those whose library is installed."""
    return {name: family for module in _installed() for name, family in _of(module).items()}


def find(name: str) -> Family | None:
    """The family of a name, if its library is installed; imports no more libraries than it takes."""
    return next((_of(module)[name] for module in _installed() if name in _of(module)), None)
