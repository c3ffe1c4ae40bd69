"""Checkpoints of pipelines are those of the plain model: saved on one mesh, training goes on on any other."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, UNITS, Reference, batch_of, loss_of, mesh_of, model_of
from tests.ranks import Ranks
from zcompile.pipelining.step import PipelinedStep

STEPS = 2
"""Before the save, and again behind the load."""


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, as training scripts have it: a rank has some of each group."""
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]


def pipelined(name: str, pipeline: int, data: int, stage: int, schedule: str) -> tuple[PipelinedStep, Any, int]:
    mesh, model = mesh_of(pipeline, data), model_of(name)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1)
    made = {
        "microbatches": MICROBATCHES,
        "backend": "eager",
        "schedule": schedule,
        "stage": stage,
        **UNITS.get(name, {}),
    }
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, **made)
    assert isinstance(step, PipelinedStep)
    return step, optimizer, mesh["dp"].get_local_rank()


def plain(name: str, data: int, stage: int, steps: int) -> tuple[Reference, dict[str, torch.Tensor]]:
    reference = Reference(name, stage, data)
    reference.optimizer = torch.optim.AdamW(groups_of(reference.model), lr=0.1)
    for number in range(steps):
        reference.train(number)
    return reference, dict(reference.model.state_dict())


def differing(model: nn.Module, wanted: dict[str, torch.Tensor]) -> list[str]:
    kept = {name: p for name, p in model.named_parameters() if not p.is_meta}
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in kept.items()}
    return [name for name, value in full.items() if not torch.equal(value, wanted[name])] + ["none"] * (not full)


def saves(rank: int, folder: str, name: str, pipeline: int, data: int, stage: int, schedule: str) -> list[bool]:
    """Train, save in a checkpoint and in one file, and go on: what was saved is what was there then."""
    step, optimizer, own = pipelined(name, pipeline, data, stage, schedule)
    for number in range(STEPS):
        step(*batch_of(name, own, number))
    saved = step.save_checkpoint(Path(folder) / "checkpoint", optimizer, extra=rank, asynchronous=True)
    step.save_full_state_dict(Path(folder) / "whole.pt")
    step(*batch_of(name, own, STEPS))
    saved.result()
    whole, nothing = step.full_state_dict(rank0_only=False), step.full_state_dict()
    _, wanted = plain(name, data, stage, STEPS + 1)
    same = [torch.equal(value, wanted[key]) for key, value in whole.items()]
    return [*same, whole.keys() == wanted.keys(), bool(nothing) is (rank == 0)]


def goes_on(rank: int, folder: str, name: str, pipeline: int, data: int, stage: int, schedule: str) -> list[Any]:
    """On another mesh; there the data-parallel ranks train on the batches of the first ones."""
    step, optimizer, own = pipelined(name, pipeline, data, stage, schedule)
    step.prepare(*batch_of(name, own, 0))
    extra = step.load_checkpoint(Path(folder) / "checkpoint", optimizer)
    reference, _ = plain(name, data, stage, 0)
    state = torch.load(Path(folder) / "whole.pt")
    reference.model.load_state_dict(state)
    found = differing(step.model, state)
    # The last of the ranks that have a buffer has written it; others have it on meta.
    buffers = {n: b for n, b in step.model.named_buffers() if n in state and not b.is_meta}
    found += [n for n, buffer in buffers.items() if not torch.equal(buffer, state[n])]
    moments = [slots["exp_avg"].full_tensor() if stage else slots["exp_avg"] for slots in optimizer.state.values()]
    found += ["no moments"] * (not any(float(one.abs().sum()) > 0 for one in moments))
    return [extra, [group["weight_decay"] for group in optimizer.param_groups], *found]


MESHES: list[Any] = [
    ("skips", (2, 2, 1, "1f1b"), [(1, 2, 3, "1f1b"), (2, 1, 0, "interleaved1f1b")]),
    ("norms", (2, 1, 1, "1f1b"), [(2, 1, 3, "zbvzerobubble")]),
    ("skips", (2, 2, 1, "1f1b"), [(4, 1, 1, "gpipe"), (1, 4, 3, "1f1b")]),
    ("gpt", (2, 2, 3, "interleavedzerobubble"), [(2, 2, 0, "zbvzerobubble"), (4, 1, 2, "1f1b")]),
    ("gpt tied", (4, 1, 1, "1f1b"), [(2, 2, 3, "1f1b")]),
    ("norms", (4, 1, 1, "1f1b"), [(2, 1, 3, "zbvzerobubble"), (1, 2, 1, "1f1b")]),
]


