"""Preparation of pipelined steps: trace, rewrite into this rank's program, compare with other ranks, load.

The first preparation divides the model. An evaluation, the forward of each micro-batch, has its own program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from zcompile.cost.hardware import CPU, GPU, Hardware
from zcompile.engine.calibration import measure
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.optimizers import point_at_shards, watch_optimizers
from zcompile.engine.reports import Reports
from zcompile.engine.sharding_plan import Parts, bytes_of_model, layout_of
from zcompile.engine.step_trace import CallSpec, StepTrace, changed_line
from zcompile.engine.train_steps import FlatResults, StepOptions, StepResult, Training, settings_of
from zcompile.errors import CaptureError, ModelError, OptionError
from zcompile.ir.actions import ActionTable
from zcompile.ir.layout import Layout
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program
from zcompile.model.sharding import Retired, retire, shard_model
from zcompile.model.tensor_parallel import check_collectives
from zcompile.pipelining.batch_means import check_mean
from zcompile.pipelining.guard import (
    SAME_DATA,
    StepGuard,
    check_traced,
    digest_of,
    traced_with,
    warn_of_batch_statistics,
)
from zcompile.pipelining.program import (
    PipelinedProgram,
    PipelinePlace,
    choose_prefetch,
    choose_starts,
    homes_of,
    rewrite,
    with_budget,
)
from zcompile.pipelining.ranks import PipelineRanks
from zcompile.pipelining.reports import PipelineCode
from zcompile.pipelining.run import PipelinedRun, StepResults
from zcompile.runtime.device import free_bytes, is_gpu
from zcompile.runtime.gradients.optimizer_trials import parameters_held
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import Communicator
from zcompile.runtime.lockstep import RunKind
from zcompile.schedule.default_pipeline import of_sequences
from zcompile.schedule.option_checks import check_gathered
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Verified
from zcompile.state.model_state import ModelState
from zcompile.torch_internals.dtensor import give_up, local_tensor
from zcompile.torch_internals.modules import buffers_of, parameters_of


@dataclass(frozen=True)
class StepSetup:
    """Everything that a step is built from.

    Attributes:
        table: The actions of all ranks.
        units: Names or patterns of units; None for the repeated blocks.
        updater: Steps the optimizers as soon as gradients arrive; None if all gradients are kept.
        flat: Flattens the results of the loss function into a list of tensors.
    """

    trained: Training
    ranks: PipelineRanks
    table: ActionTable
    options: Options
    units: Sequence[str] | None
    step_options: StepOptions
    updater: Updater | None
    flat: FlatResults = field(default_factory=FlatResults)

    @property
    def hardware(self) -> Hardware:
        """The hardware that times are predicted for."""
        return GPU if is_gpu(self.ranks.device) else CPU

    def agreement_lines(self) -> list[str]:
        """The options that must be the same on all ranks, as lines."""
        step_options, away = self.step_options, self.step_options.offload_optimizer
        lines = [str(self.options), *str(self.table).split("\n")]
        lines += [f"split {step_options.split}", f"clip_grad_norm {step_options.clip_grad_norm}"]
        lines += [f"results {step_options.results}", f"metrics {self.flat.names}"]
        lines += [f"the scale of the loss: {settings_of(step_options.grad_scaler)}"] if step_options.grad_scaler else []
        return [*lines, f"offload_optimizer {'disk' if isinstance(away, Path) else away}"]

    def loaded(self, made: PipelinedProgram, traced: Program, runtime: ModelRuntime, common: str) -> PipelinedRun:
        """Load a program of this rank; `common` is the same text on all ranks and identifies it. Collective."""
        results = StepResults.of(self.flat.names, traced, made, self.ranks.links, self.step_options.results)
        updater = self.updater if self.table.trains else None
        return PipelinedRun(made, traced, runtime, self.ranks, self.trained.model, results, common, updater)


@dataclass(frozen=True)
class ReadyStep:
    """A step that is ready to run."""

    run: PipelinedRun
    trace: StepTrace
    guard: StepGuard
    state: ModelState
    reports: Reports
    place: PipelinePlace
    options: Options

    def check(self, parts: Sequence[CallSpec]) -> list[torch.Tensor]:
        """Check that nothing has changed; returns tensors that the step reads besides arguments and the model's."""
        for part in parts:
            self.guard.check(part)
        return self.trace.others(parts[0])


