"""Freshness: whether full copies that stages 1 and 2 keep still equal the shards.

Version counters do not tell: the fused and foreach optimizers write a DTensor's local memory past them. So an
optimizer step says that it has changed parameters, and where no step came in between (gradient accumulation,
evaluation) the ranks compare what they keep with their shards and agree on the result: a write through `.data` is seen
too, and no rank gathers alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards


class Freshness:
    """Drops kept copies that are out of date, on all ranks alike."""

    def __init__(self, units: Sequence[UnitShards], communicator: Communicator) -> None:
        self.units = units
        self.communicator = communicator
        self.steps = 0
        """Optimizer steps that changed these parameters."""
        self._steps_seen = 0

    def step(self) -> None:
        """An optimizer has stepped parameters of these units."""
        self.steps += 1

    @torch.no_grad()
    def refresh(self) -> None:
        """Drop what a step or a write has outdated. Collective where copies are kept that no step has outdated."""
        stepped, self._steps_seen = self.steps != self._steps_seen, self.steps
        kept = [held for held in self.units if held.kept is not None]
        if stepped:
            for held in kept:
                if any(param.requires_grad for param in held.parameters.values()):
                    held.kept = None
        kept = [held for held in kept if held.kept is not None]
        if kept:
            self._compare(kept)

    def _compare(self, kept: list[UnitShards]) -> None:
        """Drop copies that differ from the shard on any rank."""
        differs = [not held.kept_is_current() for held in kept]
        if self.communicator.size > 1:
            flags = torch.tensor(differs, dtype=torch.int32, device=self.communicator.device)
            differs = self.communicator.any_rank(flags).tolist()
        for held, differ in zip(kept, differs, strict=True):
            if differ:
                held.kept = None
