"""A rank that runs something more or less than the others is known to all before a gradient of it is delivered."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch

import zcompile
from tests.cases import diagonal, quickly
from tests.models import batch, make
from tests.ranks import AT_ONCE, Ranks
from zcompile._torch import FakeTensorMode

FAULTS = ("evaluation", "forward", "backward", "step", "train step")


class Loop:
    """A training loop of one rank, over a model whose programs are all known to all ranks."""

    def __init__(self, rank: int, stage: int) -> None:
        self.rank = rank
        self.model = zcompile.compile(make("mlp"), stage=stage, backend="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.whole_step: Any = None
        self.evaluate()
        self.train(0)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(*batch("mlp", self.rank, 7))

    def forward(self) -> torch.Tensor:
        return self.model(*batch("mlp", self.rank, 8))

    def train(self, step: int) -> None:
        self.model(*batch("mlp", self.rank, step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train_step(self) -> None:
        if self.whole_step is None:
            self.whole_step = zcompile.train_step(self.model, None, self.optimizer)
        self.whole_step(*batch("mlp", self.rank, 9))

    def fault(self, what: str) -> None:
        actions = {
            "evaluation": self.evaluate,
            "forward": self.forward,
            "backward": lambda: self.forward().backward(),
            "step": self.optimizer.step,
            "train step": self.train_step,
        }
        actions[what]()


def out_of_step(rank: int, stage: int, culprit: int, what: str) -> tuple[str, list[bool], float]:
    loop = Loop(rank, stage)
    started = time.perf_counter()
    try:
        if rank == culprit:
            loop.fault(what)
        for step in range(1, 4):
            loop.train(step)
    except zcompile.ZcompileError as error:
        without = [p.grad is None for p in loop.model.parameters()]
        return f"{type(error).__name__}: {error}", without, time.perf_counter() - started
    return "", [], 0.0


def all_ranks_name(answers: list[tuple[str, list[bool], float]], culprit: int) -> None:
    for rank, (message, without, seconds) in enumerate(answers):
        assert message.startswith("AgreementError: the ranks are out of step: ")
        assert f"rank {culprit}: run " in message
        assert "optimizer step" in message
        assert seconds < AT_ONCE, "known long before the group's timeout"
        if rank != culprit:
            assert all(without), "no gradient was delivered"


@diagonal("what, stage", ["backward", "step"], [0, 3])
def test_one_more_on_a_rank(ranks: Ranks, stage: int, what: str) -> None:
    all_ranks_name(ranks.run(2, out_of_step, stage, 0, what, group=60), 0)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("what", FAULTS)
def test_one_more_of_anything_on_the_last_rank(ranks: Ranks, world: int, stage: int, what: str) -> None:
    answers = ranks.run(world, out_of_step, stage, world - 1, what, group=60)
    if stage == 0 and what in ("evaluation", "forward"):
        assert [message for message, _, _ in answers] == [""] * world, "they send nothing, and change nothing"
    else:
        all_ranks_name(answers, world - 1)


def test_one_evaluation_more_on_a_rank(ranks: Ranks) -> None:
    all_ranks_name(ranks.run(3, out_of_step, 3, 1, "evaluation", group=60), 1)


def evaluates_while_others_train_for_the_first_time(rank: int) -> tuple[str, list[bool], float]:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    started = time.perf_counter()
    try:
        with torch.no_grad():
            compiled(*batch("mlp", rank, 0))
        if rank == 0:
            with torch.no_grad():
                compiled(*batch("mlp", rank, 0))
        compiled(*batch("mlp", rank, 0)).backward()
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__}: {error}", [True], time.perf_counter() - started
    return "", [], 0.0


def test_a_program_that_is_new_on_one_rank_is_not_waited_for(ranks: Ranks) -> None:
    all_ranks_name(ranks.run(2, evaluates_while_others_train_for_the_first_time, group=60), 0)


def first_evaluation_alone(rank: int) -> float:
    compiled = zcompile.compile(make("mlp"), stage=0, backend="eager")
    if rank == 0:
        with torch.no_grad():
            compiled(*batch("mlp", rank, 0))
    compiled(*batch("mlp", rank, 0)).backward()
    return float(compiled.layers[0].weight.grad.sum())


def test_stage_0_evaluates_on_one_rank_alone(ranks: Ranks) -> None:
    first, second = ranks.run(2, first_evaluation_alone)
    assert first == second


def two_models_in_another_order(rank: int) -> str:
    models = [zcompile.compile(make("mlp", seed), backend="eager") for seed in range(2)]
    with torch.no_grad():
        for model in models:
            model(*batch("mlp", rank, 0))
    try:
        with torch.no_grad():
            for model in models if rank else reversed(models):
                model(*batch("mlp", rank, 0))
    except zcompile.AgreementError as error:
        return str(error)
    return ""


def test_two_models_called_in_another_order_on_a_rank(ranks: Ranks) -> None:
    for message in ranks.run(2, two_models_in_another_order):
        assert "model 1" in message
        assert "model 2" in message


def step_of_one_rank_is_skipped(rank: int) -> str:
    loop = Loop(rank, 3)
    loop.train_step()
    try:
        if rank == 0:
            loop.train_step()
        loop.model(*batch("mlp", rank, 1)).backward()
    except zcompile.AgreementError as error:
        return str(error)
    return ""


def test_a_train_step_more_updates_nothing(ranks: Ranks) -> None:
    for message in ranks.run(2, step_of_one_rank_is_skipped):
        assert "rank 0: run" in message
        assert "a train step" in message


class Scaled(torch.nn.Module):
    """Its parameter has no rows to shard: under stages 1 and 2 a forward of it sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Routed(torch.nn.Module):
    """Each row goes to the expert that it chooses; one that none has chosen is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.last = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return self.last(out).square().sum()


def routes_apart(rank: int, stage: int) -> tuple[str, float]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    compiled = zcompile.compile(Routed(), stage=stage, backend="eager")
    both = torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4]])
    for _ in range(2):
        compiled(both).backward()
    started = time.perf_counter()
    try:
        compiled(both[1:] if rank else both).backward()
    except zcompile.AgreementError as error:
        return str(error), time.perf_counter() - started
    return "no error", 0.0


@quickly("stage", [1, 2, 3], [2, 3])
def test_an_expert_that_one_rank_leaves_out(ranks: Ranks, stage: int) -> None:
    for message, seconds in ranks.run(2, routes_apart, stage):
        assert message.startswith("the ranks are out of step: ")
        assert seconds < AT_ONCE


def reads_while_it_traces(rank: int) -> bool:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    compiled(*batch("mlp", rank, 0))
    lockstep = compiled._engine.runtime.lockstep
    with FakeTensorMode():
        lockstep.check()
    return not lockstep._open


def test_what_others_run_is_read_while_a_graph_is_traced(ranks: Ranks) -> None:
    assert ranks.run(2, reads_while_it_traces) == [True, True]
