"""From a traced step to the program of one rank of a pipeline.

It is cut into stages; the program of each is rewritten; what a rank does in a step is written out, and rewritten again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import fx

from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.memory import peak_bytes
from zcompile.cost.roofline import bucket_for, operation_seconds
from zcompile.cost.simulator import step_seconds
from zcompile.errors import OptionError
from zcompile.facts import verify
from zcompile.ir.actions import ActionKind, ActionTable
from zcompile.ir.layout import Layout
from zcompile.ir.liveness import owner_of
from zcompile.ir.operation import Phase, data
from zcompile.ir.program import Program
from zcompile.passes.common.boundary import Crossing, PipelineStage, written_results
from zcompile.passes.common.stage_assignment import StageAssignment
from zcompile.passes.pipelining.cut_stages import cut_stages, one_unit_per_stage, units_in_order, work_of_units
from zcompile.passes.pipelining.unroll_microbatches import unroll_microbatches
from zcompile.pipelining.balance import StageMemory, balanced
from zcompile.proof.values import RankValues, SharedParameter, TracedTerms
from zcompile.report.dumps import dumping_failures
from zcompile.schedule.decision import DEPTHS, WORTH
from zcompile.schedule.default_pipeline import Partition, of_stages, of_steps, run_passes
from zcompile.schedule.option_checks import AUTO, bytes_of, checkpoint_of
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import ALWAYS, Journal, Pass, Verified


@dataclass(frozen=True)
class PipelinePlace:
    """Where a rank is in a pipeline, and what all of its ranks do.

    Attributes:
        table: The actions of all ranks.
        rank: This one's place along the axis.
        axis: The name of the pipeline axis.
        starts: The units with which stages begin, but for the first one.
        homes: The stage that keeps each parameter, for a model that is divided already.
    """

    table: ActionTable
    rank: int
    axis: str
    starts: tuple[str, ...]
    homes: Mapping[str, int] | None = None

    @property
    def own(self) -> list[int]:
        """The numbers of this rank's stages."""
        return self.table.stages_of(self.rank)

    def cut(self, traced: Program) -> list[PipelineStage]:
        """The stages of a traced step."""
        return cut_stages(traced, starts=self.starts, homes=self.homes)

    def unrolled(self, stages: Sequence[PipelineStage]) -> Program:
        """What this rank does in a step, of its stages as they were rewritten, written out action by action."""
        return unroll_microbatches(stages, table=self.table, rank=self.rank, axis=self.axis)


@dataclass(frozen=True)
class PipelinedProgram:
    """A step of one rank, and the stages that it is made of: this rank's are rewritten, the others as they were cut."""

    table: ActionTable
    program: Program
    stages: tuple[PipelineStage, ...]
    results: tuple[tuple[int, int], ...]
    """What the program returns, in order: which of the traced step's results, and of which micro-batch."""
    journal: Journal
    """What passes did to the program, once the actions of the rank were written out."""


def check_options(options: Options) -> None:
    """Raise OptionError for values of options that a pipeline does not take."""
    if options.shard == AUTO:
        raise OptionError("shard", "'auto' is not combined with a pipeline", "name one: 'hsdp', 'hfsdp', 'hpz', 'flat'")
    if options.has_budget and options.offload_activations is not None:
        problem = "is a budget, which does not count on what is offloaded"
        raise OptionError(
            "checkpoint", problem, "give memory_limit=, for which as much is offloaded as has to be, or 'unit'"
        )


def choose_starts(
    traced: Program,
    table: ActionTable,
    split: Sequence[str] | None,
    hardware: Hardware = CPU,
    options: Options | None = None,
) -> tuple[str, ...]:
    """The units with which stages begin: those of `split`, or so that all stages have about as much to compute.

    With a memory limit among the options: of the cuts that are within it as far as that can be told beforehand.

    Raises:
        OptionError: there are fewer units than stages, or `split` is not for so many.
    """
    units, stages = units_in_order(traced), table.stages
    if split is not None:
        if len(split) != stages - 1:
            problem = f"has {len(split)} units, and {stages} stages begin with {stages - 1}, the first one left out"
            raise OptionError("split", problem, "give a unit for each stage but the first")
        return tuple(split)
    if len(units) < stages:
        problem = f"has {stages} stages, and the model {len(units)} units: {', '.join(units)}"
        raise OptionError("schedule", problem, "use fewer ranks along the pipeline axis, or name more units by units=")
    seconds = work_of_units(traced, lambda node: operation_seconds(node, hardware))
    limit = None if options is None else bytes_of("memory_limit", options.memory_limit)
    memory = None if options is None or limit is None else stage_memory(traced, table, limit, options)
    return tuple(units[index] for index in balanced([seconds[unit] for unit in units], stages, memory))


