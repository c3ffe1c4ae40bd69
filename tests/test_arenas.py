"""Arenas: the same numbers from memory that is kept, whatever is still alive in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import quickly
from tests.models import GPT, batch, make, update
from tests.ranks import on_threads
from tests.test_training import STEPS, train, train_ddp
from zcompile.runtime.arena import Arenas

CPU = torch.device("cpu")


# -- loans ------------------------------------------------------------------------------------------------------------


def test_a_loan_ends_with_the_last_tensor_in_it() -> None:
    arenas = Arenas(CPU)
    loan = arenas.lend(1024)
    part = loan[256:512].view(torch.float32)
    del loan
    other = arenas.lend(1024)
    assert other[0:1].data_ptr() != part.data_ptr() - 256
    assert arenas.nbytes == 2048
    at = part.data_ptr()
    del part
    assert arenas.lend(1000)[256:257].data_ptr() == at
    assert arenas.nbytes == 2048


def test_a_larger_loan_takes_the_room_of_a_free_smaller_one() -> None:
    arenas = Arenas(CPU)
    for nbytes in (100, 300, 200):
        arenas.lend(nbytes)
    assert arenas.nbytes == 300


def test_parts_of_a_loan_do_not_count_as_changed_with_each_other() -> None:
    loan = Arenas(CPU).lend(1024)
    one, other = loan[0:256], loan[256:512]
    before = one._version
    other.fill_(1)
    assert one._version == before


def test_a_loan_is_found_by_what_lies_in_it() -> None:
    arenas = Arenas(CPU)
    loan = arenas.lend(1024)
    part = loan[512:768].view(torch.float32).view(8, 8)
    found = arenas.loan_of([torch.ones(3), part[2:]])
    assert found is not None
    assert found[512:513].data_ptr() == part.data_ptr()
    assert arenas.loan_of([torch.ones(3)]) is None


# -- training ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {"prefetch": 1},
    "unit": {"checkpoint": "unit", "prefetch": 2},
}


@pytest.mark.slow
@quickly("kind", ["gpt", "mlp", "conv"], ["gpt"], slow=())
@on_threads(2)
def test_numbers_are_those_of_ddp(rank: int, kind: str) -> list[str]:
    want = train_ddp(rank, kind, STEPS)
    differing = []
    for case, options in OPTIONS.items():
        if case == "plain" or kind == "gpt":
            got, _, _ = train(rank, kind, STEPS, backend="eager", arenas=True, **options)
            differing += [f"{case} {name}" for name in want if not torch.equal(got[name], want[name])]
    return differing


@quickly("stage, backend", [(3, "eager"), (1, "inductor"), (3, "inductor")], [], slow=[(3, "eager")])
@on_threads(3)
def test_in_an_odd_world_nothing_changes(rank: int, stage: int, backend: str) -> list[str]:
    options = {"stage": stage, "dtype": torch.bfloat16, "checkpoint": "unit", "backend": backend}
    want, _, _ = train(rank, "gpt", 3, **options)
    got, _, _ = train(rank, "gpt", 3, arenas=True, **options)
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.slow
@on_threads(2)
def test_what_a_backward_still_needs_is_left_alone(rank: int) -> list[str]:
    """Gradients of two losses whose backwards run last first, of one kept graph run twice, and of a failed step."""
    found = []
    for arenas in (False, True):
        compiled = zcompile.compile(make("gpt"), backend="eager", checkpoint="unit", arenas=arenas)
        losses = [compiled(*batch("gpt", rank, step)) for step in range(3)]
        with torch.no_grad():
            compiled(*batch("gpt", rank, 3))
        losses[1].backward()
        losses[2].backward(retain_graph=True)
        compiled(*batch("gpt", rank, 4))
        losses[2].backward()
        losses[0].backward()
        found.append([param.grad.to_local().clone() for param in compiled.parameters()])
    return [f"{n}" for n, (one, other) in enumerate(zip(*found, strict=True)) if not torch.equal(one, other)]


@pytest.mark.slow
@on_threads(2)
def test_arenas_stop_growing_once_they_have_seen_the_largest_batch(rank: int) -> None:
    compiled = zcompile.compile(GPT(layers=3, width=32), backend="eager", checkpoint="unit", arenas=True)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    kept = []
    for step in range(30):
        size = 2 + (7 * step + rank) % 9
        tokens = torch.randint(0, 64, (size, 16))
        compiled(tokens, tokens).backward()
        update(optimizer)
        kept.append(compiled._engine.runtime.arenas.nbytes)
    assert len(set(kept[10:])) == 1


class Dropping(nn.Module):
    """Units that draw random numbers, which their backward draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Sigmoid()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@on_threads(1)
def test_states_of_random_numbers_stay_where_torch_can_read_them(rank: int, backend: str) -> list[str]:
    found = []
    for arenas in (False, True):
        torch.manual_seed(0)
        compiled = zcompile.compile(Dropping(), backend=backend, checkpoint="unit", units=["parts.*"], arenas=arenas)
        compiled(torch.ones(4, 8)).backward()
        found.append({name: param.grad.to_local() for name, param in compiled.named_parameters()})
    return [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


class Recomputing(nn.Module):
    """Units of which the user's own checkpoint computes a part again, random numbers of two kinds in it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(first: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(first(x).sigmoid(), 0.5) * torch.rand_like(x).mean()

        for first, second in self.parts:  # type: ignore[misc]
            x = x + torch.tanh(second(checkpoint(inner, first, x.sin(), use_reentrant=False)))
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@on_threads(1)
def test_states_that_the_users_checkpoint_saves_stay_where_they_are(rank: int, backend: str, tmp_path: Path) -> None:
    every: list[dict[str, Any]] = [{}, {"arenas": True}, {"offload_activations": f"disk:{tmp_path}"}]
    found = []
    for options in every:
        torch.manual_seed(0)
        compiled = zcompile.compile(Recomputing(), backend=backend, checkpoint="unit", units=["parts.*"], **options)
        compiled(torch.ones(4, 8)).backward()
        found.append({name: param.grad.to_local() for name, param in compiled.named_parameters()})
    for other in found:
        assert [name for name, gradient in found[0].items() if not torch.equal(gradient, other[name])] == []


def test_a_limit_beside_them_is_refused() -> None:
    with pytest.raises(zcompile.OptionError, match=r"arenas(.|\n)*leave one of the two out"):
        zcompile.compile(make("mlp"), arenas=True, memory_limit="1 GiB")
