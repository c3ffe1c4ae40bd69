"""The programs that mutants are made of: small models of every kind, under every way to rewrite their steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from zcompile import Program
from zcompile.engine.tensor_parallel_group import digests, mark_replicated
from zcompile.facts import VOLUME_RIGHT, Fact, verify
from zcompile.ir.layout import STAGES
from zcompile.model.units import axes_over, make_layout
from zcompile.passes.offload_activations import offload_activations
from zcompile.passes.partition_activations import partition_activations
from zcompile.schedule.default_pipeline import ACCUMULATE
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Pass, Verified
from zcompile.tools.tracing import trace

PARTS = 2
"""Tensor-parallel ranks that have a part each of a model that is divided."""
_WIDTH, _TOKENS = 8, 7


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm; most parameters have a twin of their shape."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(h), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout)


class GPT(nn.Module):
    """A decoder and its loss; `tied`: the head is the embedding."""

    def __init__(self, words: int = _TOKENS, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, _WIDTH), nn.Embedding(4, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Distilled(nn.Module):
    """A head that learns what a frozen one says, and a gated layer: both are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(_TOKENS, _WIDTH), nn.RMSNorm(_WIDTH)
        self.gate, self.up, self.down = nn.Linear(_WIDTH, 32), nn.Linear(_WIDTH, 32), nn.Linear(32, _WIDTH)
        self.head, self.teacher = nn.Linear(_WIDTH, 40), nn.Linear(_WIDTH, 40).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.down(F.silu(self.gate(self.norm(x))) * self.up(self.norm(x)))
        taught = F.softmax(self.teacher(x), -1)
        return F.kl_div(F.log_softmax(self.head(x), -1), taught, reduction="batchmean")


class Odd(nn.Module):
    """Sizes that two ranks do not divide, twins, a scalar, several results, and an input that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))
        self.left, self.right = (nn.Parameter(torch.ones(3, 7)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale + self.shift
        # The gradient of a sum of two is one tensor for both: who reduces in place needs a copy of it.
        return x, x * y, (self.left + self.right).square().sum() * x.mean()


class Convolutions(nn.Module):
    """Convolutions whose norms write to their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = x + stage(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), y)


