"""Actions of a pipeline schedule: which part of which stage a rank runs for which micro-batch, and in what order.

    0F0, 0F1, 0B0, 0F2, 0B1, 0B2          rank 0 of the pipeline axis
    1F0, 1B0, 1F1, 1B1, 1F2, 1B2          rank 1

`2F3` is the forward of pipeline stage 2 for micro-batch 3, `2B3` its backward. In a divided backward, `2I3` computes
gradients of inputs, which the previous stage waits for, and `2W3`, later, gradients of weights. The notation is that of
torch.distributed.pipelining.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from zcompile.errors import OptionError


class ActionKind(StrEnum):
    """The part of a stage that an action runs."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """The part of the backward that other stages wait for."""
    BACKWARD_WEIGHT = "W"
    """The rest: gradients of the stage's own parameters."""


IN_FLIGHT = {True: 1, False: 2}
"""Most sends per direction that a rank has in flight when it begins an action, by whether each rank has one stage.

Ranks with several stages send to each other in both directions at a time, so waiting for a send to a later stage could
deadlock: such sends are waited for only in the backward.
"""


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a table; printed as `2F3`."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action as printed, such as `2F3`.

        Raises:
            ValueError: `text` is no action.
        """
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
        if match is None:
            raise ValueError(text)
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    @property
    def sends_back(self) -> bool:
        """True if the previous stage waits for this action's results."""
        return self.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)

    @property
    def change(self) -> int:
        """The change in micro-batches in flight: between their forward and the end of their backward."""
        if self.kind is ActionKind.FORWARD:
            return 1
        return 0 if self.kind is ActionKind.BACKWARD_INPUT else -1


_SUBJECT = "schedule"
_SPELLING = "write one line of actions for each rank, such as 0F0, 0F1, 0B0: stage, F, B, I or W, and micro-batch"


@dataclass(frozen=True)
class ActionTable:
    """A pipeline schedule: for each rank along the pipeline axis, its actions in order; printed with a line per rank.

    Raises:
        OptionError: the table deadlocks, or does not train every micro-batch once; names the rank, action and position.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if problem := next(_problems(self), ""):
            raise OptionError(
                _SUBJECT, problem, "give a table in which every stage runs each micro-batch once, in order"
            )

    def __str__(self) -> str:
        return "\n".join(", ".join(map(str, row)) for row in self.rows)

    @classmethod
    def parse(cls, text: str) -> ActionTable:
        """Parse a table; cells may be empty, where a rank idles.

        Raises:
            OptionError: a cell is not an action, or the table is invalid.
        """
        rows = []
        for rank, line in enumerate(filter(str.strip, text.splitlines())):
            cells = [cell.strip() for cell in line.split(",") if cell.strip()]
            try:
                rows.append(tuple(map(Action.parse, cells)))
            except ValueError as error:
                problem = f"rank {rank} has {str(error)!r}, which is not an action"
                raise OptionError(_SUBJECT, problem, _SPELLING) from error
        return cls(tuple(rows))

    @cached_property
    def stages(self) -> int:
        """How many pipeline stages there are."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches a step has."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank has, in order."""
        return sorted({action.stage for action in self.rows[rank]})

    def rank_of(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return self._ranks[stage]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    def in_flight(self, rank: int) -> int:
        """Return the most micro-batches in flight on a rank, over all its stages."""
        most = now = 0
        for action in self.rows[rank]:
            now += action.change
            most = max(most, now)
        return most

    @cached_property
    def at_once(self) -> frozenset[int]:
        """The stages whose backward immediately follows the forward, for every micro-batch."""
        found = set(range(self.stages))
        for row in self.rows:
            for action, following in itertools.zip_longest(row, row[1:]):
                wanted = action.stage, action.microbatch
                follows = following is not None and following.sends_back
                if action.kind is ActionKind.FORWARD and not (
                    follows and (following.stage, following.microbatch) == wanted
                ):
                    found.discard(action.stage)
        return frozenset(found)

    @cached_property
    def trains(self) -> bool:
        """False if the table has only forwards, as for an evaluation."""
        return any(action.kind is not ActionKind.FORWARD for row in self.rows for action in row)

    def forwards(self) -> ActionTable:
        """Return the table without backwards, for an evaluation."""
        kept = (tuple(action for action in row if action.kind is ActionKind.FORWARD) for row in self.rows)
        return ActionTable(tuple(kept))

    @property
    def divides_backward(self) -> bool:
        """True if any backward is divided into gradients of inputs and of weights."""
        return any(action.kind is ActionKind.BACKWARD_INPUT for row in self.rows for action in row)


def _problems(table: ActionTable) -> Iterator[str]:
    """Yield the problems of a table: first errors within a rank's row, then deadlocks between ranks."""
    if not table.stages:
        yield "has no actions"
    yield from _misplaced_stages(table)
    for stage in range(table.stages):
        yield from _mistaken_order(table, stage)
    yield from _circle(table)