def prepare(setup: StepSetup, first: CallSpec, owner: object) -> ReadyStep:
    """Prepare a step from its first micro-batch, for the lifetime of `owner`. Collective.

    Raises:
        CaptureError: the model and its loss cannot be traced into one graph, or the graph cannot be cut into stages.
        OptionError: an option does not fit the model.
        AgreementError: the ranks trace different steps.
    """
    ranks, model = setup.ranks, setup.trained.model
    trace = ranks.everyone.attempt("the traced step", lambda: trace_step(setup, first))[0]
    common = ranks.compare("the options and the traced step", "\n".join([*setup.agreement_lines(), str(trace.program)]))
    place, options, made = _rewritten(setup, trace.program)
    texts = ranks.fitting_texts("the programs of all ranks", made.program)
    warn_of_batch_statistics(model, trace.program)
    runtime, retired = divide_model(setup, made.program, trace.program, options)
    watch_optimizers(owner, runtime, retired)
    runtime.keep_states(setup.step_options.offload_optimizer, setup.updater)
    run = setup.loaded(made, trace.program, runtime, common)
    code = PipelineCode(setup.hardware, [made.journal], setup.table, [texts[rank] for rank in ranks.along])
    reports = Reports(type(model).__name__, runtime, code)
    state = ModelState(model, ranks.everyone.communicator, ranks.everyone, options.stage)
    return ReadyStep(run, trace, StepGuard(model, first), state, reports, place, options)


def trace_step(setup: StepSetup, first: CallSpec, like: StepTrace | None = None) -> StepTrace:
    """Trace the step of one micro-batch, or, for a model already divided for the step `like`, its forward only.

    Raises:
        CaptureError, OptionError: a pipeline cannot run it.
    """
    what, device, dtype = type(setup.trained.model).__name__, setup.ranks.device, setup.options.dtype
    layout = _layout(setup) if like is None else like.program.layout
    trace = StepTrace(setup.trained.model, layout, first, device, what, dtype, like, options=setup.options.tracing)
    if trace.writes:
        problem = "is changed by the step's Python code, which a pipelined step runs only once, for tracing"
        raise CaptureError(trace.writes[0], problem, "keep it in a buffer, or change it between steps")
    check_traced(trace.program, len(setup.flat.names or ()), trains=like is None)
    if setup.table.microbatches > 1:
        check_mean(trace.program)
    check_collectives(trace.program, setup.ranks.parallel)
    # Before it is cut, so that stages send each other parts.
    trace.program = Verified.traced(trace.program).after(of_sequences(setup.options.sequence)).program
    return trace


def _layout(setup: StepSetup) -> Layout:
    options = setup.options
    layout = layout_of(setup.trained.model, setup.ranks.axes, options, Parts(setup.units))
    layout = replace(layout, away=options.offload_parameters == "cpu")
    check_gathered(layout, options.outer_gather_dtype)
    return layout


def _rewritten(setup: StepSetup, traced: Program) -> tuple[PipelinePlace, Options, PipelinedProgram]:
    """Choose stages and options for this rank, and rewrite its program."""
    ranks, hardware = setup.ranks, setup.hardware
    # The first rank's choice is used: sizes may differ between tensor-parallel ranks, and so would their cuts.
    choose = partial(choose_starts, traced, setup.table, setup.step_options.split, hardware, setup.options)
    starts = ranks.everyone.attempt("the stages", choose, shown=True)[1][0]
    place = PipelinePlace(setup.table, ranks.links.rank, ranks.links.axis, tuple(starts))
    place = replace(place, homes=homes_of(traced, place))
    model = setup.trained.model
    bounded = with_budget(setup.options, traced, place, lambda: free_bytes(ranks.device) + bytes_of_model(model))
    options = replace(setup.options, prefetch=_prefetch(setup, traced, place, bounded))
    bounded = replace(bounded, prefetch=options.prefetch)
    make = partial(rewrite, traced, place, bounded, hardware, updates=setup.updater is not None)
    return place, options, ranks.everyone.attempt("the program", make)[0]


