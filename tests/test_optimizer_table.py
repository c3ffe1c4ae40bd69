"""Every cell of the table in docs/optimizers.md: optimizers over shards beside one process with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.optimizer_cases import CASES, COLUMNS, EQUAL, REFUSED, ROUNDING, Case, table
from tests.threads import Threads

WORLD = 2
PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizers.md"
Values = dict[str, torch.Tensor]
Closure = Callable[[], torch.Tensor]


def made(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.model()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(8, width, generator=generator) for width in (64, 6))
    return nn.functional.mse_loss(model(x), y)


def steps(case: Case, model: nn.Module, closure: Callable[[int], torch.Tensor]) -> Values:
    """Whole parameters behind some steps, each with the gradients that `closure` brings."""
    torch.manual_seed(0)  # some optimizers draw random numbers
    params = list(model.parameters())
    mine = [param for param in params if param.ndim == 2 or not case.matrices]
    optimizers = [case.make(mine)]
    if case.matrices:
        optimizers.append(torch.optim.AdamW([param for param in params if param.ndim != 2], lr=0.01))
    for one in optimizers:
        getattr(one, "train", lambda: None)()  # those without schedules train and evaluate at different weights
    for step in range(case.steps):
        if isinstance(optimizers[0], torch.optim.LBFGS):
            optimizers[0].step(lambda step=step: closure(step))  # type: ignore[misc]
            continue
        closure(step)
        for one in optimizers:
            one.step()
    for one in optimizers:
        getattr(one, "eval", lambda: None)()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()}


def by_one_process(case: Case) -> Values:
    model = made(case)

    def closure(step: int) -> torch.Tensor:
        grads, losses = [], []
        for rank in range(WORLD):
            model.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            losses.append(loss.detach())
            grads.append([param.grad for param in model.parameters()])
        for param, *some in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(some[1:], some[0]) / WORLD
        return torch.stack(losses).mean()

    return steps(case, model, closure)


def by_ranks(case: Case, column: str, rank: int) -> Values:
    model = made(case, rank)  # rank 0's values must win
    wanted = 2 if case.matrices else 1
    names = [name for name, param in model.named_parameters() if param.ndim >= wanted]
    whole = column == "whole="
    stage = 3 if whole else int(column)
    compiled = zcompile.compile(model, stage=stage, whole=names if whole else None, backend="eager")

    def closure(step: int) -> torch.Tensor:
        compiled.zero_grad()
        loss = loss_of(compiled, rank, step)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / WORLD

    return steps(case, compiled, closure)


def compared(rank: int, name: str, column: str) -> float | str:
    """The largest difference, as a share of the largest change of its parameter; 0.0: none. Or what was refused."""
    case = next(case for case in CASES if case.name == name)
    start = dict(made(case).named_parameters())
    try:
        ours = by_ranks(case, column, rank)
    except zcompile.OptimizerError as error:
        return str(error)
    theirs = by_one_process(case)
    assert all((theirs[name] - start[name]).abs().max() for name in start), "every parameter is stepped"
    off = [(ours[n] - theirs[n]).abs().max() / (theirs[n] - start[n]).abs().max() for n in start]
    return float(torch.stack(off).max().detach())


def differs_as(case: Case, column: str, found: float | str) -> bool:
    match case.gives(column), found:
        case (expected, str()):
            return expected == REFUSED
        case (expected, float()) if expected == EQUAL:
            return found == 0.0
        case (expected, float()) if expected == ROUNDING:
            return found < 1e-6
        case (expected, float()) if expected != REFUSED:
            return 0.0 < found <= float(expected.removeprefix("≈ "))
    return False


CELLS = [(case.name, column) for case in CASES for column in COLUMNS]
OF_TORCH = [case.name for case in CASES if case.package == "torch"]
QUICK = [(name, COLUMNS[index % len(COLUMNS)]) for index, name in enumerate(OF_TORCH)][::8]


@pytest.mark.filterwarnings("ignore")  # libraries warn of torch's own deprecations
@quickly("name, column", CELLS, QUICK, slow=())
def test_an_optimizer_gives_what_the_table_says(threads: Threads, name: str, column: str) -> None:
    case = next(case for case in CASES if case.name == name)
    pytest.importorskip(case.package)
    found = threads.run(WORLD, compared, name, column)
    assert all(differs_as(case, column, one) for one in found), found
    if case.gives(column) == REFUSED:
        assert all(any(words in str(one) for words in case.says.split("|")) for one in found), found


def test_the_page_has_the_rows_that_are_tested() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[2:] == table(), "the page has a head and these rows"