class Dropped(nn.Module):
    """Draws random numbers, several of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.dropout(torch.sin(block(x)), 0.5) * torch.rand_like(x) + torch.rand_like(x)
        return x


class Feed(nn.Module):
    """Layers that a mesh of ranks divides, beside parameters that each of them has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def partly_frozen() -> nn.Module:
    """A GPT whose blocks are not trained: what is kept of them stays current."""
    model = GPT()
    model.blocks.requires_grad_(False)
    return model


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "gpt": (GPT, (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))),
    "tied": (lambda: GPT(tied=True), (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))),
    "wide": (lambda: GPT(40), (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))),
    "wide, tied": (
        lambda: GPT(40, tied=True),
        (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)),
    ),
    "distilled": (Distilled, (torch.zeros(2, 4, dtype=torch.long),)),
    "dropout": (lambda: GPT(dropout=0.3), (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))),
    "odd": (Odd, (torch.ones(3, 5, requires_grad=True), torch.ones(3, 5, requires_grad=True))),
    "conv": (Convolutions, (torch.ones(2, 3, 4, 4), torch.zeros(2, dtype=torch.long))),
    "drawn": (Dropped, (torch.ones(4, 6),)),
    "frozen": (partly_frozen, (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))),
    "feed": (Feed, (torch.ones(2, 4, 8),)),
}
_BF16: dict[str, Any] = {"dtype": torch.bfloat16}
_MIXED: dict[str, Any] = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_SHARDS = Pass("partition_activations", functools.partial(partition_activations, least=1))
_AWAY = Pass("offload_activations", functools.partial(offload_activations, least=1))
_OFFLOAD: dict[str, Any] = {"offload_activations": "cpu", "passes": {"offload_activations": _AWAY}}
_PARTITION: dict[str, Any] = {"partition_activations": True, "passes": {"partition_activations": _SHARDS}}
_HPZ: dict[str, Any] = {"shard": "hpz", "replicas": 2}
_HFSDP: dict[str, Any] = {"shard": "hfsdp", "replicas": 2}
_BOTH = {"hpz": _HPZ, "hfsdp": _HFSDP}
_STEPS: dict[str, dict[str, Any]] = {"stage 2": {"stage": 2}, "stage 3": {}, "prefetch 0": {"prefetch": 0}}
PROGRAMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{f"gpt, stage {stage}": ("gpt", {"stage": stage}) for stage in range(4)},
    **{f"gpt, prefetch {few}": ("gpt", {"prefetch": few}) for few in (0, 1, 3)},
    "gpt, eager": ("gpt", {"backend": "eager"}),
    "gpt, bf16": ("gpt", _BF16),
    "gpt, bf16, stage 0": ("gpt", {**_BF16, "stage": 0}),
    "gpt, mixed": ("gpt", _MIXED),
    "gpt, mixed, stage 2": ("gpt", {**_MIXED, "stage": 2}),
    "gpt, checkpoint": ("gpt", {"checkpoint": "unit"}),
    "gpt, checkpoint, arenas": ("gpt", {"checkpoint": "unit", "arenas": True}),
    "gpt, arenas": ("gpt", {"arenas": True}),
    "gpt, buckets": ("gpt", {"bucket": "256 B"}),
    "gpt, memory limit": ("gpt", {"memory_limit": "1 MiB", "prefetch": 1}),
    "gpt, offload": ("gpt", _OFFLOAD),
    "gpt, train_step": ("gpt", {"updates": True}),
    "gpt, train_step, stage 0": ("gpt", {"updates": True, "stage": 0}),
    "gpt, train_step, stage 2": ("gpt", {"updates": True, "stage": 2}),
    "gpt, train_step, arenas": ("gpt", {"updates": True, "arenas": True}),
    "gpt, train_step, mixed": ("gpt", {"updates": True, **_MIXED}),
    "gpt, no_sync": ("gpt", {"stage": 1, "holds_back": True}),
    "tied": ("tied", {}),
    "tied, stage 1": ("tied", {"stage": 1}),
    "tied, train_step": ("tied", {"updates": True}),
    "odd, 3 ranks": ("odd", {"world": 3}),
    "odd, stage 0": ("odd", {"stage": 0}),
    "odd, stage 2, 3 ranks": ("odd", {"stage": 2, "world": 3}),
    "odd, alone": ("odd", {"world": 1}),
    "conv": ("conv", {"units": ["stages.*"]}),
    "conv, stage 1": ("conv", {"units": ["stages.*"], "stage": 1}),
    "dropout, checkpoint": ("dropout", {"checkpoint": "unit"}),
    "dropout, eager": ("dropout", {"backend": "eager"}),
    "drawn": ("drawn", {}),
    "hybrid": ("gpt", {"replicas": 2}),
    "hybrid, stage 2, mixed": ("gpt", {"replicas": 2, "stage": 2, **_MIXED}),
    "hybrid, int8 across": ("gpt", {"replicas": 2, "outer_dtype": torch.int8}),
    "hybrid, train_step": ("gpt", {"replicas": 2, "updates": True}),
    "hybrid, odd, 3 shards": ("odd", {"replicas": 2, "world": 6}),
    "hybrid, no_sync": ("gpt", {"replicas": 2, "stage": 1, "holds_back": True}),
    **{
        f"{shard}, stage {stage}": ("gpt", {**both, "stage": stage})
        for shard, both in _BOTH.items()
        for stage in (2, 3)
    },
    **{
        f"{shard}, train_step, {said}": ("gpt", {**both, "updates": True, **asked})
        for shard, both in _BOTH.items()
        for said, asked in _STEPS.items()
    },
    "hpz, prefetch 0": ("gpt", {**_HPZ, "prefetch": 0}),
    "hpz, mixed": ("gpt", {**_HPZ, **_MIXED}),
    "hpz, no_sync": ("gpt", {**_HPZ, "stage": 1, "holds_back": True}),
    "hpz, odd, 2 by 3": ("odd", {**_HPZ, "world": 6}),
    "hpz, conv, 3 by 1": ("conv", {**_HPZ, "replicas": 3, "world": 3, "units": ["stages.*"]}),
    "hpz, arenas, train_step": ("gpt", {**_HPZ, "arenas": True, "updates": True}),
    "hpz, offload": ("gpt", {**_HPZ, **_OFFLOAD}),
    "hpz, tensor parallel": ("feed", _HPZ),
    "hpz, activation shards": ("feed", {**_HPZ, **_PARTITION}),
    "hpz, frozen, train_step": ("frozen", {**_HPZ, "updates": True}),
    "hfsdp, frozen": ("frozen", _HFSDP),
    "hfsdp, frozen, stage 2": ("frozen", {**_HFSDP, "stage": 2}),
    "hfsdp, prefetch 0": ("gpt", {**_HFSDP, "prefetch": 0}),
    "hfsdp, int8 across": ("gpt", {**_HFSDP, "outer_dtype": torch.int8}),
    "hpz, bf16 gathers": ("gpt", {**_HPZ, "outer_gather_dtype": torch.bfloat16}),
    "hfsdp, bf16 gathers, train_step": ("gpt", {**_HFSDP, "outer_gather_dtype": torch.bfloat16, "updates": True}),
    "hfsdp, bf16, train_step": ("gpt", {**_HFSDP, **_BF16, "updates": True}),
    "hfsdp, tied, train_step": ("tied", {**_HFSDP, "updates": True}),
    "hfsdp, dropout, checkpoint": ("dropout", {**_HFSDP, "checkpoint": "unit"}),
    "hfsdp, memory limit": ("gpt", {**_HFSDP, "memory_limit": "1 MiB", "prefetch": 1}),
    "chunks": ("wide", {"chunk": 4}),
    "chunks, stage 0, checkpoint": ("wide", {"chunk": 4, "stage": 0, "checkpoint": "unit"}),
    "chunks, eager, train_step": ("wide", {"chunk": 4, "backend": "eager", "updates": True}),
    "chunks, tied, mixed": ("wide, tied", {"chunk": 4, **_MIXED}),
    "chunks, distilled": ("distilled", {"chunk": 4}),
    "chunks, distilled, train_step": ("distilled", {"chunk": 4, "stage": 2, "updates": True}),
    "tensor parallel": ("feed", {}),
    "tensor parallel, stage 2": ("feed", {"stage": 2}),
    "tensor parallel, activation shards": ("feed", _PARTITION),
}
"""For each program its model, and what is asked of it."""


