"""The whole state of an optimizer of shards: what DistributedDataParallel's optimizer has, and back into any stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import quickly
from tests.models import batch, make, update
from tests.ranks import Ranks, on_ranks
from zcompile import OptimizerError, StateError

State = dict[str, Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [p for p in model.parameters() if p.dim() < 2]}], lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, foreach=False),
    "partial": lambda model: torch.optim.RMSprop(list(model.parameters())[1:4], lr=1e-3, centered=True),
    "none yet": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(*batch("mlp", dist.get_rank(), step))
        loss.backward()
        update(optimizer)
        losses.append(loss.item())
    return losses


def as_bits(state: State) -> Any:
    """What can be compared: every tensor as its type, shape and numbers."""
    kept = {
        (index, slot): (str(value.dtype), list(value.shape), value.tolist(), type(value))
        if isinstance(value, torch.Tensor)
        else value
        for index, slots in state["state"].items()
        for slot, value in slots.items()
    }
    return kept, [{key: str(value) for key, value in group.items()} for group in state["param_groups"]]


def by_ddp(name: str) -> tuple[nn.Module, torch.optim.Optimizer, State, list[float]]:
    """A model after two steps, its optimizer, what its state was then, and the losses of two steps more."""
    model = make("mlp")
    optimizer = OPTIMIZERS[name](model)
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, range(0 if name == "none yet" else 2))
    then = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    return then[0], optimizer, then[1], train(wrapped, optimizer, range(2, 4))


@pytest.mark.slow
@quickly("stage, world", [(0, 2), (1, 2), (2, 3), (3, 2), (3, 3), (3, 1)], [(0, 2)], pairs=False)
@on_ranks()
def test_whole_state_of_ddp_goes_into_every_stage_and_comes_out_again(rank: int, stage: int, world: int) -> list[str]:
    wrong = []
    for name, make_optimizer in OPTIMIZERS.items():
        plain, _, want, losses = by_ddp(name)
        model = zcompile.compile(make("mlp", seed=7), stage=stage, backend="eager")
        optimizer = make_optimizer(model)
        train(model, optimizer, range(5, 6))  # what it has before goes
        model.load_state_dict(plain.state_dict())
        model.load_full_optimizer_state_dict(optimizer, want)
        got = model.full_optimizer_state_dict(optimizer)
        if as_bits(got) != as_bits(want) if rank == 0 else got != {}:
            wrong.append(f"{name}: the state")
        if as_bits(model.full_optimizer_state_dict(optimizer, rank0_only=False)) != as_bits(want):
            wrong.append(f"{name}: the state on every rank")
        follows = train(model, optimizer, range(2, 4))  # three ranks sum in another order than DDP's
        if follows != losses if dist.get_world_size() < 3 else follows != pytest.approx(losses, rel=1e-5):
            wrong.append(f"{name}: what follows")
    return wrong


@pytest.mark.slow
@on_ranks(2)
def test_plain_training_goes_on_from_what_shards_saved(rank: int, tmp_path: Path) -> None:
    """Two steps of shards, saved for the plain model, which goes on as the shards do."""
    path = str(tmp_path / "whole.pt")
    model = zcompile.compile(make("mlp"), stage=3, backend="eager")
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    whole = {"model": model.full_state_dict(), "optimizer": model.full_optimizer_state_dict(optimizer)}
    if rank == 0:
        torch.save(whole, path)
    want = train(model, optimizer, range(2, 4))
    dist.barrier()
    read = torch.load(path, mmap=True)
    plain = make("mlp", seed=3)
    plain.load_state_dict(read["model"])
    plain_optimizer = adamw(plain)
    plain_optimizer.load_state_dict(read["optimizer"])
    assert train(DistributedDataParallel(plain), plain_optimizer, range(2, 4)) == want


class Rotating(torch.optim.Optimizer):
    """Keeps what has other shapes than the parameter, and a list, as Shampoo and SOAP do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state.update(left=torch.eye(param.shape[0]), both=[torch.zeros_like(param), 1.0], mean=param * 0)
            state["left"] += param.grad @ param.grad.T
            state["mean"] += param.grad
            state["both"][0] += param.grad
            param.sub_(state["left"] @ state["mean"] + state["both"][0], alpha=0.01)


