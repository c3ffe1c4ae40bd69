"""Evaluations of pipelines: the losses of plain PyTorch, in stages that another program has divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, UNITS, Reference, batch_of, loss_of, mesh_of, model_of
from tests.threads import Threads
from zcompile.errors import ZcompileError
from zcompile.ir.actions import ActionTable
from zcompile.pipelining.step import PipelinedStep


def step_of(name: str, pipeline: int, data: int, **options: Any) -> PipelinedStep:
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    common: dict[str, Any] = {"mesh": mesh_of(pipeline, data), "microbatches": MICROBATCHES, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, optimizer, **common, **UNITS.get(name, {}), **options)
    assert isinstance(step, PipelinedStep)
    return step


def plainly(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of the micro-batches."""
    total, parts = torch.zeros(()), (x.chunk(MICROBATCHES), y.chunk(MICROBATCHES))
    with torch.no_grad():
        for one, wanted in zip(*parts, strict=True):
            total += loss_of(model, one, wanted)
    return total / MICROBATCHES


def evaluates(rank: int, name: str, pipeline: int, data: int, schedule: str, stage: int) -> list[str]:
    """What is not as in plain PyTorch, of evaluations between steps."""
    reference, step = Reference(name, stage, data), step_of(name, pipeline, data, schedule=schedule, stage=stage)
    own, wrong = rank % data, list[str]()
    step.prepare(*batch_of(name, own, 0))

    def compare(when: str, seed: int, rows: int = 2 * MICROBATCHES) -> None:
        batch = batch_of(name, own, seed, rows)
        loss, wanted = step.evaluate(*batch), plainly(reference.model, *batch)
        if not torch.equal(loss, wanted) or loss.requires_grad:
            wrong.append(f"{when}: {loss}, not {wanted}")

    for number in range(2):
        for model in (step.model, reference.model):
            model.eval()
        compare(f"before step {number}", number)
        compare(f"before step {number}, other rows", number, MICROBATCHES)
        for model in (step.model, reference.model):
            model.train()
        if name != "norms":  # in this mode plain PyTorch would see the batches of all data-parallel ranks
            compare(f"before step {number}, in training mode", number)
        loss, losses = step(*batch_of(name, own, number)), reference.train(number)
        if data == 1 and not torch.equal(loss, losses[own]):
            wrong.append(f"step {number}: {loss}, not {losses[own]}")
    return wrong


@pytest.mark.slow
@quickly(
    "name, pipeline, data, schedule, stage",
    [
        (name, pipeline, data, schedule, stage)
        for name in ("gpt", "skips", "gpt tied", "skips tied", "norms")
        for pipeline, data in ((2, 1), (2, 2))
        for schedule in ("gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev")
        for stage in (0, 1, 3)
        if not (name == "norms" and data > 1)  # statistics of each rank's own batches
    ],
    [("norms", 2, 1, "interleaved1f1b", 3)],
    slow=[("gpt tied", 2, 2, "1f1b", 3), ("skips", 2, 1, "dualpipev", 1), ("skips tied", 2, 2, "zbvzerobubble", 0)],
)
def test_evaluations_are_those_of_plain_pytorch(
    threads: Threads, name: str, pipeline: int, data: int, schedule: str, stage: int
) -> None:
    assert threads.run(pipeline * data, evaluates, name, pipeline, data, schedule, stage) == [[]] * (pipeline * data)


class Assisted(nn.Module):
    """A second head, there for training alone, and a bias that the first stage reads and the last one trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extra = nn.Linear(5, 2)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.last.bias.detach().mean()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.last(x)
        return result + self.extra(x) if self.training else result


def keeps_its_stages(rank: int) -> list[bool]:
    """Whether losses are plain PyTorch's: an evaluation alone would keep that bias in the first stage."""
    plain, model = Assisted(), Assisted()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    options: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": MICROBATCHES, "backend": "eager", "stage": 1}
    units = ["extra", "layers.*", "last"]
    step = zcompile.train_step(model, loss_of, optimizers[1], units=units, schedule="gpipe", **options)
    equal, batch = [], batch_of("skips", 0, 0)
    for _ in range(2):
        step(*batch)
        for part in zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True):
            (loss_of(plain, *part) / MICROBATCHES).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        for one in (plain, model):
            one.eval()
        equal.append(torch.equal(step.evaluate(*batch), plainly(plain, *batch)))
        for one in (plain, model):
            one.train()
    return equal


@pytest.mark.slow
def test_an_evaluation_keeps_parameters_in_the_stages_of_the_step(threads: Threads) -> None:
    assert threads.run(2, keeps_its_stages) == [[True, True]] * 2


def is_refused(rank: int) -> list[str]:
    """The errors of evaluations that cannot be."""
    step, found = step_of("skips", 2, 1, schedule="1f1b", stage=3), []

    def refused(*batch: Any, **named: Any) -> None:
        try:
            step.evaluate(*batch, **named)
        except ZcompileError as error:
            found.append(f"{type(error).__name__}: {error}")

    x, y = batch_of("skips", 0, 0)
    refused(x, y)
    step.prepare(x, y)
    refused(x[:3], y[:3])
    refused(x + rank, y)
    step.evaluate(x, y)
    if rank == 0:
        step.model.eval()
    refused(x, y)
    return found


@pytest.mark.slow
def test_evaluations_that_cannot_be_are_refused_on_every_rank(threads: Threads) -> None:
    for divided, rows, data, modes in threads.run(2, is_refused):
        assert "StateError: model: is not divided yet" in divided
        assert "OptionError: microbatches: is 4, which does not divide a batch of 3" in rows
        assert "AgreementError: the batch of an evaluation: is not the same on ranks 0, 1 along 'pp'" in data
        assert "AgreementError" in modes


def test_a_schedule_without_backwards_is_no_train_step() -> None:
    table = ActionTable.parse("0F0, 0F1, 0B0, 0B1\n1F0, 1B0, 1F1, 1B1")
    assert str(table.forwards()) == "0F0, 0F1\n1F0, 1F1"
    assert table.trains
    assert not table.forwards().trains
    with pytest.raises(zcompile.errors.OptionError, match="has no backward"):
        zcompile.pipelining.action_tables.action_table(table.forwards(), 2, 2)
