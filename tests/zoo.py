"""Real models in small: what people train, built from configs, nothing downloaded; a batch and a loss for each.

Nothing in them is random after the start, and weights begin larger than is usual, so that all of a small model learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

VOCABULARY, WIDTH, LENGTH = 61, 32, 12
"""An odd vocabulary, so that no world divides the embedding."""

Batch = dict[str, torch.Tensor]

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> nn.Module:
    """Its input and output embeddings are one parameter; its loss breaks the graph with a call of a logger."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True))


def mixtral(experts: str | None = None) -> nn.Module:
    """A sparse mixture of experts; without the router's auxiliary loss, which is no mean over the batch."""
    config = hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=False)
    return hf.MixtralForCausalLM._from_config(config, experts_implementation=experts)


def mixtral_loop() -> nn.Module:
    """With its experts in a loop over those that the batch hits, on each rank others: no graph holds that."""
    return mixtral("eager")


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=7,
        problem_type="single_label_classification",
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def t5() -> nn.Module:
    """Encoder and decoder share the embedding, every layer of a stack its first layer's position bias."""
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


class BasicBlock(nn.Module):
    """torchvision's."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's, of BasicBlocks, two layers deep and, unless told, narrow ones."""

    def __init__(self, first: int = 8, second: int = 14) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(first, first), BasicBlock(first, first))
        self.layer2 = nn.Sequential(BasicBlock(first, second, stride=2), BasicBlock(second, second))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(second, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Translator(nn.Module):
    """`nn.Transformer` between two embeddings and a head, as in PyTorch's own tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


def token_batch(generator: torch.Generator, size: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def masked_batch(generator: torch.Generator, size: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(1), "attention_mask": torch.ones_like(tokens)}


def pair_batch(generator: torch.Generator, size: int) -> Batch:
    source = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": source, "labels": torch.randint(1, VOCABULARY, (size, LENGTH - 3), generator=generator)}


def translation_batch(generator: torch.Generator, size: int) -> Batch:
    found = pair_batch(generator, size)
    return {"source": found["input_ids"], "target": found["labels"]}


def image_batch(generator: torch.Generator, size: int) -> Batch:
    return {
        "pixel_values": torch.randn(size, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 7, (size,), generator=generator),
    }


def hf_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def classifier_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def translation_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    source, target = batch["source"], batch["target"]
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


NORMALISES_OVER_THE_BATCH = frozenset({"resnet"})

Entry = tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Batch], Callable[..., torch.Tensor]]
MODELS: dict[str, Entry] = {
    "gpt2": (gpt2, token_batch, hf_loss),
    "llama": (llama, token_batch, hf_loss),
    "qwen3": (qwen3, token_batch, hf_loss),
    "bert": (bert, masked_batch, hf_loss),
    "vit": (vit, image_batch, hf_loss),
    "t5": (t5, pair_batch, hf_loss),
    "mixtral": (mixtral, token_batch, hf_loss),
    "mixtral_loop": (mixtral_loop, token_batch, hf_loss),
    "resnet": (ResNet, image_batch, classifier_loss),
    "transformer": (Translator, translation_batch, translation_loss),
}


def make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind][0]()


def batch(kind: str, rank: int, step: int, size: int = 4) -> Batch:
    """The batch of `rank` at `step`: the same in every run."""
    return MODELS[kind][1](torch.Generator().manual_seed(1000 * step + rank), size)


def loss(kind: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's mean loss over a batch."""
    return MODELS[kind][2](model, batch)
