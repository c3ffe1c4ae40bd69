"""What pipelined steps give beside the loss, and losses that are scaled for float16."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, batch_of, in_order, loss_of, mean, mesh_of, model_of
from tests.threads import Threads

# -- metrics ----------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """What its first layer gives is a metric, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x, first


def with_metrics(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found, first = model(x)
    loss = F.mse_loss(found, y)
    near = (found - y).abs() < 0.5
    return loss, {"near": near.sum(), "first": first.pow(2).mean((1, 2)), "targets": y, "rows": torch.tensor(len(x))}


def watched_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    return torch.randn(8, 3, 5, generator=source), torch.randn(8, 3, 5, generator=source)


def metrics(rank: int, schedule: str, results: str) -> list[str]:
    """What is not as plain PyTorch gives it for each micro-batch, twice: parameters change between."""
    mesh, model, plain = mesh_of(2, 2), Watched(), Watched()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    options: dict[str, Any] = {"units": ["layers.*"], "stage": 1, "backend": "eager", "results": results}
    made = {"mesh": mesh, "schedule": schedule, "microbatches": MICROBATCHES}
    step = zcompile.train_step(model, with_metrics, optimizers[0], **made, **options)
    wrong = []
    step.prepare(*watched_batch(rank % 2))
    for _ in range(2):
        evaluated, found = step.evaluate(*watched_batch(rank % 2)), step(*watched_batch(rank % 2))
        batches = [watched_batch(of) for of in range(2)]
        if repr(evaluated) != repr(found):
            wrong.append(f"evaluated: {evaluated} for {found}")
        each = [
            [with_metrics(plain, *part) for part in zip(*(one.chunk(MICROBATCHES) for one in of), strict=True)]
            for of in batches
        ]
        own = each[rank % 2]
        wanted = in_order([loss.detach() for loss, _ in own]) / MICROBATCHES
        mean([in_order([loss / MICROBATCHES for loss, _ in some]) for some in each]).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        if results == "last" and step.program is not None and not found:
            first = 1 if schedule == "zbvzerobubble" else 0  # in a V the first rank has the last stage
            wrong += [] if mesh["pp"].get_local_rank() == first and found is None else ["nothing"]
            continue
        loss, named = found
        wrong += [] if torch.equal(loss, wanted) else [f"{loss} for {wanted}"]
        wrong += [] if list(named) == list(own[0][1]) else [f"{list(named)}"]
        for name, value in named.items():
            stacked = torch.stack([one[name] for _, one in own])
            if value.requires_grad or not torch.equal(value, stacked):
                wrong.append(f"{name}: {value} for {stacked}")
    return wrong


@pytest.mark.slow
@quickly(
    "schedule, results",
    [(s, r) for s in ("1f1b", "zbvzerobubble") for r in ("all", "last")],
    [("1f1b", "last")],
    pairs=False,
)
def test_metrics_are_those_of_each_micro_batch(threads: Threads, schedule: str, results: str) -> None:
    assert threads.run(4, metrics, schedule, results) == [[]] * 4


def alone(rank: int) -> list[Any]:
    """Without a pipeline: the metrics of the batch."""
    model, plain = Watched(), Watched()
    step = zcompile.train_step(model, with_metrics, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    evaluated, _ = step.evaluate(*watched_batch(rank))
    loss, named = step(*watched_batch(rank))
    assert torch.equal(evaluated, loss)
    assert not evaluated.requires_grad
    expected, wanted = with_metrics(plain, *watched_batch(rank))
    assert not any(one.requires_grad for one in named.values())
    return [torch.equal(loss, expected), *(torch.equal(named[name], wanted[name]) for name in wanted)]


@pytest.mark.slow
def test_metrics_without_a_pipeline(threads: Threads) -> None:
    assert threads.run(2, alone) == [[True] * 5] * 2


def empty(rank: int, pipelined: bool) -> Any:
    model = Watched()
    made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 2, "units": ["layers.*"]} if pipelined else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(
        model, lambda m, x, y: (with_metrics(m, x, y)[0], {}), optimizer, backend="eager", **made
    )
    return step(*watched_batch(0))[1]


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [True, False])
def test_no_metrics_are_an_empty_dict(threads: Threads, pipelined: bool) -> None:
    assert threads.run(2, empty, pipelined) == [{}, {}]


