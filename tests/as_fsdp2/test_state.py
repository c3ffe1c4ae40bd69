"""States: their names and kinds, and that what is saved loads, whole or in shards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.as_fsdp2.plain import (
    Block,
    Net,
    adam,
    beside,
    differing,
    full,
    mean_square,
    numbers,
    pair,
    parameters,
    three,
)
from tests.cases import quickly
from tests.models import update
from tests.ranks import Ranks, on_ranks


class Stateful(nn.Module):
    """Tied, frozen and scalar parameters, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for block in self.blocks:
            x = block(x)
        return self.frozen(self.norm(x)) * self.scale


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    mean_square(model, x).backward()
    update(optimizer)


@on_ranks(3)
def test_a_state_has_the_plain_models_names_and_the_memory_of_its_shards(rank: int) -> list[str]:
    """The names of the plain model, shards of this rank over the memory of its parameters, and plain buffers."""
    plain, compiled = pair(Stateful)
    state, want = compiled.state_dict(), plain.state_dict()
    found = [] if list(state) == list(want) else ["names"]
    params = dict(compiled.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if name in params:
            ours = isinstance(value, DTensor) and value.to_local().data_ptr() == params[name].to_local().data_ptr()
            found += [] if ours else [name]
        found += [] if not value.requires_grad and torch.equal(full(value), want[name]) else [f"{name} differs"]
    return found


def by_shards(one: Any, optimizer: Any, other: Any, theirs: Any, folder: str) -> None:
    other.load_state_dict(copy.deepcopy(dict(one.state_dict())))
    theirs.load_state_dict(copy.deepcopy(dict(optimizer.state_dict())))


def by_whole_tensors(one: Any, optimizer: Any, other: Any, theirs: Any, folder: str) -> None:
    whole = one.full_state_dict(rank0_only=False)
    other.load_state_dict(whole)
    other.load_full_optimizer_state_dict(theirs, one.full_optimizer_state_dict(optimizer, rank0_only=False))
    for (_, mine), (_, own) in zip(other.named_buffers(), one.named_buffers(), strict=True):
        mine.copy_(own)  # a whole state has the first rank's


def by_checkpoint(one: Any, optimizer: Any, other: Any, theirs: Any, folder: str) -> None:
    one.save_checkpoint(folder, optimizer)
    other.load_checkpoint(folder, theirs)


def by_torch(one: Any, optimizer: Any, other: Any, theirs: Any, folder: str) -> None:
    dcp.save({"model": one.state_dict(), "optim": get_optimizer_state_dict(one, optimizer)}, checkpoint_id=folder)
    state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, theirs)}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, theirs, state["optim"])
    for (_, mine), (_, own) in zip(other.named_buffers(), one.named_buffers(), strict=True):
        mine.copy_(own)  # torch's format keeps one value of a name


def by_torchs_functions(one: Any, optimizer: Any, other: Any, theirs: Any, folder: str) -> None:
    set_model_state_dict(other, get_model_state_dict(one))
    set_optimizer_state_dict(other, theirs, copy.deepcopy(get_optimizer_state_dict(one, optimizer)))


WAYS = {way.__name__: way for way in (by_shards, by_whole_tensors, by_checkpoint, by_torch, by_torchs_functions)}


@quickly("way", list(WAYS), ["by_shards"])
@on_ranks(2)
def test_what_is_saved_loads_and_trains_on_bit_for_bit(rank: int, tmp_path: Path, way: str) -> list[str]:
    """What one model saves another one loads; then both train on alike."""
    _, compiled = pair(Stateful)
    optimizer = adam(compiled)
    for number in range(2):
        step(compiled, optimizer, numbers(rank, number))
    torch.manual_seed(99)
    other = zcompile.compile(Stateful(), backend="eager")
    theirs = adam(other)
    assert not torch.equal(full(other.scale), full(compiled.scale))
    WAYS[way](compiled, optimizer, other, theirs, str(tmp_path / "saved"))
    found = differing(parameters(other), parameters(compiled), "loaded", 0)
    found += differing(dict(other.named_buffers()), dict(compiled.named_buffers()), "buffer", 0)
    found += [n for n, p in other.named_parameters() if p.requires_grad != compiled.get_parameter(n).requires_grad]
    for model, one in ((compiled, optimizer), (other, theirs)):
        step(model, one, numbers(rank, 5))
    return found + differing(parameters(other), parameters(compiled), "trained on", 0)


