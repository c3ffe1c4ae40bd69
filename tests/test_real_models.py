"""Real models, small: training them on several ranks is training them in one process on the joined batch."""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests import zoo
from tests.cases import quickly
from tests.compare import full
from tests.models import update
from tests.ranks import Ranks, on_threads
from tests.threads import Threads

STEPS = 3
TOLERANCE = 1e-6
"""Relative: to a loss, and to the largest entry of each parameter and buffer."""
FUSED = 1e-5
"""The tolerance for code that Inductor has fused: it rounds elsewhere."""
FLOOR = 0.1
"""What begins at zero is compared with the size of weights: the gradient of a key's bias is nothing but rounding."""

Values = dict[str, torch.Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Rounding stays rounding: Adam blows a gradient that is zero but for rounding up to a full step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def joined(batches: list[zoo.Batch]) -> zoo.Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def reference(kind: str, world: int) -> tuple[Values, list[Values], list[float]]:
    """Plain training in this process: parameters, each rank's buffers, losses.

    A model that normalises over the batch sees one rank's batch at a time, with that rank's statistics.
    """
    model = zoo.make(kind)
    optimizer = sgd(model)
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world)]
    losses = []
    for step in range(STEPS):
        batches = [zoo.batch(kind, rank, step) for rank in range(world)]
        if kind in zoo.NORMALISES_OVER_THE_BATCH:
            calls = [functools.partial(torch.func.functional_call, model, one) for one in buffers]
            loss = torch.stack([zoo.loss(kind, call, one) for call, one in zip(calls, batches, strict=True)]).mean()
        else:
            loss = zoo.loss(kind, model, joined(batches))
        loss.backward()
        update(optimizer)
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, buffers, losses


def train(rank: int, kind: str, stage: int, backend: str) -> tuple[zcompile.CompiledModule, list[float]]:
    # Other values on other ranks: rank 0's must win.
    compiled = zcompile.compile(zoo.make(kind, seed=rank), stage=stage, backend=backend)
    optimizer = sgd(compiled)
    losses = []
    for step in range(STEPS):
        loss = zoo.loss(kind, compiled, zoo.batch(kind, rank, step))
        loss.backward()
        update(optimizer)
        torch.distributed.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / torch.distributed.get_world_size())
    return compiled, losses


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=FLOOR))


def compare(rank: int, kind: str, stage: int, backend: str) -> dict[str, Any]:
    """Relative differences by name, and how far training went: a comparison of models at rest proves nothing."""
    want, buffers, want_losses = reference(kind, torch.distributed.get_world_size())
    compiled, losses = train(rank, kind, stage, backend)
    params = {name: full(p) for name, p in compiled.named_parameters()}
    assert list(params) == list(want)
    found = {name: difference(p, want[name]) for name, p in params.items()}
    found |= {name: difference(buffer, buffers[rank][name]) for name, buffer in compiled.named_buffers()}
    found |= {f"loss {i}": abs(a - b) / b for i, (a, b) in enumerate(zip(losses, want_losses, strict=True))}
    start = zoo.make(kind)
    moved = {name: difference(p.detach(), want[name]) for name, p in start.named_parameters()}
    return {"found": found, "moved": moved, "programs": len(compiled.programs)}


WHOLE = sorted(zoo.MODELS.keys() - {"gpt2", "mixtral_loop"})


def check(ranks: Ranks | Threads, world: int, kind: str, stage: int, backend: str = "eager") -> list[dict[str, Any]]:
    answers = ranks.run(world, compare, kind, stage, backend)
    for answer in answers:
        tolerance = TOLERANCE if backend == "eager" else FUSED
        assert {name: found for name, found in answer["found"].items() if not found <= tolerance} == {}
        assert statistics.median(answer["moved"].values()) > 1000 * tolerance
    return answers


KINDS = sorted(zoo.MODELS)


@pytest.mark.slow
@quickly(
    "kind, stage, world",
    [*itertools.product(KINDS, range(4), [2, 3])],
    [(kind, 3, 2) for kind in KINDS],
    slow=[(kind, stage, 3) for kind, stage in zip(KINDS[::4], range(3), strict=True)],
)
def test_it_trains_as_one_process_on_the_joined_batch(threads: Threads, kind: str, stage: int, world: int) -> None:
    for answer in check(threads, world, kind, stage):
        if kind in WHOLE:
            assert answer["programs"] == 2, "one forward and one backward"


@pytest.mark.slow
@quickly("kind, stage", [*itertools.product(KINDS, [0, 3])], [("gpt2", 3)], slow=())
def test_inductor_trains_as_eager_pytorch_to_the_rounding_of_fused_code(
    threads: Threads, kind: str, stage: int
) -> None:
    check(threads, 2, kind, stage, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where", "why"),
    [
        ("gpt2", "GPT2LMHeadModel", "warning_once"),
        ("mixtral_loop", "model.layers.0.mlp.experts", "for expert_idx in expert_hit"),
    ],
)
@on_threads(2)
def test_explain_says_where_a_graph_breaks_and_why(rank: int, kind: str, where: str, why: str) -> None:
    compiled = zcompile.compile(zoo.make(kind), backend="eager")
    zoo.loss(kind, compiled, zoo.batch(kind, rank, 0)).backward()
    page = compiled.explain()
    assert where in page
    assert why in page
