"""Convert DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/) to zcompile code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcompile.errors import OptionError
from zcompile.tools.migration.script import AVERAGED, FUSED, WHOLE, WORLD, Config, Script

DTYPES = {
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "bfp16": "torch.bfloat16",
    "fp32": "torch.float32",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "float32": "torch.float32",
    "torch.bfloat16": "torch.bfloat16",
    "torch.float16": "torch.float16",
}
OPTIMIZERS = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "muon": "Muon",
}
"""DeepSpeed's names, in lower case, to torch's. DeepSpeed's Adam decouples weight decay by default."""
ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")
ARGUMENTS_OF_TRAINER = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
}
"""Python for optimizer arguments that are "auto"."""


def script_of(values: Mapping[str, Any], source: str) -> Script:
    """The zcompile code for a DeepSpeed config.

    Raises:
        OptionError: a value is invalid for DeepSpeed, too.
    """
    config, script = Config(values), Script(source)
    _stage(config, script)
    _precision(config, script)
    _loop(config, script)
    _optimizer(config, script)
    _levels(config, script)
    _offload(config, script)
    _activations(config, script)
    script.note_rest(config, OTHERWISE, MISSING)
    return script


def _stage(config: Config, script: Script) -> None:
    stage = config.number(f"{ZERO}.stage")
    if stage not in (0, 1, 2, 3):
        raise OptionError(f"{ZERO}.stage", f"{stage!r} is not a ZeRO stage", "choose 0, 1, 2 or 3")
    script.options["stage"] = str(stage)
    overlaps = config.take(f"{ZERO}.overlap_comm")
    if overlaps is False and stage == 3:
        script.options["prefetch"] = "0"
    elif overlaps is not None:
        script.otherwise.append(
            f"{ZERO}.overlap_comm: communication always overlaps compute; prefetch=0 gathers nothing ahead"
        )
    if config.flag(f"{ZERO}.stage3_gather_16bit_weights_on_model_save") or config.flag(
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save"
    ):
        script.saving.append(WHOLE)


def _precision(config: Config, script: Script) -> None:
    brain, half = (config.flag(f"{kind}.enabled") for kind in ("bf16", "fp16"))
    brain = config.flag("bfloat16.enabled") or brain
    if config.is_auto("bf16.enabled") and not half:
        script.options["dtype"] = "torch.bfloat16 if args.bf16 else None"
    if config.is_auto("fp16.enabled"):
        script.otherwise.append(
            "fp16.enabled: with fp16=True write dtype=torch.float16, and use a torch.amp.GradScaler"
        )
    if brain and half:
        raise OptionError("fp16.enabled", "and bf16.enabled are both true", "enable only one")
    if brain:
        script.options["dtype"] = "torch.bfloat16"
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
    scale, power, window, *others = [config.take(f"fp16.{name}") for name in names]
    if half:
        script.options["dtype"] = "torch.float16"
        script.scaler = {"init_scale": f"2.0**{power if power is not None else 16}"}
        if scale:
            script.scaler = {"init_scale": str(float(scale))}
            script.otherwise.append("fp16.loss_scale: a GradScaler starts with it, and still adapts it to overflows")
        elif window is not None:
            script.scaler["growth_interval"] = str(int(window))
        late = [f"fp16.{name}" for name, value in zip(names[3:5], others, strict=False) if value is not None]
        script.missing += [f"{name}: a GradScaler halves the scale at each overflow" for name in late]
    dtype = config.take("communication_data_type")
    if dtype is not None:
        if dtype not in DTYPES:
            raise OptionError("communication_data_type", f"is {dtype!r}", f"choose from {', '.join(DTYPES)}")
        script.options["reduce_dtype"] = DTYPES[dtype]
    elif "dtype" in script.options:
        script.otherwise.append(AVERAGED)


def _loop(config: Config, script: Script) -> None:
    steps = "gradient_accumulation_steps"
    if config.is_auto(steps):
        script.accumulate = "args.gradient_accumulation_steps"
    elif config.number(steps, 1) > 1:
        script.accumulate = str(config.number(steps))
    elif config.take(steps) is None:
        script.accumulate = _derived(config)
    clip = "args.max_grad_norm" if config.is_auto("gradient_clipping") else config.number("gradient_clipping")
    script.clip = str(clip) if clip else None
    for path in (steps, "gradient_clipping"):
        config.take(path)


