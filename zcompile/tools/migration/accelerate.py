"""Convert Accelerate's YAML (`accelerate config`) with FSDP, FSDP2, DeepSpeed or DDP to zcompile code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcompile.errors import OptionError
from zcompile.tools.migration import deepspeed
from zcompile.tools.migration.script import AVERAGED, FUSED, WHOLE, Config, Script

STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
"""FSDP1's strategies in the order of their numbers, from 1: the ZeRO stage, and whether nodes replicate shards."""
PRECISIONS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
KINDS = ("FSDP", "DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")
FSDP, AXES, DEEPSPEED = "fsdp_config", "parallelism_config", "deepspeed_config"
_RUN = "torchrun starts the ranks, by its own options"

OTHERWISE = {
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"), _RUN),
    "compute_environment": _RUN,
    "gpu_ids": "CUDA_VISIBLE_DEVICES chooses them",
    "debug": "ranks are compared before a program runs, and at each run",
    "dynamo_backend": "zcompile compiles anyway",
    "dynamo_config": "zcompile compiles anyway",
    "main_training_function": "torchrun runs the script",
    "use_cpu": "a model on the CPU trains over gloo",
    f"{FSDP}.fsdp_use_orig_params": "parameters keep their names, each with groups of its own",
    f"{FSDP}.fsdp_sync_module_states": "compile takes rank 0's values",
    f"{FSDP}.fsdp_cpu_ram_efficient_loading": "compile takes rank 0's values; with a model on meta, weights= reads a "
    "checkpoint unit by unit",
    f"{FSDP}.fsdp_forward_prefetch": "prefetch=2 units are gathered ahead, forward and backward",
    f"{FSDP}.fsdp_min_num_params": "units= names what is gathered together, by default the repeated blocks",
}
MISSING = {
    "downcast_bf16": "is for TPUs",
    "tpu_env": "is for TPUs",
    "tpu_use_cluster": "is for TPUs",
    "tpu_use_sudo": "is for TPUs",
    "enable_cpu_affinity": "numactl pins processes",
    "fp8_config": "float8 is not supported",
    "megatron_lm_config": "models are compiled as they are",
    "ipex_config": "Intel's extension is not supported",
    "mpirun_config": "torchrun starts the ranks",
    f"{FSDP}.fsdp_ignored_modules": "a regular expression of modules: name their parameters in compile(..., ignore=)",
    f"{AXES}.{AXES}_cp_size": "context parallelism is not supported",
    f"{AXES}.{AXES}_cp_comm_strategy": "context parallelism is not supported",
    **{
        f"{DEEPSPEED}.{key}": _RUN
        for key in (
            "deepspeed_hostfile",
            "deepspeed_multinode_launcher",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
        )
    },
    f"{DEEPSPEED}.zero3_init_flag": "make the model on meta: compile gives it values unit by unit",
    f"{DEEPSPEED}.deepspeed_moe_layer_cls_names": "units= names what is gathered together",
}


def script_of(values: Mapping[str, Any], source: str) -> Script:
    """The zcompile code for an Accelerate config.

    Raises:
        OptionError: a value is invalid for Accelerate, too, or `distributed_type` is not supported.
    """
    config = Config(values)
    kind = str(config.take("distributed_type", "NO")).upper()
    if kind not in KINDS:
        raise OptionError("distributed_type", f"is {kind}", f"convert a config of {', '.join(KINDS)}")
    if kind == "DEEPSPEED":
        script = deepspeed.script_of(_inner_deepspeed(config), source)
    else:
        script = Script(source, {"stage": "0"})
        if kind == "FSDP":
            _sharding(config, script)
            _offload(config, script)
            _wrapping(config, script)
    _precision(config, script)
    _launch(config, script)
    steps = config.number("gradient_accumulation_steps", 1)
    script.accumulate = str(steps) if steps > 1 else script.accumulate
    script.note_rest(config, OTHERWISE, MISSING)
    return script


def _inner_deepspeed(config: Config) -> dict[str, Any]:
    """The DeepSpeed config that Accelerate would build.

    Raises:
        OptionError: the DeepSpeed config is in a separate file.
    """
    if (file := config.take(f"{DEEPSPEED}.deepspeed_config_file")) is not None:
        fix = f"convert that file: zcompile migrate {file}"
        raise OptionError(f"{DEEPSPEED}.deepspeed_config_file", "is a separate file", fix)
    zero: dict[str, Any] = {"stage": config.number(f"{DEEPSPEED}.zero_stage", 2)}
    for which in ("optimizer", "param"):
        zero[f"offload_{which}"] = {"device": config.take(f"{DEEPSPEED}.offload_{which}_device", "none")}
        config.take(f"{DEEPSPEED}.offload_{which}_nvme_path")
    zero["stage3_gather_16bit_weights_on_model_save"] = config.flag(f"{DEEPSPEED}.zero3_save_16bit_model")
    loop = ("gradient_accumulation_steps", "gradient_clipping")
    given = {name: config.take(f"{DEEPSPEED}.{name}") for name in loop}
    precision = config.take("mixed_precision", "no")
    return {"zero_optimization": zero, "fp16": {"enabled": precision == "fp16"}, **given}


