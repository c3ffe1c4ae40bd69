"""Stage 0 keeps plain parameters, so the model's submodules and methods train as they are: as under DDP, averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_ranks
from tests.threads import Threads


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)
        self.spare = nn.Linear(7, 2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def by_method(called: Any, rank: int, step: int) -> torch.Tensor:
    return called.head(called.encode(batch(rank, step))).square().mean()


def both(called: Any, rank: int, step: int) -> torch.Tensor:
    return called(batch(rank, step)).square().mean() + by_method(called, rank, step + 7)


def penalty(called: Any, rank: int, step: int) -> torch.Tensor:
    return called(batch(rank, step)).square().mean() + 0.1 * (rank + 1) * called.head.weight.square().sum()


def one_rank_has_more(called: Any, rank: int, step: int) -> torch.Tensor:
    loss = by_method(called, rank, step)
    return loss + called.spare(called.encode(batch(rank, step))).sum() if rank == 1 else loss


LOSSES: dict[str, Callable[[Any, int, int], torch.Tensor]] = {
    "by method": by_method,
    "both": both,
    "penalty": penalty,
    "one rank has more": one_rank_has_more,
}


def trained(rank: int, loss: str, micro: int) -> tuple[list[torch.Tensor], list[bool]]:
    compiled = zcompile.compile(model(), stage=0, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    for step in range(3):
        for part in range(micro):
            if part < micro - 1:
                with compiled.no_sync():
                    LOSSES[loss](compiled, rank, step * micro + part).backward()
            else:
                LOSSES[loss](compiled, rank, step * micro + part).backward()
        missing = [p.grad is None for p in compiled.parameters()]
        update(optimizer)
    return [p.detach().clone() for p in compiled.parameters()], missing


MICRO = [*((name, 1) for name in LOSSES), ("both", 3)]


@quickly("loss, micro", MICRO, MICRO[1:4:2] + MICRO[-1:])
def test_gradients_from_outside_of_the_models_call_are_averaged(threads: Threads, loss: str, micro: int) -> None:
    reference = model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(3):
        copies = [copy.deepcopy(reference) for _ in range(2)]
        for rank, own in enumerate(copies):
            for part in range(micro):
                LOSSES[loss](own, rank, step * micro + part).backward()
        for name, parameter in reference.named_parameters():
            grads = [g for own in copies if (g := own.get_parameter(name).grad) is not None]
            parameter.grad = sum(grads) / 2 if grads else None  # type: ignore[assignment]
        missing = [p.grad is None for p in reference.parameters()]
        update(optimizer)
    for parameters, without in threads.run(2, trained, loss, micro):
        assert without == missing
        for ours, theirs in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_autograd_grad_gives_this_ranks_own_as_it_is(rank: int) -> None:
    compiled = zcompile.compile(model(), stage=0, backend="eager")
    (found,) = torch.autograd.grad(by_method(compiled, rank, 0), [compiled.head.weight])
    plain = model()
    (wanted,) = torch.autograd.grad(by_method(plain, rank, 0), [plain.head.weight])
    assert (torch.equal(found, wanted), compiled.head.weight.grad is None) == (True, True)
