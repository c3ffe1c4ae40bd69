"""`compile(model, optimizer=...)`: an optimizer that exists already goes on with shards, its state with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import diagonal
from tests.models import batch, fit, make
from tests.ranks import on_threads

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    fit(model, optimizer, (batch("mlp", rank, step) for step in steps))


@diagonal("kind, stage, stepped", KINDS, [3, 0, 3, 0], [True, False, False, True])
@on_threads(2)
def test_an_optimizer_goes_on_with_shards(rank: int, kind: str, stage: int, stepped: bool) -> list[str]:
    """Steps as under DDP; then, of both, the plain model goes on under zcompile with the optimizer that it has."""
    made, options = KINDS[kind]
    model = make("mlp")
    ddp = DistributedDataParallel(model)
    optimizer = made(groups(model), **options)
    if stepped:
        train(ddp, optimizer, rank, range(3))
    theirs_model = copy.deepcopy(model)
    theirs = made(groups(theirs_model), **options)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del ddp
    compiled = zcompile.compile(model, optimizer=optimizer, stage=stage, backend="eager")
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, theirs)]
    reference = DistributedDataParallel(theirs_model)
    for step in range(3, 6):
        train(compiled, optimizer, rank, range(step, step + 1))
        train(reference, theirs, rank, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    assert not stage or all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    got = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in compiled.named_parameters()}
    return [name for name, want in theirs_model.named_parameters() if not torch.equal(got[name], want)]


def test_several_optimizers_and_parameters_that_are_not_the_models() -> None:
    model, other = make("mlp"), nn.Parameter(torch.ones(3))
    scale, *rest = model.parameters()
    optimizers = [torch.optim.SGD([scale, other], lr=0.1), torch.optim.AdamW(rest)]
    compiled = zcompile.compile(model, optimizer=optimizers, backend="eager")
    compiled(*batch("mlp", 0, 0)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert optimizers[0].param_groups[0]["params"][1] is other
    assert {id(p) for one in optimizers for group in one.param_groups for p in group["params"]} == {
        id(other), *map(id, compiled.parameters()),
    }  # fmt: skip


def test_an_optimizer_of_another_model_is_refused_before_anything_changes() -> None:
    model = make("mlp")
    with pytest.raises(zcompile.OptimizerError, match="SGD holds none of the model's parameters"):
        zcompile.compile(model, optimizer=torch.optim.SGD(make("mlp").parameters(), lr=0.1), backend="eager")
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    assert all(param.numel() for param in model.parameters())


def test_tied_parameters_are_pointed_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = zcompile.compile(model, optimizer=optimizer, backend="eager")
    (param,) = compiled.parameters()
    assert optimizer.param_groups[0]["params"][0] is param
    assert len(optimizer.param_groups[0]["params"]) == 1
