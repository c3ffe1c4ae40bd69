"""What is compiled: models of the sizes that GPUs are used for, with as many blocks as make different regions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import transformers as hf
from torch import nn

from benchmarks.common.configurations import Sizes
from benchmarks.common.models import batch, make_model
from benchmarks.gpu.protocol import LARGE, TINY
from tests import zoo

BLOCKS = 3
GPT = replace(LARGE, blocks=BLOCKS)
"""The model of `benchmarks.gpu`."""
SEQUENCE, SIDE = 1024, 224


def gpt(sizes: Sizes) -> nn.Module:
    return make_model(sizes, seed=0)


def gpt_batch(sizes: Sizes, generator: torch.Generator, size: int) -> zoo.Batch:
    tokens, targets = batch(replace(sizes, batch=size), 0, 0, 0)
    return {"tokens": tokens, "targets": targets}


def gpt_loss(model: nn.Module, batch: zoo.Batch) -> torch.Tensor:
    return model(**batch)


LLAMA = hf.LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=BLOCKS,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
"""TinyLlama's sizes."""


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(LLAMA)


def llama_batch(generator: torch.Generator, size: int) -> zoo.Batch:
    tokens = torch.randint(0, LLAMA.vocab_size, (size, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def resnet() -> nn.Module:
    """The first half of torchvision's ResNet-18."""
    return zoo.ResNet(64, 128)


def image_batch(generator: torch.Generator, size: int) -> zoo.Batch:
    return {
        "pixel_values": torch.randn(size, 3, SIDE, SIDE, generator=generator),
        "labels": torch.randint(0, 7, (size,), generator=generator),
    }


MODELS: dict[str, zoo.Entry] = {
    "gpt": (partial(gpt, GPT), partial(gpt_batch, GPT), gpt_loss),
    "llama": (llama, llama_batch, zoo.hf_loss),
    "resnet": (resnet, image_batch, zoo.classifier_loss),
}
TINY_GPT: zoo.Entry = (partial(gpt, TINY), partial(gpt_batch, TINY), gpt_loss)
"""For tests, which want it soon."""
ALL = {**MODELS, "tiny gpt": TINY_GPT}
