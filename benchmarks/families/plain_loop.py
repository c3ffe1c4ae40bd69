"""The plain loop: `zcompile.compile`, or DistributedDataParallel without options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcompile
from benchmarks.families.family import Family
from benchmarks.families.recorder import Recorder

DDP: dict[str, Any] = {"find_unused_parameters": True, "broadcast_buffers": False}
"""Each rank has its own statistics of batch normalization, as in zcompile."""


Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes what a loss is computed under."""


def train(family: Family, options: Mapping[str, Any] | None, around_loss: Around = contextlib.nullcontext) -> Recorder:
    recorder = Recorder()
    models = family.models()
    wrapped: dict[str, Any] = {
        name: replicated(model) if options is None else zcompile.compile(model, **options)
        for name, model in models.items()
    }
    steps(family, wrapped, recorder, around_loss=around_loss)
    return recorder.end({name: model.module for name, model in wrapped.items()} if options is None else wrapped)


def replicated(model: nn.Module) -> nn.Module:
    """The model as DistributedDataParallel has it; its `module` is what was given."""
    trained = any(param.requires_grad for param in model.parameters())
    return DistributedDataParallel(model, **DDP) if trained else _Unwrapped(model)


class _Unwrapped(nn.Module):
    """A model of which nothing is trained, which DistributedDataParallel refuses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def steps(
    family: Family,
    models: Mapping[str, nn.Module],
    recorder: Recorder,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    around_loss: Around = contextlib.nullcontext,
) -> None:
    """Train models that are wrapped already, as a script does."""
    optimizers = {phase.model: make_optimizer(models[phase.model]) for phase in family.phases}
    for batch in family.batches(dist.get_rank()):
        recorder.begin()
        for phase in family.phases:
            optimizers[phase.model].zero_grad()
            with around_loss():
                loss = phase.loss(models, batch)
            loss.backward()
            optimizers[phase.model].step()
            recorder.loss(loss)
