"""`zcompile migrate`: configs as they are written for DeepSpeed and Accelerate become lines that zcompile takes."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import zcompile
from tests.cases import quickly
from zcompile import OptionError, SubjectError
from zcompile.schedule.options import Options, names_of
from zcompile.tools import command_line
from zcompile.tools.migration import migrated

ARGS = SimpleNamespace(
    bf16=True,
    learning_rate=3e-5,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    gradient_accumulation_steps=2,
)
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
ZERO_2 = {  # of DeepSpeed's tutorial
    "train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    },
}
FP16 = {
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
}
OFFLOADED = {  # of the documentation of Hugging Face's Trainer
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
AUTO = {**OFFLOADED, "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
NVME = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}},
}
STREAMED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
CLIPPED = {**STREAMED, "gradient_clipping": 1.0}
ZERO_PLUS_PLUS = {
    "communication_data_type": "bfp16",
    "zero_optimization": {
        "stage": 3,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}
QUANTIZED = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}}
MICS = {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "overlap_comm": False}}
CHECKPOINTED = {
    "zero_optimization": {"stage": 2, "cpu_offload": True},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4},
}
PLAIN = {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "amp": {"enabled": True}}
FSDP_1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: {offload}
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: {state}
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: {precision}
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP_2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: {again}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: {outer}
  parallelism_config_dp_shard_size: 4
"""
INNER = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
DDP = """
distributed_type: MULTI_GPU
gradient_accumulation_steps: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""


def fsdp_1(
    strategy: str = "FULL_SHARD", precision: str = "bf16", state: str = "FULL_STATE_DICT", offload: str = "false"
) -> str:
    return FSDP_1.format(strategy=strategy, precision=precision, state=state, offload=offload)


CASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any]]] = {
    "zero 2": (ZERO_2, {"stage": 2, "dtype": torch.bfloat16}),
    "fp16": (FP16, {"stage": 1, "dtype": torch.float16}),
    "offloaded": (OFFLOADED, {"stage": 3, "dtype": torch.bfloat16, "offload_parameters": "cpu"}),
    "auto": (AUTO, {"stage": 3, "dtype": torch.bfloat16}),
    "nvme": (NVME, {"stage": 3, "dtype": torch.bfloat16, "offload_parameters": "cpu"}),
    "streamed": (STREAMED, {"stage": 1, "offload_optimizer": "cpu"}),
    "clipped": (CLIPPED, {"stage": 1}),
    "zero++": (
        ZERO_PLUS_PLUS,
        {
            "mesh": ("ranks // 8", 8),
            "stage": 3,
            "shard": "hpz",
            "reduce_dtype": torch.bfloat16,
            "outer_dtype": torch.int8,
            "outer_gather_dtype": torch.int8,
        },
    ),
    "quantized": (QUANTIZED, {"stage": 3}),
    "mics": (MICS, {"mesh": ("ranks // 4", 4), "stage": 3, "shard": "hsdp", "prefetch": 0}),
    "checkpointed": (
        CHECKPOINTED,
        {"stage": 2, "offload_parameters": "cpu", "checkpoint": "unit", "offload_activations": "cpu"},
    ),
    "plain": (PLAIN, {"stage": 0}),
    "fsdp": (fsdp_1(), {"stage": 3, "dtype": torch.bfloat16}),
    "fsdp by number": (fsdp_1("2", "no", "SHARDED_STATE_DICT"), {"stage": 2}),
    "fsdp fp16": (fsdp_1("NO_SHARD", "fp16", "LOCAL_STATE_DICT"), {"stage": 0, "dtype": torch.float16}),
    "fsdp offload": (fsdp_1(offload="true"), {"stage": 3, "dtype": torch.bfloat16, "offload_parameters": "cpu"}),
    "fsdp hybrid": (
        fsdp_1("HYBRID_SHARD"),
        {"mesh": (2, 8), "stage": 3, "shard": "hsdp", "dtype": torch.bfloat16},
    ),
    "fsdp2": (FSDP_2.format(again="true", outer=1), {"stage": 3, "dtype": torch.bfloat16, "checkpoint": "unit"}),
    "fsdp2 hybrid": (
        FSDP_2.format(again="false", outer=2),
        {"mesh": (2, 4), "stage": 2, "shard": "hsdp", "dtype": torch.bfloat16, "checkpoint": "unit"},
    ),
    "deepspeed of accelerate": (INNER, {"stage": 3, "dtype": torch.bfloat16}),
    "ddp": (DDP, {"stage": 0}),
}


class Ranks:
    """What stands for the number of ranks in a mesh."""

    def __floordiv__(self, other: int) -> str:
        return f"ranks // {other}"


def text_of(case: str, folder: Path) -> str:
    config = CASES[case][0]
    path = folder / ("config.yaml" if isinstance(config, str) else "ds_config.json")
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return migrated(path).text


def options_in(text: str) -> dict[str, Any]:
    """The options of the call of zcompile, as values; they are also given to `Options`, which refuses what it must."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    (call,) = [one for one in calls if ast.unparse(one.func) in ("zcompile.compile", "zcompile.train_step")]
    names: dict[str, Any] = {"torch": torch, "args": ARGS, "dist": SimpleNamespace(get_world_size=Ranks)}
    names["init_device_mesh"] = lambda device, shape, mesh_dim_names: shape
    for line in text.splitlines():
        if line.startswith("mesh = "):
            exec(line, names)
    found = {str(one.arg): eval(ast.unparse(one.value), names) for one in call.keywords}
    known = names_of(zcompile.compile, zcompile.CompileOptions) | names_of(zcompile.train_step, zcompile.CompileOptions)
    assert found.keys() <= known
    Options(**{name: value for name, value in found.items() if name in {field.name for field in fields(Options)}})
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_config_becomes_a_line_that_zcompile_takes(case: str, tmp_path: Path) -> None:
    assert options_in(text_of(case, tmp_path)) == CASES[case][1]


