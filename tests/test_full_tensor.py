"""`parameter.full_tensor()` in a loss: its gradient is the average over the ranks, as all gradients are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.ranks import on_ranks
from tests.threads import Threads


class Headless(nn.Module):
    """Gives what its head would take: the loss multiplies with the head's weight by itself, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 9)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.bias.sum() + self.body(x) * self.scale


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def loss_of(run: nn.Module, model: nn.Module, rank: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    targets = torch.arange(4) + rank
    weight = whole(model.head.weight)
    chunks = [F.cross_entropy(part @ weight.T, t) for part, t in zip(run(x).split(2), targets.split(2), strict=True)]
    penalty = 0.1 * whole(model.body[0].weight).square().sum() + whole(model.scale) * (rank + 1.0)
    return torch.stack(chunks).mean() + penalty


def plain(world: int) -> dict[str, torch.Tensor]:
    """The average of what the ranks' data say, by plain PyTorch on one."""
    torch.manual_seed(1)
    model = Headless()
    torch.stack([loss_of(model, model, rank) for rank in range(world)]).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differing(rank: int, options: dict[str, Any], shape: list[int], steps: int = 2) -> list[str]:
    want = plain(dist.get_world_size())
    torch.manual_seed(1)
    names = {1: ("shard",), 2: ("replicate", "shard")}[len(shape)]
    model = zcompile.compile(
        Headless(), backend="eager", mesh=init_device_mesh("cpu", tuple(shape), mesh_dim_names=names), **options
    )
    for _ in range(steps):
        loss_of(model, model, rank).backward()
    wrong = []
    for name, parameter in model.named_parameters():
        got = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if got is None or not torch.allclose(got, steps * want[name], atol=1e-6):
            wrong.append(f"{name}: {got} is not {steps} * {want[name]}")
    return wrong


CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"stage": 3}, [2]),
    ({"stage": 1}, [3]),
    ({"stage": 2}, [2]),
    ({"stage": 3}, [3]),
    ({"stage": 3, "whole": ["head.weight", "body.0.weight"]}, [2]),
    ({"stage": 3}, [2, 2]),
    ({"stage": 0}, [2]),
]


@quickly("options, shape", CASES, [CASES[0], CASES[4]], pairs=False)
def test_gradients_through_full_tensors_are_averages(
    threads: Threads, options: dict[str, Any], shape: list[int]
) -> None:
    world = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    assert threads.run(world, differing, options, shape) == [[]] * world


def trained(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    """Parameters after three steps, with `.grad` read by nobody but the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter).detach().clone() for parameter in model.parameters()]


def trained_in_shards(rank: int, names: list[str]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = zcompile.compile(Headless(), stage=3, whole=names, backend="eager")
    return trained(model, lambda run: loss_of(run, run, rank))


def test_optimizers_step_owned_parameters_by_gradients_through_full_tensors(threads: Threads) -> None:
    torch.manual_seed(1)
    want = trained(Headless(), lambda run: torch.stack([loss_of(run, run, rank) for rank in range(2)]).mean())
    for got in threads.run(2, trained_in_shards, ["head.weight", "body.0.weight"]):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@on_ranks(2)
def test_full_tensors_need_gradients_where_their_parameters_do(rank: int) -> None:
    model = zcompile.compile(Headless(), stage=3, backend="eager")
    with torch.no_grad():
        one = model.head.weight.full_tensor()
    model.head.weight.requires_grad_(False)
    other = model.head.weight.full_tensor()
    assert not one.requires_grad
    assert not other.requires_grad
    assert model.body[0].weight.full_tensor().requires_grad
