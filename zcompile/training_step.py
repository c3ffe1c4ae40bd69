"""`zcompile.train_step`: forward, backward and the optimizer's step as one program, which keeps no gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from zcompile.compile_model import compile
from zcompile.compiled import CompiledModule, options_of
from zcompile.engine.calls.fragments import Fragment, Tree
from zcompile.engine.train_steps import (
    ONE_ELEMENT,
    BaseStep,
    LossFunction,
    ResultsOn,
    StepOptions,
    Training,
    check_metrics,
    check_scaler,
    split_results,
    untrained_loss,
    without_gradients,
)
from zcompile.errors import CaptureError, GroupError, OptimizerError, OptionError, briefly
from zcompile.frontend.capture import Names
from zcompile.ir.actions import ActionTable
from zcompile.pipelining.ranks import is_pipelined
from zcompile.pipelining.step import PipelinedStep, pipelined_step
from zcompile.report.explain import Break
from zcompile.runtime.agreement import propagate_failure
from zcompile.runtime.device import HOST, backend_of, gpu_kind
from zcompile.runtime.gradients.optimizer_trials import parameters_held
from zcompile.runtime.gradients.updates import States, Updater
from zcompile.runtime.groups import ranks_of
from zcompile.runtime.lockstep import RunKind
from zcompile.schedule.option_checks import check_place, offload_of
from zcompile.torch_internals.distributed import backend_name


@briefly
def train_step(
    model: nn.Module,
    loss_fn: LossFunction | None,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    clip_grad_norm: float | None = None,
    grad_scaler: GradScaler | None = None,
    offload_optimizer: str | None = None,
    schedule: str | ActionTable = "1f1b",
    microbatches: int = 1,
    split: Sequence[str] | None = None,
    stages_per_rank: int | None = None,
    results: ResultsOn = "all",
    **options: Any,
) -> TrainStep | PipelinedStep:
    """Make a whole step of training one call: `step = zcompile.train_step(...)`, then `loss = step(*batch)`.

    It gives, bit for bit, what the loop gives: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. But each
    unit's gradients are used for its update as soon as they are reduced, and freed: a rank holds those of the units in
    flight in place of Ψ/N. And the next step's first gathers start while the last units are updated.

    An error in the middle of a backward leaves some units updated and others not; the loop leaves none. Hooks before an
    optimizer's step are refused: they would find no gradients.

    Args:
        model: A plain module, which is compiled (`step.model` is the compiled one), or one that is compiled already.
        loss_fn: Called as `loss_fn(model, *batch)`, it gives the loss, or `(loss, {name: tensor})` with metrics; None:
            the model itself does.
        optimizer: One or several that treat each parameter by itself. Groups may change between steps, as by schedules.
        clip_grad_norm: The largest norm of all gradients together. It is known once the backward has ended: with it,
            gradients are kept until then, as in the loop.
        grad_scaler: A `torch.amp.GradScaler`, for float16: where gradients overflow on any rank, all skip the step.
        offload_optimizer: Where the optimizer's state is, fetched while the backward goes on: for a model on the CPU
            "disk:FOLDER", a file there, mapped into memory, which holds what fits; for one on a GPU "cpu".
        schedule: Of a pipeline, on a mesh with a dimension "pp": a name, or a table of actions (docs/pipelines.md).
        microbatches: Into how many parts a pipeline cuts a batch along dimension 0.
        split: The units with which its stages begin, but for the first; by default they compute about as long.
        stages_per_rank: How many of them a rank has, where the schedule leaves a choice.
        results: Which ranks along the pipeline axis are given the loss and metrics: "all", or the "last" alone.
        options: Those of `zcompile.compile`, for a plain module.

    Raises:
        OptionError: an option that cannot be meant, or that belongs to the `compile` of a compiled model.
        OptimizerError: the optimizer holds none of the model's parameters, or its step is for all of them at once.
        Others: as `zcompile.compile`; StateError: the folder cannot be written, or has no room for the state.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    asked, mesh = StepOptions(schedule, microbatches, split, stages_per_rank, results=results), options.get("mesh")
    pipelined = is_pipelined(mesh)
    with propagate_failure(lambda: ranks_of(mesh), every=True) if pipelined else nullcontext():
        _check_asked(model, asked, clip_grad_norm, pipelined=pipelined)
        given = vars(options_of(model)) if isinstance(model, CompiledModule) else options
        scaler = check_scaler(grad_scaler, given.get("dtype"))
        asked = replace(asked, clip_grad_norm=clip_grad_norm, grad_scaler=scaler)
        asked = replace(asked, offload_optimizer=_place(offload_optimizer, keeps=asked.keeps_gradients))
        _check_offloads(model, given, asked)
    trained = Training(model, loss_fn, optimizers)
    return (pipelined_step if pipelined else _unpipelined)(trained, asked, options)


