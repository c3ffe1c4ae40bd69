"""Freshness: whether full copies still equal the shards: those that stages 1 and 2 keep, those gathered ahead.

Version counters do not tell: the fused and foreach optimizers write a DTensor's local memory past them. So an
optimizer step says that it has changed parameters, and where no step came in between (gradient accumulation,
evaluation) the ranks compare what they keep with their shards and agree on the result: a write through `.data` is seen
too, and no rank gathers alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards


class Freshness:
    """Marks kept copies that a step has outdated, and drops those that a write has, on all ranks alike."""

    def __init__(
        self, units: Mapping[str, UnitShards], communicator: Communicator, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check`: called before the ranks compare, for ranks that are out of step would wait there."""
        self.units = units
        self.communicator = communicator
        self.check = check
        self.steps = 0
        """Optimizer steps that changed these parameters."""
        self.idle = 0
        """Steps that have found no gradient."""
        self._steps_seen = 0

    def step(self, *, idle: bool = False) -> None:
        """An optimizer has stepped parameters of these units; `idle`: it has found no gradient."""
        self.steps += 1
        self.idle += idle

    @torch.no_grad()
    def refresh(self) -> None:
        """Leave no copy as current that a step or a write has outdated.

        Collective where there are copies that no step has outdated. What was gathered ahead was so after the step.

        A step is taken to be every rank's, without asking: `Lockstep` compares their number with that of the run.
        """
        stepped, self._steps_seen = self.steps != self._steps_seen, self.steps
        if stepped:
            for unit in self.units.values():
                if any(param.requires_grad for param in unit.parameters.values()):
                    unit.outgrow_kept()
        self._compare([unit for unit in self.units.values() if unit.has_current])

    def _compare(self, kept: list[UnitShards]) -> None:
        """Drop copies that differ from the shard on any rank.

        Their memory is not used again: no version counter has told autograd of the write, so a backward that is still
        to come reads them.
        """
        if kept:
            self.check()
            differ = torch.stack([unit.copies_differ() for unit in kept])
            if self.communicator.size > 1:
                differ = self.communicator.any_rank(differ)
            for unit in itertools.compress(kept, differ.tolist()):
                for gather in unit.ahead.values():
                    gather.wait()  # on CUDA: its memory must not be used again while it is still being filled
                unit.ahead.clear()
                unit.kept.clear()
