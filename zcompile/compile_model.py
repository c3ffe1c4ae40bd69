"""`zcompile.compile`: shard a model's parameters and give back a module that is called like the model."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zcompile.compiled import CompiledModule, agreement_on, ignored_names, make_compiled_module, model_lines
from zcompile.engine.automatic_shard import choose_shard
from zcompile.engine.calls.interceptors import intercepted_methods
from zcompile.engine.engine import Engine
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.optimizers import check_optimizers, point_at_shards
from zcompile.engine.state_places import shard_memory
from zcompile.errors import ModelError, OptionError, briefly
from zcompile.ir.layout import STAGES, Layout
from zcompile.model.materialise import check_weights
from zcompile.model.own_dtype import compute_in_own_dtype
from zcompile.model.sharding import shard_model
from zcompile.model.tensor_kinds import check_kinds
from zcompile.model.tensor_parallel import check_replicated, model_parallel
from zcompile.model.units import UnitChoice, make_layout, match_called
from zcompile.model.weights import Source, Weights, open_weights
from zcompile.runtime.agreement import Agreement, propagate_failure
from zcompile.runtime.groups import (
    Communicator,
    as_one,
    axes_of_mesh,
    check_inside,
    default_device,
    ranks_of,
    resolve_mesh,
)
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.schedule.option_checks import (
    AUTO,
    check_axes,
    check_dtype,
    check_gathered,
    check_outer,
)
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Pass, Pipeline
from zcompile.torch_internals.dtensor import local_tensor


@briefly
def compile(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    stage: int = 3,
    prefetch: int | Literal["auto"] = 2,
    mesh: DeviceMesh | None = None,
    shard: str | None = None,
    units: UnitChoice | None = None,
    whole: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    keep_dtype: Sequence[str] | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    outer_dtype: torch.dtype | None = None,
    outer_gather_dtype: torch.dtype | None = None,
    checkpoint: str | int | float | None = None,
    memory_limit: int | str | None = None,
    bucket: int | str | None = None,
    arenas: bool = False,
    offload_activations: str | None = None,
    partition_activations: bool = False,
    offload_parameters: str | None = None,
    cuda_graphs: bool = False,
    passes: Pipeline | Mapping[str, Pass | None] | None = None,
    backend: str = "inductor",
    dump: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    weights: Source | None = None,
) -> CompiledModule:
    """Shard `model` by ZeRO, with rank 0's values, into a module that runs its training step as a program. Collective.

    Args:
        model: Any module, all on one device or on meta, where its own code gives values. Its code is not touched.
        optimizer: One or several built over the model's parameters: pointed at the shards. Later ones need no mention.
        stage: What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        prefetch: How many units are gathered ahead of the one that computes; "auto": by the cost model, once measured.
        mesh: The data-parallel `DeviceMesh`, by default all ranks; of two dimensions, "replicate" repeats the shards.
        shard: What its two dimensions divide: "hsdp" (default), "hfsdp", "hpz", "flat" (docs/stages.md), or "auto".
        units: Module paths (shell wildcards) whose parameters are gathered together, or a function of a path and its
            module that is true for them; by default the repeated blocks.
        whole: Parameters (shell wildcards) that one rank each keeps whole, for Muon, Shampoo or SOAP; stages 1 to 3.
        ignore: Parameters (shell wildcards) that stay as they are on each rank, values and gradients: left to the user.
        dtype: In which parameters are gathered and computed with, under `torch.autocast`; shards keep the model's.
        keep_dtype: Modules (shell wildcards) that compute in their parameters' dtype, arguments cast, autocast off.
        reduce_dtype: In which gradients are averaged; by default float32 where `dtype` is given.
        output_dtype: What results of a call of 16 or 32 bits are cast to; by default they are as the model gives them.
        outer_dtype: bfloat16 or int8, in which averages travel along a mesh's "replicate"; changes numbers.
        outer_gather_dtype: The same for shards that "hfsdp" and "hpz" gather along it.
        checkpoint: What is computed again: "unit", all but units' inputs; "2 GiB", 0.6 of a peak, "auto": what must be.
        memory_limit: Bytes, or "2 GiB", beside shards and optimizer state: stage 3 keeps as many units full as fit.
        bucket: Bytes, or "25 MiB", of what is copied at a time to be sent; by default the cost model decides.
        arenas: Keep memory from step to step for what is gathered, copied to be sent or saved as a checkpoint.
        offload_activations: Where what is saved for the backward waits: "cpu", for a GPU, or "disk:FOLDER", for a CPU.
        partition_activations: Of what all ranks of a tensor-parallel mesh save for the backward, keep a part on each.
        offload_parameters: Where shards are: "cpu", pinned memory, for a GPU; "disk:FOLDER", a file there, for a CPU.
        cuda_graphs: Capture the compute between communications as CUDA graphs, over parameters at fixed places.
        passes: A whole `Pipeline`, or changes to the default one by name: a `Pass` replaces or adds, None leaves out.
        backend: `"inductor"` compiles regions; `"eager"` runs them as they are, bit for bit like eager PyTorch.
        dump: A folder for the programs' text after every pass; by default the environment's ZCOMPILE_DUMP, if set.
        record: A folder for a recording of the first training step, which `zcompile replay` runs again.
        weights: Values to start from, by name: a mapping, or the path of a file or folder; read unit by unit.

    Raises: OptionError, PipelineError, ModelError, OptimizerError, GroupError or AgreementError, for what does not fit.
    """
    given, parts = locals(), Parts(units, whole, ignore, keep_dtype)
    check_dtype("output_dtype", output_dtype)
    return _compiled(model, given, mesh, parts, optimizer, weights, output_dtype)


class Parts(NamedTuple):
    """What of a model is treated in which way: the options of these names."""

    units: UnitChoice | None
    whole: Sequence[str] | None
    ignore: Sequence[str] | None
    keep_dtype: Sequence[str] | None


class _ShardingPlan(NamedTuple):
    """A model as it is to be divided, as far as a rank knows alone."""

    asked: Options
    remarks: Sequence[str]
    parallel: ModelParallel | None
    communicator: Communicator
    layout: Layout


def _sharding_plan(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh | None,
    parts: Parts,
) -> _ShardingPlan:
    check_kinds(model)
    asked, remarks = _settled(model, asked, mesh, parts)
    parallel = model_parallel(model, mesh, flat=asked.divides_outside)
    communicator = _communicator(model, asked, mesh, parallel)
    check_outer(asked.outer_dtype, communicator.mesh.ndim)
    check_axes(asked.shard, communicator.mesh.ndim, whole=bool(parts.whole))
    layout = _layout(model, asked, communicator.mesh, parallel, parts)
    for name in ignored_names(model, layout):
        if model.get_parameter(name).is_meta:
            fix = "give it values before zcompile.compile, or do not ignore it"
            raise OptionError("ignore", f"leaves {name} to you, which is on the meta device", fix)
    return _ShardingPlan(asked, remarks, parallel, communicator, layout)


def _compiled(
    model: nn.Module,
    given: Mapping[str, Any],
    mesh: DeviceMesh | None,
    parts: Parts,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    weights: Source | None,
    output_dtype: torch.dtype | None,
) -> CompiledModule:
    with propagate_failure(lambda: ranks_of(mesh)):
        optimizers = _optimizers(optimizer, model)
        asked, remarks, parallel, communicator, layout = _sharding_plan(model, Options.among(given), mesh, parts)
    kept = match_called(model, parts.keep_dtype or ())
    agreement = agreement_on(communicator, [str(asked), f"keep_dtype={[*kept]}", *model_lines(model, layout)])
    check_inside(communicator.mesh, asked.hybrid)
    check_gathered(layout, asked.outer_gather_dtype)
    read = None if weights is None else agreement.attempt("the weights", lambda: open_weights(weights))[0]
    everyone = agreement
    if parallel is not None:
        everyone = Agreement(Communicator(parallel.ranks, communicator.device))
        parallel = _checked_parallel(model, parallel, everyone, asked, read, communicator.rank)
    elif asked.partition_activations:
        problem = "is for models that a model-parallel mesh divides, and no parameter of this one is a DTensor"
        raise OptionError("partition_activations", problem, "call parallelize_module before, or leave it out")
    # What can fail comes before the model is touched.
    if read is not None:
        _check_weights(read, model, agreement)
    rank = communicator.dividing.rank
    memory = shard_memory(asked, layout, communicator.device, rank, agreement)
    layout = replace(layout, away=memory.is_away)
    runtime = ModelRuntime(layout, communicator, agreement, asked, parallel, everyone)
    runtime.remarks += remarks
    runtime.output_dtype = output_dtype
    engine = Engine(runtime, title=type(model).__name__)
    shards, sites, retired = shard_model(model, layout, communicator, read, parallel, memory)
    for module in kept.values():
        compute_in_own_dtype(module, intercepted_methods(module), communicator.device)
    point_at_shards(optimizers, shards.values(), retired)
    runtime.has_optimizer_state = any(optimizer.state for optimizer in optimizers)
    return make_compiled_module(model, engine, shards, sites, retired)


def _layout(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh,
    parallel: ModelParallel | None,
    parts: Parts,
) -> Layout:
    axes = axes_of_mesh(mesh, None if parallel is None else parallel.mesh)
    stage, (units, whole, ignore, keep) = STAGES[asked.stage], parts
    return make_layout(model, stage, axes, units, asked.precision, whole, asked.hybrid, ignore, keep)


def _settled(
    model: nn.Module,
    asked: Options,
    mesh: DeviceMesh | None,
    parts: Parts,
) -> tuple[Options, list[str]]:
    """Options without shard="auto", and what is said of the choice. Collective where there is one."""
    if asked.shard != AUTO:
        return asked, []
    parallel = model_parallel(model, mesh)
    communicator = _communicator(model, asked, mesh, parallel)
    if communicator.outside is None:
        return replace(asked, shard=None), []

    def layout_of(shard: str) -> Layout:
        settled = replace(asked, shard=shard)
        laid_over = as_one(communicator.mesh) if settled.has_one_axis else communicator.mesh
        return _layout(model, settled, laid_over, parallel, parts)

    held = sum(local_tensor(p).nbytes for p in model.parameters() if not p.is_meta)
    others = (None, None) if parallel is None else (parallel.mesh, parallel.ranks)
    tensor, everyone = (None if one is None else Communicator(one, communicator.device) for one in others)
    choice = choose_shard(
        asked, communicator, layout_of, whole=bool(parts.whole), held=held, model_parallel=tensor, everyone=everyone
    )
    return replace(asked, shard=choice.chosen.shard), [str(choice)]


def _check_weights(weights: Weights, model: nn.Module, agreement: Agreement) -> None:
    """Compare the weights with the model on all ranks; the first one says what will be rounded."""
    rounded, _ = agreement.attempt("the weights", lambda: check_weights(weights, model))
    if rounded and agreement.communicator.rank == 0:
        warnings.warn(f"zcompile: weights {rounded}", stacklevel=5)


def _communicator(
    model: nn.Module, asked: Options, mesh: DeviceMesh | None, parallel: ModelParallel | None
) -> Communicator:
    device = _device(model, mesh)
    mesh = resolve_mesh(mesh, device, None if parallel is None else parallel.mesh)
    return Communicator(as_one(mesh) if asked.has_one_axis else mesh, device, asked.hybrid)


def _checked_parallel(
    model: nn.Module, parallel: ModelParallel, everyone: Agreement, asked: Options, weights: Weights | None, rank: int
) -> ModelParallel:
    if weights is not None:
        fix = "load them before parallelize_module, or with load_full_state_dict afterwards"
        raise OptionError("weights", "cannot be read into a tensor-parallel model", fix)
    everyone.reach("the options", [str(asked)])
    return check_replicated(model, parallel, everyone, first=rank == 0)


def _optimizers(given: Optimizer | Sequence[Optimizer] | None, model: nn.Module) -> Sequence[Optimizer]:
    optimizers = [given] if isinstance(given, Optimizer) else given or ()
    check_optimizers(optimizers, model)
    return optimizers


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """The device of the model's parameters, or of its buffers if it has none; of what is on meta the one it is for."""
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ModelError(name, "has a gradient, which would be lost", "step or zero_grad() before zcompile.compile")
        if not param.is_meta:
            devices.setdefault(param.device, name)
    if next(model.parameters(), None) is None:
        devices = {buffer.device: name for name, buffer in reversed([*model.named_buffers()]) if not buffer.is_meta}
    _refuse_shared_storage(model)
    if len(devices) > 1:
        problem = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise ModelError("the model", f"is on several devices: {problem}", "move it to one: model.to(device)")
    return next(iter(devices)) if devices else default_device(mesh)


def _refuse_shared_storage(model: nn.Module) -> None:
    """Two parameters in one memory are one to an optimizer, and would be two once sharded."""
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, n)
        for n, p in ((name, local_tensor(param)) for name, param in model.named_parameters())
        if p.numel() and not p.is_meta
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            fix = "tie them by one Parameter: b.weight = a.weight"
            raise ModelError(other, f"shares its memory with {name}, but is another Parameter", fix)
