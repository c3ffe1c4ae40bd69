"""Optimizer state in a file: the same numbers, less memory, and errors before anything is trained."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.ranks import on_ranks
from tests.test_train_step import OPTIMIZERS, grouped
from tests.threads import Threads
from zcompile.torch_internals.dtensor import local_tensor


def trained(rank: int, kind: str, optimizer: str, stage: int, folder: str | None) -> list[torch.Tensor]:
    model = make(kind)
    made = OPTIMIZERS[optimizer](grouped(model))
    offload = f"disk:{folder}" if folder else None
    step = zcompile.train_step(model, None, made, stage=stage, backend="eager", offload_optimizer=offload)
    for number in range(3):
        step(*batch(kind, rank, number))
    if folder:
        assert os.listdir(folder) == [], "the file has no name"
        assert mapped(made) == {True}, "all of the state is in the file"
    return list(step.model.full_state_dict(rank0_only=False).values())


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a mapped file that has no name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = [line.split()[0].split("-") for line in lines if "(deleted)" in line]
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in files)


def mapped(optimizer: torch.optim.Optimizer) -> set[bool]:
    """Whether what the optimizer keeps in the shape of parameters lies in a mapped file."""
    found = set()
    for param, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                local = local_tensor(value)
                if local.numel():
                    found.add(is_mapped(local))
    return found


TRAINED = [("gpt", "adamw", 3), ("mlp", "adamw", 1), ("mlp", "momentum", 0), ("mlp", "adagrad", 3)]


@quickly("kind, optimizer, stage", TRAINED, TRAINED[1:2], pairs=False)
def test_training_is_that_without(threads: Threads, tmp_path: Path, kind: str, optimizer: str, stage: int) -> None:
    want = threads.run(2, trained, kind, optimizer, stage, None)
    got = threads.run(2, trained, kind, optimizer, stage, str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(want[0], got[0], strict=True))


@pytest.mark.slow
def test_two_optimizers_over_one_parameter_have_states_of_their_own(tmp_path: Path) -> None:
    results = []
    for place in (None, f"disk:{tmp_path}"):
        model = make("mlp")
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum) for momentum in (0.5, 0.9)]
        step = zcompile.train_step(model, None, optimizers, backend="eager", offload_optimizer=place)
        for number in range(3):
            step(*batch("mlp", 0, number))
        results.append(step.model.full_state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.slow
def test_a_state_is_saved_and_loaded_as_any_other(tmp_path: Path) -> None:
    models = [make("mlp") for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    places = [f"disk:{tmp_path / 'state'}", None]
    steps = [
        zcompile.train_step(model, None, optimizer, backend="eager", offload_optimizer=place)
        for model, optimizer, place in zip(models, optimizers, places, strict=True)
    ]
    for number in range(2):
        steps[0](*batch("mlp", 0, number))
    steps[0].model.save_checkpoint(tmp_path / "saved", optimizers[0])
    for step, optimizer in zip(steps, optimizers, strict=True):
        step.model.load_checkpoint(tmp_path / "saved", optimizer)
        step(*batch("mlp", 0, 2))
    assert mapped(optimizers[0]) == {True}, "what was loaded has moved into the file"
    states = [step.model.full_state_dict() for step in steps]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["disk", "disk:", "tape:/x", 7])
def test_what_is_no_place_is_refused(place: Any) -> None:
    with pytest.raises(zcompile.OptionError, match=r"offload_optimizer: .* is not a place"):
        zcompile.train_step(model := make("mlp"), None, adamw(model), offload_optimizer=place)


def test_clipping_steps_all_at_once() -> None:
    with pytest.raises(zcompile.OptionError, match="streams the state unit by unit"):
        zcompile.train_step(
            model := make("mlp"), None, adamw(model), clip_grad_norm=1.0, offload_optimizer="disk:/tmp/state"
        )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(zcompile.StateError, match=r"file/state: .*cannot be written"):
        zcompile.train_step(
            model := make("mlp"), None, adamw(model), backend="eager", offload_optimizer=f"disk:{tmp_path}/file/state"
        )


def full_disk(here: bool) -> contextlib.AbstractContextManager[Any]:
    """There is no room on a rank's disk, where it is `here`."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return mock.patch.object(os, "posix_fallocate", side_effect=error) if here else contextlib.nullcontext()


@on_ranks(2)
def test_a_disk_that_is_full_is_an_error_of_all_ranks_before_the_first_step(rank: int, tmp_path: Path) -> None:
    model = make("mlp")
    with full_disk(here=rank == 1), pytest.raises(zcompile.StateError) as caught:
        zcompile.train_step(model, None, adamw(model), backend="eager", offload_optimizer=f"disk:{tmp_path}")
    assert "on rank 1: has no room for the" in str(caught.value)
    assert "No space left on device" in str(caught.value)
