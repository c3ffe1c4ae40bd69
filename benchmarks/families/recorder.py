"""What a run of a family leaves, to be compared with another run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FLOOR = 0.1
"""What is smaller is compared with this: the gradient of a key's bias is nothing but rounding."""


@dataclass
class Recorder:
    """Losses as they come, what the models hold at the end, and the seconds until the first step was done."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic)
    _steps: int = 0

    def begin(self) -> None:
        """A step begins: the second one tells how long the first took, with all that stood before it."""
        self._steps += 1
        if self._steps == 2:
            self.seconds = time.monotonic() - self._started

    def loss(self, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def end(self, models: Mapping[str, nn.Module]) -> Recorder:
        """Keep what the models hold, whole. Collective where they are sharded."""
        for kind, model in models.items():
            for name, value in model.state_dict().items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                self.state[f"{kind}.{name}"] = whole.detach().clone()
        return self

    def values(self) -> dict[str, Tensor]:
        return {**self.state, **{f"loss {number}": loss for number, loss in enumerate(self.losses)}}


def distance(ours: Recorder, theirs: Recorder) -> tuple[float, str]:
    """The largest relative distance and the name of what has it; 0 where all are equal bit for bit.

    Raises:
        ValueError: One has what the other does not.
    """
    mine, wanted = ours.values(), theirs.values()
    if mine.keys() != wanted.keys():
        raise ValueError(f"only one of both has {sorted(mine.keys() ^ wanted.keys())[:4]}")
    far, where = 0.0, ""
    for name, want in wanted.items():
        found = _distance(mine[name], want)
        if found != found or found > far:
            far, where = found, name
    return far, where


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{ours.dtype} {list(ours.shape)} in place of {theirs.dtype} {list(theirs.shape)}")
    if torch.equal(ours, theirs):
        return 0.0
    if not torch.isfinite(ours).all():
        return float("nan")
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=FLOOR))
