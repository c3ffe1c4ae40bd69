"""Accelerate's loop: zcompile's Accelerator, or Accelerate's own without options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accelerate
import torch
import torch.distributed as dist

from benchmarks.families.family import Family
from benchmarks.families.loops import DDP
from benchmarks.families.recorder import Recorder
from zcompile.integrations.accelerate import Accelerator


def train(family: Family, options: Mapping[str, Any] | None) -> Recorder:
    recorder = Recorder()
    models = family.models()
    trained = [phase.model for phase in family.phases]
    optimizers = {
        name: torch.optim.AdamW([p for p in models[name].parameters() if p.requires_grad], lr=1e-3) for name in trained
    }
    accelerator = _accelerator(options)
    both = accelerator.prepare(*(models[name] for name in trained), *(optimizers[name] for name in trained))
    wrapped = {**models, **dict(zip(trained, both, strict=False))}
    stepped = dict(zip(trained, both[len(trained) :], strict=True))
    for batch in family.batches(dist.get_rank()):
        recorder.begin()
        for phase in family.phases:
            stepped[phase.model].zero_grad()
            loss = phase.loss(wrapped, batch)
            accelerator.backward(loss)
            stepped[phase.model].step()
            recorder.loss(loss)
    return recorder.end(
        {name: getattr(model, "module", model) if options is None else model for name, model in wrapped.items()}
    )


def _accelerator(options: Mapping[str, Any] | None) -> Any:
    if options is not None:
        return Accelerator(cpu=True, zcompile=options)
    return accelerate.Accelerator(cpu=True, kwargs_handlers=[accelerate.DistributedDataParallelKwargs(**DDP)])
