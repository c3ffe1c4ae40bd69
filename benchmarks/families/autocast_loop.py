"""The plain loop with losses computed under `torch.autocast` in bfloat16, with zcompile or DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.families import plain_loop
from benchmarks.families.family import Family
from benchmarks.families.recorder import Recorder


def train(family: Family, options: Mapping[str, Any] | None) -> Recorder:
    return plain_loop.train(family, options, lambda: torch.autocast("cpu", torch.bfloat16))
