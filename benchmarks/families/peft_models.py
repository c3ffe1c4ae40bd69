"""Adapters of peft on a small Llama, whose own weights are frozen."""

from __future__ import annotations

import functools

import peft
from torch import nn

from benchmarks.families.family import Family
from benchmarks.families.transformers_models import by_trainer, llama, tokens


def lora(*, dora: bool = False) -> nn.Module:
    config = peft.LoraConfig(
        r=3, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], use_dora=dora, init_lora_weights=False
    )
    return peft.get_peft_model(llama(), config)


def ia3() -> nn.Module:
    names = ["k_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(llama(), peft.IA3Config(target_modules=names, feedforward_modules=["down_proj"]))


FAMILIES: tuple[Family, ...] = (
    by_trainer("peft_lora", lora, tokens, "peft"),
    by_trainer("peft_dora", functools.partial(lora, dora=True), tokens, "peft"),
    by_trainer("peft_ia3", ia3, tokens, "peft"),
)