def _sharding(config: Config, script: Script) -> None:
    version = int(config.number(f"{FSDP}.fsdp_version", 1))
    again = config.take(f"{FSDP}.fsdp_reshard_after_forward", "true" if version == 2 else None)
    strategy = config.take(f"{FSDP}.fsdp_sharding_strategy")
    if str(again).lower() in ("true", "false"):
        stage, repeats = (3 if str(again).lower() == "true" else 2), False
    else:
        stage, repeats = _strategy(again or strategy or "FULL_SHARD")
    script.options["stage"] = str(stage)
    ahead = str(config.take(f"{FSDP}.fsdp_backward_prefetch", "BACKWARD_PRE")).upper()
    if ahead == "NO_PREFETCH":
        script.options["prefetch"] = "0"
    elif ahead != "BACKWARD_PRE":
        script.options["prefetch"] = "1"
    outer, inner = (int(config.number(f"{AXES}.{AXES}_dp_{one}_size", 1)) for one in ("replicate", "shard"))
    nodes, ranks = (int(config.number(name, 1)) for name in ("num_machines", "num_processes"))
    if outer > 1:
        script.mesh = str(outer), str(inner)
    elif repeats:
        script.mesh = str(nodes), str(max(ranks // nodes, 1))
    if script.mesh is not None and stage:
        script.options["shard"] = '"hsdp"'
    if config.number(f"{AXES}.{AXES}_tp_size", 1) > 1:
        how = "torch.distributed.tensor.parallel before zcompile.compile, on a mesh with a dimension for it"
        script.otherwise.append(f"{AXES}.{AXES}_tp_size: {how}")


def _strategy(name: Any) -> tuple[int, bool]:
    names = list(STRATEGIES)
    text = str(name).upper()
    text = names[int(text) - 1] if text.isdecimal() and 1 <= int(text) <= len(names) else text
    if text not in STRATEGIES:
        raise OptionError("fsdp_sharding_strategy", f"is {name!r}", f"choose from {', '.join(names)}")
    return STRATEGIES[text]


def _offload(config: Config, script: Script) -> None:
    if config.flag(f"{FSDP}.fsdp_offload_params"):
        if script.stage >= 2 and config.take("mixed_precision") != "fp16":
            script.options["offload_parameters"] = '"cpu"'
            script.otherwise.append(FUSED)
        else:
            script.missing.append(f"{FSDP}.fsdp_offload_params: is for stages 2 and 3, and not combined with float16")
    if config.flag(f"{FSDP}.fsdp_activation_checkpointing"):
        script.options["checkpoint"] = '"unit"'
    if config.flag(f"{FSDP}.fsdp_activation_checkpointing_offload"):
        script.options["offload_activations"] = '"cpu"'


def _wrapping(config: Config, script: Script) -> None:
    policy = str(config.take(f"{FSDP}.fsdp_auto_wrap_policy", "")).upper()
    classes = config.take(f"{FSDP}.fsdp_transformer_layer_cls_to_wrap")
    if policy == "TRANSFORMER_BASED_WRAP":
        named = f" ({classes})" if classes else ""
        units = "units=[name for name, module in model.named_modules() if type(module).__name__ in names]"
        text = f"units are the repeated blocks by default; or name them, {units}"
        script.otherwise.append(f"{FSDP}.fsdp_transformer_layer_cls_to_wrap{named}: {text}")
    elif policy == "NO_WRAP":
        text = "units are the repeated blocks by default; units= names others"
        script.otherwise.append(f"{FSDP}.fsdp_auto_wrap_policy: {text}")
    kind = str(config.take(f"{FSDP}.fsdp_state_dict_type", "FULL_STATE_DICT")).upper()
    if kind == "SHARDED_STATE_DICT":
        script.saving.append("compiled.save_checkpoint(folder, optimizer): shards, which load in any stage and world")
    elif kind == "FULL_STATE_DICT":
        script.saving.append(WHOLE)
    else:
        text = f"{kind} holds the shards of one rank; compiled.save_checkpoint loads in any stage and world"
        script.missing.append(f"{FSDP}.fsdp_state_dict_type: {text}")


def _precision(config: Config, script: Script) -> None:
    precision = str(config.take("mixed_precision", "no")).lower()
    if precision in PRECISIONS:
        script.options["dtype"] = PRECISIONS[precision]
        script.otherwise.append(AVERAGED)
    elif precision != "no":
        script.missing.append(f"mixed_precision: {precision} is not supported")
    if precision == "fp16" and script.scaler is None:
        script.scaler = {}


def _launch(config: Config, script: Script) -> None:
    nodes, ranks = (int(config.number(name, 1)) for name in ("num_machines", "num_processes"))
    each = max(ranks // max(nodes, 1), 1)
    script.launch = f"torchrun --nnodes {nodes} --nproc-per-node {each} train.py"
    if nodes == 1:
        script.launch = f"torchrun --standalone --nproc-per-node {each} train.py"
