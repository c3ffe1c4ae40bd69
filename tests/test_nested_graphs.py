"""`torch.compiler.nested_compile_region`: the program computes what that of code does which is not marked.

A region within a region is refused by torch 2.13, whatever the backend.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_threads


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Inner(), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.inner(self.norm(x)), 0.25, self.training)


def model(marked: type[nn.Module] | None) -> nn.Module:
    class MarkedInner(Inner):
        pass

    class MarkedBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MarkedInner()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(MarkedBlock() for _ in range(3))
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x).square().mean()

    for kind, base in ((MarkedInner, Inner), (MarkedBlock, Block)):
        if base is marked:
            kind.forward = torch.compiler.nested_compile_region(base.forward)  # type: ignore[method-assign]
    torch.manual_seed(0)
    return Model()


def trained(rank: int, marked: type[nn.Module] | None, backend: str) -> tuple[list[list[str]], list[torch.Tensor]]:
    torch.compiler.reset()
    compiled = zcompile.compile(model(marked), backend=backend)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(2):
        compiled(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        update(optimizer)
    with torch.no_grad():
        last = compiled.eval()(torch.ones(3, 6))
    sent = [program.communications() for program in compiled.programs]
    return sent, [last, *compiled.full_state_dict().values()]


WAYS = [(marked, backend) for marked in (Inner, Block) for backend in ("eager", "inductor")]


@pytest.mark.slow
@quickly("marked, backend", WAYS, [(Inner, "eager")], pairs=False)
@on_threads(2)
def test_marked_blocks_train_with_the_same_bits(rank: int, marked: type[nn.Module], backend: str) -> None:
    plain, found = trained(rank, None, backend), trained(rank, marked, backend)
    assert found[0] == plain[0]
    for one, other in zip(found[1], plain[1], strict=True):
        assert torch.equal(one, other)