@pytest.mark.slow
@quickly("name, first, others", MESHES, MESHES[1:2], slow=MESHES[3:4])
def test_a_checkpoint_is_loaded_on_any_mesh(
    ranks: Ranks, tmp_path: Path, name: str, first: Any, others: list[Any]
) -> None:
    assert all(map(all, ranks.run(first[0] * first[1], saves, str(tmp_path), name, *first)))
    for mesh in others:
        for rank, (extra, decay, *differing) in enumerate(
            ranks.run(mesh[0] * mesh[1], goes_on, str(tmp_path), name, *mesh)
        ):
            assert (extra, decay) == (rank, [0.01, 0.0])
            assert differing == []


def continues(rank: int, folder: str, shape: tuple[int, int]) -> list[str]:
    """Take the two steps that follow what was saved."""
    pipeline, data = shape
    step, optimizer, own = pipelined("skips", pipeline, data, 1, "1f1b")
    step.prepare(*batch_of("skips", own, 0))
    step.load_checkpoint(folder, optimizer)
    for number in range(STEPS, 2 * STEPS):
        step(*batch_of("skips", own, number))
    return differing(step.model, plain("skips", data, 1, 2 * STEPS)[1])


def continues_without(rank: int, folder: str) -> list[str]:
    """Two data-parallel ranks that no pipeline divides, which accumulate over the micro-batches."""
    model = model_of("skips")
    compiled = zcompile.compile(model, stage=1, backend="eager")
    optimizer = torch.optim.AdamW(groups_of(compiled), lr=0.1)
    compiled.load_checkpoint(folder, optimizer)
    for number in range(STEPS, 2 * STEPS):
        parts = [one.chunk(MICROBATCHES) for one in batch_of("skips", rank, number)]
        with compiled.no_sync():
            for part in list(zip(*parts, strict=True))[:-1]:
                (loss_of(compiled, *part) / MICROBATCHES).backward()
        (loss_of(compiled, *(one[-1] for one in parts)) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return differing(compiled, plain("skips", 2, 1, 2 * STEPS)[1])


def saves_unpipelined(rank: int, folder: str) -> None:
    """What two data-parallel ranks without a pipeline save."""
    model = model_of("skips")
    compiled = zcompile.compile(model, stage=1, backend="eager")
    optimizer = torch.optim.AdamW(groups_of(compiled), lr=0.1)
    for number in range(STEPS):
        parts = [one.chunk(MICROBATCHES) for one in batch_of("skips", rank, number)]
        with compiled.no_sync():
            for part in list(zip(*parts, strict=True))[:-1]:
                (loss_of(compiled, *part) / MICROBATCHES).backward()
        (loss_of(compiled, *(one[-1] for one in parts)) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled.save_checkpoint(folder, optimizer)


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_with_and_without_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    pipelines, alone = tmp_path / "checkpoint", tmp_path / "alone"
    assert all(map(all, ranks.run(4, saves, str(tmp_path), "skips", 2, 2, 1, "1f1b")))
    assert ranks.run(4, continues, str(pipelines), (2, 2)) == [[]] * 4
    assert ranks.run(2, continues_without, str(pipelines)) == [[]] * 2
    ranks.run(2, saves_unpipelined, str(alone))
    assert ranks.run(4, continues, str(alone), (2, 2)) == [[]] * 4


def wrong(rank: int, folder: str) -> dict[str, str]:
    step, optimizer, own = pipelined("skips", 2, 1, 1, "1f1b")
    found = {"early": error_of(lambda: step.load_checkpoint(folder, optimizer))}
    step.prepare(*batch_of("skips", own, 0))
    found["missing"] = error_of(lambda: step.load_checkpoint(folder, optimizer))
    state = dict(model_of("skips").state_dict())
    state["last.weight"] = state["last.weight"][:1]
    found["shape"] = error_of(lambda: step.load_full_state_dict(state if rank == 0 else None))
    found["other"] = error_of(lambda: step.load_full_state_dict({**model_of("skips").state_dict(), "x": torch.ones(1)}))
    good = {name: torch.full_like(value, 2.0) for name, value in model_of("skips").state_dict().items()}
    step.load_full_state_dict(good if rank == 0 else None)
    found["loaded"] = str(differing(step.model, good))
    step.load_full_state_dict({name: value + 1 for name, value in good.items()})
    found["loaded on all"] = str(differing(step.model, {name: value + 1 for name, value in good.items()}))
    found["steps"] = "" if math.isfinite(float(step(*batch_of("skips", own, 0)))) else "no loss"
    return found


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
def test_wrong_states_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, wrong, str(tmp_path / "none")):
        assert found["early"].startswith("StateError: model: is not divided yet")
        assert "call step.prepare(*batch) first" in found["early"]
        assert "does not exist" in found["missing"]
        assert found["shape"].startswith("StateError: last.weight: has shape [1, 7] in the state dict, and [2, 7]")
        assert found["other"].startswith("StateError: x: is in the state dict, but is not a parameter or buffer")
        assert found["loaded"] == found["loaded on all"] == "[]"
        assert found["steps"] == ""
