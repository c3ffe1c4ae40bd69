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
_TAKEN = frozenset({"stage", "prefetch", "dtype", "reduce_dtype", "backend", "bucket", "checkpoint", "chunk", "dump"})
_TAKEN |= {"shard", "outer_dtype", "outer_gather_dtype", "memory_limit", "offload_parameters", "offload_activations"}
_TAKEN |= {"record", "sequence"}
"""Options of `zcompile.compile` that pipelines support, besides `units` and `mesh`."""


def pipelined_step(trained: Training, step_options: StepOptions, given: dict[str, Any]) -> PipelinedStep:
    """Make a train step on the mesh in `given`, the options of `zcompile.compile`. Collective.

    Raises:
        OptionError: pipelines do not support an option, or the schedule does not fit the number of ranks.
        GroupError, OptimizerError: as `zcompile.train_step`.
    """
    mesh, units, model = given.pop("mesh"), given.pop("units", None), trained.model
    with propagate_failure(lambda: ranks_of(mesh), every=True):
        options = _options_of(given)
        check_kinds(model)
        check_optimizers(trained.optimizers, model)
        if step_options.grad_scaler is not None:
            _check_scales(model, options)
        device = checked_device(model, mesh, options)
        table = action_table(
            step_options.schedule, mesh[PIPELINE].size(), step_options.microbatches, step_options.stages_per_rank
        )
    preflight_barrier(ranks_of(mesh), device, "a pipelined train step")
    ranks = PipelineRanks.of(model, mesh, device, options)
    ranks = ranks.with_replicated(model, first=ranks.first)
    updater = None if step_options.keeps_gradients else Updater(trained.optimizers)
    return PipelinedStep(StepSetup(trained, ranks, table, options, units, step_options, updater))


def _options_of(given: dict[str, Any]) -> Options:
    """The options of a pipeline. Raises OptionError for an option that pipelines do not support."""
    known = {field.name: field for field in fields(Options)}
    if unknown := [name for name in given if name not in known]:
        raise OptionError(unknown[0], "is not an option of a pipeline", f"choose from {', '.join(sorted(_TAKEN))}")
    for name, value in given.items():
        if name not in _TAKEN and value != known[name].default:
            raise OptionError(name, "cannot be combined with a pipeline yet", "leave it out")
    options = Options.among(given)
    check_options(options)
    return options


def _check_scales(model: nn.Module, options: Options) -> None:
    """Raise OptionError if a GradScaler cannot handle all gradients together."""
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    if len(kinds) > 1 and options.stage == 0:
        problem = "cannot handle DTensors together with plain tensors, the gradients of a tensor-parallel stage 0"
        raise OptionError("grad_scaler", problem, "choose stage 1, 2 or 3, or compute in bfloat16")