# -- loss scaling -----------------------------------------------------------------------------------------------------


class Scaled:
    """Plain PyTorch in float16 with a scaler: micro-batches of all ranks, added up in float32."""

    def __init__(self, name: str, stage: int, data: int, clip: float | None) -> None:
        self.name, self.stage, self.data, self.clip, self.model = name, stage, data, clip, model_of(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def train(self, step: int) -> None:
        low = copy.deepcopy(self.model).half()
        rows: dict[str, list[list[torch.Tensor]]] = {}
        for rank in range(self.data):
            for x, y in zip(*(one.chunk(MICROBATCHES) for one in batch_of(self.name, rank, step)), strict=True):
                low.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(low, x, y)
                self.scaler.scale(loss / MICROBATCHES).backward()
                for name, parameter in low.named_parameters():
                    assert parameter.grad is not None
                    found = rows.setdefault(name, [[] for _ in range(self.data)])
                    found[rank].append(parameter.grad.float())
        for name, parameter in self.model.named_parameters():
            if self.stage < 2:
                parameter.grad = mean([in_order(row) for row in rows[name]])
            else:
                parameter.grad = in_order([mean(list(column)) for column in zip(*rows[name], strict=True)])
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def scaled(rank: int, pipeline: int, data: int, stage: int, clip: float | None) -> tuple[float, list[float], list[str]]:
    """How far parameters are from plain PyTorch's after steps of which the first overflow; the scales; and mistakes."""
    plain, model = Scaled("gpt", stage, data, clip), model_of("gpt")
    tokens = [model.get_parameter("tokens.weight")]
    others = [p for p in model.parameters() if not any(p is one for one in tokens)]
    optimizers = [torch.optim.AdamW(some, lr=0.01) for some in (tokens, others)]  # the last stage has none of the first
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    step = zcompile.train_step(
        model,
        loss_of,
        optimizers,
        mesh=mesh_of(pipeline, data),
        microbatches=MICROBATCHES,
        stage=stage,
        dtype=torch.float16,
        backend="eager",
        grad_scaler=scaler,
        clip_grad_norm=clip,
    )
    scales, wrong = [], []
    for number in range(12):
        step(*batch_of("gpt", rank % data, number))
        plain.train(number)
        scales.append(scaler.get_scale())
        if scaler.get_scale() != plain.scaler.get_scale():
            wrong.append(f"step {number}: {scaler.get_scale()} for {plain.scaler.get_scale()}")
    wanted, far = dict(plain.model.named_parameters()), 0.0
    for name, one in model.named_parameters():
        if not one.is_meta:
            full = one.full_tensor() if isinstance(one, DTensor) else one
            far = max(far, float((full - wanted[name]).abs().max()))
    return far, scales, wrong


@pytest.mark.slow
@quickly(
    "pipeline, data, stage, clip",
    [(p, d, s, c) for p, d in ((2, 1), (2, 2), (4, 1)) for s in range(4) for c in (None, 0.5)],
    [(2, 1, 3, 0.5)],
    pairs=False,
)
def test_steps_that_overflow_are_skipped_on_all_ranks(
    threads: Threads, pipeline: int, data: int, stage: int, clip: float | None
) -> None:
    for far, scales, wrong in threads.run(pipeline * data, scaled, pipeline, data, stage, clip):
        assert wrong == []
        assert far <= (0.0 if clip is None else 1e-5)
        assert scales[0] == 2.0**23, "the first step overflows"
        assert scales[-1] == scales[-2], "later ones do not"


def one_stage_overflows(rank: int, pipelined: bool) -> list[tuple[bool, float]]:
    """Whether each step changes parameters; in the second one the gradients of the last stage alone are not finite."""
    model, scaler = Watched(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 2, "units": ["layers.*"]} if pipelined else {}

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        found, _ = model(x)
        return F.mse_loss(found, y) + (model.layers[3][0].weight[0, 0] * bad).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"dtype": torch.float16, "backend": "eager", "grad_scaler": scaler}
    step, seen = zcompile.train_step(model, loss_fn, optimizer, **options, **made), []
    for number in range(3):
        x, y = watched_batch(0)
        bad = torch.full((8,), torch.inf if number == 1 else 1.0)
        before = [(name, one.detach().clone()) for name, one in model.named_parameters() if not one.is_meta]
        step(x, y, bad)
        now = dict(model.named_parameters())
        known = [(name, one) for name, one in before if not now[name].is_meta and now[name].shape == one.shape]
        seen.append((any(not torch.equal(full_of(now[name]), full_of(one)) for name, one in known), scaler.get_scale()))
    return seen


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize("pipelined", [True, False])
def test_an_overflow_in_one_stage_skips_the_step_on_all(threads: Threads, pipelined: bool) -> None:
    for found in threads.run(2, one_stage_overflows, pipelined):
        assert found == [(True, 1024.0), (False, 512.0), (True, 512.0)]


