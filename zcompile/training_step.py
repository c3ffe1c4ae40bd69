"""`zcompile.train_step`: forward, backward and optimizer step as one program that keeps no gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from zcompile.engine.step_graphs import Inputs, StepGraphs, StepResults
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
from zcompile.errors import CaptureError, GroupError, OptimizerError, OptionError, ParameterError, briefly
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
from zcompile.torch_internals.autograd import have_post_accumulate_hooks
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
    """Make a whole training step one call: `step = zcompile.train_step(...)`, then `loss = step(*batch)`.

    The results equal, bit for bit, those of the loop `loss.backward(); optimizer.step(); optimizer.zero_grad()`. But
    each unit is updated as soon as its gradients are reduced, and these are then freed: a rank holds the gradients of
    the units in flight instead of Ψ/N. The first gathers of the next step start while the last units are updated.

    An error in the middle of a backward leaves some units updated and others not; the loop would leave all unchanged.
    Optimizers with step pre-hooks are refused, because the hooks would find no gradients.

    On a GPU, `cuda_graphs="step"` captures all of a step as one CUDA graph, with its communication and updates. It is
    replayed by a single launch, once two steps for a batch's shapes have run without.

    Args:
        model: A plain module, which is then compiled (`step.model`), or a compiled module.
        loss_fn: Called as `loss_fn(model, *batch)`; returns the loss, or `(loss, {name: tensor})` with metrics. None:
            the model returns them.
        optimizer: One or more optimizers that update each parameter independently. Groups may change between steps.
        clip_grad_norm: Maximum norm of all gradients together. It is known only after the backward, so gradients are
            kept until then, as in the loop.
        grad_scaler: A `torch.amp.GradScaler`, for float16. If gradients overflow on any rank, all ranks skip the step.
        offload_optimizer: Where to keep optimizer state, fetched during the backward: "disk:FOLDER", a memory-mapped
            file, for a model on the CPU; "cpu", pinned memory, for a model on a GPU.
        schedule: Pipeline schedule, for a mesh with a dimension "pp": a name or an action table (docs/pipelines.md).
        microbatches: Number of micro-batches into which a pipeline splits a batch along dimension 0.
        split: First unit of each pipeline stage except the first; default: stages of about equal compute time.
        stages_per_rank: Number of pipeline stages on a rank, for schedules that leave it open.
        results: The ranks along the pipeline axis that return the loss and metrics: "all", or only the "last".
        options: Options of `zcompile.compile`, for a plain module.

    Raises:
        OptionError: an invalid option, or an option of `zcompile.compile` with a module that is compiled already.
        OptimizerError: the optimizer holds none of the model's parameters, or updates them jointly.
        StateError: the folder cannot be written, or has no room for the optimizer state.
        Others: as `zcompile.compile`.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    settings, mesh = StepOptions(schedule, microbatches, split, stages_per_rank, results=results), options.get("mesh")
    pipelined = is_pipelined(mesh)
    with propagate_failure(lambda: ranks_of(mesh), every=True) if pipelined else nullcontext():
        _check_settings(model, settings, clip_grad_norm, pipelined=pipelined)
        given = vars(options_of(model)) if isinstance(model, CompiledModule) else options
        scaler = check_scaler(grad_scaler, given.get("dtype"))
        settings = replace(settings, clip_grad_norm=clip_grad_norm, grad_scaler=scaler)
        offload = _parse_offload(offload_optimizer, keeps=settings.keeps_gradients)
        if given.get("cuda_graphs") == "step":
            _check_whole({**given, "offload_optimizer": offload, "schedule": pipelined})
        settings = replace(settings, offload_optimizer=offload)
        _check_offloads(model, given, settings)
    trained = Training(model, loss_fn, optimizers)
    return (pipelined_step if pipelined else _plain_step)(trained, settings, options)


def _plain_step(trained: Training, settings: StepOptions, options: dict[str, Any]) -> TrainStep:
    """Make a train step without a pipeline."""
    model, optimizers = trained.model, trained.optimizers
    updater = None if settings.keeps_gradients else Updater(optimizers)
    if not isinstance(model, CompiledModule):
        model = compile(model, optimizer=optimizers, **options)
    elif options:
        fix = "give it to zcompile.compile, or give train_step the plain model"
        raise OptionError(next(iter(options)), "belongs to zcompile.compile, and the model is compiled already", fix)
    if ignored := model._model_state.ignored:
        problem = f"leaves the update of {ignored[0]} to you, and a train step updates all parameters"
        raise OptionError("ignore", problem, "train with zcompile.compile and a loop")
    model._engine.runtime.keep_states(settings.offload_optimizer, updater)
    return TrainStep(replace(trained, model=model), settings, updater)


