"""Autograd: whatever a forward takes and gives, gradients reach every parameter that a loss depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.as_fsdp2.plain import Block, Net, average, beside, differing, gradients, numbers, pair, three
from tests.cases import quickly
from tests.ranks import on_threads
from tests.threads import Threads

# -- what a forward gives ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Out:
    value: torch.Tensor
    inner: dict[str, Any]
    nothing: None = None
    label: str = "a label"


def nested(x: torch.Tensor, y: torch.Tensor) -> Any:
    return [x, ({"deep": (y, None)}, 3), "text"]


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda out: out["x"].sum() + out["y"].square().sum()),
    "named tuple": (Pair, lambda out: out.first.sum() + out.second.square().sum()),
    "dataclass": (lambda x, y: Out(x, {"y": [y]}), lambda out: out.value.sum() + out.inner["y"][0].square().sum()),
    "nested": (nested, lambda out: out[0].sum() + out[1][0]["deep"][0].square().sum()),
    "views": (lambda x, y: (x[:, :2], x.t(), y), lambda out: out[0].sum() + out[1].square().sum() + out[2].sum()),
    "the same twice": (lambda x, y: (x, x, y), lambda out: (out[0] * out[1]).sum() + out[2].sum()),
    "detached beside": (lambda x, y: (x.detach(), y + x), lambda out: (out[0] * out[1]).sum()),
    "integers beside": (lambda x, y: (x.argmax(-1), x + y), lambda out: (out[1].gather(1, out[0][:, None])).sum()),
}


class Giving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.other = nn.Linear(7, 7)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return OUTPUTS[self.kind][0](x, torch.tanh(self.other(x)))


@pytest.mark.slow
@quickly(
    "kind, world, stage",
    [(kind, world, stage) for kind in OUTPUTS for world in (2, 3) for stage in (3, 2)],
    [("nested", 2, 3)],
    pairs=False,
)
@on_threads()
def test_a_backward_goes_through_outputs_of_every_form(rank: int, kind: str, world: int, stage: int) -> list[str]:
    plain, compiled = pair(lambda: Giving(kind), stage=stage)
    assert type(plain(numbers(rank, 0))) is type(compiled(numbers(rank, 0)))
    return beside(plain, compiled, three(rank), lambda model, x: OUTPUTS[kind][1](model(x)), tolerance=1e-5)


# -- what a forward takes ---------------------------------------------------------------------------------------------


class Taking(Net):
    def forward(self, parts: dict[str, Any], *rest: torch.Tensor, factor: int = 2, mask: Any = None) -> torch.Tensor:
        x = parts["x"] + parts["more"][0].mean()
        for part in rest:
            x = x + part
        y = super().forward(x)
        return (y if mask is None else y * mask).square() * factor


def take(model: Any, x: torch.Tensor) -> torch.Tensor:
    given = {"x": x, "more": [x.square(), None]}
    plainly = model(given, x.sin(), x.cos(), factor=2).mean()
    return plainly + model(given, factor=3, mask=torch.ones(3)).mean()


@pytest.mark.slow
@on_threads(2)
def test_arguments_may_be_nested_variable_and_no_tensors(rank: int) -> list[str]:
    plain, compiled = pair(Taking)
    return beside(plain, compiled, three(rank), take)


@pytest.mark.slow
@on_threads(2)
def test_gradients_of_inputs_are_the_ranks_own(rank: int) -> list[str]:
    plain, compiled = pair(Net)
    found = []
    inputs = [numbers(rank, 0).requires_grad_() for _ in range(2)]
    for model, x in zip((plain, compiled), inputs, strict=True):
        (model(x.sin()).square().mean() * 3).backward()
    average(plain)
    if not torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-6):
        found.append("the gradient of the input")
    return found + differing(gradients(compiled), gradients(plain), "gradient")


# -- what of it a loss uses -------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Three heads; `skips` leaves a block out of the forward."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(7, 2) for _ in range(3))
        self.skips = skips

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for block in self.blocks[::2] if self.skips else self.blocks:
            x = block(x)
        return [head(x) for head in self.heads]


USES = [(which, skips) for which in ("one", "another on each rank", "another in each step") for skips in (False, True)]


@pytest.mark.slow
@quickly("which, skips", USES, [USES[3], USES[4]], pairs=False)
@on_threads(3)
def test_unused_outputs_and_modules_have_no_gradient_and_others_have_theirs(
    rank: int, which: str, skips: bool
) -> list[str]:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        heads = model(x)
        if which == "one":
            return heads[1].square().mean()
        if which == "another on each rank":
            return heads[rank].square().mean()
        step = next(step for step in range(3) if torch.equal(x, numbers(rank, step)))
        return heads[step].square().mean()

    plain, compiled = pair(lambda: Heads(skips))
    return beside(plain, compiled, three(rank), loss)


# -- ways to run a backward -------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 4 * x * grad


class Own(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubled.apply(x) + Doubled.apply(self.first(x)))


def at_once(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A backward from two roots, and then that of what is returned."""
    y = model(x)
    torch.autograd.backward([y.sum(), y.square().sum()], retain_graph=True)
    return y.mean()


def again(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


def in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.mul_(2)
    return y.square().mean()


def hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A hook on a result, which changes the gradient that enters the model."""
    y = model(x)
    y.register_hook(lambda grad: 3 * grad)
    return y.square().mean()


def with_respect_to_results(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), y, retain_graph=True)
    return (grad.detach() * y).sum()


BACKWARDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    way.__name__: way for way in (at_once, again, in_place, hooked, with_respect_to_results)
}


@pytest.mark.slow
@quickly(
    "way, model",
    [(way, model) for way in BACKWARDS for model in ("net", "own")],
    [("hooked", "net")],
    pairs=False,
)
@on_threads(2)
def test_a_backward_may_be_run_in_every_way(rank: int, way: str, model: str) -> list[str]:
    plain, compiled = pair({"net": Net, "own": Own}[model])
    return beside(plain, compiled, three(rank), BACKWARDS[way], tolerance=1e-5)


def penalised(rank: int) -> str:
    _, compiled = pair(Net)
    x = numbers(rank, 0).requires_grad_()
    try:
        (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    except Exception as error:
        return type(error).__name__
    return "ran"


@pytest.mark.slow
def test_gradients_of_gradients_are_refused(threads: Threads) -> None:
    assert threads.run(2, penalised) == ["BackwardError"] * 2