def _unpipelined(trained: Training, asked: StepOptions, options: dict[str, Any]) -> TrainStep:
    """A train step without a pipeline."""
    model, optimizers = trained.model, trained.optimizers
    updater = None if asked.keeps_gradients else Updater(optimizers)
    if not isinstance(model, CompiledModule):
        model = compile(model, optimizer=optimizers, **options)
    elif options:
        fix = "give it to zcompile.compile, or give train_step the plain model"
        raise OptionError(next(iter(options)), "belongs to zcompile.compile, and the model is compiled already", fix)
    if ignored := model._model_state.ignored:
        problem = f"leaves {ignored[0]} to you, and a train step updates all parameters"
        raise OptionError("ignore", problem, "train with zcompile.compile and a loop")
    model._engine.runtime.keep_states(asked.offload_optimizer, updater)
    return TrainStep(replace(trained, model=model), asked, updater)


def _check_asked(model: nn.Module, asked: StepOptions, clip_grad_norm: float | None, *, pipelined: bool) -> None:
    """Raise OptionError for what cannot be meant, with or without a pipeline."""
    if clip_grad_norm is not None and not 0 < clip_grad_norm < math.inf:
        raise OptionError("clip_grad_norm", f"{clip_grad_norm!r} is no norm", "give a positive number, or None")
    if asked.results not in get_args(ResultsOn):
        raise OptionError("results", f"{asked.results!r} is unknown", "give 'all' or 'last'")
    if pipelined and isinstance(model, CompiledModule):
        fix = "give it the plain model"
        raise OptionError("model", "is compiled already, and a pipeline divides the model by itself", fix)
    if not pipelined and asked != StepOptions():
        problem = "are for a pipeline, and the mesh has no dimension 'pp'"
        names = "schedule, microbatches, split, stages_per_rank, results"
        raise OptionError(names, problem, "leave them out, or give mesh=")


def _place(offload: str | None, *, keeps: bool) -> Path | Literal["cpu"] | None:
    """Where the optimizer's state is to be.

    Raises:
        OptionError: it is no place, or gradients are kept, so that the optimizer steps all at once.
    """
    place = offload_of("offload_optimizer", offload)
    if place is not None and keeps:
        problem = (
            "streams the state unit by unit, and with clipping by the global norm, or a GradScaler, all step at once"
        )
        raise OptionError("offload_optimizer", problem, "leave these out, or clip each gradient in a hook")
    return place


def _check_offloads(model: nn.Module, given: Mapping[str, Any], asked: StepOptions) -> None:
    """Raise what `train_step` raises for what does not fit where shards are; `given`: what the model is compiled with.

    Before the model is sharded.
    """
    ranks = model._engine.runtime.ranks if isinstance(model, CompiledModule) else None
    place, on_host = asked.offload_optimizer, given.get("offload_parameters") == "cpu"
    if on_host and place == "cpu":
        problem = "has no effect: beside offload_parameters='cpu' the state is where the parameters are"
        raise OptionError("offload_optimizer", problem, "leave it out")
    if place is not None:
        first = next(model.parameters(), None)
        if ranks is not None:
            check_place("offload_optimizer", place, ranks.device)
        elif first is not None and not first.is_meta:
            check_place("offload_optimizer", place, first.device)
    if on_host and asked.grad_scaler is not None:
        problem = "is 'cpu', and a GradScaler's flags for the host are read before they are there"
        raise OptionError("offload_parameters", problem, "compute in bfloat16, or leave it out")
    if on_host and asked.clip_grad_norm is not None:
        _check_reaches_host(given.get("mesh") if ranks is None else ranks.data.mesh)


def _check_reaches_host(mesh: DeviceMesh | None) -> None:
    """Raise GroupError if the norm of gradients in the memory of the host is to be taken over ranks that cannot."""
    groups = [dist.GroupMember.WORLD] if mesh is None else mesh.get_all_groups()
    try:
        for group in groups:
            if group is not None and group.size() > 1:
                backend_name(group, torch.device("cpu"))
    except RuntimeError as error:
        problem = "has no backend for gradients in the memory of the host, whose norm clip_grad_norm takes"
        both = ",".join(f"{kind}:{backend_of(kind)}" for kind in (HOST, gpu_kind()))
        fix = f"initialise one beside NCCL: init_process_group({both!r})"
        raise GroupError("process group", problem, fix) from error


