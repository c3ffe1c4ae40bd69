"""What these tests compare with: plain modules, whose gradients are averaged over the ranks by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.compare import full, gradients, parameters
from tests.models import update

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Values = dict[str, torch.Tensor | None]


class Block(nn.Module):
    """Two layers around a nonlinearity, whose sizes no world divides."""

    def __init__(self, width: int = 7, inner: int = 5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between an embedding of numbers and a head."""

    def __init__(self, blocks: int = 3, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def numbers(rank: int, step: int, *shape: int) -> torch.Tensor:
    """What a rank is given at a step, the same in every run."""
    return torch.randn(*(shape or (4, 7)), generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_square(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the gradients of a plain model; one that no rank has stays None, and one that some have is zero there."""
    for param in model.parameters():
        there = torch.tensor(0.0 if param.grad is None else 1.0)
        dist.all_reduce(there, group=group)
        if there:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad, group=group)
            param.grad = grad / dist.get_world_size(group)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, zcompile.CompiledModule]:
    """A plain model, and the same compiled. Stage 3 and eager regions are the defaults."""
    torch.manual_seed(0)
    plain = make()
    return plain, zcompile.compile(copy.deepcopy(plain), **{"backend": "eager", **options})


def differing(got: Values, want: Values, where: str, tolerance: float = 1e-6) -> list[str]:
    """Names of what differs by more than rounding; 0 asks for the same bits."""
    assert list(got) == list(want)
    found = []
    for name, theirs in want.items():
        ours = got[name]
        if ours is None or theirs is None:
            same = ours is theirs
        elif tolerance:
            same = torch.allclose(ours, theirs, rtol=10 * tolerance, atol=tolerance)
        else:
            same = torch.equal(ours, theirs)
        found += [] if same else [f"{where}: {name}"]
    return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay: a step that does not skip a parameter without gradient shows."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def beside(
    plain: nn.Module,
    compiled: nn.Module,
    batches: Iterable[torch.Tensor],
    loss: Loss = mean_square,
    *,
    tolerance: float = 1e-6,
) -> list[str]:
    """Train both on this rank's batches, and tell what differs: losses, gradients and parameters of each step."""
    optimizers = [adam(plain), adam(compiled)]
    found: list[str] = []
    for step, batch in enumerate(batches):
        losses: list[torch.Tensor] = []
        for model in (plain, compiled):
            losses.append(loss(model, batch))
            losses[-1].backward()
        average(plain)
        found += differing({"loss": full(losses[1])}, {"loss": full(losses[0])}, f"step {step}", tolerance)
        found += differing(gradients(compiled), gradients(plain), f"step {step}, gradient", tolerance)
        update(*optimizers)
        found += differing(parameters(compiled), parameters(plain), f"step {step}, parameter", tolerance)
    return found


def three(rank: int) -> list[torch.Tensor]:
    """Batches of three steps."""
    return [numbers(rank, step) for step in range(3)]