def _check_whole(given: Mapping[str, Any]) -> None:
    """Raise OptionError for options with which a step cannot be captured as one graph."""
    acting = ("offload_parameters", "offload_activations", "offload_optimizer", "record", "schedule")
    for option in filter(given.get, (*acting, "arenas")):
        why = "makes the host act within a step" if option in acting else "keeps memory of its own"
        fix = "leave one of the two out, or capture regions only: cuda_graphs=True"
        raise OptionError("cuda_graphs", f"'step' captures all of a step, and {option} {why}", fix)


def _check_settings(model: nn.Module, settings: StepOptions, clip_grad_norm: float | None, *, pipelined: bool) -> None:
    """Raise OptionError for options that are invalid, or that do not fit the mesh."""
    if clip_grad_norm is not None and not 0 < clip_grad_norm < math.inf:
        raise OptionError("clip_grad_norm", f"{clip_grad_norm!r} is not a norm", "give a positive number, or None")
    if settings.results not in get_args(ResultsOn):
        raise OptionError("results", f"{settings.results!r} is unknown", "give 'all' or 'last'")
    if pipelined and isinstance(model, CompiledModule):
        fix = "give the plain model"
        raise OptionError("model", "is compiled already, and a pipeline must split the plain model", fix)
    if not pipelined and settings != StepOptions():
        problem = "are for a pipeline, and the mesh has no dimension 'pp'"
        names = "schedule, microbatches, split, stages_per_rank, results"
        raise OptionError(names, problem, "leave them out, or give mesh=")


def _parse_offload(text: str | None, *, keeps: bool) -> Path | Literal["cpu"] | None:
    """Parse `offload_optimizer`. `keeps`: gradients are kept until the end of the backward.

    Raises:
        OptionError: it is invalid, or gradients are kept, so that all units are updated at once.
    """
    offload = offload_of("offload_optimizer", text)
    if offload is not None and keeps:
        problem = "streams the state unit by unit, but clip_grad_norm and grad_scaler update all units at once"
        raise OptionError("offload_optimizer", problem, "leave these out, or clip each gradient in a hook")
    return offload


def _check_offloads(model: nn.Module, given: Mapping[str, Any], settings: StepOptions) -> None:
    """Check, before the model is sharded, that the options fit `given`, the options that the model is compiled with.

    Raises OptionError or GroupError.
    """
    ranks = model._engine.runtime.ranks if isinstance(model, CompiledModule) else None
    offload, on_host = settings.offload_optimizer, given.get("offload_parameters") == "cpu"
    if on_host and offload == "cpu":
        problem = "has no effect with offload_parameters='cpu', which keeps the state with the parameters"
        raise OptionError("offload_optimizer", problem, "leave it out")
    if offload is not None:
        first = next(model.parameters(), None)
        if ranks is not None:
            check_place("offload_optimizer", offload, ranks.device)
        elif first is not None and not first.is_meta:
            check_place("offload_optimizer", offload, first.device)
    if on_host and settings.grad_scaler is not None:
        problem = "is 'cpu', and GradScaler would read its flags on the host before they have arrived"
        raise OptionError("offload_parameters", problem, "compute in bfloat16, or leave it out")
    if on_host and settings.clip_grad_norm is not None:
        _check_reaches_host(given.get("mesh") if ranks is None else ranks.data.mesh)


def _check_reaches_host(mesh: DeviceMesh | None) -> None:
    """Raise GroupError if some group has no CPU backend, which the norm of gradients on the host needs."""
    groups = [dist.GroupMember.WORLD] if mesh is None else mesh.get_all_groups()
    try:
        for group in groups:
            if group is not None and group.size() > 1:
                backend_name(group, torch.device("cpu"))
    except RuntimeError as error:
        problem = "has no CPU backend, and clip_grad_norm reduces the norm of gradients on the host"
        both = ",".join(f"{kind}:{backend_of(kind)}" for kind in (HOST, gpu_kind()))
        fix = f"initialise one in addition to NCCL: init_process_group({both!r})"
        raise GroupError("process group", problem, fix) from error


