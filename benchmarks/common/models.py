"""What every configuration trains: the model, the optimizer's settings and the data of each step; and worlds for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.configurations import Sizes
from examples.gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
STRIDE = 4  # tokens take steps below this along the vocabulary, so that there is something to learn


def make_model(sizes: Sizes, seed: int) -> GPT:
    """The model with the same values on every rank and in every configuration."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(sizes.vocabulary, sizes.sequence, sizes.blocks, sizes.heads, sizes.width))


def batch(sizes: Sizes, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (batch, sequence) int64, of one step on one rank."""
    generator = torch.Generator().manual_seed(((seed * 1_000_003) + step) * 1_009 + rank)
    steps = torch.randint(0, STRIDE, (sizes.batch, sizes.sequence + 1), generator=generator)
    walk = steps.cumsum(dim=1) % sizes.vocabulary
    return walk[:, :-1].contiguous(), walk[:, 1:].contiguous()


@contextmanager
def rank_0_of(world: int) -> Iterator[None]:
    """In a process group whose other ranks are not there: nothing is sent, and what would come from them is not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
