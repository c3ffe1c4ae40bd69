"""Loops of plain PyTorch: around zcompile and `torch.compile`, or around DistributedDataParallel without options."""

from __future__ import annotations

import contextlib
import functools
import importlib
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
Options = Mapping[str, Any]


def plain(family: Family, options: Options | None, around_loss: Around = contextlib.nullcontext) -> Recorder:
    """`zcompile.compile`, or DistributedDataParallel."""
    recorder, models = Recorder(), family.models()
    wrapped: dict[str, Any] = {
        name: replicated(model) if options is None else zcompile.compile(model, **options)
        for name, model in models.items()
    }
    steps(family, wrapped, recorder, around_loss)
    return recorder.end({name: model.module for name, model in wrapped.items()} if options is None else wrapped)


def autocast(family: Family, options: Options | None) -> Recorder:
    """The same with losses computed under `torch.autocast` in bfloat16."""
    return plain(family, options, lambda: torch.autocast("cpu", torch.bfloat16))


def compiled(family: Family, options: Options) -> Recorder:
    """Around `torch.compile(model, backend="zcompile")`."""
    recorder, models = Recorder(), family.models()
    wrapped: Any = {
        name: torch.compile(model, backend="zcompile", options=dict(options)) for name, model in models.items()
    }
    steps(family, wrapped, recorder)
    return recorder.end(models)


def traced(family: Family, options: Options) -> Recorder:
    """DistributedDataParallel around a model that torch.compile traces: what tracing alone changes."""
    recorder, models = Recorder(), family.models()
    wrapped: Any = {name: replicated(torch.compile(model, **options)) for name, model in models.items()}
    steps(family, wrapped, recorder)
    return recorder.end(models)


LOOPS: dict[str, Callable[..., Recorder]] = {
    "plain": plain,
    "autocast": autocast,
    "compiled": compiled,
    "traced": traced,
}


def loop_of(name: str, options: Options | None) -> Callable[[Family], Recorder]:
    """A loop, with these options of zcompile; those of others' trainers are imported when they are asked for."""
    if options is None and name in ("compiled", "traced"):
        name = "plain"
    if name not in LOOPS:
        LOOPS[name] = importlib.import_module(f"benchmarks.families.{name}_loop").train
    return functools.partial(LOOPS[name], options=options)


def replicated(model: Any) -> nn.Module:
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
    family: Family, models: Mapping[str, nn.Module], recorder: Recorder, around_loss: Around = contextlib.nullcontext
) -> None:
    """Train models that are wrapped already, as a script does."""
    optimizers = {phase.model: sgd(models[phase.model]) for phase in family.phases}
    for batch in family.batches(dist.get_rank()):
        recorder.begin()
        for phase in family.phases:
            optimizers[phase.model].zero_grad()
            with around_loss():
                loss = phase.loss(models, batch)
            loss.backward()
            optimizers[phase.model].step()
            recorder.loss(loss)