class PipelinedStep(BaseStep, Savable, Reported):
    """A train step made by `zcompile.train_step` for a mesh with a dimension "pp". Collective: every rank calls it.

    The first call, or `prepare`, traces the step and divides the model; until then each rank has all of it. Afterwards,
    the parameters of other ranks' stages are on meta and no longer in the optimizers. Saved state is that of the whole
    model: a checkpoint loads on any other mesh, and without a pipeline.
    """

    def __init__(self, setup: StepSetup) -> None:
        super().__init__(setup.trained, setup.step_options, setup.updater)
        self._setup, self._ranks, self.table = setup, setup.ranks, setup.table
        self._overflow = None if self._scaler is None else Overflow(setup.ranks.device)
        self._compared = False
        """True once the ranks along the pipeline axis have been checked to get the same batch."""
        self._prepared: ReadyStep | None = None
        self._evaluations: Evaluations | None = None

    @briefly
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take one step. All ranks along the pipeline axis must be given the same batch.

        Returns the mean loss over the micro-batches of this data-parallel rank, detached. If `loss_fn` returns metrics,
        too, returns `(loss, {name: tensor})`, with each metric of all micro-batches stacked to [microbatches, ...].
        With `results="last"`, returns None on all ranks but the one with the last stage.

        Raises:
            OptionError: the batch cannot be split into micro-batches, or differs in size from the first batch; or the
                loss is not one element with a gradient.
            ModelError: the model was changed after the first step.
            CaptureError: the model and its loss cannot be traced into one graph, or it cannot be cut into stages.
            AgreementError: the ranks trace different steps, or are out of step.
            GroupError: another rank failed or did not call the step.
        """
        parts = self._checked_microbatches(batch, named)
        ready = self._prepare_once(parts[0])
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
        """Return what a step would return, by the forward only: computes no gradients and updates nothing. Collective.

        The model stays in its mode: call `step.model.eval()` before and `step.model.train()` afterwards. Each new batch
        size or mode is traced at its first evaluation into a separate program.

        Args:
            batch: Positional arguments, as for a call.
            named: Keyword arguments, as for a call.

        Raises:
            StateError: the model is not divided yet.
            Others: as a call.
        """
        self._stored()
        assert self._prepared is not None, "_stored raises before the first step"
        if self._evaluations is None:
            setup = replace(self._setup, table=self.table.forwards(), flat=FlatResults())
            self._evaluations = Evaluations(setup, self._prepared)
        evaluations, flat = self._evaluations, self._evaluations.setup.flat
        return evaluations.run(*self._reporting(lambda: evaluations.look_up(self._microbatches(batch, named, flat))))

    @briefly
    def prepare(self, *batch: Any, **named: Any) -> None:
        """Trace the step and divide the model without taking a step, as before loading a checkpoint. Collective.

        Args:
            batch: Positional arguments, as for a call; values do not matter.
            named: Keyword arguments, likewise.

        Raises:
            Errors as a call.
        """
        self._prepare_once(self._checked_microbatches(batch, named)[0])

    def _checked_by(self, scaler: GradScaler, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
        """Share overflows and check that scales agree among ranks; returns the optimizers that have gradients here."""
        assert self._overflow is not None, "gradients are scaled"
        everyone, found = self._ranks.everyone.communicator, self._overflow.found(parameters, scaler)
        if everyone.size > 1:
            with everyone.waits.explained("a comparison of float16 gradients"):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=everyone.group)
        _, most, longest, least, shortest = found.tolist()
        if (most, longest) != (-least, -shortest):
            problem = f"is {most} on one rank, for {longest:g} steps, and {-least} on another, for {-shortest:g}"
            raise AgreementError("the loss scale", problem, "load the same GradScaler state on all ranks")
        return self._overflow.spread(scaler, self.optimizers, found)

    @property
    def program(self) -> Program | None:
        """The program of this rank; None before the first step."""
        return None if self._prepared is None else self._prepared.run.program

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.table.stages_of(self._ranks.links.rank)))
        of = f"stages {stages} of {self.table.stages}, {self.table.microbatches} micro-batches"
        return f"PipelinedStep({type(self.model).__name__}, {of})"

    def _reporting(self, act: Callable[[], Result]) -> Result:
        """Call `act`; if it raises, report the error to the other ranks, which would otherwise wait, and raise it."""
        try:
            return act()
        except ZcompileError as error:
            self._ranks.everyone.communicator.waits.report_failure("the step", error)
            raise

    def _checked_microbatches(self, batch: tuple[Any, ...], named: dict[str, Any]) -> list[CallSpec]:
        """Check that a step may be taken, and split its batch into micro-batches."""

        def check() -> list[CallSpec]:
            self._check_before(self.model.named_parameters())
            return self._microbatches(batch, named, self._setup.flat)

        if self._prepared is None:  # the first step is collective from here on
            return self._ranks.everyone.attempt("the first batch", check)[0]
        return self._reporting(check)

    def _microbatches(self, batch: tuple[Any, ...], named: dict[str, Any], flat: FlatResults) -> list[CallSpec]:
        """Split a batch into the calls of its micro-batches, whose results `flat` flattens."""
        call, signature = self._trained.call(flat)
        names = tuple(signature.parameters)[1:]
        # They must not refer to `self`: torch keeps what it has traced, which would keep the step alive.
        return [CallSpec(call, *part, names) for part in microbatches_of(batch, named, self.table.microbatches)]

    def _prepare_once(self, first: CallSpec) -> ReadyStep:
        """The prepared step; prepares it from a micro-batch if there is none yet."""
        if self._prepared is None:
            self._prepared = in_large_frame(prepare, self._setup, first, self)
            self._prepared.reports.dump_if_asked()
        return self._prepared

    def _shown(self) -> Reports:
        return self._require_prepared("has no program yet: the first step traces it").reports

    @property
    def traffic(self) -> TrafficMeter:
        """Bytes that this rank has sent so far, by mesh axis, and seconds that it waited for other ranks."""
        return self._ranks.data.traffic

    def _stored(self) -> ModelState:
        return self._require_prepared("is not divided yet: the first step traces and divides it").state

    def _require_prepared(self, problem: str) -> ReadyStep:
        """The prepared step. Raises StateError with `problem` if there is none."""
        if self._prepared is None:
            raise StateError("model", problem, "call step.prepare(*batch) first, with any batch")
        return self._prepared


def deliver(gradients: Sequence[Gradients | InsideAverages]) -> list[nn.Parameter]:
    """Assign averaged gradients to `.grad`; returns the parameters that have a gradient now."""
    home = [one if isinstance(one, Gradients) else one.gradients() for one in gradients]
    for memory in {one.shards.memory for one in home}:
        memory.landed()
    return [parameter for one in home for parameter in set_gradients(one)]


@torch.no_grad()
def clip_together(parameters: Sequence[nn.Parameter], links: StageLinks, max_norm: float) -> torch.Tensor:
    """Clip the gradients of all stages to a total 2-norm of at most `max_norm`. Collective.

    Returns the norm before clipping, a float32 0-d tensor on the device, the same on all ranks.
    """
    # With tensor parallelism some are plain tensors, and torch cannot take their norm together with DTensors.
    kinds = [[one for one in parameters if isinstance(one.grad, DTensor) is kind] for kind in (True, False)]
    total = torch.zeros((), device=links.device)
    for some in filter(None, kinds):  # for an empty list get_total_norm returns a CPU tensor
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