def other_scales(rank: int, loaded: dict[str, Any]) -> str:
    """What is said of ranks that have other scales from the beginning, or load them behind `prepare`."""
    model, scaler = Watched(), torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + (0 if loaded else rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 2, "units": ["layers.*"], "grad_scaler": scaler}
    try:
        step = zcompile.train_step(model, lambda m, x, y: with_metrics(m, x, y)[0], optimizer, backend="eager", **made)
        step.prepare(*watched_batch(0))
        if rank == 1:
            scaler.load_state_dict({**scaler.state_dict(), **loaded})
        step(*watched_batch(0))
    except zcompile.AgreementError as error:
        assert all(parameter.grad is None for parameter in model.parameters())
        return str(error)
    return "taken"


@pytest.mark.slow
def test_ranks_with_other_scales_are_told(threads: Threads) -> None:
    for found in threads.run(2, other_scales, {}):
        assert "the scale of the loss: scale 1024.0" in found
        assert "the scale of the loss: scale 2048.0" in found
    for found in threads.run(2, other_scales, {"scale": 256.0}):
        assert found.startswith("the loss scale: is 1024.0 on one rank, for 0 steps, and 256.0 on another, for 0")
    for found in threads.run(2, other_scales, {"_growth_tracker": 7}):
        assert found.startswith("the loss scale: is 1024.0 on one rank, for 7 steps, and 1024.0 on another, for 0")


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(rank: int, pipelined: bool, loss_fn: Callable[..., Any], options: dict[str, Any]) -> str:
    model = Watched()
    made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": 2, "units": ["layers.*"]} if pipelined else {}
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zcompile.train_step(model, loss_fn, optimizer, backend="eager", **made, **options)(*watched_batch(0))
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def number_beside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return with_metrics(model, x, y)[0], {"rows": 8}


def named_by_number(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss, found = with_metrics(model, x, y)
    return loss, {1: found["near"]}


def loss_alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return with_metrics(model, x, y)[0]


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize(
    ("loss_fn", "options", "message"),
    [
        (number_beside, {}, "OptionError: loss_fn: gives a metric 'rows' that is not a tensor"),
        (named_by_number, {}, "OptionError: loss_fn: gives a metric called 1"),
        (loss_alone, {"results": "first"}, "OptionError: results: 'first' is unknown"),
        (loss_alone, {"grad_scaler": 1.0}, "OptionError: grad_scaler: is a float"),
        (loss_alone, {"dtype": torch.float16}, "OptionError: dtype: is float16.*need a GradScaler"),
        (
            loss_alone,
            {"dtype": torch.float16, "grad_scaler": torch.amp.GradScaler("cpu", enabled=False)},
            "OptionError: dtype: is float16.*the one that is given is disabled",
        ),
        (
            loss_alone,
            {"dtype": torch.bfloat16, "grad_scaler": torch.amp.GradScaler("cpu")},
            "OptimizerError: GradScaler: scales the loss of a model that computes in bfloat16",
        ),
    ],
)
def test_what_is_no_metric_or_scaler_is_refused(
    threads: Threads, pipelined: bool, loss_fn: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    for found in threads.run(2, refused, pipelined, loss_fn, options):
        assert re.match(message, found), found


def wrong_on_one(rank: int, options: dict[str, Any]) -> str:
    """What each rank hears of an option that one of them alone gives wrongly."""
    return refused(rank, True, loss_alone, options if rank == 1 else {})


@pytest.mark.parametrize("options", [{"results": "first"}, {"grad_scaler": 1.0}])
def test_what_is_wrong_on_one_rank_is_told_to_the_others(threads: Threads, options: dict[str, Any]) -> None:
    first, second = threads.run(2, wrong_on_one, options)
    assert second.startswith("OptionError: ")
    assert "rank 1" in first
