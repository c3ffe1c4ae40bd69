"""What a pipeline's ranks hold: shards and activations elsewhere, and budgets of checkpoints."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.cases import quickly
from tests.compare import full
from tests.models import GPT
from tests.pipelines import batch_of, loss_of, mesh_of, trains
from tests.ranks import Ranks
from tests.threads import Threads
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.ir.ops import Offload
from zcompile.pipelining.step import PipelinedStep

# -- shards, optimizer state and activations elsewhere ----------------------------------------------------------------


def on_disk(rank: int, folder: str, name: str, schedule: str, stage: int, options: dict[str, Any]) -> list[str]:
    places = dict.fromkeys(options, f"disk:{folder}")
    return trains(rank, name, 2, 2, schedule, stage, places)


@pytest.mark.slow
@quickly(
    "name, schedule, stage, options",
    [
        (name, schedule, stage, options)
        for name in ("gpt", "skips tied", "norms")
        for schedule in ("1f1b", "interleavedzerobubble")
        for stage in range(1, 4)
        for options in (("offload_parameters",), ("offload_optimizer",), ("offload_parameters", "offload_optimizer"))
    ],
    [
        ("norms", "1f1b", 3, ("offload_parameters", "offload_optimizer")),
    ],
    pairs=False,
)
def test_what_is_on_a_disk_changes_no_bit(
    threads: Threads, tmp_path: Any, name: str, schedule: str, stage: int, options: tuple[str, ...]
) -> None:
    assert threads.run(4, on_disk, str(tmp_path), name, schedule, stage, options) == [[]] * 4


def activations(rank: int, folder: str, limit: str | None, options: dict[str, Any]) -> tuple[list[str], int, int, int]:
    """What differs where activations are on a disk; how many go there; what the step holds without that, and with."""
    steps, models = list[PipelinedStep](), list[nn.Module]()
    for away in (None, f"disk:{folder}"):
        torch.manual_seed(0)
        model = GPT(layers=6, width=64, heads=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 4, "backend": "eager"}
        made["offload_activations"] = away
        if away is not None:
            made["memory_limit"] = limit
        step = zcompile.train_step(model, loss_of, optimizer, **{**made, **options})
        assert isinstance(step, PipelinedStep)
        for number in range(3):
            step(*batch_of("gpt", 0, number, rows=64))
        steps.append(step)
        models.append(model)
    programs = [step.program for step in steps]
    assert programs[0] is not None
    assert programs[1] is not None
    here = [name for name, one in models[0].named_parameters() if not one.is_meta]
    both = [name for name in here if not models[1].get_parameter(name).is_meta]  # a limit may move the cut
    assert len(both) > 20
    pairs = [(name, models[0].get_parameter(name), models[1].get_parameter(name)) for name in both]
    wrong = [name for name, one, other in pairs if not torch.equal(full(one), full(other))]
    return wrong, len(programs[1].nodes(Offload)), *map(peak_bytes, programs)


@pytest.mark.slow
@quickly(
    "limit, options",
    [
        (None, {"schedule": "1f1b"}),
        (None, {"schedule": "gpipe", "checkpoint": "unit"}),
        (None, {"schedule": "interleavedzerobubble", "stage": 1}),
        ("6.5 MB", {"schedule": "1f1b", "stage": 3, "split": ["blocks.3"]}),
    ],
    [
        ("6.5 MB", {"schedule": "1f1b", "stage": 3, "split": ["blocks.3"]}),
    ],
    pairs=False,
)
def test_activations_on_a_disk_change_no_bit(
    threads: Threads, tmp_path: Any, limit: str | None, options: dict[str, Any]
) -> None:
    (first, moved, before, after), (last, *_) = threads.run(2, activations, str(tmp_path), limit, options)
    assert first == last == []
    assert moved > 0
    assert after < before
    assert limit is None or after <= 6.5e6 < before


# -- budgets of activation checkpoints --------------------------------------------------------------------------------


def within(rank: int, schedule: str, stage: int, share: float, tied: bool) -> tuple[list[str], list[int]]:
    """What differs in bits where a share of the peak is given, as many bytes, and as much memory; what steps hold.

    At first without.
    """
    peaks, models, free = list[int](), list[nn.Module](), 0.0
    for checkpoint in (None, share, -1, "auto"):
        torch.manual_seed(0)
        model = GPT(layers=6, width=64, heads=2)
        if tied:
            model.head.weight = model.tokens.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 4, "backend": "eager", "schedule": schedule}
        if checkpoint == -1:
            limit = torch.tensor(int(share * peaks[0]))
            dist.all_reduce(limit, dist.ReduceOp.MAX)  # one for all ranks
            checkpoint = int(limit)
        made |= {"stage": stage, "checkpoint": checkpoint}
        step = zcompile.train_step(model, loss_of, optimizer, **made)
        assert isinstance(step, PipelinedStep)
        before = sum(parameter.nbytes for parameter in model.parameters())
        with mock.patch("zcompile.pipelining.preparation.free_bytes", lambda _, at=free - before: at):
            for number in range(2):
                step(*batch_of("gpt", 0, number, rows=64))
        assert step.program is not None
        peaks.append(peak_bytes(step.program))
        models.append(model)
        # Twice as much for the moments of an optimizer; a tenth of what is left is not used.
        free = 3 * model_state(step.program.layout).parameters + share * peaks[0] / 0.9 + 16
    wrong = [
        name
        for name, one in models[0].named_parameters()
        for other in models[1:]
        if not one.is_meta and not torch.equal(full(one), full(other.get_parameter(name)))
    ]
    return wrong, peaks


@quickly(
    "schedule, stage, share, tied",
    [
        (schedule, stage, share, tied)
        for tied in (False, True)
        for schedule in ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble")
        for stage in (1, 3)
        for share in (0.9, 0.75)
    ],
    [],
    slow=[("interleaved1f1b", 3, 0.75, True)],
)
def test_steps_hold_no_more_than_a_budget(ranks: Ranks, schedule: str, stage: int, share: float, tied: bool) -> None:
    found, most = ranks.run(2, within, schedule, stage, share, tied), 0
    for wrong, (before, *after) in found:
        assert wrong == []
        assert after[0] <= share * before
        assert after[2] <= share * before
        most = max(before, most)
    assert all(peak <= share * most for _, (*_, peak) in found)


def too_small(rank: int) -> str:
    model = GPT(layers=2, width=64, heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {"mesh": mesh_of(2, 1), "microbatches": 4, "backend": "eager", "checkpoint": "100 KiB"}
    try:
        zcompile.train_step(model, loss_of, optimizer, **made).prepare(*batch_of("gpt", 0, 0, rows=64))
    except zcompile.OptionError as error:
        return str(error)
    return "taken"


@pytest.mark.slow
def test_a_budget_that_is_too_small_says_how_much_it_takes(threads: Threads) -> None:
    for found in threads.run(2, too_small):
        assert re.match(r"checkpoint: 100 KiB is less than the .* that this step takes at the least", found), found