class TrainStep(BaseStep):
    """See `train_step`. Collective: every rank calls it."""

    model: CompiledModule

    def __init__(self, trained: Training, asked: StepOptions, updater: Updater | None) -> None:
        super().__init__(trained, asked, updater)
        model, optimizers = self.model, self.optimizers
        self._parameters = dict(model.named_parameters())
        held = {id(param) for optimizer in optimizers for param in parameters_held(optimizer)}
        if not any(id(param) in held for param in self._parameters.values()):
            fix = "build it over the parameters of the model that is given here"
            raise OptimizerError("optimizer", "holds none of the model's parameters", fix)
        self._engine = model._engine
        self._engine.runtime.scales = self._scaler is not None
        for optimizer in optimizers:
            self._engine.runtime.settings.know(optimizer)
        self._fragment = _Loss(model._tree, trained, updater)

    @briefly
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take one step; gives the loss, detached. It is this rank's own, of its own batch.

        Where `loss_fn` gives metrics, too, so does this: `(loss, {name: tensor})`.

        Raises:
            OptionError: the loss is no scalar with a gradient, or this is within `no_sync`.
            ParameterError: a parameter has a gradient already, which would be lost.
            CaptureError: the model and its loss cannot be traced into one graph.
            Others: as a call of the compiled model.
        """
        self._check()
        lockstep = self._engine.runtime.lockstep
        lockstep.enter(RunKind.STEP, "0")
        with torch.enable_grad():
            loss, metrics = _checked(self._fragment.tree.run(self._fragment, batch, named))
            if self._updater is None:
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            else:
                lockstep.check()  # the backward updates: behind it, it would be too late
                with self._updater.updating():
                    loss.backward()
        if self._updater is not None:
            self._updater.finish()
            self._engine.runtime.freshness.step()
        else:
            self._step_optimizers(self.optimizers, self._clip)
        self._drop_gradients(self._parameters.values())
        return loss.detach() if metrics is None else (loss.detach(), metrics)

    @briefly
    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """What a step with a batch would give, by the forward alone: no gradient is computed, and nothing updated.

        The model is evaluated in the mode that it is in: call `step.model.eval()` before, and `train()` after it.

        Raises:
            As a call of the compiled model.
        """
        model, loss_fn = self.model, self._trained.loss_fn
        with torch.no_grad():
            return model(*batch, **named) if loss_fn is None else loss_fn(model, *batch, **named)

    def _clip(self, limit: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # f"{norm:.3f}" takes no DTensor

    @property
    def states(self) -> States | None:
        """Where the optimizers' state is, if it is not in the device's memory."""
        return None if self._updater is None else self._updater.states

    def __repr__(self) -> str:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        kept = "kept until all are there" if self._updater is None else "used as they arrive"
        return f"TrainStep({type(self.model).__name__} with {kinds}, gradients {kept})"

    def _check(self) -> None:
        if self._engine.runtime.is_full:
            raise OptionError("unsharded()", "is for evaluation, and has nothing to train", "train outside")
        if self._engine.runtime.accumulates:
            fix = "accumulate over micro-batches in the loop: compiled(batch).backward(), then optimizer.step()"
            raise OptionError("no_sync", "holds gradients back, and a train step uses them at once", fix)
        self._check_before(self._parameters.items())


def _checked(result: object) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """The loss, and metrics if there are."""
    loss, metrics = split_results(result)
    if metrics is not None:
        check_metrics({name: isinstance(one, torch.Tensor) for name, one in metrics.items()})
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        problem = f"gives {list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}"
        raise OptionError("loss_fn", problem, ONE_ELEMENT)
    if not loss.requires_grad:
        raise untrained_loss()
    return loss, metrics


class _Loss(Fragment):
    """The model and its loss, traced as one graph."""

    def __init__(self, tree: Tree, trained: Training, updater: Updater | None) -> None:
        self.updater = updater
        call, self._signature = replace(trained, model=tree.model).call(without_gradients)
        super().__init__(tree, tree.model, "", call)

    @property
    def names(self) -> Names:
        return self.tree.names(self.path, self._signature)

    def _split(self, error: Exception) -> None:
        graph_break = Break.of("", "the model and its loss", error)
        fix = "fix it, or use the loop: compiled(batch), loss.backward(), optimizer.step()"
        raise CaptureError(
            graph_break.where, f"breaks the graph of the train step: {graph_break.reason}", fix
        ) from error
