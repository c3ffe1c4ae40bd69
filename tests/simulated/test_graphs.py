"""CUDA graphs, by torch's own trees on the simulated device: the same numbers, and nothing captured that moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.ranks import Ranks

STEPS = 6


def given(rank: int, step: int, size: int = 4) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in batch("gpt", rank, step, size)]


def plainly(model: nn.Module, rank: int, step: int) -> Any:
    model(*given(rank, step)).backward()


def accumulating(model: Any, rank: int, step: int) -> Any:
    with model.no_sync():
        model(*given(rank, step)).backward()
        model(*given(rank, step + 10)).backward()
    model(*given(rank, step + 20)).backward()


def two_forwards(model: nn.Module, rank: int, step: int) -> Any:
    """Two graphs are alive at once in every other step, and end in either order."""
    losses = [model(*given(rank, step + 10 * number)) for number in range(1 + step % 2)]
    for loss in losses if step % 4 == 1 else reversed(losses):
        loss.backward()


def overlapping(model: Any, rank: int, step: int) -> Any:
    """A backward comes only when the next forwards have been."""
    first, second = model(*given(rank, step)), model(*given(rank, step + 10))
    second.backward()
    third = model(*given(rank, step + 20))
    first.backward()
    third.backward()


def unfinished(model: nn.Module, rank: int, step: int) -> Any:
    """More forwards than a path has, each while the result of the one before is alive."""
    for number in range(12):
        loss = model(*given(rank, step + 10 * number))
    loss.backward()


def retaining(model: nn.Module, rank: int, step: int) -> Any:
    loss = model(*given(rank, step))
    loss.backward(retain_graph=step % 2 == 0)
    if step % 2 == 0:
        loss.backward()


def dropping(model: nn.Module, rank: int, step: int) -> Any:
    """Some forwards never see their backward."""
    if step % 2:
        model(*given(rank, step + 10))
    plainly(model, rank, step)


def evaluating(model: nn.Module, rank: int, step: int) -> Any:
    loss = model(*given(rank, step))
    with torch.no_grad():
        model(*given(rank, step + 10))
    loss.backward()
    with torch.no_grad():
        model(*given(rank, step + 20))


def resetting(model: nn.Module, rank: int, step: int) -> Any:
    """What torch has compiled and captured is forgotten meanwhile."""
    if step == 3:
        torch.compiler.reset()
    plainly(model, rank, step)


def varying(model: nn.Module, rank: int, step: int) -> Any:
    model(*given(rank, step, size=2 + step % 3)).backward()


WAYS: dict[str, Callable[[Any, int, int], Any]] = {
    "plainly": plainly,
    "accumulating": accumulating,
    "two_forwards": two_forwards,
    "overlapping": overlapping,
    "unfinished": unfinished,
    "retaining": retaining,
    "dropping": dropping,
    "evaluating": evaluating,
    "resetting": resetting,
    "varying": varying,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "checkpoint": {"stage": 3, "checkpoint": "unit"},
    "chunks": {"stage": 3, "chunk": 8},
    "activations": {"stage": 3, "offload_activations": "cpu"},
    "parameters": {"stage": 3, "offload_parameters": "cpu"},
}


def trained(rank: int, way: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Losses are kept to the end: whose memory they have been would be seen."""
    compiled = zcompile.compile(make("gpt").cuda(), backend="eager", **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    kept = list[torch.Tensor]()
    compiled.register_forward_hook(lambda module, args, result: kept.append(result.detach()))
    for step in range(STEPS):
        WAYS[way](compiled, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return [*values(compiled), *(loss.cpu() for loss in kept)]


def _both(rank: int, train: Any, way: str, options: dict[str, Any]) -> tuple[list[bool], list[str], int]:
    """Whether the numbers are those without graphs; findings; how many graphs a step replays."""
    from tests.simulated.device import checker

    checker.findings.clear()
    with_graphs = train(rank, way, {**options, "cuda_graphs": True})
    launched = checker.launches["a CUDA graph"]
    without = train(rank, way, options)
    same = [torch.equal(one, other) for one, other in zip(with_graphs, without, strict=True)]
    return same, [str(finding) for finding in checker.findings.values()], launched


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@quickly(
    "way, name",
    [*itertools.product(WAYS, OPTIONS)],
    [("overlapping", "stage 3")],
    slow=(),
)
def test_graphs_compute_what_is_computed_without(gpus: Ranks, name: str, way: str) -> None:
    check(gpus.run(2, _both, trained, way, OPTIONS[name], timeout=300))


def check(answers: Sequence[tuple[list[bool], list[str], int]]) -> None:
    for same, findings, launched in answers:
        assert findings == []
        assert all(same), same
        assert launched


def forward_graphs(rank: int, stage: int) -> int:
    """How many graphs a forward replays."""
    from tests.simulated.device import checker

    compiled = zcompile.compile(make("gpt").cuda(), backend="eager", stage=stage, cuda_graphs=True)
    for step in range(STEPS):
        checker.launches.clear()
        loss = compiled(*given(rank, step))
        launched = checker.launches["a CUDA graph"]
        loss.backward()
        compiled.zero_grad()
    return launched


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_regions_that_nothing_parts_are_one_graph(gpus: Ranks) -> None:
    assert gpus.run(2, forward_graphs, 0) == [1, 1]
    (parted, _) = gpus.run(2, forward_graphs, 3)
    assert parted > 1  # by gathers and releases


class Drawing(nn.Module):
    """Random numbers are drawn in the forward, and its results are no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        self.last = x.detach() * 2
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu(), 0.3) + x
        return x.sum(1, keepdim=True) - y, x.transpose(0, 1)


def returning(rank: int, _: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Results that are held on to, and written to, while steps go on."""
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    compiled = zcompile.compile(Drawing().cuda(), backend="eager", **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    kept = list[torch.Tensor]()
    for step in range(STEPS):
        x, y = (tensor.cuda() for tensor in batch("mlp", rank, step))
        x.requires_grad_()
        error, hidden = compiled(x, y)
        (error.square().mean() + hidden.mean()).backward()
        kept += [error.detach().add_(1), hidden.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*values(compiled), compiled.calls.cpu(), *(tensor.cpu() for tensor in kept)]


class Waves(nn.Module):
    """Nothing that its forward saves is a view, by which torch would see that it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin().exp()


def waving(rank: int, _: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Once the path of one forward and its backward is known: two forwards, whose backwards come in either order."""
    compiled = zcompile.compile(Waves().cuda(), backend="eager", **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(STEPS):
        count = 1 if step < 3 else 2
        results = [compiled(torch.full((6, 2), float(step + rank + number), device="cuda")) for number in range(count)]
        for result in results if step % 2 else reversed(results):
            result.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(compiled)


def two_models(rank: int, kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Each in a forward of its own before either has its backward, as by turns."""
    models = [zcompile.compile(make(kind, seed).cuda(), backend="eager", **options) for seed in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(STEPS):
        losses = [model(*(tensor.cuda() for tensor in batch(kind, rank, step))) for model in models]
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [value for model in models for value in values(model)]


def whole_steps(rank: int, kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    model = make(kind).cuda()
    step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters(), lr=1e-2), backend="eager", **options)
    losses = [step(*(tensor.cuda() for tensor in batch(kind, rank, number))) for number in range(STEPS)]
    return [*values(step.model), *(loss.cpu() for loss in losses)]


def by_torch_compile(rank: int, kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    model = make(kind).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=zcompile.backend(backend="eager", **options))
    for step in range(STEPS):
        compiled(*(tensor.cuda() for tensor in batch(kind, rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_local(param).cpu() for param in optimizer.param_groups[0]["params"]]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [_local(tensor).cpu() for tensor in (*model.parameters(), *model.buffers())]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@quickly(
    "train, kind, stage",
    [
        *((two_models, kind, stage) for kind in ("conv", "mlp") for stage in (0, 1, 2, 3)),
        *((whole_steps, kind, stage) for kind in ("conv", "gpt") for stage in (1, 3)),
        *((by_torch_compile, "gpt", stage) for stage in (0, 3)),
        *((train, "", stage) for train in (returning, waving) for stage in (0, 1, 2, 3)),
    ],
    [(waving, "", 3)],
    slow=[(two_models, "conv", 2), (whole_steps, "gpt", 1), (by_torch_compile, "gpt", 3), (returning, "", 0)],
)
def test_graphs_of_other_models(gpus: Ranks, train: Any, kind: str, stage: int) -> None:
    check(gpus.run(2, _both, train, kind, {"stage": stage}, timeout=300))
