"""What a model family is: how its small model is made from random weights, its batches, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Models = Mapping[str, nn.Module]

ROWS = 4
"""Rows of a batch on each rank."""
STEPS = 3


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