def _misplaced_stages(table: ActionTable) -> Iterator[str]:
    homes: dict[int, int] = {}
    for rank, row in enumerate(table.rows):
        if not row:
            yield f"rank {rank} has no actions"
        for index, action in enumerate(row):
            home = homes.setdefault(action.stage, rank)
            if home != rank:
                yield f"rank {rank} has {action} at place {index + 1}, and rank {home} has stage {action.stage}"
    present = {action.stage for row in table.rows for action in row}
    if lacking := set(range(table.stages)) - present:
        yield f"no rank has stage {min(lacking)} of {table.stages}"


def _mistaken_order(table: ActionTable, stage: int) -> Iterator[str]:
    """Check that each micro-batch runs once, in order (gradients are summed in it), each backward after its forward."""
    rank = table.rank_of(stage)
    row = [(index, action) for index, action in enumerate(table.rows[rank]) if action.stage == stage]
    for what, kinds in _ONCE.items() if table.trains else [("forward", _ONCE["forward"])]:
        found = [(index, action) for index, action in row if action.kind in kinds]
        for number in range(max(len(found), table.microbatches)):
            if number >= len(found):
                yield f"rank {rank} lacks the {what} of stage {stage} for micro-batch {number}"
            elif number >= table.microbatches or found[number][1].microbatch != number:
                index, action = found[number]
                wanted = number if number < table.microbatches else "none"
                yield (
                    f"rank {rank} has {action} at place {index + 1}, where the {what} of stage {stage} for micro-batch "
                    f"{wanted} would come"
                )
    done: set[Action] = set()
    for index, action in row:
        for earlier in _own_needs(action):
            if earlier not in done:
                yield f"rank {rank} has {action} at place {index + 1}, before {earlier}"
        done.add(action)
    for index, action in row:
        if action.kind is ActionKind.BACKWARD_WEIGHT and _of(action, ActionKind.BACKWARD) in done:
            yield f"rank {rank} has {action} at place {index + 1}, which {_of(action, ActionKind.BACKWARD)} includes"


_ONCE = {
    "forward": (ActionKind.FORWARD,),
    "backward": (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT),
    "gradient of weights": (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT),
}


def _of(action: Action, kind: ActionKind, stage: int | None = None) -> Action:
    return Action(action.stage if stage is None else stage, kind, action.microbatch)


def _own_needs(action: Action) -> list[Action]:
    """Return the actions of the same stage that must run before `action`."""
    if action.kind is ActionKind.FORWARD:
        return []
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [_of(action, ActionKind.BACKWARD_INPUT)]
    return [_of(action, ActionKind.FORWARD)]


def _other_needs(table: ActionTable, action: Action) -> list[tuple[Action, ...]]:
    """Return groups of actions of other stages; one action of each group must run before `action`."""
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return [(_of(action, ActionKind.FORWARD, action.stage - 1),)]
    if action.sends_back and action.stage + 1 < table.stages:
        return [tuple(_of(action, kind, action.stage + 1) for kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT))]
    return []


def _circle(table: ActionTable) -> Iterator[str]:
    """Report the ranks that wait for each other after each has run as far as it can."""
    done: set[Action] = set()
    at = [0] * len(table.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while at[rank] < len(row) and all(done.intersection(group) for group in _other_needs(table, row[at[rank]])):
                done.add(row[at[rank]])
                at[rank] += 1
                moved = True
    stuck = {rank: row[at[rank]] for rank, row in enumerate(table.rows) if at[rank] < len(row)}
    if stuck:
        waits = (
            f"rank {rank} waits at place {at[rank] + 1} with {action} for {_other_needs(table, action)[0][0]}"
            for rank, action in stuck.items()
        )
        yield f"ranks wait for each other: {'; '.join(waits)}"
