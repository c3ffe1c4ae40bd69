"""Bytes that units hold in the stages of a pipeline, and activations that are computed again within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from torch import fx

from zcompile.cost.memory import peak_bytes
from zcompile.ir.actions import ActionTable
from zcompile.ir.layout import Layout
from zcompile.ir.liveness import owner_of
from zcompile.ir.operation import Phase, data
from zcompile.ir.program import Program
from zcompile.passes.common.boundary import PipelineStage
from zcompile.passes.common.stage_assignment import StageAssignment
from zcompile.passes.pipelining.cut_stages import one_unit_per_stage
from zcompile.pipelining.balance import StageMemory
from zcompile.schedule.options import Options


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


def stage_memory(traced: Program, table: ActionTable, limit: int, options: Options) -> StageMemory:
    """What stages would hold of a traced step's units, in order, where a rank's step may hold `limit` bytes.

    Each unit saves its input alone where something is computed again. A rank of several stages divides the limit among
    them. What is offloaded is there for one micro-batch at a time.
    """
    units, assignment = one_unit_per_stage(traced)
    every = _saved_bytes(assignment)
    saved = every if options.checkpoint is None else _input_bytes(assignment)
    in_flight = [1 + others_in_flight(table, stage) for stage in range(table.stages)]
    if options.offload_activations is not None:
        in_flight = [1] * table.stages
    again = [0] * len(units) if options.checkpoint is None else every
    ahead = 1 + options.schedule.prefetch
    kept = tuple(_kept_bytes(traced.layout, unit, several=table.microbatches > 1) for unit in units)
    running = [
        max(map(_running_bytes, own), default=0) + one + _passing_bytes(traced.layout, unit, ahead)
        for unit, own, one in zip(units, assignment.own, again, strict=True)
    ]
    share = limit / (table.stages / len(table.rows))
    return StageMemory(tuple(in_flight), tuple(saved), kept, tuple(running), share)


def _saved_bytes(assignment: StageAssignment) -> list[int]:
    """By unit, what its backward, or another one, reads of its forward."""
    result = []
    for own in assignment.own:
        forward = (node for node in own if data(node).phase is Phase.FORWARD)
        read_later = (node for node in forward if any(data(u).phase is Phase.BACKWARD for u in node.users))
        result.append(sum(data(node).nbytes for node in {owner_of(node) for node in read_later}))
    return result


def _input_bytes(assignment: StageAssignment) -> list[int]:
    """By unit, what it reads of earlier ones."""
    result = [0] * assignment.count
    for node, source, to in assignment.crossings:
        result[to] += data(node).nbytes if source < to else 0
    return result


def _running_bytes(node: fx.Node) -> int:
    """Bytes of what an operation reads and gives."""
    return data(node).nbytes + sum(data(owner_of(one)).nbytes for one in node.all_input_nodes)


def _passing_bytes(layout: Layout, name: str, ahead: int) -> int:
    """Bytes that come and go with a unit: as many gathered units as there are at a time, and its full gradients."""
    if not layout.has_unit(name):
        return 0
    gathered = ahead * layout.gathered_bytes(name) if layout.stage.parameters_sharded else 0
    if not layout.stage.gradients_sharded:
        return gathered
    return gathered + sum(
        param.numel * param.full_dtype.itemsize for param in layout.unit(name).params if param.trainable
    )


def _kept_bytes(layout: Layout, name: str, *, several: bool) -> int:
    """Bytes of a unit's parameters and gradients that a step holds from action to action.

    `several`: there are several micro-batches, whose gradients are added up.
    """
    if not layout.has_unit(name):
        return 0
    unit, stage = layout.unit(name), layout.stage
    gathered = 0 if stage.parameters_sharded or not layout.must_gather(name) else layout.gathered_bytes(name)
    trained = [param for param in unit.params if param.trainable]
    if stage.gradients_sharded:
        return gathered + sum(param.shard_numel * param.reduce_dtype.itemsize for param in trained)
    dtypes = ((param.sum_dtype if several else None) or param.full_dtype for param in trained)
    return gathered + sum(param.numel * dtype.itemsize for param, dtype in zip(trained, dtypes, strict=True))