def _prefetch(setup: StepSetup, traced: Program, place: PipelinePlace, options: Options) -> int:
    """The number of units to gather ahead; for "auto", the largest that any rank chooses.

    With a memory limit, the smallest: a larger one might exceed the limit on the rank that chose it.
    """
    ranks = setup.ranks
    if options.prefetch != "auto":
        return options.prefetch
    tensor = None if ranks.parallel is None else Communicator(ranks.parallel.mesh, ranks.device)
    measured = measure(ranks.data, options.dtype or torch.float32, tensor)
    choose = partial(choose_prefetch, traced, place, options, measured, updates=setup.updater is not None)
    depths = ranks.everyone.attempt("the schedule of gathers", choose, shown=True)[1]
    return int(max(depths) if options.memory_limit is None else min(depths))


def divide_model(setup: StepSetup, program: Program, traced: Program, options: Options) -> tuple[ModelRuntime, Retired]:
    """Shard the units of this rank, with the first rank's values, into a runtime. Collective.

    Afterwards the parameters of other units are on meta and removed from the optimizers, and so are buffers to meta
    that only other ranks write to.
    """
    model, ranks, optimizers = setup.trained.model, setup.ranks, setup.trained.optimizers
    named = (*model.named_parameters(), *model.named_buffers())
    blank = [name for name, tensor in named if tensor.is_meta]
    ranks.everyone.reach("the tensors of the model on meta", blank, "build it on meta on all ranks, or on none")
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            ranks.links.broadcast(local_tensor(tensor))
    runtime = ModelRuntime(program.layout, ranks, options)
    shards, _, retired = shard_model(
        model, program.layout, ranks.data, parallel=ranks.parallel, memory=runtime.memory, whole=traced.layout
    )
    runtime.extend((), shards)
    point_at_shards(optimizers, shards.values(), retired)
    _drop_parameters(model, {id(p) for unit in shards.values() for p in unit.parameters.values()}, optimizers)
    runtime.lockstep.place = ranks.links.rank
    for optimizer in optimizers:
        runtime.settings.know(optimizer)
    _drop_buffers(model, written_buffers(traced) - written_buffers(program))
    return runtime, retired


def written_buffers(program: Program) -> set[str]:
    """Names of the buffers that a program writes to."""
    inputs = (op_of(node, Input) for node in program.nodes(Input))
    return {op.held for op in inputs if op.mutated}


def _drop_parameters(model: nn.Module, own: set[int], optimizers: Sequence[Optimizer]) -> None:
    """Free the parameters that other ranks keep, and put parameters on meta in their place."""
    for optimizer in optimizers:
        for parameter in parameters_held(optimizer):
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
    others = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in own]
    empty = {
        id(old): nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="meta"), old.requires_grad)
        for _, old in others
    }
    for module in model.modules():
        table = parameters_of(module)
        table.update({key: empty[id(old)] for key, old in table.items() if old is not None and id(old) in empty})
    for name, parameter in others:
        give_up(parameter)
        retire(parameter, name)


def _drop_buffers(model: nn.Module, names: set[str]) -> None:
    """Move buffers to meta that only other ranks write to: their values here would be stale."""
    left = {id(buffer) for name, buffer in model.named_buffers() if name in names}
    for module in model.modules():
        table = buffers_of(module)
        table.update(
            {k: torch.empty_like(b, device="meta") for k, b in table.items() if b is not None and id(b) in left}
        )


NEW = 0
"""Mark of a rank that has no program for an evaluation yet."""
MAX_EVALUATIONS = 8
"""Number of evaluation programs kept, for different batch sizes and modes."""


