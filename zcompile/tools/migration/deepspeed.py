"""DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/) as lines of zcompile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcompile.errors import OptionError
from zcompile.tools.migration.config import Config
from zcompile.tools.migration.deepspeed_keys import MISSING, OTHERWISE, ZERO
from zcompile.tools.migration.script import WORLD, Script

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
"""DeepSpeed's names, in lower case, and torch's. DeepSpeed's Adam decouples weight decay by default."""
ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")
ARGUMENTS_OF_TRAINER = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
}
"""What stands for "auto" among the optimizer's arguments."""


def script_of(values: Mapping[str, Any], source: str) -> Script:
    """The lines for a config of DeepSpeed's.

    Raises:
        OptionError: a value that DeepSpeed would not take either.
    """
    config, script = Config(values), Script(source)
    _stage(config, script)
    _precision(config, script)
    _loop(config, script)
    _optimizer(config, script)
    _levels(config, script)
    _offload(config, script)
    _activations(config, script)
    script.tell_rest(config, OTHERWISE, MISSING)
    return script


def _stage(config: Config, script: Script) -> None:
    stage = config.number(f"{ZERO}.stage")
    if stage not in (0, 1, 2, 3):
        raise OptionError(f"{ZERO}.stage", f"{stage!r} is no ZeRO stage", "choose 0, 1, 2 or 3")
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
        script.saving.append("torch.save(compiled.full_state_dict(), path): collective, whole tensors on rank 0")


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
        raise OptionError("fp16.enabled", "and bf16.enabled are both true", "choose one")
    if brain:
        script.options["dtype"] = "torch.bfloat16"
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "auto_cast")
    scale, power, window, *others = [config.take(f"fp16.{name}") for name in names]
    if half:
        script.options["dtype"] = "torch.float16"
        script.scaler = {"init_scale": f"2.0**{power if power is not None else 16}"}
        if scale:
            script.scaler = {"init_scale": str(float(scale))}
            script.otherwise.append("fp16.loss_scale: a GradScaler begins with it, and still adapts it to overflows")
        elif window is not None:
            script.scaler["growth_interval"] = str(int(window))
        late = [f"fp16.{name}" for name, value in zip(names[3:5], others, strict=False) if value is not None]
        script.missing += [f"{name}: a GradScaler halves the scale at each overflow" for name in late]
    dtype = config.take("communication_data_type")
    if dtype is not None:
        if dtype not in DTYPES:
            raise OptionError("communication_data_type", f"is {dtype!r}", f"choose from {', '.join(DTYPES)}")
        script.options["reduce_dtype"] = DTYPES[dtype]
    elif script.precision is not None:
        script.otherwise.append("gradients are averaged in float32, not in 16 bits: reduce_dtype= changes that")


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
    """Micro-batches of a step by the batch of all ranks, as DeepSpeed finds them where it is not told how many."""
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
        script.missing.append(f"optimizer.type: torch has no {kind}; any optimizer of a package is taken as it is")
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
    """Two levels of the network: ZeRO++ and MiCS."""
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
    """Shards and the optimizer's state on the host."""
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
        script.otherwise.append("an optimizer on the host is fastest with fused=True")
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