def homes_of(traced: Program, place: PipelinePlace) -> dict[str, int]:
    """The stage that keeps each parameter."""
    return {
        param.name: number for number, stage in enumerate(place.cut(traced)) for param in stage.program.layout.params
    }


def layout_of_rank(traced: Program, place: PipelinePlace) -> Layout:
    """What a rank keeps: the units of its stages."""
    stages = place.cut(traced)
    return traced.layout.with_units(tuple(unit for number in place.own for unit in stages[number].program.layout.units))


def rewrite(
    traced: Program, place: PipelinePlace, options: Options, hardware: Hardware = CPU, *, updates: bool = True
) -> PipelinedProgram:
    """The program of this rank's step.

    Args:
        traced: The step of one micro-batch, of the whole model, laid out for the ranks that it is to run on.
        place: Where this rank is in the pipeline.
        options: What is asked for.
        hardware: What messages are made for, where options do not say it.
        updates: Let the optimizer use gradients as soon as they are there.
    """
    steps, stages, step = _unrolled(traced, place, options, hardware, updates=updates)
    values = values_of_rank(traced, step, stages, place)
    verify(step, (*ALWAYS, values.fact), "after unroll_microbatches")
    finish, journal = _to_the_end(steps, options, options.schedule.prefetch), Journal(part=values)
    with dumping_failures(None, 0, journal):
        program = Verified(step, values).after(finish, journal).program
    return PipelinedProgram(place.table, program, stages, values.results, journal)


def choose_prefetch(
    traced: Program, place: PipelinePlace, options: Options, hardware: Hardware, *, updates: bool = True
) -> int:
    """The least prefetch with which the rank's step, the others taken to send at once, is about as short as with any.

    Further units cost memory, and so do messages that are received ahead: what is beyond a memory limit, or a budget of
    `checkpoint=`, is no choice.

    Raises:
        OptionError: the step is beyond the memory limit without any prefetch.
    """
    options = replace(options, prefetch=0)
    steps, _, step = _unrolled(traced, place, options, hardware, updates=updates)
    budget = checkpoint_of(options.checkpoint)
    seconds = dict[int, float]()
    for depth in DEPTHS:
        try:
            program = run_passes(_to_the_end(steps, options, depth), step)
        except OptionError:
            if depth == 0:
                raise
            continue
        if depth == 0 or not isinstance(budget, int) or peak_bytes(program) <= budget:
            seconds[depth] = step_seconds(program, hardware)
    enough = min(seconds.values()) * (1 + WORTH)
    return next(depth for depth in seconds if seconds[depth] <= enough)


def _unrolled(
    traced: Program, place: PipelinePlace, options: Options, hardware: Hardware, *, updates: bool
) -> tuple[Callable[..., Sequence[Pass]], tuple[PipelineStage, ...], Program]:
    """The passes that steps go through when their actions are written out, all stages, and the step that is next."""
    bucket = bytes_of("bucket", options.bucket) or bucket_for(hardware)
    steps = partial(of_steps, options.stage, prefetch=options.schedule.prefetch, bucket=bucket, updates=updates)
    stages = _rewritten(place.cut(traced), place, options, bucket, steps())
    return steps, stages, place.unrolled(stages)


def _to_the_end(steps: Callable[..., Sequence[Pass]], options: Options, prefetch: int) -> Sequence[Pass]:
    """The same with what a memory limit and offloading ask for, which comes last."""
    limit = bytes_of("memory_limit", options.memory_limit)
    return steps(prefetch=prefetch, memory_limit=limit, away=options.offload_activations is not None)