class TrainStep(BaseStep):
    """A training step, made by `zcompile.train_step`. Collective: every rank calls it."""

    model: CompiledModule

    def __init__(self, trained: Training, settings: StepOptions, updater: Updater | None) -> None:
        super().__init__(trained, settings, updater)
        model, optimizers = self.model, self.optimizers
        self._parameters = dict(model.named_parameters())
        held = {id(param) for optimizer in optimizers for param in parameters_held(optimizer)}
        if not any(id(param) in held for param in self._parameters.values()):
            fix = "build it over the parameters of this model"
            raise OptimizerError("optimizer", "holds none of the model's parameters", fix)
        self._engine = model._engine
        self._engine.runtime.scales = self._scaler is not None
        for optimizer in optimizers:
            self._engine.runtime.settings.know(optimizer)
        wanted = self._engine.options.cuda_graphs == "step"
        self._graphs = StepGraphs(self._engine.runtime, optimizers, self._in_graphs) if wanted else None
        self._fragment = _Loss(model._tree, trained, updater, self._graphs)

    @briefly
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take one step. Returns the loss, detached: the loss of this rank's batch, not averaged over ranks.

        If `loss_fn` returns metrics, too, returns `(loss, {name: tensor})`, detached.

        Raises:
            OptionError: the loss is not one element with a gradient, or this is within `no_sync` or `unsharded`.
            ParameterError: a parameter already has a gradient, which would be lost.
            CaptureError: the model and its loss cannot be traced into one graph.
            Others: as a call of the compiled model.
        """
        self._check()
        if self._graphs is not None:
            loss, metrics, self.grad_norm = self._graphs.run(lambda: self._step(batch, named))
        else:
            self._engine.runtime.lockstep.enter(RunKind.STEP, "0")
            loss, metrics, self.grad_norm = self._step(batch, named)
        return loss if metrics is None else (loss, metrics)

    def _in_graphs(self) -> tuple[Any, ...]:
        """What a graph of the step has captured by value, of what can change."""
        scaler = self._scaler
        factors = () if scaler is None else (scaler.get_growth_factor(), scaler.get_backoff_factor())
        return (self.clip_grad_norm, *factors, None if scaler is None else scaler.get_growth_interval())

    def _step(self, batch: tuple[Any, ...], named: dict[str, Any]) -> StepResults:
        with torch.enable_grad():
            result = self._fragment.tree.run(self._fragment, batch, named)
            if self._graphs is not None and self._graphs.replays:
                return *split_results(result), None
            loss, metrics = _split_loss(result)
            if self._updater is None:
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            else:
                self._engine.runtime.lockstep.check()  # here, since the backward already updates parameters
                with self._updater.updating():
                    loss.backward()
        if self._updater is not None:
            self._updater.finish()
            self._engine.runtime.freshness.step()
        else:
            self._step_optimizers(self.optimizers, self._clip)
        self._drop_gradients(self._parameters.values())
        return loss.detach(), metrics, self.grad_norm

    @briefly
    def evaluate(self, *batch: Any, **named: Any) -> Any:
        """Return what a step would return, by the forward only: computes no gradients and updates nothing.

        The model stays in its mode: call `step.model.eval()` before and `step.model.train()` afterwards.

        Raises:
            Errors as a call of the compiled model.
        """
        model, loss_fn = self.model, self._trained.loss_fn
        with torch.no_grad():
            return model(*batch, **named) if loss_fn is None else loss_fn(model, *batch, **named)

    def _clip(self, limit: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm  # DTensor does not support f"{norm:.3f}"

    @property
    def states(self) -> States | None:
        """The offloaded state of the optimizers; None if it is in the device's memory."""
        return None if self._updater is None else self._updater.states

    def __repr__(self) -> str:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        kept = "kept until all are there" if self._updater is None else "used as they arrive"
        return f"TrainStep({type(self.model).__name__} with {kinds}, gradients {kept})"

    def _check(self) -> None:
        if self._engine.runtime.is_full:
            raise OptionError("unsharded()", "is for evaluation, not for training", "train outside of it")
        if self._engine.runtime.accumulates:
            fix = "accumulate over micro-batches in the loop: compiled(batch).backward(), then optimizer.step()"
            raise OptionError("no_sync", "delays the reduction of gradients, and a train step needs it at once", fix)
        self._check_before(self._parameters.items())
        if self._graphs is not None and have_post_accumulate_hooks(self._parameters.values()):
            problem = "have a hook of register_post_accumulate_grad_hook, which a graph would not call"
            raise ParameterError("parameters", problem, "remove it, or leave cuda_graphs='step' out")


def _split_loss(result: object) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """The loss, and the metrics if there are any; raises OptionError for an invalid loss."""
    loss, metrics = split_results(result)
    if metrics is not None:
        check_metrics({name: isinstance(one, torch.Tensor) for name, one in metrics.items()})
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        problem = f"returns {list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}"
        raise OptionError("loss_fn", problem, ONE_ELEMENT)
    if not loss.requires_grad:
        raise untrained_loss()
    return loss, metrics


class _Loss(Fragment):
    """The model and its loss, traced as one graph."""

    def __init__(self, tree: Tree, trained: Training, updater: Updater | None, graphs: StepGraphs | None) -> None:
        self.updater, self._graphs = updater, graphs
        call, self._signature = replace(trained, model=tree.model).call(without_gradients)
        super().__init__(tree, tree.model, "", call)

    @property
    def names(self) -> Names:
        return self.tree.names(self.path, self._signature)

    def _capture(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        program = super()._capture(module, inputs)
        known = {**self.names.parameters, **self.names.others}
        return program if self._graphs is None else self._graphs.within(program, Inputs.of(inputs, known))

    def _split(self, error: Exception) -> None:
        graph_break = Break.of("", "the model and its loss", error)
        fix = "fix it, or use the loop: compiled(batch), loss.backward(), optimizer.step()"
        raise CaptureError(
            graph_break.where, f"breaks the graph of the train step: {graph_break.reason}", fix
        ) from error
