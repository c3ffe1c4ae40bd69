"""The plain loop of DistributedDataParallel around a model that torch.compile traces: what tracing alone changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from benchmarks.families import plain_loop
from benchmarks.families.family import Family
from benchmarks.families.recorder import Recorder


def train(family: Family, options: Mapping[str, Any] | None) -> Recorder:
    if options is None:
        return plain_loop.train(family, None)
    recorder = Recorder()
    models = family.models()
    traced = {name: cast(nn.Module, torch.compile(model, **options)) for name, model in models.items()}
    plain_loop.steps(family, {name: plain_loop.replicated(model) for name, model in traced.items()}, recorder)
    return recorder.end(models)
