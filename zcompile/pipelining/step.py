"""Train steps on a mesh with a pipeline axis: each rank has some units, and runs one program for all micro-batches."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile._torch import has_step_pre_hooks, tree_leaves, tree_map_only
from zcompile.cost.hardware import CPU, GPU, Hardware
from zcompile.engine.calibration import measure
from zcompile.engine.loss_scaling import Overflow, scale_of, settings_of, step_all, unscale
from zcompile.engine.metrics import FlatResults
from zcompile.engine.optimizers import check_optimizers, watch_optimizers
from zcompile.engine.reported import Reported
from zcompile.engine.state_places import optimizer_states
from zcompile.engine.step_trace import Called, StepTrace
from zcompile.errors import (
    AgreementError,
    OptimizerError,
    OptionError,
    ParameterError,
    StateError,
    ZcompileError,
)
from zcompile.ir.actions import ActionTable
from zcompile.ir.layout import STAGES
from zcompile.ir.program import Program
from zcompile.model.tensor_kinds import check_kinds
from zcompile.model.tensor_parallel import check_replicated
from zcompile.model.units import make_layout
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.clipping import clip_together, deliver
from zcompile.pipelining.division import divide_model
from zcompile.pipelining.guard import StepGuard, check_mean, check_traced, say_statistics
from zcompile.pipelining.program import PipelinePlace, check_options, choose_prefetch, choose_starts, rewrite
from zcompile.pipelining.ranks import PIPELINE, PipelineRanks, check_levels, device_of
from zcompile.pipelining.reports import PipelineCode, PipelineReports
from zcompile.pipelining.results import ResultPlaces, ResultsOn, StepResults
from zcompile.pipelining.run import PipelinedRun
from zcompile.proof.ranks import check_texts
from zcompile.runtime.agreement import all_through, told_to_others
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.device import is_gpu
from zcompile.runtime.executor import Gradients, InsideAverages
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import Communicator, ranks_of
from zcompile.schedule.option_checks import check_gathered
from zcompile.schedule.options import Options
from zcompile.state.model_state import ModelState
from zcompile.state.savable import Savable

LossFunction = Callable[..., torch.Tensor]
Result = TypeVar("Result")
_TAKEN = frozenset({"stage", "prefetch", "dtype", "reduce_dtype", "backend", "bucket", "checkpoint", "memory_limit"})
_TAKEN |= {"shard", "outer_dtype", "outer_gather_dtype", "offload_parameters", "offload_activations"}
"""Options of `zcompile.compile` that a pipeline takes, beside `units` and `mesh`."""


@dataclass(frozen=True)
class PipelineOptions:
    """What a pipeline is asked to do.

    Attributes:
        schedule: A name of `zcompile.pipelining.action_tables.SCHEDULES`, or a table of actions.
        microbatches: Into how many equal parts a batch is cut along dimension 0.
        split: The units with which stages begin, the first stage's left out; None: so that all compute about as long.
        stages_per_rank: None for as many as is usual for the schedule.
        clip_grad_norm: The largest 2-norm of all gradients together, of all stages.
        grad_scaler: What scales the loss, for gradients in float16.
        results: Which ranks along the pipeline axis are given the loss and metrics.
        offload_optimizer: Where the optimizers' state is; None: where shards are.
    """

    schedule: str | ActionTable = "1f1b"
    microbatches: int = 1
    split: Sequence[str] | None = None
    stages_per_rank: int | None = None
    clip_grad_norm: float | None = None
    grad_scaler: GradScaler | None = None
    results: ResultsOn = "all"
    offload_optimizer: Path | Literal["cpu"] | None = None

    @property
    def keeps_gradients(self) -> bool:
        """True if all gradients are looked at before the first optimizer steps."""
        return self.clip_grad_norm is not None or self.grad_scaler is not None


def pipelined_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizers: Sequence[Optimizer],
    asked: PipelineOptions,
    given: dict[str, Any],
) -> PipelinedStep:
    """A train step on the mesh among the options that are `given`.

    Raises:
        OptionError: an option that a pipeline does not take, or a schedule that is not for so many ranks.
        GroupError, OptimizerError: as `zcompile.train_step`.
    """
    mesh, units = given.pop("mesh"), given.pop("units", None)
    with told_to_others(lambda: ranks_of(mesh), every=True):
        options = _options_of(given)
        check_kinds(model)
        check_optimizers(optimizers, model)
        if asked.grad_scaler is not None:
            _check_scales(model, options)
        device = device_of(model, mesh)
        check_levels(model, mesh, options)
        table = action_table(asked.schedule, mesh[PIPELINE].size(), asked.microbatches, asked.stages_per_rank)
    all_through(ranks_of(mesh), device, "a pipelined train step")
    ranks = PipelineRanks.of(model, mesh, device, options)
    if ranks.parallel is not None:
        ranks = replace(ranks, parallel=check_replicated(model, ranks.parallel, ranks.agreement, first=ranks.first))
    return PipelinedStep(model, loss_fn, optimizers, ranks, table, options, units, asked)


def _options_of(given: dict[str, Any]) -> Options:
    """The options of a pipeline.

    Raises:
        OptionError: one that it does not take.
    """
    known = {field.name: field for field in fields(Options)}
    if unknown := [name for name in given if name not in known]:
        raise OptionError(unknown[0], "is no option of a pipeline", f"choose among {', '.join(sorted(_TAKEN))}")
    for name, value in given.items():
        if name not in _TAKEN and value != known[name].default:
            raise OptionError(name, "is not combined with a pipeline so far", "leave it out")
    options = Options.among(given)
    check_options(options)
    return options


def _check_scales(model: nn.Module, options: Options) -> None:
    """Raise OptionError where a scaler cannot look at the gradients of all parameters."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    if len(kinds) > 1 and options.stage == 0:
        problem = (
            "looks at all gradients at once, and under stage 0 only those that tensor parallelism divides are DTensors"
        )
        raise OptionError("grad_scaler", problem, "choose stage 1, 2 or 3, or compute in bfloat16")


