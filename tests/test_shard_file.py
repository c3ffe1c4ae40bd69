"""Parameters in a file: the same numbers, and errors before a model is touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zcompile
from tests.models import batch, fit, make
from tests.ranks import on_ranks
from tests.test_offload import full_disk, is_mapped
from tests.threads import Threads
from zcompile import OptionError, StateError
from zcompile.runtime.offload.host_shards import ShardFile
from zcompile.torch_internals.dtensor import local_tensor


def trained(rank: int, kind: str, folder: str | None, options: dict[str, Any]) -> list[torch.Tensor]:
    place = None if folder is None else f"disk:{folder}"
    compiled = zcompile.compile(make(kind, seed=rank), backend="eager", offload_parameters=place, **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    fit(compiled, optimizer, (batch(kind, rank, number) for number in range(3)))
    if folder is not None:
        assert os.listdir(folder) == [], "the file has no name"
        sharded = [param for param in compiled.parameters() if param.dim() and local_tensor(param).numel()]
        assert all(is_mapped(local_tensor(param)) for param in sharded), "all shards are in the file"
    return list(compiled.full_state_dict(rank0_only=False).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt", {"stage": 3, "dtype": torch.bfloat16}), ("mlp", {"stage": 1})],
    ids=["stage 3 in bfloat16", "stage 1"],
)
def test_training_is_that_without(threads: Threads, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    want = threads.run(2, trained, kind, None, options)
    got = threads.run(2, trained, kind, str(tmp_path), options)
    assert all(torch.equal(one, other) for one, other in zip(want[0], got[0], strict=True))


@pytest.mark.slow
def test_a_train_step_keeps_state_and_parameters_in_files(tmp_path: Path) -> None:
    found = []
    for place in (None, f"disk:{tmp_path}"):
        model = make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = zcompile.train_step(
            model, None, optimizer, backend="eager", offload_parameters=place, offload_optimizer=place
        )
        for number in range(3):
            step(*batch("mlp", 0, number))
        step.model.save_checkpoint(tmp_path / "saved" / str(place is None))
        step.model.load_checkpoint(tmp_path / "saved" / "True")
        found.append(step.model.full_state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_comes_next_is_read_before_its_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = ShardFile(tmp_path, {"a": 10, "b": 5000, "c": 10, "d": 10}), list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, *rest: asked.append(offset))
    monkeypatch.setattr(file._file._reader, "submit", lambda function, *args: function(*args))
    page = os.sysconf("SC_PAGESIZE")
    start = {"a": 0, "b": page, "c": 3 * page, "d": 4 * page}
    for unit in "abcdcba":  # forward and backward
        file.before(unit)
    assert asked == []
    expected = {"a": "", "b": "cd", "c": "dc"}
    file._last = "b", "a"  # as after a backward
    for unit in "abcd":
        file.before(unit)
        coming = "".join(name for name, offset in start.items() if offset in asked)
        assert set(expected.get(unit, "")) <= set(coming), unit
        asked.clear()


def test_tensors_of_a_unit_do_not_overlap(tmp_path: Path) -> None:
    file = ShardFile(tmp_path, {"a": 128 + 6, "b": 4})
    first, second, third = (
        file.zeros("a", 3, torch.float32),
        file.zeros("a", 3, torch.bfloat16),
        file.zeros("b", 1, torch.float32),
    )
    for value, tensor in enumerate((first, second, third), 1):
        assert not tensor.any()
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in (first, second, third)] == [[1.0], [2.0], [3.0]]
    assert file.zeros("b", 0, torch.float32).numel() == 0


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"offload_parameters": "cpu"}, "offload_parameters: is 'cpu', and the model is on cpu"),
        ({"offload_parameters": "tape:/x"}, "offload_parameters: 'tape:/x' is not a place"),
        ({"offload_parameters": "disk:/tmp/x", "stage": 0}, "offload_parameters: moves shards, and stage 0 has none"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(OptionError, match=found):
        zcompile.compile(make("mlp"), **options)


@on_ranks(2)
def test_a_disk_that_is_full_is_an_error_of_all_ranks(rank: int, tmp_path: Path) -> None:
    model = make("mlp")
    with full_disk(here=rank == 1), pytest.raises(StateError) as caught:
        zcompile.compile(model, backend="eager", offload_parameters=f"disk:{tmp_path}")
    assert model(*batch("mlp", 0, 0)).requires_grad, "the model is as it was"
    assert "on rank 1: has no room for the" in str(caught.value)
    assert "of parameters of this rank: No space left on device" in str(caught.value)
