"""Views of parameters whose sizes are the batch's: read again in the backward, with every length the plain numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcompile
from tests.cases import quickly

VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slice": lambda p, x: x * p[: x.shape[1]],
    "from the end": lambda p, x: x * p[-x.shape[1] :],
    "between": lambda p, x: x * p[x.shape[1] - 1 : 2 * x.shape[1] - 1],
    "step": lambda p, x: x * p[: 2 * x.shape[1] : 2],
    "expand": lambda p, x: x * p[0].expand_as(x),
    "broadcast": lambda p, x: x * torch.broadcast_to(p[0], x.shape),
    "row": lambda p, x: x * p[x.shape[1]],
    "narrow": lambda p, x: x * p.narrow(0, 1, x.shape[1]),
    "matmul": lambda p, x: (x @ p[: x.shape[1]].T).tanh() @ p[: x.shape[1]],
    "transposed": lambda p, x: x * p.T[:, : x.shape[1]].T,
    "view": lambda p, x: x * p.flatten()[: x.shape[1] * 8].view(x.shape[1], 8),
    "as_strided": lambda p, x: x * p.as_strided((x.shape[1], 8), (8, 1)),
    "split": lambda p, x: x * p.split(x.shape[1])[0],
    "unfold": lambda p, x: x * p.unfold(0, x.shape[1], 1)[0].T,
    "cast": lambda p, x: x * p[: x.shape[1]].double().float(),
    "cat": lambda p, x: x * torch.cat([p[:1], p[1 : x.shape[1]]]),
    "embedding": lambda p, x: x * F.embedding(torch.arange(x.shape[1]), p),
    "pad": lambda p, x: x * F.pad(p[: x.shape[1] - 1], (0, 0, 0, 1), value=1.0),
    "attention": lambda p, x: F.scaled_dot_product_attention(x, *[p[None, : x.shape[1]].expand_as(x)] * 2),
    "relative": lambda p, x: x + (p[: x.shape[1]] @ p[: x.shape[1]].T).softmax(-1) @ x,
}
BY_LENGTH = {"split", "unfold"}
"""Of these torch.compile makes a graph for each length."""


class Scaled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.positions, self.linear = kind, nn.Parameter(torch.randn(32, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(VIEWS[self.kind](self.positions, x))


@quickly(
    "kind, checkpoint",
    [(kind, checkpoint) for kind in VIEWS for checkpoint in (None, "unit")],
    [("slice", None)],
    pairs=False,
)
def test_every_length_gives_the_gradients_of_the_plain_model(kind: str, checkpoint: str | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(kind), Scaled(kind))
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager", checkpoint=checkpoint)
    for size, length in ((2, 5), (2, 6), (3, 7), (2, 3), (1, 9), (2, 8)):
        x = torch.randn(size, length, 8)
        losses = [model(x).square().mean() for model in (compiled, plain)]
        torch.testing.assert_close(*losses)
        for model, loss in zip((compiled, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    if kind not in BY_LENGTH:
        assert len(compiled.programs) < 12, "fewer than a program for each length"
