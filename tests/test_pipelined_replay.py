"""Recordings of pipelined steps: each rank's micro-batches again, alone, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, UNITS, batch_of, loss_of, mesh_of, model_of
from tests.test_replay import assert_equal_bits, command, replayed
from tests.threads import Threads
from zcompile.pipelining.step import PipelinedStep


def stepped(
    name: str, pipeline: int, data: int, rank: int, nan: str = "", steps: int = 2, **options: Any
) -> tuple[PipelinedStep, Any]:
    """A step that was taken, on a mesh of so many ranks, and its loss."""
    model = model_of(name)
    if nan:
        with torch.no_grad():
            model.get_parameter(nan).view(-1)[0] = torch.nan
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mesh, options = mesh_of(pipeline, data), {"backend": "eager", **UNITS.get(name, {}), **options}
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, microbatches=MICROBATCHES, **options)
    assert isinstance(step, PipelinedStep)
    losses = [step(*batch_of(name, rank % data, number)) for number in range(steps)]
    return step, losses[0]


def records(rank: int, folder: Path, name: str, pipeline: int, data: int, options: dict[str, Any]) -> float:
    _, loss = stepped(name, pipeline, data, rank, record=folder, **options)
    return float(loss)


WAYS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "1f1b, stage 1": ("gpt", 2, 2, {"schedule": "1f1b", "stage": 1}),
    "stage 0": ("gpt", 2, 2, {"schedule": "1f1b", "stage": 0}),
    "stage 2": ("skips", 2, 2, {"schedule": "gpipe", "stage": 2}),
    "zbv, stage 3": ("skips", 2, 2, {"schedule": "zbvzerobubble", "stage": 3}),
    "tied": ("gpt tied", 2, 2, {"schedule": "interleaved1f1b", "stage": 3}),
    "buffers": ("norms", 2, 1, {"schedule": "interleavedzerobubble", "stage": 1}),
    "bfloat16 sums": ("gpt", 2, 2, {"stage": 1, "dtype": torch.bfloat16}),
    "checkpoints": ("gpt", 2, 1, {"stage": 1, "checkpoint": "unit"}),
    "inductor": ("gpt", 2, 1, {"stage": 1, "backend": "inductor"}),
}


@pytest.mark.slow
@quickly("way", list(WAYS), ["zbv, stage 3"], slow=list(WAYS)[:1])
def test_each_rank_of_a_pipeline_is_replayed_alone(threads: Threads, tmp_path: Path, way: str) -> None:
    name, pipeline, data, options = WAYS[way]
    losses = threads.run(pipeline * data, records, tmp_path, name, pipeline, data, options)
    for rank in range(pipeline * data):
        assert_equal_bits(tmp_path, rank, "step")
    if name == "gpt":  # its loss is called so, and the last rank computes it
        values = [value for line in replayed(tmp_path, len(losses) - 1) for value in line.values]
        own = [value.tensor for value in values if re.fullmatch(r"m\d_loss", value.name)]
        assert torch.stack(own).mean().item() == pytest.approx(losses[-1], rel=1e-6)


def records_one(rank: int, folder: Path) -> list[str]:
    step, _ = stepped("gpt", 2, 1, rank, steps=1)
    with step.record(folder):
        step(*batch_of("gpt", 0, 1))
    step(*batch_of("gpt", 0, 2))
    return [type(step).__name__]


@pytest.mark.slow
def test_one_step_is_recorded_where_that_is_asked(threads: Threads, tmp_path: Path) -> None:
    threads.run(2, records_one, tmp_path)
    for rank in range(2):
        assert_equal_bits(tmp_path, rank, "step")
    code, output = command("replay", tmp_path, "--rank", 1, "--brief")
    assert (code, "all equal, bit for bit" in output) == (0, True), output


def records_nan(rank: int, folder: Path) -> None:
    stepped("gpt", 2, 1, rank, nan="blocks.0.attention.qkv.weight", steps=1, record=folder)


@pytest.mark.slow
def test_where_nan_came_from_is_said_on_the_rank_that_received_it(threads: Threads, tmp_path: Path) -> None:
    threads.run(2, records_nan, tmp_path)
    _, output = command("replay", tmp_path, "--rank", 1, "--brief")
    assert "It was received from rank 0 along pp, as " in output, output
    _, output = command("replay", tmp_path)
    assert "The earliest NaN is on rank 0" in output, output
