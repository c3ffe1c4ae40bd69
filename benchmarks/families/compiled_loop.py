"""The plain loop around `torch.compile(model, backend="zcompile")`."""

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
    given: dict[str, Any] = {"backend": "zcompile", "options": dict(options)}
    compiled = {name: cast(nn.Module, torch.compile(model, **given)) for name, model in models.items()}
    plain_loop.steps(family, compiled, recorder)
    return recorder.end(models)