class PipelinedStep(Savable, Reported):
    """See `zcompile.train_step`, with a mesh that has a dimension "pp". Collective: every rank calls it.

    The first call, or `prepare`, traces the step and divides the model: until then each rank has all of it. Then
    parameters of other ranks' stages are on meta, and in no group of the optimizers. State is whole, as the plain
    model's is: a checkpoint of it can be loaded on any other mesh, and by a model that no pipeline divides.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizers: Sequence[Optimizer],
        ranks: PipelineRanks,
        table: ActionTable,
        options: Options,
        units: Sequence[str] | None,
        asked: PipelineOptions,
    ) -> None:
        self.model, self.optimizers, self.table = model, optimizers, table
        self._loss_fn, self._ranks, self._options, self._units, self._asked = loss_fn, ranks, options, units, asked
        self._updater = None if asked.keeps_gradients else Updater(optimizers)
        self._norm: torch.Tensor | None = None
        self._flat = FlatResults()
        self._overflow = None if asked.grad_scaler is None else Overflow(ranks.device)
        self._compared = False
        """True once ranks along the pipeline axis are known to be given the same batch."""
        self._run: PipelinedRun | None = None
        self._state: ModelState | None = None
        self._reports: PipelineReports | None = None
        self._guard: StepGuard | None = None
        self._trace: StepTrace | None = None

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take one step with a batch, which all ranks along the pipeline axis are given alike.

        Gives the mean loss of the micro-batches of this data-parallel rank, a detached tensor. Where `loss_fn` gives
        metrics, too, `(loss, {name: tensor})`: of each metric the values of all micro-batches, [microbatches, ...].
        With `results="last"` ranks other than that with the last stage are given None.

        Raises:
            OptionError: the batch cannot be cut into micro-batches, or is of another size than the first; or the loss
                is no scalar with a gradient.
            ModelError: the model was changed since the first step.
            CaptureError: the model and its loss cannot be traced into one graph, or that cannot be cut.
            AgreementError: the ranks trace other steps, or are out of step.
            GroupError: another rank failed or stayed away.
        """
        parts = self._asked_for(batch, named)
        run = self._ready(parts[0])
        if not self._compared:
            fix = "let all ranks along 'pp' read the same data: samplers count the ranks along 'dp' alone"
            self._ranks.compare_along("the first batch", _digest(batch, named), fix)
            self._compared = True
        others = self._check_unchanged(parts)
        scaler, device = self._asked.grad_scaler, self._ranks.device
        scale = None if scaler is None else scale_of(scaler, device)
        results, gradients = run.step([[*part.leaves(), *others] for part in parts], self._updater, scale)
        try:
            if self._updater is not None:
                self._updater.finish()
                run.runtime.freshness.step()
            else:
                with run.runtime.freshness.one_step():
                    self._clip_and_step(gradients)
        finally:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model.zero_grad()  # of what no optimizer holds
        return results

    def prepare(self, *batch: Any, **named: Any) -> None:
        """Do what the first call does before it takes a step, such as to load a checkpoint then. Collective.

        Args:
            batch: As for a call; its values do not matter.
            named: The same.

        Raises:
            As a call.
        """
        self._ready(self._asked_for(batch, named)[0])

    def _clip_and_step(self, gradients: Sequence[Gradients | InsideAverages]) -> None:
        """The optimizers' steps with gradients that were kept."""
        parameters, scaler, limit = deliver(gradients), self._asked.grad_scaler, self._asked.clip_grad_norm
        optimizers = self.optimizers if scaler is None else self._checked_by(scaler, parameters)
        if limit is not None:
            unscale(scaler, optimizers)
            self._norm = clip_together(parameters, self._ranks.links, limit)
        step_all(scaler, optimizers)

    def _checked_by(self, scaler: GradScaler, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
        """The optimizers that have gradients here; `scaler` skips their steps, or none, as on all other ranks."""
        assert self._overflow is not None, "gradients are scaled"
        everyone, found = self._ranks.everyone, self._overflow.found(parameters, scale_of(scaler, self._ranks.device))
        if everyone.size > 1:
            with everyone.waits.explained("a comparison of float16 gradients"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=everyone.group)
        _, most, negated = found.tolist()
        if most != -negated:
            problem = f"of the loss is {most} on a rank, and {-negated} on another"
            raise AgreementError("the scale", problem, "load the same state of the GradScaler on all ranks")
        return self._overflow.spread(scaler, self.optimizers, found)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """With `clip_grad_norm=`, the norm of all gradients of the last step before it was clipped."""
        return self._norm

    @property
    def program(self) -> Program | None:
        """The program of this rank, once there is one: print it."""
        return None if self._run is None else self._run.program

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.table.stages_of(self._ranks.links.rank)))
        of = f"stages {stages} of {self.table.stages}, {self.table.microbatches} micro-batches"
        return f"PipelinedStep({type(self.model).__name__}, {of})"

    def _check(self) -> None:
        for optimizer in self.optimizers if self._updater is not None else ():
            if has_step_pre_hooks(optimizer):
                problem = f"{type(optimizer).__name__} has a hook before its step, which would find no gradients"
                raise OptimizerError("optimizer", problem, "use a hook behind the step")
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                fix = "call optimizer.step() or zero_grad() before the train step"
                raise ParameterError(name, "has a gradient already, which the train step would not add to its own", fix)

    def _check_unchanged(self, parts: Sequence[Called]) -> list[torch.Tensor]:
        """Raise what has changed since the step was traced; other ranks, which would wait, are told.

        Gives the tensors that the step reads beside its arguments, parameters and buffers.
        """
        guard, trace = self._guard, self._trace
        assert guard is not None, "a step was traced"
        assert trace is not None, "a step was traced"

        def check() -> list[torch.Tensor]:
            for part in parts:
                guard.check(part)
            return trace.others(parts[0])

        return self._told(check)

    def _told(self, act: Callable[[], Result]) -> Result:
        """What `act` gives; where it raises on this rank, the others, who would wait for it in the step, are told."""
        try:
            return act()
        except ZcompileError as error:
            problem = f"rank {self._ranks.everyone.waits.rank} cannot run it: {error.subject} {error.problem}"
            self._ranks.everyone.waits.refuse(AgreementError("the step", problem, error.fix))
            raise

    def _asked_for(self, batch: tuple[Any, ...], named: dict[str, Any]) -> list[Called]:
        """The micro-batches of a step that can be taken."""

        def check() -> list[Called]:
            self._check()
            return self._microbatches(batch, named)

        if self._run is None:  # all ranks come here for the first step
            return self._ranks.agreement.attempt("the first batch", check)[0]
        return self._told(check)

    def _microbatches(self, batch: tuple[Any, ...], named: dict[str, Any]) -> list[Called]:
        """The micro-batches of a batch; tensors without dimensions are the same in all."""
        count = self.table.microbatches
        tensors = [leaf for leaf in tree_leaves((batch, named)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.requires_grad for tensor in tensors):
            raise OptionError("batch", "has a tensor with requires_grad, which would get no gradient", "detach it")
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        if len(sizes) > 1:
            problem = f"cuts batches along dimension 0, and tensors of this one have {sorted(sizes)} rows"
            raise OptionError("microbatches", problem, "let all that loss_fn is given have a row for each sample")
        if any(size % count for size in sizes):
            problem = f"is {count}, which does not divide a batch of {min(sizes)}"
            raise OptionError("microbatches", problem, "give batches that it divides")
        call: Callable[..., Any] = self.model if self._loss_fn is None else self._loss_fn
        first = () if self._loss_fn is None else (self.model,)
        signature = inspect.signature(type(self.model).forward if self._loss_fn is None else self._loss_fn)
        names = tuple(signature.parameters)[1:]
        flat = self._flat  # torch remembers what it has traced, which must not keep this step alive

        def part(number: int) -> Called:
            def rows(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.chunk(count)[number] if tensor.dim() else tensor

            args, kwargs = tree_map_only(torch.Tensor, rows, (batch, named))
            return Called(lambda *a, **k: flat(call(*first, *a, **k)), args, kwargs, names)

        return [part(number) for number in range(count)]

    def _shown(self) -> PipelineReports:
        if self._reports is None:
            problem = "has no program yet: it is traced at the first step"
            raise StateError("model", problem, "call step.prepare(*batch) before, with any batch")
        return self._reports

    @property
    def traffic(self) -> TrafficMeter:
        """What this rank has sent so far, by the axes of the mesh, and how long it waited for others."""
        return self._ranks.data.traffic

    def _stored(self) -> ModelState:
        if self._state is None:
            problem = "is not divided yet: that happens at the first step, which traces the model"
            raise StateError("model", problem, "call step.prepare(*batch) before, with any batch")
        return self._state

    # -- the first step -------------------------------------------------------------------------------------------

    def _ready(self, first: Called) -> PipelinedRun:
        """What runs the program, made of a micro-batch if there is none yet."""
        if self._run is None:
            self._run = self._prepared(first)
            self._guard = StepGuard(self.model, first)
            everyone = self._ranks.everyone
            self._state = ModelState(self.model, everyone, self._ranks.agreement, self._options.stage)
            self._shown().dump_if_asked()
        return self._run

    def _prepared(self, first: Called) -> PipelinedRun:
        """Trace the step, rewrite this rank's part, compare it with all others', and divide the model."""
        ranks, options, what = self._ranks, self._options, type(self.model).__name__
        traced = ranks.agreement.attempt("the traced step", lambda: self._traced(first))[0]
        asked = [str(options), *str(self.table).split("\n")]
        asked += [f"split {self._asked.split}", f"clip_grad_norm {self._asked.clip_grad_norm}"]
        asked += [f"results {self._asked.results}", f"metrics {self._flat.names}"]
        asked += [f"the scale of the loss: {settings_of(scaler)}"] if (scaler := self._asked.grad_scaler) else []
        away = self._asked.offload_optimizer
        asked += [f"offload_optimizer {'disk' if isinstance(away, Path) else away}"]
        common = ranks.compare("the options and the traced step", "\n".join([*asked, str(traced)]))
        hardware = GPU if is_gpu(ranks.device) else CPU
        # Of tensor-parallel ranks each may have other sizes, by which it would cut elsewhere.
        chosen = ranks.agreement.attempt("the stages", lambda: self._starts(traced, hardware), shown=True)[1]
        starts = tuple(chosen[0])
        place = PipelinePlace(self.table, ranks.links.rank, ranks.links.axis, starts)
        options = self._with_prefetch(traced, place, options)
        make = partial(rewrite, traced, place, options, hardware, updates=self._updater is not None)
        made = ranks.agreement.attempt("the program", make)[0]
        program = made.program
        texts = ranks.agreement.share("the programs of all ranks", program.text(regions=True))
        check_texts(dict(zip(ranks.everyone.waits.ranks, texts, strict=True)))
        say_statistics(self.model, traced)
        runtime, retired = divide_model(self.model, program, traced, ranks, options, self.optimizers)
        watch_optimizers(self, runtime, retired)
        if self._asked.offload_optimizer is not None and self._updater is not None:
            self._updater.states = optimizer_states(self._asked.offload_optimizer, runtime, self._updater)
        places = ResultPlaces.of(self._flat.names, traced, made, self.table)
        results = StepResults(places, self.table.microbatches, ranks.links, self._asked.results)
        run = PipelinedRun(program, traced, runtime, ranks, self.model, results, common)
        along = [texts[rank] for rank in ranks.along]
        code = PipelineCode([made.journal], run.regions, hardware, self.table, along)
        self._reports = PipelineReports(what, runtime, code)
        return run

    def _with_prefetch(self, traced: Program, place: PipelinePlace, options: Options) -> Options:
        """The options with a number of units to gather ahead, if that is to be chosen: the most that a rank wants.

        Within a memory limit it is the least: more might be beyond it there.
        """
        ranks = self._ranks
        if options.prefetch != "auto":
            return options
        tensor = None if ranks.parallel is None else Communicator(ranks.parallel.mesh, ranks.device)
        measured = measure(ranks.data, options.dtype or torch.float32, tensor)
        choose = partial(choose_prefetch, traced, place, options, measured, updates=self._updater is not None)
        depths = ranks.agreement.attempt("the schedule of gathers", choose, shown=True)[1]
        return replace(options, prefetch=max(depths) if options.memory_limit is None else min(depths))

    def _starts(self, traced: Program, hardware: Hardware) -> tuple[str, ...]:
        return choose_starts(traced, self.table, self._asked.split, hardware, self._options)

    def _traced(self, first: Called) -> Program:
        """The step of one micro-batch.

        Raises:
            CaptureError, OptionError: it is none that a pipeline can run.
        """
        ranks, options, what = self._ranks, self._options, type(self.model).__name__
        stage, precision, hybrid = STAGES[options.stage], options.precision, options.hybrid
        layout = make_layout(self.model, stage, ranks.axes, self._units, precision, hybrid=hybrid)
        layout = replace(layout, away=options.offload_parameters == "cpu")
        check_gathered(layout, options.outer_gather_dtype)
        self._trace = StepTrace(self.model, layout, first, ranks.device, what, options.dtype)
        traced = self._trace.program
        check_traced(traced, len(self._flat.names or ()))
        if self.table.microbatches > 1:
            check_mean(traced)
        return traced


def _digest(batch: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Of the values of a batch."""
    found = hashlib.sha256()
    for leaf in tree_leaves((batch, named)):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