class Evaluations:
    """The evaluations of a divided model, prepared on demand.

    Args:
        setup: The setup of the train step, with an action table of forwards only.
        ready: The train step.
    """

    def __init__(self, setup: StepSetup, ready: ReadyStep) -> None:
        self.setup, self._ready = setup, ready
        self._made: dict[str, tuple[PipelinedRun, StepTrace]] = {}

    def look_up(self, parts: Sequence[CallSpec]) -> tuple[Sequence[CallSpec], str, list[torch.Tensor] | None]:
        """The arguments of `run` for the micro-batches of a batch, computed without communication.

        These are the micro-batches, the guards of their evaluation (`traced_with`), and the further tensors that it
        reads, or None if it must be traced.

        Raises:
            OptionError, ModelError: the micro-batches differ, or modules have changed since the first train step.
        """
        self._ready.guard.check_modules()
        traced_for, *others = (traced_with(self.setup.trained.model, part) for part in parts)
        for other in others:
            if line := changed_line(traced_for, other):
                raise OptionError("batch", f"has micro-batches that differ: {line}", "give a uniform batch")
        return parts, traced_for, self._extra(traced_for, parts[0])

    def run(self, parts: Sequence[CallSpec], traced_for: str, extra: list[torch.Tensor] | None) -> StepResult | None:
        """Evaluate a batch. Collective.

        Raises:
            Errors as `PipelinedStep.evaluate`.
        """
        lockstep, is_new = self._ready.run.runtime.lockstep, extra is None
        digest = hashlib.sha256(traced_for.encode(errors="backslashreplace")).hexdigest()
        call = lockstep.enter(RunKind.EVALUATION, digest, [NEW] if is_new else [], is_new=is_new)
        lockstep.check()
        if NEW in call.marks:
            self._made[traced_for] = self._prepared(parts)
        extra = self._extra(traced_for, parts[0]) if extra is None else extra
        assert extra is not None, "it has just been traced"
        run, _ = self._made[traced_for]
        return run.evaluate([[*part.leaves(), *extra] for part in parts])

    def _extra(self, traced_for: str, first: CallSpec) -> list[torch.Tensor] | None:
        """Tensors that an evaluation reads besides its arguments; None if it must be traced (again)."""
        known = self._made.get(traced_for)
        try:
            return None if known is None else known[1].others(first)
        except ModelError:
            return None

    def _prepared(self, parts: Sequence[CallSpec]) -> tuple[PipelinedRun, StepTrace]:
        """Trace, rewrite, prove and load an evaluation. Collective."""
        setup, trained = self.setup, self._ready
        ranks, values = setup.ranks, {str(number): (part.args, part.kwargs) for number, part in enumerate(parts)}
        ranks.compare_along("the batch of an evaluation", digest_of((), values), SAME_DATA)
        while len(self._made) >= MAX_EVALUATIONS:
            self._made.pop(next(iter(self._made)))
        traced = partial(trace_step, setup, parts[0], trained.trace)
        trace = ranks.everyone.attempt("the traced evaluation", traced)[0]
        common = ranks.compare("the traced evaluation", str(trace.program))
        made = ranks.everyone.attempt("the program of the evaluation", lambda: self._rewritten(trace.program))[0]
        ranks.fitting_texts("the programs of the evaluation", made.program)
        return setup.loaded(made, trace.program, trained.run.runtime, common), trace

    def _rewritten(self, traced: Program) -> PipelinedProgram:
        """The program of this rank. Raises CaptureError if it reads a buffer that is on another rank only."""
        place = replace(self._ready.place, table=self.setup.table)
        options = replace(self._ready.options, checkpoint=None, offload_activations=None)
        made = rewrite(traced, place, options, self.setup.hardware, updates=False)
        buffers = dict(self.setup.trained.model.named_buffers())
        inputs = [op_of(node, Input) for node in traced.nodes(Input)]
        given = [op for op in inputs if op.kind is Kind.DATA]
        for op in (op_of(node, Input) for node in made.program.nodes(Input)):
            held = given[op.index].held if op.kind is Kind.DATA else ""
            if held in buffers and buffers[held].is_meta:
                problem = "is a buffer that the train step writes in one stage, and the evaluation reads in another"
                fix = "choose other first units of stages, so that one stage does both: split=[...]"
                raise CaptureError(held, problem, fix)
        return made
