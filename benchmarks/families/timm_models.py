"""Image models of timm, small and at small images."""

from __future__ import annotations

import functools
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from benchmarks.families.family import ROWS, Batch, Family, drawn, integers, normal, single

CLASSES = 7
SIDE = 64

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet10t", {}),
    "mobilenet_v3": ("mobilenetv3_small_050", {}),
    "efficientnet": ("tinynet_e", {}),
    "regnet": ("regnetx_002", {}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "vit": ("vit_tiny_patch16_224", {"img_size": SIDE, "depth": 2}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {"img_size": SIDE, "depth": 2}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": SIDE, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    ),
}
"""The name in timm and what is smaller than there."""


def made(name: str, options: dict[str, Any]) -> nn.Module:
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, drop_path_rate=0.0, **options)


def mixer() -> nn.Module:
    return MlpMixer(num_classes=CLASSES, img_size=SIDE, num_blocks=2, embed_dim=32)


images = drawn(pixels=normal(ROWS, 3, SIDE, SIDE), labels=integers(0, CLASSES, ROWS))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    given = model(batch["pixels"])
    heads = given if isinstance(given, tuple) else (given,)
    return torch.stack([F.cross_entropy(head, batch["labels"]) for head in heads]).mean()


FAMILIES: tuple[Family, ...] = (
    *(
        single(f"timm_{key}", "timm", functools.partial(made, *variant), images, loss)
        for key, variant in VARIANTS.items()
    ),
    single("timm_mlp_mixer", "timm", mixer, images, loss),
)