def _rewritten(
    cut: Sequence[PipelineStage], place: PipelinePlace, options: Options, bucket: int, finish: Sequence[Pass]
) -> tuple[PipelineStage, ...]:
    """The stages, this rank's rewritten; `finish`: what steps go through when their actions are written out."""
    table, budget = place.table, checkpoint_of(options.checkpoint)
    partition: Partition = "min_cut" if options.backend == "inductor" else "default"

    def rewritten(
        stage: PipelineStage, checkpoint: Literal["unit"] | int | None, step: Callable[[Program], Program] | None = None
    ) -> PipelineStage:
        passes = of_stages(
            partition=partition,
            sent=stage.boundary.sent_back if table.divides_backward else None,
            bucket=bucket,
            checkpoint=checkpoint,
            at_once=stage.number in table.at_once,
            others=others_in_flight(table, stage.number),
            step=step,
        )
        lent = stage.lent and Verified.traced(stage.lent).after(of_stages(partition=partition, bucket=bucket)).program
        return replace(stage, program=Verified.traced(stage.program).after(passes).program, lent=lent)

    if budget is None or budget == "unit":
        return tuple(rewritten(one, budget) if one.number in place.own else one for one in cut)
    assert budget != "auto", "it is refused before"

    def step_of(stages: Sequence[PipelineStage]) -> Program:
        return run_passes(finish, place.unrolled(stages))

    return within_budget(cut, place.own, rewritten, step_of, budget)


def values_of_rank(traced: Program, step: Program, stages: Sequence[PipelineStage], place: PipelinePlace) -> RankValues:
    """What a rank's step has to compute."""
    own = [stages[number] for number in place.own]
    results, draws, writes = list[tuple[int, int]](), list[tuple[int, int]](), list[tuple[int, int]]()
    for action in place.table.rows[place.rank]:
        boundary, forward = stages[action.stage].boundary, action.kind is ActionKind.FORWARD
        if forward:
            for end in (end for end in boundary.outputs if isinstance(end, int)):
                (writes if end in boundary.written else results).append((end, action.microbatch))
        if action.kind is not ActionKind.BACKWARD_WEIGHT:
            draws += [(action.microbatch, number) for number in boundary.draws[0 if forward else 1]]
    ends = (end for stage in own for end in (*stage.boundary.inputs, *stage.boundary.tangents))
    crossing = (e for e in ends if isinstance(e, Crossing))
    received = Counter(e.value for e in crossing if place.table.rank_of(e.stage) != place.rank)
    made = set[str]()
    for stage in own:
        taken = {e.value for e in (*stage.boundary.inputs, *stage.boundary.tangents) if isinstance(e, Crossing)}
        given = (e.value for e in (*stage.boundary.outputs, *stage.boundary.gradients) if isinstance(e, Crossing))
        made.update(value for value in given if value not in taken)
    return RankValues(
        TracedTerms(traced),
        step.layout,
        place.table.microbatches,
        tuple(results),
        {value: count for value, count in received.items() if value not in made},
        tuple(draws),
        frozenset(made.intersection(received)),
        _shared(stages, place.own),
        written_results(traced),
        tuple(writes),
    )


def _shared(stages: Sequence[PipelineStage], own: Sequence[int]) -> tuple[SharedParameter, ...]:
    """The parameters that several stages read, one of them this rank's."""
    found = []
    for home in stages:
        for param, value in dict.fromkeys((one.param, one.value) for one in home.boundary.lends):
            readers = [one.stage for one in home.boundary.lends if one.param == param]
            parts = {
                number: stages[number].boundary.summands[param]
                for number in (home.number, *readers)
                if param in stages[number].boundary.summands
            }
            if {home.number, *readers}.intersection(own):
                found.append(SharedParameter(param, value, home.number, tuple(readers), parts))
    return tuple(found)


def within_budget(
    cut: Sequence[PipelineStage],
    own: Sequence[int],
    rewritten: Callable[..., PipelineStage],
    step_of: Callable[[Sequence[PipelineStage]], Program],
    checkpoint: int | float,
) -> tuple[PipelineStage, ...]:
    """The stages of a rank rewritten so that its step holds at most so many bytes, and the least time is lost.

    Of several stages the others compute again all that they can, until it is their turn to choose.

    Args:
        cut: All stages as they were cut.
        own: The numbers of the rank's.
        rewritten: Rewrites one of them, within "unit" or bytes of the step that its last argument makes of a program.
        step_of: The finished step of stages that are rewritten.
        checkpoint: Bytes beside shards and optimizer state, or a share of what is held with nothing computed again.

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
