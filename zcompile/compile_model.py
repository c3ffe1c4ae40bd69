"""`zcompile.compile`: shard a model's parameters and give back a module that is called like the model."""

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
    """Shard `model` by ZeRO, with rank 0's values, into a module that runs its training step as a program. Collective.

    Args:
        model: Any module, all on one device or on meta, where its own code gives values. Its code is not touched.
        optimizer: One or several built over the model's parameters: pointed at the shards. Later ones need no mention.
        stage: What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        prefetch: How many units are gathered ahead of the one that computes; "auto": by the cost model, once measured.
        mesh: The data-parallel `DeviceMesh`, by default all ranks; of two dimensions, "replicate" repeats the shards.
        dtype: In which parameters are gathered and computed with, under `torch.autocast`; shards keep the model's.
        checkpoint: What is computed again: "unit", all but units' inputs; "2 GiB", 0.6 of a peak, "auto": what must be.
        backend: `"inductor"` compiles regions; `"eager"` runs them as they are, bit for bit like eager PyTorch.
        options: More of them by name, which `zcompile.CompileOptions` lists by subject.

    Keyword Args:
        shard: What two dimensions of the mesh divide: "hsdp" (default), "hfsdp", "hpz", "flat" (docs/stages.md), or
            "auto".
        units: Module paths (shell wildcards) whose parameters are gathered together, or a function of a path and its
            module that is true for them; by default the repeated blocks.
        whole: Parameters (shell wildcards) that one rank each keeps whole, for Muon, Shampoo or SOAP; stages 1 to 3.
        ignore: Parameters (shell wildcards) that stay as they are on each rank, values and gradients: left to the user.
        weights: Values to start from, by name: a mapping, or the path of a file or folder; read unit by unit.
        keep_dtype: Modules (shell wildcards) that compute in their parameters' dtype, arguments cast, autocast off.
        reduce_dtype: In which gradients are averaged; by default float32 where `dtype` is given.
        output_dtype: What results of a call of 16 or 32 bits are cast to; by default they are as the model gives them.
        outer_dtype: bfloat16 or int8, in which averages travel along a mesh's "replicate"; changes numbers.
        outer_gather_dtype: The same for shards that "hfsdp" and "hpz" gather along it.
        memory_limit: Bytes, or "2 GiB", beside shards and optimizer state: stage 3 keeps as many units full as fit.
        bucket: Bytes, or "25 MiB", of what is copied at a time to be sent; by default the cost model decides.
        arenas: Keep memory from step to step for what is gathered, copied to be sent or saved as a checkpoint.
        cuda_graphs: Capture the compute between communications as CUDA graphs, over parameters at fixed places.
        offload_activations: Where what is saved for the backward waits: "cpu", for a GPU, or "disk:FOLDER", for a CPU.
        partition_activations: Of what all ranks of a tensor-parallel mesh save for the backward, keep a part on each.
        offload_parameters: Where shards are: "cpu", pinned memory, for a GPU; "disk:FOLDER", a file there, for a CPU.
        passes: A whole `Pipeline`, or changes to the default one by name: a `Pass` replaces or adds, None leaves out.
        dump: A folder for the programs' text after every pass; by default the environment's ZCOMPILE_DUMP, if set.
        record: A folder for a recording of the first training step, which `zcompile replay` runs again.

    Raises: OptionError, PipelineError, ModelError, OptimizerError, GroupError or AgreementError, for what does not fit.
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
    """What a plan comes to. What can fail comes before the model is touched."""
    model, asked = plan.model, plan.options
    ranks, kept = plan.agreed()
    read = None if weights is None else ranks.agreement.attempt("the weights", lambda: open_weights(weights))[0]
    if ranks.parallel is not None:
        if read is not None:
            fix = "load them before parallelize_module, or with load_full_state_dict afterwards"
            raise OptionError("weights", "cannot be read into a tensor-parallel model", fix)
        ranks.everyone.reach("the options", [str(asked)])
        ranks = ranks.with_replicated(model, first=ranks.data.rank == 0)
    elif asked.partition_activations:
        problem = "is for models that a model-parallel mesh divides, and no parameter of this one is a DTensor"
        raise OptionError("partition_activations", problem, "call parallelize_module before, or leave it out")
    if read is not None:
        _check_weights(read, model, ranks.agreement)
    runtime = ModelRuntime(plan.layout, ranks, asked)
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
    """Compare the weights with the model on all ranks; the first one says what will be rounded."""
    rounded, _ = agreement.attempt("the weights", lambda: check_weights(weights, model))
    if rounded and agreement.communicator.rank == 0:
        warnings.warn(f"zcompile: weights {rounded}", stacklevel=5)
