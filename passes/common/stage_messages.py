"""What the stages of a pipeline give each other in a step: by which names, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zcompile.ir.actions import Action, ActionKind, ActionTable
from zcompile.passes.common.boundary import Crossing, End, Lending, PipelineStage


class StageMessage(NamedTuple):
    """A value that one stage gives another: its name in the traced step, to which stage, of which micro-batch.

    Without a micro-batch it is the value of a parameter that is lent, or the sum of its gradients.
    """

    value: str
    to: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.prefix + self.value

    @property
    def prefix(self) -> str:
        """What lines begin with that are of this micro-batch."""
        return "" if self.microbatch is None else f"m{self.microbatch}_"


def lent_value(lending: Lending) -> StageMessage:
    """The value of a parameter, by what the stage that keeps it says of another one."""
    return StageMessage(f"stage{lending.stage}_{lending.value}", lending.stage)


def collected(lending: Lending, by: int, home: int) -> StageMessage:
    """The sum of a parameter's gradients that stage `by` gives the one that keeps it."""
    return StageMessage(f"stage{by}_{lending.value}_grad", home)


def messages_between(stages: Sequence[PipelineStage], table: ActionTable, sender: int, to: int) -> list[StageMessage]:
    """What one rank sends another in a step, in its order."""
    found = [lent_value(lending) for number in table.stages_of(sender) for lending in stages[number].boundary.lends]
    for action in table.rows[sender]:
        for crossing in crossings(ends_given(stages[action.stage], action.kind)):
            found.append(StageMessage(crossing.value, crossing.stage, action.microbatch))
        if is_last(action, table):
            found += [collected(one, action.stage, one.stage) for one in borrowed(stages[action.stage])]
    return [message for message in found if table.rank_of(message.to) == to]


def is_last(action: Action, table: ActionTable) -> bool:
    """True for the action of a stage behind which it has all gradients of its parameters."""
    kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    return action.kind in kinds and action.microbatch == table.microbatches - 1


def borrowed(stage: PipelineStage) -> list[Lending]:
    """The parameters of other stages that this one computes gradients of."""
    return [end for end in stage.boundary.gradients if isinstance(end, Lending)]


def ends_given(stage: PipelineStage, kind: ActionKind) -> tuple[End, ...]:
    """What an action of a stage gives, for this micro-batch alone."""
    if kind is ActionKind.BACKWARD_WEIGHT:
        return ()
    boundary = stage.boundary
    return boundary.outputs if kind is ActionKind.FORWARD else boundary.gradients[: boundary.sent_back]


def crossings(ends: Sequence[End]) -> list[Crossing]:
    """Those that are values of the traced step for other stages."""
    return [end for end in ends if isinstance(end, Crossing)]