def _derived(config: Config) -> str | None:
    """Python for the number of micro-batches, derived from the total batch size as DeepSpeed does; None for one."""
    total, micro = (config.take(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if not isinstance(total, int) or not isinstance(micro, int):
        return None
    return f"max({total} // ({micro} * torch.distributed.get_world_size()), 1)"


def _optimizer(config: Config, script: Script) -> None:
    kind = config.take("optimizer.type")
    given = {name: config.take(f"optimizer.params.{name}") for name in ARGUMENTS}
    texts = {name: str(tuple(one) if isinstance(one, list) else one) for name, one in given.items() if one is not None}
    automatic = (name for name in ARGUMENTS_OF_TRAINER if config.is_auto(f"optimizer.params.{name}"))
    texts |= {name: ARGUMENTS_OF_TRAINER[name] for name in automatic}
    own = ("torch_adam", "fused", "cuda_aware", "comm_backend_name", "freeze_step")
    decoupled, corrects, *_ = [
        config.take(f"optimizer.params.{name}") for name in ("adam_w_mode", "bias_correction", *own)
    ]
    if corrects is False:
        script.missing.append("optimizer.params.bias_correction: torch's optimizers always correct for it")
    if kind is None:
        return
    name = OPTIMIZERS.get(str(kind).lower())
    if name is None:
        script.missing.append(f"optimizer.type: torch has no {kind}; optimizers of other packages work unchanged")
        return
    if str(kind).lower() == "adam" and decoupled is False:
        name = "Adam"
    if str(kind).lower() in ("onebitadam", "zerooneadam"):
        script.missing.append(
            f"optimizer.type: {kind} compresses what ranks send; gradients travel in reduce_dtype here"
        )
    if name == "Muon":
        script.otherwise.append(
            "optimizer.type: Muon takes matrices only, whole on one rank each: compile(..., whole=[names])"
        )
    arguments = "".join(f", {key}={text}" for key, text in texts.items())
    script.optimizer = f"torch.optim.{name}({{}}{arguments})"


def _levels(config: Config, script: Script) -> None:
    """ZeRO++ and MiCS, which distinguish two levels of the network."""
    hpz, mics = (int(config.number(f"{ZERO}.{name}", 0)) for name in ("zero_hpz_partition_size", "mics_shard_size"))
    inner = hpz if hpz > 1 and script.stage == 3 else mics
    if inner > 1 and script.stage:
        script.mesh = f"{WORLD} // {inner}", str(inner)
        script.options["shard"] = '"hpz"' if inner == hpz else '"hsdp"'
    if config.flag(f"{ZERO}.zero_quantized_weights"):
        if script.options.get("shard") == '"hpz"':
            script.options["outer_gather_dtype"] = "torch.int8"
        else:
            script.missing.append(
                f"{ZERO}.zero_quantized_weights: int8 is for gathers between nodes, with shard='hpz' or 'hfsdp'"
            )
    if config.flag(f"{ZERO}.zero_quantized_gradients"):
        if script.mesh is not None:
            script.options["outer_dtype"] = "torch.int8"
        else:
            script.missing.append(
                f"{ZERO}.zero_quantized_gradients: int8 is for averages between nodes, on a mesh of two dimensions"
            )


def _offload(config: Config, script: Script) -> None:
    """Offloading of shards and optimizer state to the host."""
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_params"}
    device = {
        which: config.take(f"{ZERO}.{which}.device", "none") if not config.flag(f"{ZERO}.{name}") else "cpu"
        for which, name in old.items()
    }
    asked = [which for which in old if device[which] != "none"]
    if not asked:
        return
    if "nvme" in device.values():
        script.missing.append(f"{ZERO}: a model on a GPU offloads to the host, not to NVMe")
    if script.scaler is None and script.stage >= 2:
        script.options["offload_parameters"] = '"cpu"'
        if asked == ["offload_optimizer"]:
            script.otherwise.append(
                f"{ZERO}.offload_optimizer: shards, gradients and state are on the host, and the optimizer steps there"
            )
        script.otherwise.append(FUSED)
    elif asked == ["offload_optimizer"] and script.scaler is None and script.clip is None and script.accumulate is None:
        script.offload_optimizer = script.stage > 0
    else:
        why = "float16: compute in bfloat16" if script.scaler is not None else "clipping or accumulation in stage 1"
        script.missing += [f"{ZERO}.{which}: is not combined with {why}" for which in asked]


def _activations(config: Config, script: Script) -> None:
    section = "activation_checkpointing"
    away, parts = (config.flag(f"{section}.{name}") for name in ("cpu_checkpointing", "partition_activations"))
    if away or parts:
        script.options["checkpoint"] = '"unit"'
        script.otherwise.append(f"{section}: checkpoint= does it; take deepspeed.checkpointing out of the model")
    if away:
        script.options["offload_activations"] = '"cpu"'
    if parts:
        script.otherwise.append(
            f"{section}.partition_activations: partition_activations=True, for a model that is tensor-parallel"
        )


ZERO = "zero_optimization"
_UNITS = "gathers are by unit, prefetch= of them ahead; prefetch='auto' chooses by measured links"
_BUCKET = (
    "the cost model chooses how much is sent at once; bucket= would fix it, in bytes where DeepSpeed counts elements"
)
_KEPT = "memory_limit= keeps as many units full as fit; without it at most prefetch= besides the one that computes"
_LOOP = "the DataLoader and the loop decide: each rank takes batches of its own"
_OWN_LOOP = "log in the loop"

OTHERWISE = {
    "train_batch_size": _LOOP,
    "train_micro_batch_size_per_gpu": _LOOP,
    "scheduler": "torch.optim.lr_scheduler works as it is: scheduler.step() in the loop",
    "steps_per_print": _OWN_LOOP,
    "wall_clock_breakdown": "print(compiled.timeline) says where the last step's time went",
    "memory_breakdown": "compiled.explain() predicts memory, and `zcompile plan` does before a run",
    "dump_state": "compile(..., dump='folder') writes the programs",
    "flops_profiler": "`zcompile plan` and compiled.timeline count FLOPs and seconds",
    "comms_logger": "compiled.traffic counts what was sent and waited for",
    "autotuning": "`zcompile plan` compares the choices before a run",
    "compile": "zcompile compiles anyway",
    "torch_autocast": "dtype= runs the call under torch.autocast",
    "zero_allow_untested_optimizer": "any torch optimizer is taken",
    "checkpoint": "compiled.save_checkpoint(folder, optimizer) writes checkpoints that load in any stage and world",
    "load_universal_checkpoint": "checkpoints load in any stage and world",
    "dataloader_drop_last": "drop_last= of the DataLoader; ranks may also have batches of different sizes",
    "sparse_gradients": "gradients of embeddings are dense, averaged with their unit",
    "tensor_parallel": "torch.distributed.tensor.parallel before zcompile.compile, on a mesh with a dimension for it",
    "pipeline": "train_step(..., mesh=..., schedule='1f1b', microbatches=...) on a mesh with a dimension 'pp'",
    f"{ZERO}.reduce_bucket_size": _BUCKET,
    f"{ZERO}.allgather_bucket_size": _BUCKET,
    f"{ZERO}.stage3_prefetch_bucket_size": _UNITS,
    f"{ZERO}.prefetch_bucket_size": _UNITS,
    f"{ZERO}.stage3_max_live_parameters": _KEPT,
    f"{ZERO}.stage3_max_reuse_distance": _KEPT,
    **dict.fromkeys(
        (f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_model_persistence_threshold"),
        "small parameters are packed into one message, and none stays full because of its size",
    ),
    f"{ZERO}.allgather_partitions": "stages 1 and 2 gather parameters unit by unit, where they are read",
    f"{ZERO}.reduce_scatter": "gradients are scattered in stages 1 to 3",
    f"{ZERO}.contiguous_gradients": "arenas=True keeps memory at fixed places from step to step",
    f"{ZERO}.round_robin_gradients": "each parameter is divided among all ranks",
    f"{ZERO}.sub_group_size": "train_step updates unit by unit",
    f"{ZERO}.elastic_checkpoint": "checkpoints load in any stage and world",
    f"{ZERO}.ignore_unused_parameters": "unused parameters are found in the trace, and have no gradient",
    f"{ZERO}.leaf_module": "units= names what is gathered together",
    f"{ZERO}.memory_efficient_linear": "the partitioner decides what is saved for the backward",
    f"{ZERO}.use_multi_rank_bucket_allreduce": "the program says how gradients travel",
    f"{ZERO}.module_granularity_threshold": "units= names what is gathered together",
    f"{ZERO}.load_from_fp32_weights": "shards are in the model's dtype: load float32 weights for float32 shards",
    **{
        f"{ZERO}.{which}.pin_memory": "memory on the host is always pinned"
        for which in ("offload_optimizer", "offload_param")
    },
    "activation_checkpointing.number_checkpoints": "checkpoint= takes a size or a share of the peak",
    "activation_checkpointing.contiguous_memory_optimization": "arenas=True gives saved activations fixed places",
    "activation_checkpointing.synchronize_checkpoint_boundary": "the program orders what it waits for",
    "activation_checkpointing.profile": "print(compiled.timeline)",
}
MISSING = {
    "amp": "Apex is not used: dtype= computes in 16 bits over float32 shards",
    "prescale_gradients": "gradients are averaged after the sum, in reduce_dtype",
    "gradient_predivide_factor": "gradients are averaged after the sum, in reduce_dtype",
    "zero_force_ds_cpu_optimizer": "there is no DeepSpeedCPUAdam: torch.optim.AdamW(fused=True) steps on the CPU",
    "tensorboard": _OWN_LOOP,
    "wandb": _OWN_LOOP,
    "csv_monitor": _OWN_LOOP,
    "comet": _OWN_LOOP,
    "sparse_attention": "models are compiled as they are",
    "data_efficiency": "the training loop handles data",
    "data_types": "gradients are accumulated in the dtype of the parameters",
    "curriculum_learning": "the training loop handles data",
    "progressive_layer_drop": "models are compiled as they are",
    "eigenvalue": "is not measured",
    "compression_training": "models are compiled as they are",
    "quantize_training": "models are compiled as they are",
    "elasticity": "start again with another world: checkpoints load in it",
    "aio": "what is on a disk is mapped into memory",
    "hybrid_engine": "generate under `with compiled.unsharded():`",
    "nebula": "checkpoints are written by torch.distributed.checkpoint",
    "seed": "call torch.manual_seed",
    f"{ZERO}.zero_quantized_nontrainable_weights": "int8 is for what travels between nodes: outer_gather_dtype=",
    f"{ZERO}.zenflow": "all updates wait for their gradients",
    f"{ZERO}.mics_hierarchical_params_gather": "shard='hsdp' gathers within a node only",
    f"{ZERO}.pipeline_loading_checkpoint": "checkpoints are read by torch.distributed.checkpoint",
    f"{ZERO}.legacy_stage1": "there is one stage 1",
    f"{ZERO}.override_module_apply": "modules keep their methods",
    f"{ZERO}.log_trace_cache_warnings": "the order of gathers is fixed in the program",
    **{
        f"{ZERO}.{which}.{key}": reason
        for which in ("offload_optimizer", "offload_param")
        for key, reason in {
            "buffer_count": "what is fetched ahead goes by unit: prefetch=",
            "buffer_size": "what is fetched ahead goes by unit: prefetch=",
            "max_in_cpu": "all shards are on the host",
            "nvme_path": "files are for models on a CPU: 'disk:FOLDER'",
            "fast_init": "the optimizer's state is made where it is kept",
            "pipeline_read": "transfers always overlap compute",
            "pipeline_write": "transfers always overlap compute",
            "ratio": "all of it is on the host, or nothing",
            "super_offload": "all of it is on the host, or nothing",
        }.items()
    },
}
