"""From a traced step to the program of one rank of a pipeline.

The step is cut into stages, and the program of each stage is rewritten. Then the actions of a rank are unrolled into
one program, which is rewritten again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import fx

from zcompile.cost.hardware import CPU, Hardware
from zcompile.cost.memory import model_state, peak_bytes
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
from zcompile.schedule.decision import DEPTHS, WORTH, checkpoint_budget
from zcompile.schedule.default_pipeline import Partition, of_stages, of_steps, run_passes
from zcompile.schedule.option_checks import AUTO, bytes_of, checkpoint_of
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import ALWAYS, Journal, Pass, Verified


@dataclass(frozen=True)
class PipelinePlace:
    """A rank's position in a pipeline, and the actions of all ranks.

    Attributes:
        table: The actions of all ranks.
        rank: Index of this rank along the pipeline axis.
        axis: Name of the pipeline axis.
        starts: First unit of each stage except the first stage.
        homes: Stage that keeps each parameter, for a model that is divided already.
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
        """Cut a traced step into stages."""
        return cut_stages(traced, starts=self.starts, homes=self.homes)

    def unrolled(self, stages: Sequence[PipelineStage]) -> Program:
        """Unroll the actions of this rank into one program, from its rewritten stages."""
        return unroll_microbatches(stages, table=self.table, rank=self.rank, axis=self.axis)


@dataclass(frozen=True)
class PipelinedProgram:
    """A step of one rank, and all stages: those of this rank rewritten, the others as cut."""

    table: ActionTable
    program: Program
    stages: tuple[PipelineStage, ...]
    results: tuple[tuple[int, int], ...]
    """For each output of the program: the index of the traced step's output, and the micro-batch."""
    journal: Journal
    """The passes on the program after unrolling."""


def check_options(options: Options) -> None:
    """Raise OptionError for values of options that pipelines do not support."""
    if options.shard == AUTO:
        raise OptionError("shard", "'auto' is not combined with a pipeline", "name one: 'hsdp', 'hfsdp', 'hpz', 'flat'")
    if options.has_chunk_budget:
        raise OptionError("chunk", "is a size, which pipelines do not support", "give a number of rows, or 'auto'")
    if options.has_budget and options.offload_activations is not None:
        problem = "is a budget, and offload_activations is given, which a budget does not take into account"
        raise OptionError("checkpoint", problem, "give memory_limit=, which offloads as much as needed, or 'unit'")


def choose_starts(
    traced: Program,
    table: ActionTable,
    split: Sequence[str] | None,
    hardware: Hardware = CPU,
    options: Options | None = None,
) -> tuple[str, ...]:
    """The first unit of each stage except the first stage: `split`, or balanced by compute time.

    If the options have a memory limit, only cuts within it, by an estimate, are considered.

    Raises:
        OptionError: there are fewer units than stages, or `split` is for another number of stages.
    """
    units, stages = units_in_order(traced), table.stages
    if split is not None:
        if len(split) != stages - 1:
            problem = f"has {len(split)} units, and {stages} stages need {stages - 1}"
            raise OptionError("split", problem, "give the first unit of each stage except the first stage")
        return tuple(split)
    if len(units) < stages:
        problem = f"has {stages} stages, and the model has {len(units)} units: {', '.join(units)}"
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
    """The layout of a rank: the units of its stages."""
    stages = place.cut(traced)
    return traced.layout.with_units(tuple(unit for number in place.own for unit in stages[number].program.layout.units))


def with_budget(options: Options, traced: Program, place: PipelinePlace, free: Callable[[], float]) -> Options:
    """The options with checkpoint="auto" resolved to bytes, of the `free` ones that the rank's shards leave.

    Ranks may get different figures, since recomputation is local to a rank.
    """
    if options.checkpoint != "auto":
        return options
    layout = layout_of_rank(traced, place)
    shards = 0 if layout.away else model_state(layout).parameters
    return replace(options, checkpoint=checkpoint_budget(options, layout, lambda: free() - shards))


def rewrite(
    traced: Program, place: PipelinePlace, options: Options, hardware: Hardware = CPU, *, updates: bool = True
) -> PipelinedProgram:
    """Rewrite a traced step into the program of this rank's step.

    Args:
        traced: The step of one micro-batch, of the whole model, laid out for the ranks that run it.
        place: This rank's position in the pipeline.
        options: The options of the train step.
        hardware: The hardware that the message size is chosen for, unless options set it.
        updates: Update parameters as soon as their gradients arrive.
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
    """The smallest prefetch for which the step is about as fast as for the best, if other ranks never delay it.

    Larger values take more memory for units and for messages received ahead. Values with which the step exceeds the
    memory limit, or a budget of `checkpoint=`, are not considered.

    Raises:
        OptionError: the step exceeds the memory limit even without prefetch.
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
    """The passes to run after unrolling, all stages, and the unrolled step before these passes."""
    bucket = bytes_of("bucket", options.bucket) or bucket_for(hardware)
    steps = partial(of_steps, options.stage, prefetch=options.schedule.prefetch, bucket=bucket, updates=updates)
    stages = _rewritten(place.cut(traced), place, options, bucket, steps())
    return steps, stages, place.unrolled(stages)


