"""Shards on the host: the same numbers, where every copy is made and no host reads what is not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from zcompile import GroupError, OptionError
from zcompile import compiled as compiling
from zcompile._torch import local_tensor
from zcompile.layout import Param
from zcompile.runtime.host_shards import HostShards
from zcompile.runtime.placing import along


class LateHost(HostShards):
    """The host, for a model on the CPU, whose gradients are there when `settle` has returned, and NaN until then."""

    def __init__(self, model: torch.device) -> None:
        super().__init__(model)
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.returned = 0

    def home(self, gradient: torch.Tensor) -> torch.Tensor:
        self._late.append((torch.full_like(gradient, torch.nan), super().home(gradient)))
        self.returned += 1
        return self._late[-1][0]

    def settle(self) -> None:
        for late, gradient in self._late:
            late.copy_(gradient)
        self._late.clear()


def trained(rank: int, kind: str, away: bool, whole_step: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    model = make(kind, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory = LateHost if away else compiling.ShardMemory
    with mock.patch.object(compiling, "ShardMemory", memory):
        if whole_step:
            step = zcompile.train_step(model, None, optimizer, backend="eager", **options)
            compiled = step.model
        else:
            compiled = zcompile.compile(model, optimizer=optimizer, backend="eager", **options)
    for number in range(3):
        if whole_step:
            step(*batch(kind, rank, number))
        else:
            compiled(*batch(kind, rank, number)).backward()
            nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            compiled(*batch(kind, rank, number))
            next(compiled.parameters()).mul_(0.99)  # between steps anybody may write
    if away:
        (used,) = {shards.memory for shards in compiled._engine.shards.values()}
        assert isinstance(used, LateHost)
        assert used.returned, "gradients have gone there"
    return list(compiled.full_state_dict(rank0_only=False).values())


@pytest.mark.parametrize(
    ("world", "kind", "whole_step", "options"),
    [
        (2, "gpt", False, {"stage": 3, "dtype": torch.bfloat16}),
        (3, "mlp", False, {"stage": 2}),
        (2, "gpt", True, {"stage": 3, "arenas": True}),
        (1, "gpt", False, {"stage": 3, "dtype": torch.bfloat16}),
    ],
    ids=["stage 3 in bfloat16", "stage 2, world 3", "a train step in arenas", "a world of one"],
)
def test_training_is_that_without(
    ranks: Ranks, world: int, kind: str, whole_step: bool, options: dict[str, Any]
) -> None:
    want = ranks.run(world, trained, kind, False, whole_step, options)
    got = ranks.run(world, trained, kind, True, whole_step, options)
    assert all(torch.equal(one, other) for one, other in zip(want[0], got[0], strict=True))


def test_the_host_waits_for_copies_whenever_a_call_ends() -> None:
    with mock.patch.object(compiling, "ShardMemory", HostShards):
        compiled = zcompile.compile(make("mlp"), backend="eager")
    (memory,) = {shards.memory for shards in compiled._engine.shards.values()}
    with mock.patch.object(memory, "settle") as settle:
        with torch.no_grad():
            compiled(*batch("mlp", 0, 0))
        assert settle.called, "a forward alone"
        settle.reset_mock()
        with pytest.raises(TypeError):
            compiled(*batch("mlp", 0, 0), "one too many")
        assert settle.called, "a call that fails"


@pytest.fixture
def without_group() -> Iterator[None]:
    """No group before, and none left behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("without_group")
def test_a_part_of_a_tensor_may_be_on_another_device_than_its_mesh() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    local = torch.arange(6.0).view(3, 2)
    placed = along(Param("w", (3, 2), torch.float32, shards=1), mesh).place(local)
    assert placed.device.type == "cpu"
    assert local_tensor(placed).data_ptr() == local.data_ptr()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_stage_1_is_refused() -> None:
    with pytest.raises(OptionError, match="offload_parameters: takes gradients to the host, and stage 1 keeps full"):
        zcompile.compile(make("mlp"), stage=1, offload_parameters="cpu")


def test_a_state_that_is_on_the_host_anyway_is_not_moved_there() -> None:
    model = make("mlp").to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptionError, match="offload_optimizer: has no effect: beside offload_parameters='cpu'"):
        zcompile.train_step(model, None, optimizer, offload_parameters="cpu", offload_optimizer="cpu")


@pytest.mark.usefixtures("without_group")
def test_a_norm_wants_a_group_for_the_host() -> None:
    dist.init_process_group("cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(GroupError, match="has no backend for gradients in the memory of the host"):
        zcompile.train_step(model, None, optimizer, offload_parameters="cpu", clip_grad_norm=1.0)
    assert model(*batch("mlp", 0, 0)).requires_grad, "the model is as it was"
