"""Train steps on a mesh with a pipeline axis: each rank has some units, and runs one program for all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile.engine.interpreter import in_large_frame
from zcompile.engine.optimizers import check_optimizers
from zcompile.engine.reports import Reported, Reports
from zcompile.engine.step_trace import CallSpec
from zcompile.engine.train_steps import BaseStep, FlatResults, Overflow, StepOptions, Training, scale_of
from zcompile.errors import AgreementError, OptionError, StateError, ZcompileError, briefly
from zcompile.ir.program import Program
from zcompile.model.sharding import check_kinds
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.guard import SAME_DATA, digest_of, microbatches_of
from zcompile.pipelining.preparation import Evaluations, ReadyStep, StepSetup, prepare
from zcompile.pipelining.program import check_options
from zcompile.pipelining.ranks import PIPELINE, PipelineRanks, checked_device
from zcompile.runtime.agreement import preflight_barrier, propagate_failure
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.executor import Gradients, InsideAverages
from zcompile.runtime.gradients.delivery import set_gradients
from zcompile.runtime.gradients.updates import Updater
from zcompile.runtime.groups import ranks_of
from zcompile.runtime.stage_links import StageLinks
from zcompile.schedule.options import Options
from zcompile.state.model_state import ModelState
from zcompile.state.savable import Savable

Result = TypeVar("Result")
_TAKEN = frozenset({"stage", "prefetch", "dtype", "reduce_dtype", "backend", "bucket", "checkpoint", "memory_limit"})
_TAKEN |= {"shard", "outer_dtype", "outer_gather_dtype", "offload_parameters", "offload_activations", "dump", "record"}
"""Options of `zcompile.compile` that a pipeline takes, beside `units` and `mesh`."""


def pipelined_step(trained: Training, asked: StepOptions, given: dict[str, Any]) -> PipelinedStep:
    """A train step on the mesh among the options that are `given`.

    Raises:
        OptionError: an option that a pipeline does not take, or a schedule that is not for so many ranks.
        GroupError, OptimizerError: as `zcompile.train_step`.
    """
    mesh, units, model = given.pop("mesh"), given.pop("units", None), trained.model
    with propagate_failure(lambda: ranks_of(mesh), every=True):
        options = _options_of(given)
        check_kinds(model)
        check_optimizers(trained.optimizers, model)
        if asked.grad_scaler is not None:
            _check_scales(model, options)
        device = checked_device(model, mesh, options)
        table = action_table(asked.schedule, mesh[PIPELINE].size(), asked.microbatches, asked.stages_per_rank)
    preflight_barrier(ranks_of(mesh), device, "a pipelined train step")
    ranks = PipelineRanks.of(model, mesh, device, options)
    ranks = ranks.with_replicated(model, first=ranks.first)
    updater = None if asked.keeps_gradients else Updater(trained.optimizers)
    return PipelinedStep(StepSetup(trained, ranks, table, options, units, asked, updater))


def _options_of(given: dict[str, Any]) -> Options:
    """The options of a pipeline; raises OptionError for one that it does not take."""
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


class PipelinedStep(BaseStep, Savable, Reported):
    """See `zcompile.train_step`, with a mesh that has a dimension "pp". Collective: every rank calls it.

    The first call, or `prepare`, traces the step and divides the model: until then each rank has all of it. Then
    parameters of other ranks' stages are on meta, and in no group of the optimizers. State is whole, as the plain
    model's is: a checkpoint of it can be loaded on any other mesh, and by a model that no pipeline divides.
    """

    def __init__(self, setup: StepSetup) -> None:
        super().__init__(setup.trained, setup.asked, setup.updater)
        self._setup, self._ranks, self.table = setup, setup.ranks, setup.table
        self._overflow = None if self._scaler is None else Overflow(setup.ranks.device)
        self._compared = False
        """True once ranks along the pipeline axis are known to be given the same batch."""
        self._made: ReadyStep | None = None
        self._evaluations: Evaluations | None = None

    @briefly
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
        ready = self._ready(parts[0])
        if not self._compared:
            self._ranks.compare_along("the first batch", digest_of(batch, named), SAME_DATA)
            self._compared = True
        others = self._reporting(lambda: ready.check(parts))
        scale = None if self._scaler is None else scale_of(self._scaler, self._ranks.device)
        results, gradients = ready.run.step([[*part.leaves(), *others] for part in parts], scale)
        try:
            if self._updater is not None:
                self._updater.finish()
                ready.run.runtime.freshness.step()
            else:
                with ready.run.runtime.freshness.one_step():
                    parameters = deliver(gradients)
                    optimizers = self.optimizers if self._scaler is None else self._checked_by(self._scaler, parameters)
                    self._step_optimizers(optimizers, partial(clip_together, parameters, self._ranks.links))
        finally:
            self._drop_gradients(self.model.parameters())
        return results

    @briefly
    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """What a step with a batch would give, by the forward alone: no gradient is computed, and nothing updated.

        The model is evaluated in the mode that it is in: call `step.model.eval()` before, and `train()` after it.
        Batches of another size, or another mode, are traced at the first evaluation, into programs of their own.
        Collective.

        Args:
            batch: As for a call.
            named: The same.

        Raises:
            StateError: the model is not divided yet.
            Others: as a call.
        """
        self._stored()
        assert self._made is not None, "what is stored is divided"
        if self._evaluations is None:
            setup = replace(self._setup, table=self.table.forwards(), flat=FlatResults())
            self._evaluations = Evaluations(setup, self._made)
        evaluations, flat = self._evaluations, self._evaluations.setup.flat
        return evaluations.run(*self._reporting(lambda: evaluations.look_up(self._microbatches(batch, named, flat))))

    @briefly
    def prepare(self, *batch: Any, **named: Any) -> None:
        """Do what the first call does before it takes a step, such as to load a checkpoint then. Collective.

        Args:
            batch: As for a call; its values do not matter.
            named: The same.

        Raises:
            As a call.
        """
        self._ready(self._asked_for(batch, named)[0])

    def _checked_by(self, scaler: GradScaler, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
        """The optimizers that have gradients here; `scaler` skips their steps, or none, as on all other ranks."""
        assert self._overflow is not None, "gradients are scaled"
        everyone, found = self._ranks.everyone.communicator, self._overflow.found(parameters, scaler)
        if everyone.size > 1:
            with everyone.waits.explained("a comparison of float16 gradients"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=everyone.group)
        _, most, longest, least, shortest = found.tolist()
        if (most, longest) != (-least, -shortest):
            problem = (
                f"of the loss is {most} on a rank, for {longest:g} steps, and {-least} on another, for {-shortest:g}"
            )
            raise AgreementError("the scale", problem, "load the same state of the GradScaler on all ranks")
        return self._overflow.spread(scaler, self.optimizers, found)

    @property
    def program(self) -> Program | None:
        """The program of this rank, once there is one: print it."""
        return None if self._made is None else self._made.run.program

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.table.stages_of(self._ranks.links.rank)))
        of = f"stages {stages} of {self.table.stages}, {self.table.microbatches} micro-batches"
        return f"PipelinedStep({type(self.model).__name__}, {of})"

    def _reporting(self, act: Callable[[], Result]) -> Result:
        """The result of `act`; where it raises on this rank alone, that is reported to the others, who would wait."""
        try:
            return act()
        except ZcompileError as error:
            self._ranks.everyone.communicator.waits.report_failure("the step", error)
            raise

    def _asked_for(self, batch: tuple[Any, ...], named: dict[str, Any]) -> list[CallSpec]:
        """The micro-batches of a step that can be taken."""

        def check() -> list[CallSpec]:
            self._check_before(self.model.named_parameters())
            return self._microbatches(batch, named, self._setup.flat)

        if self._made is None:  # all ranks come here for the first step
            return self._ranks.everyone.attempt("the first batch", check)[0]
        return self._reporting(check)

    def _microbatches(self, batch: tuple[Any, ...], named: dict[str, Any], flat: FlatResults) -> list[CallSpec]:
        """The calls of the micro-batches of a batch, whose results `flat` makes tensors of."""
        call, signature = self._trained.call(flat)
        names = tuple(signature.parameters)[1:]
        # Of this step they hold nothing: torch remembers what it has traced, which must not keep the step alive.
        return [CallSpec(call, *part, names) for part in microbatches_of(batch, named, self.table.microbatches)]

    def _ready(self, first: CallSpec) -> ReadyStep:
        """What takes the step, made of a micro-batch if there is nothing yet."""
        if self._made is None:
            self._made = in_large_frame(prepare, self._setup, first, self)
            self._made.reports.dump_if_asked()
        return self._made

    def _shown(self) -> Reports:
        return self._taken("has no program yet: it is traced at the first step").reports

    @property
    def traffic(self) -> TrafficMeter:
        """What this rank has sent so far, by the axes of the mesh, and how long it waited for others."""
        return self._ranks.data.traffic

    def _stored(self) -> ModelState:
        return self._taken("is not divided yet: that happens at the first step, which traces the model").state

    def _taken(self, problem: str) -> ReadyStep:
        """What takes the step; raises StateError with `problem` before there is one."""
        if self._made is None:
            raise StateError("model", problem, "call step.prepare(*batch) before, with any batch")
        return self._made


def deliver(gradients: Sequence[Gradients | InsideAverages]) -> list[nn.Parameter]:
    """Put averaged gradients into `.grad`; gives the parameters that have one now."""
    home = [one if isinstance(one, Gradients) else one.gradients() for one in gradients]
    for memory in {one.shards.memory for one in home}:
        memory.landed()
    return [parameter for one in home for parameter in set_gradients(one)]


@torch.no_grad()
def clip_together(parameters: Sequence[nn.Parameter], links: StageLinks, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that they have at most the norm `max_norm` together. Collective.

    Gives their 2-norm before, a tensor without dimensions on the device, the same on all ranks.
    """
    # Beside tensor parallelism some are plain tensors, and torch takes these and DTensors apart.
    kinds = [[one for one in parameters if isinstance(one.grad, DTensor) is kind] for kind in (True, False)]
    total = torch.zeros((), device=links.device)
    for some in filter(None, kinds):  # the norm of none is a number on the host
        norm = nn.utils.get_total_norm([one.grad for one in some if one.grad is not None])
        own = norm.full_tensor() if isinstance(norm, DTensor) else norm
        total += own.to(links.device, torch.float32).square()
    if links.size > 1:
        with links.waits.explained("the norm of all gradients"):
            dist.all_reduce(total, group=links.group)
    total = total.sqrt_()
    for some in filter(None, kinds):
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total
