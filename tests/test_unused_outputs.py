"""Results that a loss leaves out: parameters that are reached through them alone have no gradient, on any rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_threads
from tests.threads import Threads
from zcompile import AgreementError
from zcompile.torch_internals.dispatch import TorchDispatchMode


class Heads(nn.Module):
    """A body and three heads, of which a loss uses some; `scale` is written to in place, the last result is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        hidden = torch.tanh(self.body(x))
        first, second, third = (head(hidden) for head in self.heads)
        return first, second, third.t()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Heads()


def given(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


Uses = Callable[[int, int], tuple[int, ...]]
"""Which results the loss of a rank uses at a step."""


def alternating(rank: int, step: int) -> tuple[int, ...]:
    return (step % 2,)


def by_rank(rank: int, step: int) -> tuple[int, ...]:
    return ((rank + step) % 2,)


def one_then_all(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 2) if step == 1 and rank == 0 else (2,)


USES = {"alternating": alternating, "by rank": by_rank, "one, then all": one_then_all}


def loss_of(results: tuple[torch.Tensor, ...], used: tuple[int, ...]) -> torch.Tensor:
    return sum(results[index].square().mean() for index in used)  # type: ignore[return-value]


def expected(world: int, uses: Uses, steps: int, micro: int) -> tuple[list[dict[str, bool]], list[torch.Tensor]]:
    """By plain PyTorch: whether each gradient is None at each step, and the parameters at the end."""
    reference = model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    missing = []
    for step in range(steps):
        copies = [copy.deepcopy(reference) for _ in range(world)]
        for rank, own in enumerate(copies):
            for part in range(micro):
                loss_of(own(given(rank, step * micro + part)), uses(rank, step * micro + part)).backward()
        for name, parameter in reference.named_parameters():
            found = [own.get_parameter(name).grad for own in copies]
            grads = [grad for grad in found if grad is not None]
            parameter.grad = sum(grads) / world if grads else None  # type: ignore[assignment]
        missing.append({name: p.grad is None for name, p in reference.named_parameters()})
        update(optimizer)
    return missing, [p.detach() for p in reference.parameters()]


def trained(rank: int, stage: int, uses: str, micro: int, way: str) -> tuple[list[dict[str, bool]], list[Any]]:
    plain = model()
    backend = zcompile.backend(stage=stage, backend="eager") if way == "backend" else None
    if backend is not None:
        called: Any = torch.compile(plain, backend=backend)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
        holder: nn.Module = plain
    else:
        called = holder = zcompile.compile(plain, stage=stage, backend="eager")
        optimizer = torch.optim.AdamW(holder.parameters(), lr=0.1, weight_decay=0.5)
    missing = []
    for step in range(3):
        for part in range(micro):
            number = step * micro + part
            last = part == micro - 1
            if last or way != "no_sync":
                loss_of(called(given(rank, number)), USES[uses](rank, number)).backward()
            else:
                with called.no_sync():
                    loss_of(called(given(rank, number)), USES[uses](rank, number)).backward()
        missing.append({name: p.grad is None for name, p in holder.named_parameters()})
        update(optimizer)
    shards = backend.shards().values() if backend is not None else holder.parameters()
    return missing, [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in shards]


CASES = [
    (2, stage, uses, micro, way)
    for stage in range(4)
    for uses, micro, way in (
        ("alternating", 1, "loop"),
        ("by rank", 1, "loop"),
        ("one, then all", 3, "no_sync"),
        ("alternating", 2, "accumulation"),
    )
]
CASES += [(3, 3, "by rank", 1, "loop"), (2, 0, "alternating", 1, "backend"), (2, 3, "alternating", 1, "backend")]


@pytest.mark.slow
@quickly("world, stage, uses, micro, way", CASES, CASES[10:12], pairs=False)
def test_no_gradient_where_none_flows(
    threads: Threads, world: int, stage: int, uses: str, micro: int, way: str
) -> None:
    missing, values = expected(world, USES[uses], 3, micro)
    assert any(any(step.values()) for step in missing), "the case is about gradients that are None"
    for found, parameters in threads.run(world, trained, stage, uses, micro, way):
        assert found == missing
        for ours, theirs in zip(parameters, values, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# -- results that are left out cost nothing ---------------------------------------------------------------------------


class Speaks(nn.Module):
    """Logits in each of the ways in which models return them beside a loss, as they are, as a view and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, WORDS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(logits[..., 0].numel(), dtype=torch.long))
        return loss, logits, hidden.transpose(0, 1), logits[:, :2]


WORDS = 37


class Sizes(TorchDispatchMode):
    """What operations of a backward are as large as logits, by name."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.numel and not func.is_view:
            self.found.append(func.name())
        return result


@quickly("backend", ["eager", "inductor"], [], slow=["eager"])
def test_the_tangent_of_what_a_loss_leaves_out_is_nowhere(backend: str) -> None:
    torch.manual_seed(0)
    plain = Speaks()
    compiled = zcompile.compile(copy.deepcopy(plain), stage=3, backend=backend)
    for rows, uses in [(4, [0]), (4, [0]), (4, [0, 1]), (4, [0, 3]), (4, [2]), (6, [0]), (6, [1, 2]), (5, [0])]:
        x = torch.randn(rows, 3, 5)
        for model in (plain, compiled):
            model.zero_grad()
            results = model(x)
            loss = sum(results[use].square().mean() for use in uses)
            with Sizes(rows * 3 * WORDS) as sizes:
                loss.backward()  # type: ignore[union-attr]
        for param, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
            found = param.grad if param.grad is None else param.grad.to_local()  # type: ignore[attr-defined]
            torch.testing.assert_close(found, wanted.grad, rtol=0, atol=1e-6 if backend == "inductor" else 0)
        if uses == [0]:
            assert not {"aten::zeros", "aten::full", "aten::add.Tensor"}.intersection(sizes.found)


@pytest.mark.slow
def test_a_mode_that_compares_sizes_has_nothing_compiled_for_these_alone() -> None:
    torch.manual_seed(0)
    compiled = zcompile.compile(Speaks(), stage=3, backend="inductor")
    plain = Speaks()
    plain.load_state_dict(compiled.full_state_dict())
    for rows, uses in [(4, [0]), (6, [0]), (6, [1, 2]), (5, [1, 2])]:
        x = torch.randn(rows, 3, 5)
        for model in (plain, compiled):
            model.zero_grad()
            results = model(x)
            with Sizes(rows * 3 * WORDS):
                sum(results[use].square().mean() for use in uses).backward()  # type: ignore[union-attr]
        for param, wanted in zip(compiled.parameters(), plain.parameters(), strict=True):
            if wanted.grad is not None:
                torch.testing.assert_close(param.grad.to_local(), wanted.grad)  # type: ignore[union-attr]


class Joined(Heads):
    """On the second rank the first result is the sum of two: there, both their heads are reached together."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = super().forward(x)
        return (first + second, third) if self.rank else (first, second, third)


@on_threads(2)
def test_parameters_that_are_not_reached_alike_on_all_ranks_are_refused(rank: int) -> None:
    """Which of them have a gradient is told by groups, and these ranks have others."""
    compiled = zcompile.compile(Joined(rank), stage=1, backend="eager")
    with pytest.raises(AgreementError) as refused:
        loss_of(compiled(given(rank, 0)), (0,)).backward()
    message = str(refused.value)
    assert "give gradients through other results on some ranks than on others" in message
