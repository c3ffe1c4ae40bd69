"""Shards on the host: the same numbers; nobody reads what is not there yet, or writes what is still read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from tests.models import batch, make, update
from tests.threads import Threads
from zcompile import GroupError, OptionError
from zcompile.cost.memory import peak_bytes
from zcompile.engine import model_runtime
from zcompile.engine.optimizers import _moved_to_host
from zcompile.ir.layout import Layout, Param
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.host_shards import HostShards
from zcompile.runtime.shards import shard_bytes
from zcompile.runtime.tensors.placement import along
from zcompile.torch_internals.dtensor import local_tensor


class WatchedHost(HostShards):
    """The host, for a model on the CPU, with copies as late as a GPU's may be, which watches the host meanwhile.

    Gradients are NaN until `landed` has returned. What a gather copies may be read until `settle` has returned: a write
    to it before that is noted.
    """

    def __init__(self, device: torch.device, sizes: Mapping[str, int]) -> None:
        super().__init__(device, sizes)
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent: dict[str, torch.Tensor] | None = None
        self.returned, self.early = 0, list[str]()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        self._look("a gather")
        with super().sending():
            yield
        if self._sent is None:
            self._sent = {unit: room.clone() for unit, room in self._room.items()}

    def home(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._look("a gradient")
        home, late = super().home(gradients), {name: torch.full_like(one, torch.nan) for name, one in gradients.items()}
        self._late += [(one, home[name]) for name, one in late.items()]
        self.returned += len(late)
        return late

    def landed(self) -> None:
        for late, gradient in self._late:
            late.copy_(gradient)
        self._late.clear()

    def settle(self) -> None:
        self.landed()
        self._look("a call")
        self._sent = None

    def _look(self, where: str) -> None:
        written = [unit for unit, sent in (self._sent or {}).items() if not torch.equal(sent, self._room[unit])]
        self.early += [f"{unit} before {where} ended" for unit in written]
        self._sent = {unit: room.clone() for unit, room in self._room.items()} if written else self._sent


def watched(asked: object, layout: Layout, data: Communicator, agreement: Agreement) -> WatchedHost:
    return WatchedHost(torch.device("cpu"), {unit.name: shard_bytes(unit, 0) for unit in layout.units})


def on_host(*, away: bool = True) -> AbstractContextManager[object]:
    """Within this, compiled models have their shards on a watched host."""
    return mock.patch.object(model_runtime, "shard_memory", watched) if away else contextlib.nullcontext()


def memory_of(compiled: zcompile.CompiledModule) -> WatchedHost:
    (memory,) = {shards.memory for shards in compiled._engine.runtime.shards.values()}
    assert isinstance(memory, WatchedHost)
    return memory


def trained(rank: int, kind: str, away: bool, whole_step: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    model = make(kind, seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with on_host(away=away):
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
            update(optimizer)
        with torch.no_grad():
            compiled(*batch(kind, rank, number))
            for param in compiled.parameters():
                param.mul_(0.99)  # between steps anybody may write
    if away:
        memory = memory_of(compiled)
        assert memory.returned, "gradients have gone there"
        # A train step updates units within the backward, behind the gathers of those units alone.
        assert whole_step or not memory.early, memory.early
    return list(compiled.full_state_dict(rank0_only=False).values())


@pytest.mark.slow
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
    threads: Threads, world: int, kind: str, whole_step: bool, options: dict[str, Any]
) -> None:
    want = threads.run(world, trained, kind, False, whole_step, options)
    got = threads.run(world, trained, kind, True, whole_step, options)
    assert all(torch.equal(one, other) for one, other in zip(want[0], got[0], strict=True))


@pytest.mark.slow
def test_the_host_waits_for_copies_whenever_a_call_or_a_backward_ends() -> None:
    with on_host():
        compiled = zcompile.compile(make("mlp"), backend="eager")
    memory, (x, y) = memory_of(compiled), batch("mlp", 0, 0)

    def write() -> None:
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.mul_(0.9)

    with torch.no_grad():
        compiled(x, y)
    write()
    with pytest.raises(TypeError):
        compiled(x, y, "one too many")
    write()
    torch.autograd.grad(compiled(x.requires_grad_(), y), x)  # delivers no gradient
    write()
    loss = compiled(x, y)
    with mock.patch.object(memory, "home", side_effect=RuntimeError("no memory")), pytest.raises(RuntimeError):
        loss.backward()
    write()
    compiled(x, y).backward()
    assert not memory.early


@pytest.mark.parametrize("stage", [2, 3])
def test_writes_between_forwards_are_seen(stage: int) -> None:
    found = []
    for away in (False, True):
        with on_host(away=away):
            compiled = zcompile.compile(make("mlp"), backend="eager", stage=stage)
        losses = []
        for parameter in (None, *compiled.parameters()):
            with torch.no_grad():
                if parameter is not None:
                    parameter.mul_(1.5)
                losses.append(compiled(*batch("mlp", 0, 0)).item())
        found.append(losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])


@pytest.mark.slow
def test_alone_a_gather_takes_the_memory_of_its_unit() -> None:
    peaks = []
    for away in (False, True):
        with on_host(away=away):
            compiled = zcompile.compile(make("gpt"), backend="eager", prefetch=0)
        compiled(*batch("gpt", 0, 0)).backward()
        (journal,) = compiled._engine.journals
        program = journal.entries[-1].after
        peaks.append(peak_bytes(program))
        text = program.text(regions=True)
        assert zcompile.parse(text).text(regions=True) == text
        assert ('shards = "cpu"' in text) is away
    assert peaks[1] > peaks[0]


def test_float16_is_refused_where_its_scaler_would_be_wrong() -> None:
    with on_host():
        compiled = zcompile.compile(make("mlp"), backend="eager", dtype=torch.float16)
    with pytest.raises(OptionError, match="offload_parameters: is 'cpu', and gradients are float16"):
        compiled(*batch("mlp", 0, 0))


def test_state_beside_a_parameter_goes_with_it() -> None:
    host, device = torch.empty(3), torch.empty(3, device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # it is copied from there
        _moved_to_host(torch.empty((), device="meta"), host)
    assert _moved_to_host(step := torch.tensor(2.0), device) is step, "on the host, where optimizers keep it"
    assert _moved_to_host(7, host) == 7


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
    with pytest.raises(OptionError, match="offload_optimizer: has no effect with offload_parameters='cpu'"):
        zcompile.train_step(model, None, optimizer, offload_parameters="cpu", offload_optimizer="cpu")


@pytest.mark.usefixtures("without_group")
def test_a_norm_wants_a_group_for_the_host() -> None:
    dist.init_process_group("cuda:fake", store=dist.HashStore(), rank=0, world_size=2)
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(GroupError, match="has no CPU backend, and clip_grad_norm reduces"):
        zcompile.train_step(model, None, optimizer, offload_parameters="cpu", clip_grad_norm=1.0)
    assert model(*batch("mlp", 0, 0)).requires_grad, "the model is as it was"
