"""Optimizer state in the memory of the host. Copies are made on the CPU too, so what they do to the state is tested."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

import zcompile
from tests.models import batch, make
from tests.test_train_step import OPTIMIZERS, grouped
from tests.threads import Threads
from zcompile.runtime.offload.optimizer_states import HostState
from zcompile.torch_internals.dtensor import local_tensor


def hosted(step: zcompile.TrainStep) -> HostState:
    """Let the state of a step's optimizers be on the host."""
    updater = step._updater
    assert updater is not None
    units = {name: list(shards.parameters.values()) for name, shards in step._engine.runtime.shards.items()}
    updater.states = made = HostState(torch.device("cpu"), updater.optimizers, units, updater.slots)
    return made


def trained(rank: int, kind: str, optimizer: str, stage: int, host: bool) -> tuple[list[torch.Tensor], int]:
    model = make(kind)
    made = OPTIMIZERS[optimizer](grouped(model))
    step = zcompile.train_step(model, None, made, stage=stage, backend="eager")
    states = hosted(step) if host else None
    for number in range(4):
        step(*batch(kind, rank, number))
        if number == 0:
            early = copy.deepcopy(made.state_dict()["state"])
        if number == 1:  # other tensors, which move again
            made.load_state_dict({**made.state_dict(), "state": early})
    if states is not None:
        assert states._coming == {}
        away = {value.data_ptr() for value in states._host.values()}
        kept = [v for s in made.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
        assert all(local_tensor(value).data_ptr() in away for value in kept if local_tensor(value).numel())
    return list(step.model.full_state_dict(rank0_only=False).values()), len(states._host) if states else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer", "stage"),
    [("gpt", "adamw", 3), ("mlp", "momentum", 0)],
)
def test_training_is_that_without(threads: Threads, kind: str, optimizer: str, stage: int) -> None:
    want = threads.run(2, trained, kind, optimizer, stage, False)
    got = threads.run(2, trained, kind, optimizer, stage, True)
    for (one, _), (other, moved) in zip(want, got, strict=True):
        assert moved
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_what_the_next_units_need_comes_before_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt")
    step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()), backend="eager")
    states, here = hosted(step), list[tuple[str, int]]()
    for number in range(2):
        step(*batch("gpt", 0, number))
    before = HostState.before

    def watched(self: HostState, parameters: Any) -> None:
        here.append((self._unit_of[id(parameters[0])], len(self._coming)))
        before(self, parameters)

    monkeypatch.setattr(HostState, "before", watched)
    step(*batch("gpt", 0, 2))
    assert len(here) == len(states._order)
    assert all(count > 0 for _, count in here)


@pytest.mark.slow
def test_the_updates_of_a_step_that_fails_are_ended() -> None:
    model = make("gpt")
    step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()), backend="eager")
    states = hosted(step)
    step(*batch("gpt", 0, 0))
    with mock.patch.object(HostState, "after", side_effect=MemoryError("no memory")), pytest.raises(MemoryError):
        step(*batch("gpt", 0, 1))
    assert not states._coming, "the end makes it void"


def test_what_a_failed_step_had_fetched_is_void() -> None:
    parameters = {name: [torch.nn.Parameter(torch.ones(4))] for name in "abc"}
    optimizer = torch.optim.SGD([one for (one,) in parameters.values()], lr=0.1, momentum=0.9)
    states = HostState(torch.device("cpu"), [optimizer], parameters, [{"momentum_buffer": torch.float32}])

    def step(fails_at: str = "") -> None:
        states.begin()
        for name, (parameter,) in parameters.items():
            if name == fails_at:
                break
            states.before([parameter])
            state = optimizer.state[parameter]
            state["momentum_buffer"] = state.get("momentum_buffer", torch.zeros(4)) * 0.5 + 1
            states.after(optimizer, [parameter])
        states.end()

    step()
    step(fails_at="b")
    loaded = optimizer.state_dict()
    for state in loaded["state"].values():
        state["momentum_buffer"] = torch.full((4,), 100.0)
    optimizer.load_state_dict(loaded)
    step()
    found = [optimizer.state[one]["momentum_buffer"].tolist() for (one,) in parameters.values()]
    assert found == [[51.0] * 4] * 3


def test_the_host_is_for_models_on_a_gpu() -> None:
    model = make("mlp")
    with pytest.raises(zcompile.OptionError, match="offload_optimizer: is 'cpu', and the model is on cpu"):
        zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()), offload_optimizer="cpu")
    assert model(*batch("mlp", 0, 0)).requires_grad, "the model is as it was"
