"""What a rank of a pipeline holds beside shards and moments, action by action."""

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
    """What a rank holds at the peak of a step, or as soon as that is more than the limit."""
    held = _HeldBytes(divided, rank)
    for action in divided.table.rows[rank]:
        held.run(action)
        if sum(held.most.values()) > limit:
            break
    return held.most


class _HeldBytes:
    """What a rank holds beside shards and moments, while its actions run."""

    def __init__(self, divided: DividedPipeline, rank: int) -> None:
        setting, table, stages = divided.setting, divided.table, divided.stages
        self.zero, self.stages = setting.stage, stages
        self.depth = max(setting.prefetch, 1)
        own = [stages[number] for number in table.stages_of(rank)]
        self.borrowed = sum(stage.borrowed for stage in own)
        full = [one.full for one in divided.gathers_of(rank)]
        self.full = _most_of(full, 1 + setting.prefetch) if self.zero.parameters_sharded else sum(full)
        several = setting.size > 1  # alone, averages are in the gradients' own memory
        reduced = [one.gradients + (one.averages if several else 0) for one in divided.reductions_of(rank)]
        self.reducing = _most_of(reduced, self.depth) if self.zero.gradients_sharded else 0
        self.several = table.microbatches > 1
        self.simple = table.stages == len(table.rows)
        self.coming = _Coming(divided, rank, self.depth if setting.prefetch else 0)
        self.ahead, self.back = list[_Sent](), list[_Sent]()
        self.saved = dict[tuple[int, int], int]()
        self.total = 0
        """Bytes of `saved`."""
        self.within = dict[tuple[int, ActionKind, bool], tuple[int, int]]()
        self.gradients = dict[int, int]()
        self.most = dict.fromkeys(MemoryKind, 0)

    def run(self, action: Action) -> None:
        """Run an action: what is held while it does, and what is left behind it."""
        stage, place, kind = self.stages[action.stage], (action.stage, action.microbatch), action.kind
        self._end_sending(action)
        self.total -= self.saved.pop(place, 0)
        others = self.total + sum(one.nbytes for one in (*self.ahead, *self.back)) + self.coming.take(action)
        first = kind in WEIGHTS and action.stage not in self.gradients
        if (key := (action.stage, kind, first)) not in self.within:
            self.within[key] = self._most_within(stage, kind, first)
        self._note(others, self.within[key])
        left = {ActionKind.FORWARD: stage.saved, ActionKind.BACKWARD_INPUT: stage.left}.get(kind)
        if left is not None:
            self.saved[place] = sum(left.values())
            self.total += self.saved[place]
        if kind is ActionKind.FORWARD:
            self.ahead.append(_Sent(*place, sum(stage.ahead.values())))
        if action.sends_back:
            self.back.append(_Sent(*place, sum(stage.back.values())))
        if first:
            self.gradients[action.stage] = self._left(stage.layouts)

    def _left(self, layouts: Iterable[UnitLayout]) -> int:
        """Bytes of gradients that a backward leaves: in full until a reduction behind the last, or what that leaves."""
        if self.zero.gradients_sharded:
            return sum(one.averages for one in layouts)
        return sum(one.sums if self.several else one.gradients for one in layouts)

    def _end_sending(self, action: Action) -> None:
        """Free what has arrived by now, as `unroll_microbatches` waits for it."""
        place, most = (action.stage, action.microbatch), IN_FLIGHT[self.simple]
        if action.kind is not ActionKind.FORWARD:
            self.ahead = [one for one in self.ahead if one[:2] != place]
            self.back = self.back[-most:] if action.sends_back else self.back
        elif self.simple:
            self.ahead = self.ahead[-most:]

    def _most_within(self, stage: StageCost, kind: ActionKind, first: bool) -> tuple[int, int]:
        """The most activations of this micro-batch, with the gradients that are new, that are there in an action.

        `first`: it is the first that gives gradients of weights.
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
    """What a stage has sent of a micro-batch, and is kept until it must have arrived."""

    stage: int
    microbatch: int
    nbytes: int


def _is_own(name: str) -> bool:
    """True for what a unit keeps of its own, False for what crosses its boundary."""
    return name.isdecimal()


def _most_of(sizes: Sequence[int], count: int) -> int:
    """The sum of those of so many neighbours that take most."""
    return max(sum(sizes[begin : begin + count]) for begin in range(max(len(sizes) - count, 0) + 1))


class _Coming:
    """Messages that a rank receives ahead: from each other rank so many at a time."""

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
        """Bytes that are being received when an action has taken what is for it."""
        for queue in self.queues.values():
            while queue and queue[0][0] == action:
                queue.popleft()
        return sum(nbytes for queue in self.queues.values() for _, nbytes in islice(queue, self.depth))