@quickly(
    "case",
    ["zero 2", "auto", "plain", "fsdp by number", "deepspeed of accelerate", "ddp", "quantized"],
    ["zero 2", "fsdp by number", "ddp"],
)
def test_the_script_trains(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    names = {
        "model": model,
        "args": ARGS,
        "batches": [torch.randn(3, 4) for _ in range(4)],
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    text = text_of(case, tmp_path).replace("zcompile.compile(model", 'zcompile.compile(model, backend="eager"')
    exec(text, names)
    after = names["compiled"].full_state_dict().values()
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_loop_clips_accumulates_and_scales(tmp_path: Path) -> None:
    text = text_of("zero 2", tmp_path)
    assert "optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.00015, betas=(0.9, 0.95))\n" in text
    assert "    is_last = number % 4 == 0\n" in text
    assert "        norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1)\n" in text
    text = text_of("fp16", tmp_path)
    assert 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=500)\n' in text
    order = ["scaler.scale(loss).backward()", "scaler.unscale_(", "clip_grad_norm_(", "scaler.step(", "scaler.update()"]
    assert sorted(order, key=text.index) == order
    assert "# - fp16.hysteresis: a GradScaler halves the scale at each overflow\n" in text


@pytest.mark.parametrize(("policy", "says"), [("NO_WRAP", True), ("SIZE_BASED_WRAP", False)])
def test_a_policy_that_wraps_nothing_is_explained(policy: str, says: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(fsdp_1().replace("TRANSFORMER_BASED_WRAP", policy))
    said = "fsdp_config.fsdp_auto_wrap_policy: units are the repeated blocks by default; units= names others"
    assert (said in migrated(path).text) is says


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "zero 2",
            "zero_optimization.reduce_bucket_size, zero_optimization.allgather_bucket_size: the cost model chooses",
        ),
        ("nvme", "zero_optimization: a model on a GPU offloads to the host, not to NVMe"),
        ("clipped", "zero_optimization.offload_optimizer: is not combined with clipping or accumulation in stage 1"),
        ("quantized", "zero_optimization.zero_quantized_gradients: int8 is for averages between nodes"),
        ("plain", "optimizer.type: torch has no Lamb"),
        ("plain", "amp: Apex is not used"),
        ("fsdp", "torchrun --nnodes 2 --nproc-per-node 8 train.py"),
        ("fsdp", "torch.save(compiled.full_state_dict(), path)"),
        ("fsdp fp16", "fsdp_config.fsdp_state_dict_type: LOCAL_STATE_DICT holds the shards of one rank"),
        ("fsdp2", "fsdp_config.fsdp_transformer_layer_cls_to_wrap (LlamaDecoderLayer): units are the repeated blocks"),
        ("fsdp2", "compiled.save_checkpoint(folder, optimizer)"),
        ("ddp", "torchrun --standalone --nproc-per-node 2 train.py"),
    ],
)
def test_what_becomes_no_option_is_said(case: str, said: str, tmp_path: Path) -> None:
    text = " ".join(text_of(case, tmp_path).replace("\n#   ", " ").split())
    assert said in text


@pytest.mark.parametrize("case", CASES)
def test_every_key_of_a_real_config_is_known(case: str, tmp_path: Path) -> None:
    assert "Unknown keys" not in text_of(case, tmp_path)


def test_an_unknown_key_is_told_with_the_nearest(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "overlap_com": True}, "gradient_cliping": 1.0, "mystery": 3}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    text = migrated(tmp_path / "ds.json").text
    assert "# - zero_optimization.overlap_com: did you mean 'zero_optimization.overlap_comm'?\n" in text
    assert "# - gradient_cliping: did you mean 'gradient_clipping'?\n" in text
    assert "# - mystery: no key of this name is known\n" in text


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.json", "{", SubjectError, "is not valid JSON"),
        ("a.json", "[1]", SubjectError, "has a list instead of keys"),
        ("a.json", '{"a": 1}', SubjectError, "has none of the keys zero_optimization"),
        ("a.yaml", "a: [", SubjectError, "is not valid YAML"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', OptionError, "stage: 4 is not a ZeRO stage"),
        ("a.json", '{"bf16": {"enabled": "si"}}', OptionError, "bf16.enabled: is 'si'"),
        ("a.json", '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', OptionError, "are both true"),
        ("a.json", '{"fp16": {}, "gradient_clipping": "much"}', OptionError, "gradient_clipping: is 'much'"),
        (
            "a.json",
            '{"bf16": {}, "communication_data_type": "int3"}',
            OptionError,
            "communication_data_type: is 'int3'",
        ),
        ("a.yaml", "distributed_type: MEGATRON_LM", OptionError, "distributed_type: is MEGATRON_LM"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}", OptionError, "is 'HALF'"),
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}",
            OptionError,
            "zcompile migrate ds.json",
        ),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, name: str, text: str, error: type, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        migrated(tmp_path / name)


def test_a_missing_file_and_a_missing_package_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SubjectError, match=r"absent.json: cannot be read"):
        migrated(tmp_path / "absent.json")
    (tmp_path / "a.yaml").write_text(DDP)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SubjectError, match=r"PyYAML is not installed.\n  Fix: pip install pyyaml"):
        migrated(tmp_path / "a.yaml")


def test_the_command_prints_the_script(tmp_path: Path) -> None:
    text = text_of("zero 2", tmp_path)
    result = CliRunner().invoke(command_line.app, ["migrate", str(tmp_path / "ds_config.json")])
    assert (result.exit_code, result.stdout) == (0, text)
