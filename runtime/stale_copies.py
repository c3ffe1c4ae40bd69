"""Freshness: whether copies still equal the shards: full ones, secondary shards, and what is gathered ahead.

An optimizer step says that it has changed parameters. Where none came in between (gradient accumulation, evaluation,
the next train step), a parameter says whether it may have been written to: by version counters, by operations that
these do not show, or by anybody who has taken its `.data`, or has what `state_dict` gives. The ranks tell each other
with the run, and if one of them has such a parameter, all compare what they keep with their shards and agree on the
result: no rank gathers alone.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch

from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import UnitShards


class Freshness:
    """Marks kept copies that a step has outdated, and drops those that a write has, on all ranks alike."""

    def __init__(self, units: Mapping[str, UnitShards], communicator: Communicator) -> None:
        self.units = units
        self.communicator = communicator
        self.steps = 0
        """Optimizer steps that changed these parameters."""
        self.idle = 0
        """Steps that have found no gradient."""
        self._steps_seen = 0
        self._given: list[weakref.ref[torch.Tensor]] = []
        """What shows the memory of shards to others, who may write to it; no counter of a parameter tells of that."""

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that somebody has `tensors`, which show the memory of shards, and may write to them."""
        self._given += map(weakref.ref, tensors)

    def _prune(self) -> None:
        self._given = [given for given in self._given if given() is not None]

    def step(self, *, idle: bool = False) -> None:
        """An optimizer has stepped parameters of these units; `idle`: it has found no gradient."""
        self.steps += 1
        self.idle += idle

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Whatever optimizers do within is one step on all ranks, of which each has parameters of other optimizers."""
        before = self.steps, self.idle
        try:
            yield
        finally:
            self.steps, self.idle = before[0] + 1, before[1]

    def drop_stale_copies(self) -> bool:
        """Leave no copy as current that a step has outdated; returns whether any that is left may differ.

        What was gathered ahead was so after the step. A step is taken to be every rank's, without asking: `Lockstep`
        compares their number with that of the run.
        """
        stepped, self._steps_seen = self.steps != self._steps_seen, self.steps
        if stepped:
            for unit in self.units.values():
                if any(param.requires_grad for param in unit.parameters.values()):
                    unit.drop_stale_copy()
        if not self.has_current:
            self._prune()  # what was written so far will be gathered
            return False
        return bool(self._given) or any(unit.may_differ for unit in self.units.values())

    @property
    def has_current(self) -> bool:
        """True if there are copies that no step has outdated: on every rank, or on none."""
        return any(unit.has_current for unit in self.units.values())

    @torch.no_grad()
    def compare(self) -> None:
        """Drop copies that differ from the shard on any rank. Collective.

        Their memory is not used again: autograd may not know of the write, so a backward that is still to come reads
        them.
        """
        kept = [unit for unit in self.units.values() if unit.has_current]
        differ = self.communicator.any_rank(torch.stack([unit.copies_differ() for unit in kept]).cpu())
        for unit in itertools.compress(kept, differ.tolist()):
            unit.drop_copies()
        for unit in kept:
            unit.compared()
        self._prune()
