"""A rank that runs something more or less than the others is known to all before a gradient of it is delivered."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ReduceLROnPlateau

import zcompile
from tests.cases import diagonal, quickly
from tests.models import batch, make
from tests.pipelines import batch_of, loss_of, mesh_of, model_of
from tests.ranks import AT_ONCE, Ranks, on_ranks
from tests.refusals import error_of
from zcompile.runtime.optimizer_settings import OptimizerSettings, difference
from zcompile.torch_internals.sizes import FakeTensorMode

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


@pytest.mark.slow
@diagonal("what, stage", ["backward", "step"], [0, 3], pairs=False)
def test_one_more_on_a_rank(ranks: Ranks, stage: int, what: str) -> None:
    all_ranks_name(ranks.run(2, out_of_step, stage, 0, what, group=60), 0)


@pytest.mark.slow
@quickly("what, stage, world", [*itertools.product(FAULTS, range(4), [2, 3])], [])
def test_one_more_of_anything_on_the_last_rank(ranks: Ranks, world: int, stage: int, what: str) -> None:
    answers = ranks.run(world, out_of_step, stage, world - 1, what, group=60)
    if stage == 0 and what in ("evaluation", "forward"):
        assert [message for message, _, _ in answers] == [""] * world, "they send nothing, and change nothing"
    else:
        all_ranks_name(answers, world - 1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_program_that_is_new_on_one_rank_is_not_waited_for(ranks: Ranks) -> None:
    all_ranks_name(ranks.run(2, evaluates_while_others_train_for_the_first_time, group=60), 0)


def first_evaluation_alone(rank: int) -> float:
    compiled = zcompile.compile(make("mlp"), stage=0, backend="eager")
    if rank == 0:
        with torch.no_grad():
            compiled(*batch("mlp", rank, 0))
    compiled(*batch("mlp", rank, 0)).backward()
    return float(compiled.layers[0].weight.grad.sum())


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@quickly("stage", [1, 2, 3], [2])
@on_ranks(2)
def test_an_expert_that_one_rank_leaves_out(rank: int, stage: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    compiled = zcompile.compile(Routed(), stage=stage, backend="eager")
    both = torch.tensor([[1.0, 2, 3, 4], [-1, 2, 3, 4]])
    for _ in range(2):
        compiled(both).backward()
    started = time.perf_counter()
    message = error_of(lambda: compiled(both[1:] if rank else both).backward(), zcompile.AgreementError)
    assert message.startswith("the ranks are out of step: ")
    assert time.perf_counter() - started < AT_ONCE


@on_ranks(2)
def test_what_others_run_is_read_while_a_graph_is_traced(rank: int) -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    compiled(*batch("mlp", rank, 0))
    lockstep = compiled._engine.runtime.lockstep
    with FakeTensorMode():
        lockstep.check()
    assert not lockstep._open


# -- settings of optimizers -------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "rate": (lambda one: one.param_groups[1].update(lr=3e-3), "AdamW, group 1, lr: is 0.01 on rank 0, and 0.003 on"),
    "decay": (lambda one: one.param_groups[0].update(weight_decay=0.5), "AdamW, group 0, weight_decay: is 0.01 on"),
    "betas": (lambda one: one.param_groups[0].update(betas=(0.9, 0.8)), "AdamW, group 0, betas: is (0.9, 0.999) on"),
    "tensor": (lambda one: one.param_groups[1].update(lr=torch.tensor(0.5)), "AdamW, group 1, lr: is 0.01 on rank 0"),
    "moved": (
        lambda one: one.param_groups[1]["params"].append(one.param_groups[0]["params"].pop()),
        "AdamW, group 0, parameter 1: is layers.0.weight on rank 0, and nothing on rank 1",
    ),
    "plateau": (lambda one: ReduceLROnPlateau(one, patience=0).step(torch.inf), "AdamW, group 0, lr: is 0.01 on"),
}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    some = list(model.parameters())
    return torch.optim.AdamW([{"params": some[:2]}, {"params": some[2:]}], lr=1e-2)


class Apart:
    """Three steps of training; before the one that is named rank 1 sets its optimizer otherwise, somewhere in it."""

    def __init__(self, rank: int, change: str, at: tuple[int, str], **options: Any) -> None:
        self.rank, self.change, self.at = rank, change, at
        self.model = zcompile.compile(make("mlp"), backend="eager", **options)
        self.optimizer = two_groups(self.model)
        self.kept: list[torch.Tensor] = []

    def _maybe(self, step: int, place: str) -> None:
        if (step, place) == self.at:
            self.kept = [full(param) for param in self.model.parameters()]
            if self.rank == 1:
                SETTINGS[self.change][0](self.optimizer)

    def found(self) -> tuple[str, bool]:
        """What is said, and whether parameters are as before."""
        try:
            for step in range(3):
                self._maybe(step, "first")
                loss = self.model(*batch("mlp", self.rank, step))
                self._maybe(step, "within")
                loss.backward()
                self._maybe(step, "before the step")
                self.optimizer.step()
                self.optimizer.zero_grad()
        except zcompile.AgreementError as error:
            return str(error), True
        return "no error", False


def full(param: torch.Tensor) -> torch.Tensor:
    return param.to_local().clone() if hasattr(param, "to_local") else param.detach().clone()


def set_apart(rank: int, stage: int, change: str, at: tuple[int, str], nodes: bool = False) -> tuple[str, bool]:
    mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))} if nodes else {}
    loop = Apart(rank, change, at, stage=stage, **mesh)
    said, _ = loop.found()
    same = all(torch.equal(full(p), kept) for p, kept in zip(loop.model.parameters(), loop.kept, strict=True))
    return said, same


@quickly(
    "stage, change, place",
    [(stage, change, place) for stage in range(4) for change in SETTINGS for place in ("first", "within")],
    [(0, "rate", "within"), (1, "betas", "first")],
    pairs=False,
)
def test_a_rank_that_is_set_otherwise_is_named_before_anything_is_updated(
    ranks: Ranks, stage: int, change: str, place: str
) -> None:
    for said, same in ranks.run(2, set_apart, stage, change, (1, place), group=60):
        assert said.startswith(SETTINGS[change][1])
        assert same


@pytest.mark.slow
@quickly("stage", range(4), [3])
def test_settings_are_compared_at_the_first_step(ranks: Ranks, stage: int) -> None:
    for said, same in ranks.run(2, set_apart, stage, "decay", (0, "first"), group=60):
        assert said.startswith(SETTINGS["decay"][1])
        assert same


@quickly("stage", range(4), [0])
def test_settings_of_a_rank_that_change_right_before_its_step(ranks: Ranks, stage: int) -> None:
    answers = ranks.run(2, set_apart, stage, "rate", (1, "before the step"), group=60)
    assert all(said.startswith(SETTINGS["rate"][1]) for said, _ in answers)
    assert answers[1][1], "the rank that has changed them has not stepped"


@pytest.mark.slow
def test_settings_across_replicas(ranks: Ranks) -> None:
    for said, same in ranks.run(4, set_apart, 3, "decay", (1, "first"), True, group=60):
        assert "is 0.01 on ranks 0, 2, 3, and 0.5 on rank 1" in said
        assert same


def changed_by_all(rank: int) -> list[float]:
    """Every kind of change that all ranks make, at every moment, with optimizers that come and go."""
    compiled = zcompile.compile(make("mlp"), stage=2, backend="eager")
    for step in range(3):
        optimizer = two_groups(compiled)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(2):
            loss = compiled(*batch("mlp", rank, step))
            optimizer.param_groups[0]["weight_decay"] += 0.1
            loss.backward()
            optimizer.param_groups[1]["lr"] /= 2
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if rank:
            optimizer.cycle = schedule.cycle = (optimizer, schedule)  # type: ignore[attr-defined]  # outlives rank 0's
        else:
            del schedule.optimizer
    return [float(value.full_tensor().sum()) for value in compiled.parameters()]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_all_ranks_change_is_no_difference(ranks: Ranks) -> None:
    first, second = ranks.run(2, changed_by_all, group=60)
    assert first == second


@quickly("clip", [None, 1.0], [None])
@on_ranks(2, group=60)
def test_settings_of_a_train_step(rank: int, clip: float | None) -> None:
    model = make("mlp")
    optimizer = two_groups(model)
    step = zcompile.train_step(model, None, optimizer, backend="eager", clip_grad_norm=clip)
    step(*batch("mlp", rank, 0))
    if rank == 1:
        SETTINGS["rate"][0](optimizer)
    before = [full(param) for param in step.model.parameters()]
    said = error_of(lambda: step(*batch("mlp", rank, 1)), zcompile.AgreementError)
    assert said.startswith(SETTINGS["rate"][1])
    assert all(torch.equal(full(p), one) for p, one in zip(step.model.parameters(), before, strict=True))


def pipelines_apart(rank: int, culprits: list[int]) -> str:
    """`culprits`: ranks that set a rate of their own. Along the pipeline axis optimizers may be set otherwise."""
    optimizer = torch.optim.SGD((model := model_of("skips")).parameters(), lr=0.1)
    made: dict[str, Any] = {"mesh": mesh_of(2, 2), "microbatches": 4, "stage": 1}
    step = zcompile.train_step(model, loss_of, optimizer, backend="eager", **made)
    try:
        for number in range(2):
            step(*batch_of("skips", rank % 2, number))
            if rank in culprits:
                optimizer.param_groups[0]["lr"] = 0.2
    except zcompile.AgreementError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_settings_along_the_data_parallel_axis_of_a_pipeline(ranks: Ranks) -> None:
    for said in ranks.run(4, pipelines_apart, [3], group=60):
        assert said.startswith("SGD, group 0, lr: is 0.1 on rank 2, and 0.2 on rank 3")


@pytest.mark.slow
def test_stages_of_a_pipeline_may_be_set_otherwise(ranks: Ranks) -> None:
    assert ranks.run(4, pipelines_apart, [2, 3], group=60) == ["no error"] * 4


def test_settings_are_read_as_they_are_now() -> None:
    model = nn.Linear(2, 2)
    settings = OptimizerSettings(lambda: {id(param): name for name, param in model.named_parameters()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    number, group = settings.know(optimizer), optimizer.param_groups[0]
    seen = [settings.digests()[number]]

    def changes(act: Callable[[], object]) -> bool:
        act()
        seen.append(settings.digests()[number])
        return seen[-1] != seen[-2]

    assert not changes(lambda: None)
    assert not changes(lambda: group.update(lr=torch.tensor(0.5)))
    assert changes(lambda: group["lr"].fill_(0.25))
    assert not changes(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    assert changes(lambda: optimizer.param_groups[0]["params"].reverse())
    assert changes(lambda: optimizer.param_groups[0].update(nesterov=True))
    assert changes(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    assert "SGD, group 0, parameter 0 = bias" in settings.lines()
    assert difference({0: ["a = 1", "b = 2"], 1: ["a = 1", "b = 3"], 2: ["a = 1", "b = 2"]}) == (
        "b",
        "is 2 on ranks 0, 2, and 3 on rank 1",
    )
    settings.know(torch.optim.SGD(model.parameters(), lr=0.5))
    assert list(settings.digests()) == [number], "the other one is gone"
