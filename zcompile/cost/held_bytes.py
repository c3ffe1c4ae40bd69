"""Predicts the bytes that a pipeline rank holds in addition to shards and moments, action by action."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from zcompile.cost.divided import WEIGHTS, DividedPipeline, StageCost, UnitLayout
from zcompile.cost.memory import MemoryKind
from zcompile.ir.actions import IN_FLIGHT, Action, ActionKind


def most_held(divided: DividedPipeline, rank: int, limit: float = math.inf) -> dict[MemoryKind, int]:
    """Return the bytes that a rank holds at the peak of a step, or at the first action that exceeds the limit."""
    held = _HeldBytes(divided, rank)
    for action in divided.table.rows[rank]:
        held.run(action)
        if sum(held.most.values()) > limit:
            break
    return held.most


class _HeldBytes:
    """The bytes that a rank holds in addition to shards and moments, while its actions run."""

    def __init__(self, divided: DividedPipeline, rank: int) -> None:
        setting, table, stages = divided.setting, divided.table, divided.stages
        self.zero, self.stages = setting.stage, stages
        self.depth = max(setting.prefetch, 1)
        own = [stages[number] for number in table.stages_of(rank)]
        self.borrowed = sum(stage.borrowed for stage in own)
        full = [layout.full for layout in divided.gathers_of(rank)]
        self.full = _most_of(full, 1 + setting.prefetch) if self.zero.parameters_sharded else sum(full)
        shared = setting.size > 1  # without other ranks, averages are in the gradients' own memory
        reduced = [unit.gradients + (unit.averages if shared else 0) for unit in divided.reductions_of(rank)]
        self.reducing = _most_of(reduced, self.depth) if self.zero.gradients_sharded else 0
        self.several = table.microbatches > 1
        self.simple = table.stages == len(table.rows)
        self.incoming = _Incoming(divided, rank, self.depth if setting.prefetch else 0)
        self.ahead, self.back = list[_Sent](), list[_Sent]()
        self.saved = dict[tuple[int, int], int]()
        self.total = 0
        """The sum of `saved`, in bytes."""
        self.within = dict[tuple[int, ActionKind, bool], tuple[int, int]]()
        self.gradients = dict[int, int]()
        self.most = dict.fromkeys(MemoryKind, 0)

    def run(self, action: Action) -> None:
        """Run an action: update the peak, and the bytes that are held afterwards."""
        stage, origin, kind = self.stages[action.stage], (action.stage, action.microbatch), action.kind
        self._end_sending(action)
        self.total -= self.saved.pop(origin, 0)
        others = self.total + sum(sent.nbytes for sent in (*self.ahead, *self.back)) + self.incoming.take(action)
        first = kind in WEIGHTS and action.stage not in self.gradients
        if (key := (action.stage, kind, first)) not in self.within:
            self.within[key] = self._most_within(stage, kind, first)
        self._note(others, self.within[key])
        left = {ActionKind.FORWARD: stage.saved, ActionKind.BACKWARD_INPUT: stage.left}.get(kind)
        if left is not None:
            self.saved[origin] = sum(left.values())
            self.total += self.saved[origin]
        if kind is ActionKind.FORWARD:
            self.ahead.append(_Sent(*origin, sum(stage.ahead.values())))
        if action.sends_back:
            self.back.append(_Sent(*origin, sum(stage.back.values())))
        if first:
            self.gradients[action.stage] = self._left(stage.layouts)

    def _left(self, layouts: Iterable[UnitLayout]) -> int:
        """Return the bytes of gradients held after a backward: full until the last one, or sharded averages."""
        if self.zero.gradients_sharded:
            return sum(layout.averages for layout in layouts)
        return sum(layout.sums if self.several else layout.gradients for layout in layouts)

    def _end_sending(self, action: Action) -> None:
        """Free the sends that `unroll_microbatches` waits for before this action."""
        origin, most = (action.stage, action.microbatch), IN_FLIGHT[self.simple]
        if action.kind is not ActionKind.FORWARD:
            self.ahead = [sent for sent in self.ahead if sent[:2] != origin]
            self.back = self.back[-most:] if action.sends_back else self.back
        elif self.simple:
            self.ahead = self.ahead[-most:]

    def _most_within(self, stage: StageCost, kind: ActionKind, first: bool) -> tuple[int, int]:
        """Return the bytes of this micro-batch's activations and of new gradients, at the peak of an action.

        `first`: the action is the first that computes gradients of weights.
        """
        if kind is ActionKind.FORWARD:
            most = held = 0
            for unit in stage.units:
                taken = {**unit.inputs, **{name: nbytes for name, nbytes in unit.saved.items() if not _is_own(name)}}
                most = max(most, held + sum(taken.values()) + unit.parts[kind].peak)
                held += sum(unit.saved.values())
            return most, 0
        begins = stage.left if kind is ActionKind.BACKWARD_WEIGHT else stage.saved
        held, new, best = sum(begins.values()), 0, (0, 0)
        for unit, layout in zip(reversed(stage.units), reversed(stage.layouts), strict=True):
            needs = stage.needs(unit, kind)
            own = sum(nbytes for name, nbytes in needs.items() if _is_own(name))
            tangents = 0 if kind is ActionKind.BACKWARD_WEIGHT else sum(unit.tangents.values())
            best = max(best, (held + tangents + max(stage.part(unit, kind).peak - own, 0), new), key=sum)
            held -= sum(needs.values())
            if kind is ActionKind.BACKWARD_INPUT and not stage.is_first:
                held += sum(unit.left.values())
            new += self._left([layout]) if first else 0
        return best

    def _note(self, others: int, within: tuple[int, int]) -> None:
        activations, new = within
        found = {
            MemoryKind.FULL: self.full,
            MemoryKind.GRADIENTS: sum(self.gradients.values()) + new + (self.reducing if self.gradients or new else 0),
            MemoryKind.ACTIVATIONS: others + activations + 2 * self.borrowed,
            MemoryKind.BUFFERS: 0,
        }
        if sum(found.values()) > sum(self.most.values()):
            self.most = found


class _Sent(NamedTuple):
    """A value that a stage sent for a micro-batch, held until the send is waited for."""

    stage: int
    microbatch: int
    nbytes: int


def _is_own(name: str) -> bool:
    """Return True for a value that a unit saves for itself, False for one that crosses its boundary."""
    return name.isdecimal()


def _most_of(sizes: Sequence[int], count: int) -> int:
    """Return the largest sum of `count` consecutive sizes."""
    return max(sum(sizes[begin : begin + count]) for begin in range(max(len(sizes) - count, 0) + 1))


class _Incoming:
    """Messages that a rank receives ahead of time: up to `depth` from each other rank."""

    def __init__(self, divided: DividedPipeline, rank: int, depth: int) -> None:
        self.depth, self.queues = depth, dict[int, deque[tuple[Action, int]]]()
        table, stages = divided.table, divided.stages
        for action in table.rows[rank]:
            forward = action.kind is ActionKind.FORWARD
            for number in divided.senders[forward][action.stage] if forward or action.sends_back else ():
                if (home := table.rank_of(number)) != rank:
                    sent = stages[number].ahead if forward else stages[number].back
                    self.queues.setdefault(home, deque()).append((action, sent[action.stage]))

    def take(self, action: Action) -> int:
        """Consume the messages of an action, and return the bytes of the messages being received afterwards."""
        for queue in self.queues.values():
            while queue and queue[0][0] == action:
                queue.popleft()
        return sum(nbytes for queue in self.queues.values() for _, nbytes in islice(queue, self.depth))