def _to_the_end(steps: Callable[..., Sequence[Pass]], options: Options, prefetch: int) -> Sequence[Pass]:
    """The passes to run after unrolling, including those for a memory limit and offloading, which come last."""
    limit = bytes_of("memory_limit", options.memory_limit)
    return steps(prefetch=prefetch, memory_limit=limit, away=options.offload_activations is not None)


def _rewritten(
    cut: Sequence[PipelineStage], place: PipelinePlace, options: Options, bucket: int, finish: Sequence[Pass]
) -> tuple[PipelineStage, ...]:
    """All stages, with this rank's rewritten. `finish`: the passes to run after unrolling, to predict a budget."""
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
            chunk=options.chunk,
        )
        lent = stage.lent and Verified.traced(stage.lent).after(of_stages(partition=partition, bucket=bucket)).program
        return replace(stage, program=Verified.traced(stage.program).after(passes).program, lent=lent)

    if budget is None or budget == "unit":
        return tuple(rewritten(one, budget) if one.number in place.own else one for one in cut)
    assert budget != "auto", "callers resolve it to bytes"

    def step_of(stages: Sequence[PipelineStage]) -> Program:
        return run_passes(finish, place.unrolled(stages))

    return within_budget(cut, place.own, rewritten, step_of, budget)


def values_of_rank(traced: Program, step: Program, stages: Sequence[PipelineStage], place: PipelinePlace) -> RankValues:
    """The values that a rank's step must compute, for its proof."""
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
    """The parameters that several stages read, at least one of them on this rank."""
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
    """Rewrite the stages of a rank so that its step is within a memory budget, at the least cost in time.

    A rank's stages choose one after another; stages that have not chosen yet recompute as much as possible.

    Args:
        cut: All stages, not rewritten.
        own: The numbers of the rank's stages.
        rewritten: Called as `rewritten(stage, checkpoint, step)`: rewrites a stage with checkpoint None, "unit", or a
            budget in bytes for the program that `step` makes from that of the stage.
        step_of: Makes the finished step from rewritten stages.
        checkpoint: Bytes besides shards and optimizer state, or a share of the peak without recomputation.

    Raises:
        OptionError: the budget cannot be met.
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
    """The most micro-batches of a stage in flight at a time (forward begun, backward not ended), minus one."""
    most = now = 0
    for action in table.rows[table.rank_of(stage)]:
        if action.stage == stage:
            now += action.change
            most = max(most, now)
    return max(most - 1, 0)


def _with(cut: Sequence[PipelineStage], found: dict[int, PipelineStage]) -> tuple[PipelineStage, ...]:
    return tuple(found.get(stage.number, stage) for stage in cut)


def stage_memory(traced: Program, table: ActionTable, limit: int, options: Options) -> StageMemory:
    """Estimate the memory of stages from that of units, if a rank's step may hold `limit` bytes.

    With recomputation, each unit is taken to save only its input. A rank with several stages divides the limit equally
    among them. Offloaded activations are counted for one micro-batch at a time.
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
    """For each unit, bytes of its forward's values that any backward reads."""
    result = []
    for own in assignment.own:
        forward = (node for node in own if data(node).phase is Phase.FORWARD)
        read_later = (node for node in forward if any(data(u).phase is Phase.BACKWARD for u in node.users))
        result.append(sum(data(node).nbytes for node in {owner_of(node) for node in read_later}))
    return result


def _input_bytes(assignment: StageAssignment) -> list[int]:
    """For each unit, bytes that it reads from earlier units."""
    result = [0] * assignment.count
    for node, source, to in assignment.crossings:
        result[to] += data(node).nbytes if source < to else 0
    return result


def _running_bytes(node: fx.Node) -> int:
    """Bytes of an operation's arguments and result."""
    return data(node).nbytes + sum(data(owner_of(one)).nbytes for one in node.all_input_nodes)


def _passing_bytes(layout: Layout, name: str, ahead: int) -> int:
    """Temporary bytes of a unit: `ahead` gathered units, and its full gradients."""
    if not layout.has_unit(name):
        return 0
    gathered = ahead * layout.gathered_bytes(name) if layout.stage.parameters_sharded else 0
    if not layout.stage.gradients_sharded:
        return gathered
    return gathered + sum(
        param.numel * param.full_dtype.itemsize for param in layout.unit(name).params if param.trainable
    )


def _kept_bytes(layout: Layout, name: str, *, several: bool) -> int:
    """Bytes of a unit's full parameters and gradients that a step keeps between actions.

    `several`: the gradients of several micro-batches are summed.
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
