"""Models of diffusers: denoisers of images and of latents, and autoencoders."""

from __future__ import annotations

from typing import Any

import diffusers
import torch.nn.functional as F
from diffusers.models.embeddings import LabelEmbedding
from torch import Tensor, nn

from benchmarks.families.family import ROWS, Batch, Family, drawn, integers, normal, single

SIDE, TEXT, WORDS = 16, 24, 5


noisy = drawn(
    sample=normal(ROWS, 4, SIDE, SIDE),
    noise=normal(ROWS, 4, SIDE, SIDE),
    time=integers(0, 1000, ROWS),
    text=normal(ROWS, WORDS, TEXT),
    pooled=normal(ROWS, TEXT),
    labels=integers(0, 7, ROWS),
)


SIZES: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4}
UNET: dict[str, Any] = {**SIZES, "sample_size": SIDE, "layers_per_block": 1, "attention_head_dim": 4}
CODER: dict[str, Any] = {**SIZES, "in_channels": 4, "out_channels": 4, "latent_channels": 2}
ENDS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
GRID: dict[str, Any] = {"sample_size": SIDE, "in_channels": 4, "out_channels": 4, "num_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}


def unet() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(**UNET, in_channels=4, out_channels=4, **blocks)


def conditioned_unet() -> nn.Module:
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    return diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=TEXT, down_block_types=down, up_block_types=up)


def autoencoder() -> nn.Module:
    return diffusers.AutoencoderKL(**CODER, **ENDS, layers_per_block=1)


def quantised_autoencoder() -> nn.Module:
    return diffusers.VQModel(**CODER, **ENDS, num_vq_embeddings=13)


def dit() -> nn.Module:
    model = diffusers.DiTTransformer2DModel(**GRID, **HEADS, num_embeds_ada_norm=1000, norm_num_groups=4, dropout=0.0)
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0  # of labels, which no config switches off
    return model


def sd3() -> nn.Module:
    widths = {"joint_attention_dim": TEXT, "caption_projection_dim": 16, "pooled_projection_dim": TEXT}
    return diffusers.SD3Transformer2DModel(**GRID, **HEADS, **widths, pos_embed_max_size=SIDE)


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["sample"], batch["time"]).sample, batch["noise"])


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["sample"], batch["time"], batch["text"]).sample, batch["noise"])


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    given = model(batch["sample"], timestep=batch["time"], class_labels=batch["labels"]).sample
    return F.mse_loss(given, batch["noise"])


def pooled_loss(model: nn.Module, batch: Batch) -> Tensor:
    given = model(batch["sample"], batch["text"], batch["pooled"], batch["time"]).sample
    return F.mse_loss(given, batch["noise"])


def autoencoding_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["sample"]).sample, batch["sample"])


FAMILIES: tuple[Family, ...] = (
    single("diffusers_unet", "diffusers", unet, noisy, denoising_loss),
    single("diffusers_text_unet", "diffusers", conditioned_unet, noisy, text_loss),
    single("diffusers_autoencoder_kl", "diffusers", autoencoder, noisy, autoencoding_loss),
    single("diffusers_vq", "diffusers", quantised_autoencoder, noisy, autoencoding_loss),
    single("diffusers_dit", "diffusers", dit, noisy, label_loss),
    single("diffusers_sd3", "diffusers", sd3, noisy, pooled_loss),
)