@pytest.mark.slow
@quickly("by", ["ours", "torch"], ["torch"])
@on_ranks(2)
def test_a_whole_state_loads_into_the_plain_model(rank: int, by: str) -> list[str]:
    """A whole state, by zcompile's method and by torch's function, loads strictly into the plain model."""
    plain, compiled = pair(Stateful)
    optimizer = adam(compiled)
    for number in range(2):
        step(compiled, optimizer, numbers(rank, number))
    if by == "ours":
        whole = compiled.full_state_dict()
    else:
        whole = get_model_state_dict(compiled, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    want = parameters(compiled)
    if rank:
        return [] if not whole else ["not empty"]
    plain.load_state_dict(whole)
    return differing(parameters(plain), want, "loaded", 0)


@quickly("by", ["ours", "torch"], ["torch"])
@on_ranks(3)
def test_the_first_rank_may_send_a_whole_state(rank: int, by: str) -> list[str]:
    """The plain model's state lies on the first rank alone, as one that was read from a file there does."""
    torch.manual_seed(5)
    plain = Stateful()
    torch.manual_seed(6)
    compiled = zcompile.compile(Stateful(), backend="eager")
    state = plain.state_dict() if rank == 0 else {}
    if by == "ours":
        compiled.load_full_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(compiled, state, options=options)
    return differing(parameters(compiled), parameters(plain), "loaded", 0)


def across(rank: int, folder: str, save: bool, hybrid: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    plain, compiled = pair(Net, mesh=mesh, stage=3 if save else 2)
    optimizer = adam(compiled)
    if save:
        step(compiled, optimizer, numbers(0, 0))
        compiled.save_checkpoint(folder, optimizer)
        return []
    compiled.load_checkpoint(folder, optimizer)
    steps = adam(plain)
    step(plain, steps, numbers(0, 0))
    found = differing(parameters(compiled), parameters(plain), "loaded")
    step(plain, steps, numbers(0, 1))
    step(compiled, optimizer, numbers(0, 1))
    return found + differing(parameters(compiled), parameters(plain), "trained on")


@pytest.mark.slow
@quickly(
    "saving, loading", [("2", "3"), ("3", "2"), ("4 as 2 x 2", "3"), ("3", "4 as 2 x 2")], [("2", "3")], pairs=False
)
def test_a_checkpoint_loads_in_another_world(ranks: Ranks, tmp_path: Path, saving: str, loading: str) -> None:
    for how, save in ((saving, True), (loading, False)):
        world = int(how[0])
        assert ranks.run(world, across, str(tmp_path / "saved"), save, "x" in how) == [[]] * world


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(rank: int) -> list[str]:
    """What each wrong state says; values are as before."""
    _, compiled = pair(Net)
    before, found = parameters(compiled), []
    state = dict(compiled.state_dict())
    for change in ({"extra": torch.ones(1)}, {"head.bias": torch.ones(4)}, {"head.bias": None}):
        wrong = {name: value for name, value in {**state, **change}.items() if value is not None}
        try:
            compiled.load_state_dict(wrong)
            found.append(f"{change} was taken")
        except zcompile.StateError:
            pass
    missing = {name: value for name, value in state.items() if name != "head.bias"}
    assert compiled.load_state_dict(missing, strict=False).missing_keys == ["head.bias"]
    return found + differing(parameters(compiled), before, "value", 0)


@pytest.mark.slow
@on_ranks(2)
def test_a_state_may_be_taken_and_loaded_between_steps(rank: int) -> list[str]:
    """A state that is taken in the middle of training is that of the step, and taking it changes nothing."""
    plain, compiled = pair(Net)
    found = []
    for number in range(2):
        found += beside(plain, compiled, [numbers(rank, number)])
        state = {name: full(value) for name, value in compiled.state_dict().items()}
        found += differing(state, dict(plain.state_dict()), f"step {number}, state")
        compiled.load_state_dict(compiled.state_dict())
    return found + beside(plain, compiled, three(rank))
