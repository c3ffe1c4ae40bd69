"""Activations that the stages of a rank compute again, so that its step holds no more than a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from zcompile.cost.memory import peak_bytes
from zcompile.ir.actions import ActionTable
from zcompile.ir.program import Program
from zcompile.passes.common.boundary import PipelineStage


class RewriteStage(Protocol):
    """Rewrites a stage as it was cut."""

    def __call__(
        self,
        stage: PipelineStage,
        checkpoint: Literal["unit"] | int | None,
        step: Callable[[Program], Program] | None = None,
    ) -> PipelineStage:
        """`step`: what makes a step of the stage's program, whose peak a number of bytes as `checkpoint` bounds."""


def within_budget(
    cut: Sequence[PipelineStage],
    own: Sequence[int],
    rewritten: RewriteStage,
    step_of: Callable[[Sequence[PipelineStage]], Program],
    checkpoint: int | float,
) -> tuple[PipelineStage, ...]:
    """The stages of a rank rewritten so that its step holds at most so many bytes, and the least time is lost.

    Of several stages the others compute again all that they can, until it is their turn to choose.

    Args:
        cut: All stages as they were cut.
        own: The numbers of the rank's.
        rewritten: Rewrites one of them.
        step_of: The finished step of stages that are rewritten.
        checkpoint: Bytes beside shards and optimizer state, or a share of what the step holds with nothing computed
            again.

    Raises:
        OptionError: no choice is as small as that.
    """
    untouched = _with(cut, {number: rewritten(cut[number], None) for number in own})
    peak = peak_bytes(step_of(untouched))
    limit = int(checkpoint * peak) if isinstance(checkpoint, float) else checkpoint
    if peak <= limit:
        return untouched
    chosen = {number: rewritten(cut[number], "unit") for number in own} if len(own) > 1 else {}
    for number in own:

        def step(program: Program, number: int = number) -> Program:
            return step_of(_with(cut, {**chosen, number: replace(untouched[number], program=program)}))

        chosen[number] = rewritten(cut[number], limit, step)
    return _with(cut, chosen)


def others_in_flight(table: ActionTable, stage: int) -> int:
    """The most other micro-batches of a stage whose forward has run when one does, and whose backward has not ended."""
    most = now = 0
    for action in table.rows[table.rank_of(stage)]:
        if action.stage == stage:
            now += action.change
            most = max(most, now)
    return max(most - 1, 0)


def _with(cut: Sequence[PipelineStage], found: dict[int, PipelineStage]) -> tuple[PipelineStage, ...]:
    return tuple(found.get(stage.number, stage) for stage in cut)
