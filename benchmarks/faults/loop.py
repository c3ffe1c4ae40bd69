"""Training loops as strings, one letter an operation: what a rank is told to do, on zcompile or on plain PyTorch.

    F forward with gradients         E evaluate under no_grad       C save_checkpoint
    B backward of the last forward   V evaluate in eval() mode      D full_state_dict
    R backward that keeps the graph  S optimizer.step()             O load_checkpoint
    A micro-batch within no_sync     Z optimizer.zero_grad()        G clip_grad_norm_
    T a call of train_step
    M full_state_dict and momenta    c save_checkpoint, asynchronous, waited for by w
    Y, y: from here on half the learning rate, another weight decay
    L, f, g: a forward of a larger batch, through other arithmetic, past a block

and faults of a process, which a plain loop knows as its end or as nothing:

    K killed      X os._exit(1)       P stopped    p stopped, and continued after some seconds
    W 12 s late   N never comes back  k killed within the next moments
    ! an exception of the user's own
    h an exception in a backward's hook   o in the optimizer's step   t in the loss of train_step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

FORWARDS = "FLfg"
ENDS = "KXNP!hot"
"""The last thing that a rank does."""
SOMETIME = "k"
KILLED = "KXPk"
MOMENTS = (0.001, 1.0)
"""The least and the most seconds after which `k` kills; each power of ten is as likely as any other."""
LATE = 12.0
RATE = 0.1
DECAY = 0.1
NORM = 0.05


@dataclass(frozen=True)
class Op:
    """One operation of a rank's loop."""

    letter: str
    place: int
    """How many came before it: batches follow from it."""

    def batch(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rank trains on here, or evaluates."""
        generator = torch.Generator().manual_seed(1000 * self.place + rank)
        size = 5 if self.letter == "L" else 3
        return torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator)

    @property
    def path(self) -> str:
        """Which way through the model a forward takes."""
        return {"f": "other", "g": "past"}.get(self.letter, "straight")


BEFORE = Op("start", -1)
"""What a rank does until its first operation."""


class Net(nn.Module):
    """Sizes that few worlds divide; a unit for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, path: str = "straight") -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if path == "past" and number == 1:
                continue
            x = x + (torch.sin(block(x)) if path == "other" else torch.tanh(block(x)))
        loss: torch.Tensor = (self.head(x) - y).square().mean()
        return loss


def make_model() -> Net:
    """The same on every rank, and on every thread: they share torch's own generator."""
    model, generator = Net(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.4, 0.4, generator=generator)
    return model


def set_otherwise(optimizer: torch.optim.Optimizer, letter: str) -> None:
    """What Y and y do."""
    for group in optimizer.param_groups:
        if letter == "Y":
            group["lr"] /= 2
        else:
            group["weight_decay"] += DECAY


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