@dataclass(frozen=True)
class Original:
    """A program that is right, with what it was made of.

    Attributes:
        name: Of PROGRAMS.
        traced: The step before any pass, laid out.
        verified: What the passes have made of it, with what is known of that.
        goals: Facts that the finished program has beside.
        parts: Tensor-parallel ranks.
        divided: Parameters of which each of them has a part.
    """

    name: str
    traced: Program
    verified: Verified
    goals: tuple[Fact, ...]
    parts: int = 1
    divided: frozenset[str] = frozenset()

    @property
    def program(self) -> Program:
        return self.verified.program

    @property
    def ranks(self) -> int:
        """Data-parallel times tensor-parallel ones."""
        return self.program.layout.world * self.parts

    def verify(self, mutant: Program) -> None:
        """Hold a mutant to all that the pipeline holds its last program to.

        Raises:
            ProgramError: it is refused.
        """
        verify(mutant, (*self.verified.facts, self.verified.values.fact, *self.goals), "mutant")


@functools.cache
def original(name: str) -> Original:
    """The program of PROGRAMS that is called so."""
    kind, asked = PROGRAMS[name]
    asked = dict(asked)
    replicas, units = asked.pop("replicas", 1), asked.pop("units", None)
    world = asked.pop("world", 2 * replicas)
    updates, held = asked.pop("updates", False), asked.pop("holds_back", False)
    options = Options(**asked)
    with _mesh(kind) as divided:
        model = divided(MODELS[kind][0]())
        args = MODELS[kind][1]
        dtypes: dict[str, Any] = {"dtype": options.dtype, "reduce_dtype": options.reduce_dtype}
        program = trace(model, args, units=units, chunks=options.chunk is not None, **dtypes)
        axes = axes_over(model, world, replicas)
        layout = make_layout(model, STAGES[options.stage], axes, units, options.precision, hybrid=options.hybrid)
        parts = _divided(model)
        if layout.tensor is not None:
            group = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh.get_group().group_name
            program = mark_replicated(program, digests(program, group, parts))
    traced = replace(program, layout=layout)
    verified = options.pipeline(updates=updates).verified(traced)
    if held:
        verified = verified.holding_back().after([ACCUMULATE])
    goals = () if held else (VOLUME_RIGHT,)
    return Original(name, traced, verified, goals, 1 if layout.tensor is None else PARTS, parts)


def _divided(model: nn.Module) -> frozenset[str]:
    """The parameters of which each tensor-parallel rank has a part."""
    given = ((name, param) for name, param in model.named_parameters() if isinstance(param, DTensor))
    return frozenset(name for name, param in given if param.placements[0].is_shard())


@contextmanager
def _mesh(kind: str) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """What divides a model among tensor-parallel ranks, within a group whose other ranks are not there."""
    if kind != "feed":
        yield lambda model: model
        return
    dist.init_process_group("fake", rank=0, world_size=2 * PARTS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, PARTS), mesh_dim_names=("dp", "tp"))["tp"]
        plan = {f"blocks.{n}.{k}": style() for n in range(3) for k, style in _STYLES.items()}
        yield lambda model: parallelize_module(model, mesh, plan)
    finally:
        dist.destroy_process_group()


_STYLES: Mapping[str, Callable[[], Any]] = {"1": ColwiseParallel, "3": RowwiseParallel}