def _flat(slots: State) -> list[Any]:
    return [leaf for slot in sorted(slots) for leaf in (slots[slot] if slot == "both" else [slots[slot]])]


@pytest.mark.slow
@on_ranks(2)
def test_state_of_owned_parameters_is_whole_too(rank: int) -> None:
    """State of parameters that one rank each has."""

    def matrices(model: nn.Module) -> Rotating:
        return Rotating([param for name, param in model.named_parameters() if name.endswith("weight")])

    plain = make("mlp")
    optimizer = matrices(plain)
    train(DistributedDataParallel(plain), optimizer, range(2))
    want = optimizer.state_dict()
    model = zcompile.compile(make("mlp"), stage=3, whole=["layers.*.weight"], backend="eager")
    optimizer = matrices(model)
    train(model, optimizer, range(2))
    got = model.full_optimizer_state_dict(optimizer, rank0_only=False)
    same = all(
        torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        for index, slots in want["state"].items()
        for one, other in zip(_flat(slots), _flat(got["state"][index]), strict=True)
    )
    losses = train(model, optimizer, range(2, 4))
    plain.zero_grad()
    again = zcompile.compile(plain, stage=2, whole=["layers.*.weight"], backend="eager")
    optimizer = matrices(again)
    again.load_full_optimizer_state_dict(optimizer, got)
    assert same
    assert train(again, optimizer, range(2, 4)) == losses


def refusals(rank: int) -> list[str]:
    """What does not fit is refused on every rank, and nothing is written."""
    model = zcompile.compile(make("mlp"), stage=3, backend="eager")
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    want = as_bits(model.full_optimizer_state_dict(optimizer, rank0_only=False))
    other = torch.optim.AdamW(make("mlp").parameters())
    shards = optimizer.state_dict()
    unlike = model.full_optimizer_state_dict(optimizer, rank0_only=False)
    if rank == 1:
        unlike["state"][99] = {}
    said = []
    for act in (
        lambda: model.full_optimizer_state_dict(other),
        lambda: model.load_full_optimizer_state_dict(optimizer, other.state_dict()),
        lambda: model.load_full_optimizer_state_dict(optimizer, shards),
        lambda: model.load_full_optimizer_state_dict(optimizer, {"state": {}}),
        lambda: model.load_full_optimizer_state_dict(optimizer, unlike),
    ):
        with pytest.raises((StateError, OptimizerError)) as caught:
            act()
        said.append(str(caught.value).split("\n")[0])
    assert as_bits(model.full_optimizer_state_dict(optimizer, rank0_only=False)) == want
    return said


def unlike(rank: int) -> str:
    """Rank 1 has lost the state of a parameter, of which gathers would not meet."""
    model = zcompile.compile(make("mlp"), stage=3, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    if rank == 1:
        optimizer.state.pop(next(model.parameters()))
    with pytest.raises(StateError) as caught:
        model.full_optimizer_state_dict(optimizer)
    return str(caught.value).split("\n")[0]


@pytest.mark.slow
def test_ranks_whose_optimizers_differ_are_told(ranks: Ranks) -> None:
    first, second = ranks.run(2, unlike)
    assert first == second
    assert "has different optimizer state on rank 1 and on rank 0" in first


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusals)
    assert first == second
    assert "parameter 0 of group 0" in first[0]
    assert "has groups of [7] parameters, and the optimizer of [3, 4]" in first[1]
    assert "is a DTensor" in first[2]
    assert "has no 'param_groups'" in first[3]
    assert "has state of parameter 99" in first[4]
