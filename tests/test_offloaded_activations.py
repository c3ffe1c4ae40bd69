"""Activations away: the same numbers, whatever the graph is used for, and errors before anything is updated."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import GPT, make, update
from tests.ranks import on_threads
from tests.threads import Threads
from zcompile import OptionError, StateError
from zcompile.cost.memory import peak_bytes
from zcompile.ir.ops import Offload as OffloadOperation
from zcompile.ir.ops import OffloadStore
from zcompile.runtime import offloaded_activations
from zcompile.runtime.offload.activation_storage import DiskStorage
from zcompile.runtime.offload.unnamed_files import Room
from zcompile.runtime.offloaded_activations import OffloadedActivations


def disk_of(offload: OffloadedActivations) -> DiskStorage:
    assert isinstance(offload.storage, DiskStorage)
    return offload.storage


# -- offloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_comes_back_is_what_went_away_and_laid_out_alike(tmp_path: Path, dtype: torch.dtype) -> None:
    offload = OffloadedActivations(DiskStorage(tmp_path))
    values = [torch.randn(7, 5, 3).to(dtype), torch.randn(9, 4).t().to(dtype), torch.ones(()).to(dtype)]
    values.append(torch.randn(100, 8)[3:].to(dtype))
    tokens = [offload.offload(value) for value in values]
    for value, token in reversed(list(zip(values, tokens, strict=True))):
        back = offload.fetch(token).wait()
        assert torch.equal(back, value)
        assert back.stride() == value.stride()
        assert back.dtype is dtype


def test_room_is_used_again(tmp_path: Path) -> None:
    offload = OffloadedActivations(DiskStorage(tmp_path))
    for _ in range(20):
        tokens = [offload.offload(torch.ones(1000)) for _ in range(3)]
        for token in tokens:
            offload.fetch(token).wait()
    assert disk_of(offload).nbytes <= 8 * 4000
    assert list(tmp_path.iterdir()) == []


def test_what_is_dropped_is_forgotten(tmp_path: Path) -> None:
    offload = OffloadedActivations(DiskStorage(tmp_path))
    for _ in range(20):
        offload.offload(torch.ones(1000))
    assert len(offload._slots) <= 1
    assert disk_of(offload).nbytes <= 5 * 4000


def test_what_is_not_written_yet_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload, write = OffloadedActivations(DiskStorage(tmp_path)), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.2), write(*args))[1])
    first, second = offload.offload(torch.ones(10)), offload.offload(torch.full((10,), 2.0))
    assert torch.equal(offload.fetch(second).wait(), torch.full((10,), 2.0))
    assert torch.equal(offload.fetch(first).wait(), torch.ones(10))


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload, write, read = OffloadedActivations(DiskStorage(tmp_path)), os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:5]], at))
    value = torch.arange(50.0)
    token = offload.offload(value)
    disk_of(offload)._waiting[-1].written.result()
    assert torch.equal(offload.fetch(token).wait(), value)


def test_a_disk_that_fails_is_an_error_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    offload = OffloadedActivations(DiskStorage(tmp_path))
    monkeypatch.setattr(os, "pwrite", failing)
    kept = []
    with pytest.raises(StateError, match=rf"{tmp_path}: failed to keep activations: Input/output error"):
        kept += [offload.offload(torch.ones(10)) for _ in range(5)]


def test_sizes_that_vary_share_their_room(tmp_path: Path) -> None:
    offload = OffloadedActivations(DiskStorage(tmp_path))
    for size in range(1, 100):
        held = [offload.offload(torch.ones(100 * size)) for _ in range(3)]
        for token in held:
            offload.fetch(token).wait()
    assert disk_of(offload).nbytes <= 3 * 3 * 400 * 99


def test_what_was_fetched_and_not_waited_for_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded_activations, "keeps_graph", lambda: False)  # as within a backward
    offload = OffloadedActivations(DiskStorage(tmp_path))
    for _ in range(20):
        token = offload.offload(torch.ones(1000))
        disk_of(offload)._waiting[-1].written.result()
        offload.fetch(token)
        time.sleep(0.02)  # in which a busy machine reads it
    assert disk_of(offload).nbytes <= 5 * 4000


def test_what_was_fetched_before_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "keeps_graph", lambda: False)  # as within a backward
    offload = OffloadedActivations(DiskStorage(tmp_path))
    token = offload.offload(torch.ones(10))
    offload.fetch(token).wait()
    with pytest.raises(StateError, match="saved_tensors_hooks"):
        offload.fetch(token)


def test_a_place_that_is_dropped_while_it_writes_closes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, write = OffloadedActivations(DiskStorage(tmp_path)), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.2), write(*args))[1])
    offload.offload(torch.ones(10))
    file = disk_of(offload)._file.number
    del offload
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    offload = OffloadedActivations(DiskStorage(tmp_path))
    value = torch.ones(10)
    with torch.device("meta"):
        token = offload.offload(value)
        disk_of(offload)._waiting[-1].written.result()
        assert torch.equal(offload.fetch(token).wait(), value)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=60))
def test_room_is_given_once_at_a_time(asked: list[tuple[int, int]]) -> None:
    room, taken = Room(), list[tuple[int, int]]()
    for nbytes, back in asked:
        start = room.take(nbytes)
        assert all(start + nbytes <= other or other + size <= start for other, size in taken)
        taken.append((start, nbytes))
        assert max(other + size for other, size in taken) <= room.end
        while back and taken and len(taken) > 5 - back:
            room.give(*taken.pop(len(taken) // 2))
    for one in taken:
        room.give(*one)
    assert room.take(max(room.end, 1)) == 0


# -- training ---------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=3, width=128, context=64)


def tokens(rank: int, step: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (size, 64), generator=generator)


def trained(rank: int, folder: str | None, **options: Any) -> tuple[list[torch.Tensor], int]:
    away = None if folder is None else f"disk:{folder}/{rank}"  # a disk of each rank's own
    compiled = zcompile.compile(model(), offload_activations=away, **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    for step in range(3):
        given = tokens(rank, step, 4 + step)  # sizes vary
        loss = compiled(given, given)
        loss.backward(retain_graph=True)
        loss.backward()
        compiled(given, given)  # a graph that is dropped
        update(optimizer)
    values = compiled.full_state_dict(rank0_only=False)
    offload = compiled._engine.runtime.offloads.get(OffloadStore())
    return [values[name] for name in sorted(values)], 0 if offload is None else disk_of(offload).nbytes  # type: ignore[attr-defined]


CASES: dict[str, dict[str, Any]] = {
    "unit": {"checkpoint": "unit", "backend": "eager"},
    "inductor": {"prefetch": 1},
    "arenas": {"checkpoint": "unit", "arenas": True, "backend": "eager", "dtype": torch.bfloat16},
    "whole": {"stage": 0, "checkpoint": "unit", "backend": "eager", "prefetch": 0},
}


def differing(rank: int, case: str, folder: str) -> list[str]:
    want, _ = trained(rank, None, **CASES[case])
    got, nbytes = trained(rank, folder, **CASES[case])
    found = [str(n) for n, (one, other) in enumerate(zip(want, got, strict=True)) if not torch.equal(one, other)]
    return found + ([] if nbytes else ["nothing was away"])


QUICK = [case for case in CASES if case not in ("arenas", "inductor", "unit", "whole")]


@quickly("case", [*CASES], QUICK, slow=["whole"])
def test_numbers_stay_what_they_are(threads: Threads, tmp_path: Path, case: str) -> None:
    assert threads.run(2, differing, case, str(tmp_path)) == [[], []]
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.slow
@on_threads(2)
def test_a_full_disk_fails_the_step_before_anything_is_updated(rank: int, tmp_path: Path) -> list[str]:
    """What has changed after steps that failed because the disk of one rank is full."""
    folder = str(tmp_path)
    compiled = zcompile.compile(model(), checkpoint="unit", backend="eager", offload_activations=f"disk:{folder}")
    step = zcompile.train_step(compiled, None, torch.optim.AdamW(compiled.parameters()))
    before = {name: p.to_local().clone() for name, p in compiled.named_parameters()}
    room, calls = os.posix_fallocate, []

    def full(file: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        room(file, offset, nbytes)

    os.posix_fallocate = full
    try:
        step(tokens(rank, 0), tokens(rank, 0))
    except StateError as error:
        found = [] if folder in str(error) and "No space left" in str(error) else [str(error)]
    else:
        found = ["no error"]
    finally:
        os.posix_fallocate = room
    return found + [n for n, p in compiled.named_parameters() if not torch.equal(p.to_local(), before[n])]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["disk:", "ssd", 3, "disk"])
def test_a_place_that_is_none_is_refused(place: Any) -> None:
    with pytest.raises(OptionError, match="offload_activations"):
        zcompile.compile(make("mlp"), offload_activations=place)


def test_the_memory_of_the_host_is_no_other_place_for_a_model_there() -> None:
    kept = make("mlp")
    with pytest.raises(OptionError, match=r"offload_activations(.|\n)*disk:FOLDER"):
        zcompile.compile(kept, offload_activations="cpu")
    assert all(type(param) is nn.Parameter for param in kept.parameters()), "the model is as it was"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = make("mlp")
    with pytest.raises(StateError, match=r"file/folder"):
        zcompile.compile(kept, offload_activations=f"disk:{tmp_path}/file/folder")
    assert all(type(param) is nn.Parameter for param in kept.parameters()), "the model is as it was"


# -- as much as exceeds a limit ---------------------------------------------------------------------------------------


def limited(folder: Path, limit: int | None) -> tuple[int, int, list[torch.Tensor]]:
    """The predicted peak of a step, how many activations were moved, and its gradients."""
    torch.manual_seed(0)
    place = f"disk:{folder}"
    compiled = zcompile.compile(
        GPT(layers=4, width=64, context=64), backend="eager", prefetch=1, offload_activations=place, memory_limit=limit
    )
    given = tokens(0, 0, 16)
    compiled(given, given).backward()
    program = compiled._engine.runtime.steps[0].program
    grads = [param.grad.to_local() for param in compiled.parameters() if param.grad is not None]
    return peak_bytes(program), len(program.nodes(OffloadOperation)), grads


@pytest.mark.slow
def test_no_more_goes_away_than_exceeds_the_limit(tmp_path: Path) -> None:
    least, everything, want = limited(tmp_path, None)
    whole, nothing, _ = limited(tmp_path, 2**40)
    assert everything > 1
    assert nothing == 0
    assert whole > least
    before = 0
    for share in (0.6, 0.3):
        limit = int(least + share * (whole - least))
        peak, moved, grads = limited(tmp_path, limit)
        assert peak <= limit
        assert before <= moved <= everything
        assert all(torch.equal(one, other) for one, other in zip(grads, want, strict=True))
        before = moved
    assert before > 0


@pytest.mark.slow
def test_a_limit_that_moving_all_does_not_keep_is_refused(tmp_path: Path) -> None:
    least, _, _ = limited(tmp_path, None)
    with pytest.raises(OptionError, match=r"memory_limit: .* is less than the .* that this step takes") as caught:
        limited(tmp_path, least // 2)
    needed = int(re.findall(r"at least (\d+) bytes", str(caught.value))[0])
    assert needed <= least, "what does not lower the peak stays"
    assert limited(tmp_path, needed)[0] <= needed
