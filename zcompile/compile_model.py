"""`zcompile.compile`: shard a model's parameters and return a module that is called like the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zcompile.compiled import CompiledModule
from zcompile.engine.calls.interceptors import intercepted_methods
from zcompile.engine.engine import Engine
from zcompile.engine.model_runtime import ModelRuntime
from zcompile.engine.optimizers import check_optimizers, point_at_shards
from zcompile.engine.sharding_plan import Parts, ShardingPlan
from zcompile.errors import OptionError, briefly
from zcompile.model.conversion import compute_in_own_dtype
from zcompile.model.materialise import check_weights
from zcompile.model.sharding import shard_model
from zcompile.model.weights import Source, Weights, open_weights
from zcompile.runtime.agreement import Agreement, propagate_failure
from zcompile.runtime.groups import ranks_of
from zcompile.schedule.option_checks import check_dtype
from zcompile.schedule.options import CompileOptions, Options, check_known, names_of


@briefly
def compile(
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    stage: int = 3,
    prefetch: int | Literal["auto"] = 2,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    checkpoint: str | int | float | None = None,
    backend: str = "inductor",
    **options: Unpack[CompileOptions],
) -> CompiledModule:
    """Shard `model` by ZeRO, from rank 0's values, and compile its training step into programs. Collective.

    Args:
        model: Any module on one device, or on meta if its own code initializes it. Its code is not changed.
        optimizer: One or more optimizers built over the model's parameters, to be moved to the shards.
        stage: What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        prefetch: Number of units to gather ahead of the one being computed; "auto": measure, then ask the cost model.
        mesh: The data-parallel `DeviceMesh`; default: all ranks. Of two dimensions, "replicate" replicates the shards.
        dtype: Dtype to gather parameters and compute in, under `torch.autocast`; shards keep the model's dtype.
        checkpoint: What to recompute: "unit", all but units' inputs; or to fit "2 GiB", 0.6 of the peak, or "auto".
        backend: `"inductor"` compiles regions; `"eager"` runs them as traced, bit for bit like eager PyTorch.
        options: Further options by name; `zcompile.CompileOptions` lists them by subject.

    Keyword Args:
        shard: What the two dimensions of a mesh shard: "hsdp" (default), "hfsdp", "hpz", "flat" (docs/stages.md), or
            "auto".
        units: Paths of modules (shell wildcards) whose parameters are gathered together, or a predicate that takes a
            path and its module; default: the repeated blocks.
        whole: Parameters (shell wildcards) each kept whole on one rank, for Muon, Shampoo or SOAP; stages 1 to 3.
        ignore: Parameters (shell wildcards) left to the user: neither sharded nor synchronized, nor their gradients.
        weights: Initial values by name: a mapping, or the path of a file or folder, which is read unit by unit.
        keep_dtype: Modules (shell wildcards) that compute in their parameters' dtype: arguments cast, autocast off.
        reduce_dtype: Dtype to average gradients in; default: float32 if `dtype` is given, else the gradients' own.
        output_dtype: Dtype to cast 16- and 32-bit floating-point outputs to; default: no cast.
        outer_dtype: bfloat16 or int8: dtype in which averages are sent along "replicate"; changes numerical results.
        outer_gather_dtype: The same for the shards that "hfsdp" and "hpz" gather along "replicate".
        memory_limit: Bytes, or "2 GiB", besides shards and optimizer state; stage 3 keeps as many units full as fit.
        bucket: Bytes, or "25 MiB", copied at a time for sending; default: chosen by the cost model.
        arenas: Keep memory across steps for gathered parameters, send buffers and saved activations.
        cuda_graphs: Capture the compute between communications as CUDA graphs, whose parameters have fixed addresses;
            or "step": `zcompile.train_step` captures each step as one graph, and other calls have none.
        chunk: The most rows (tokens) for which wide values, such as logits, are computed at once; "8 GiB", within which
            the step is kept so; or "auto": losses, and more if the device's memory is short.
        sequence: Divide the tokens of a batch over the ranks of a mesh's last dimension, "sp", which have the same
            batch: "ulysses", by heads for attention (DeepSpeed-Ulysses); "ring", whose keys and values go round (Ring
            Attention); or "auto", by the cost model.
        offload_activations: Where to keep saved activations: "cpu" for a model on a GPU, "disk:FOLDER" on the CPU.
        partition_activations: Divide activations saved alike by all tensor-parallel ranks among these ranks.
        offload_parameters: Where to keep shards: "cpu" (pinned memory) for a GPU, "disk:FOLDER" (a file) for the CPU.
        passes: A whole `Pipeline`, or changes to the default by name: a `Pass` replaces or adds one, None removes it.
        dump: Folder for the text of the programs after every pass; default: ZCOMPILE_DUMP of the environment, if set.
        record: Folder for a recording of the first training step, which `zcompile replay` runs again.

    Raises: OptionError, PipelineError, ModelError, OptimizerError, GroupError or AgreementError, for invalid arguments.
    """
    given = {**locals(), **options}
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
    with propagate_failure(lambda: ranks_of(mesh)):
        check_known(options, names_of(compile, CompileOptions), "zcompile.compile")
        output_dtype = options.get("output_dtype")
        check_dtype("output_dtype", output_dtype)
        check_optimizers(optimizers, model)
        parts = Parts(options.get("units"), options.get("whole"), options.get("ignore"), options.get("keep_dtype"))
        plan = ShardingPlan(model, Options.among(given), mesh, parts)
    return _compiled(plan, optimizers, options.get("weights"), output_dtype)


def _compiled(
    plan: ShardingPlan, optimizers: Sequence[Optimizer], weights: Source | None, output_dtype: torch.dtype | None
) -> CompiledModule:
    """Carry out a plan. Everything that can fail runs before the model is changed."""
    model, options = plan.model, plan.options
    ranks, kept = plan.agreed()
    read = None if weights is None else ranks.agreement.attempt("the weights", lambda: open_weights(weights))[0]
    if ranks.parallel is not None:
        if read is not None:
            fix = "load them before parallelize_module, or with load_full_state_dict afterwards"
            raise OptionError("weights", "cannot be read into a tensor-parallel model", fix)
        ranks.everyone.reach("the options", [str(options)])
        ranks = ranks.with_replicated(model, first=ranks.data.rank == 0)
    elif options.partition_activations:
        problem = "is for models that a model-parallel mesh divides, and no parameter of this one is a DTensor"
        raise OptionError("partition_activations", problem, "call parallelize_module before, or leave it out")
    if read is not None:
        _check_weights(read, model, ranks.agreement)
    runtime = ModelRuntime(plan.layout, ranks, options)
    runtime.remarks += plan.remarks
    runtime.output_dtype = output_dtype
    engine = Engine(runtime, title=type(model).__name__)
    shards, sites, retired = shard_model(model, runtime.layout, ranks.data, read, ranks.parallel, runtime.memory)
    for module in kept:
        compute_in_own_dtype(module, intercepted_methods(module), ranks.device)
    point_at_shards(optimizers, shards.values(), retired)
    runtime.has_optimizer_state = any(optimizer.state for optimizer in optimizers)
    return CompiledModule(model, engine, shards, sites, retired)


def _check_weights(weights: Weights, model: nn.Module, agreement: Agreement) -> None:
    """Check the weights against the model on all ranks; rank 0 warns about values that will be rounded."""
    rounded, _ = agreement.attempt("the weights", lambda: check_weights(weights, model))
    if rounded and agreement.communicator.rank == 0:
        warnings.warn(f"zcompile: weights {rounded}", stacklevel=5)
