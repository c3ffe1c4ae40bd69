from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import GPT
from tests.ranks import AT_ONCE, Ranks
from tests.threads import Threads
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.ir.actions import ActionTable
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather, Offload, Reduce, Send, Sum, SumAverages
from zcompile.pipelining.step import PipelinedStep

MICROBATCHES = 4
SCALE = 1.0


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3), nn.Linear(3, width)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Skips(nn.Module):
    """Odd sizes, scalars, a mask, values that cross several cuts, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.down = nn.ModuleList(Residual(7) for _ in range(3))
        self.up = nn.ModuleList(Residual(7) for _ in range(3))
        self.up[1].gain.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = 1.0
        self.factors = [1.0, 1.0]
        self.last = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(x.shape[1])[:, None] > 1).float()
        h, kept = self.first(x), []
        for block in self.down:
            h = block(h) * mask
            kept.append(h)
        for block in self.up:
            h = block(h + kept.pop().transpose(1, 2).transpose(1, 2)) * mask
        result: torch.Tensor = self.last(h) * self.scale * torch.tensor(self.factors)
        return result


class Tied(Skips):
    """Two layers far apart have one matrix, and a third one its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up[2].up.weight = self.down[0].up.weight
        self.up[2].down = Transposed(self.down[0].up.weight)


class Normed(nn.Module):
    """Batch normalization, whose statistics each stage keeps, a counter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv1d(i, o, 1), nn.BatchNorm1d(o)) for i, o in ((4, 6), (6, 6)))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)) for _ in range(3))
        self.last = nn.Conv1d(6, 4, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("weights", torch.rand(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        self.calls.add_(1)
        for block in self.blocks:
            x = x + torch.relu(block(x)) * self.weights
        result: torch.Tensor = self.last(x)[..., :2]
        return result


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "norms":
        return Normed()
    if "gpt" not in name:
        return Tied() if "tied" in name else Skips()
    model = GPT(layers=3, width=16, heads=2)
    if "tied" in name:
        model.head.weight = model.tokens.weight
    return model


UNITS: dict[str, Any] = {"norms": {"units": ["layers.*", "blocks.*", "last"]}}
"""Small layers next to each other are else one unit."""
APART = {"gpt tied": {"head": "tokens.weight"}, "skips tied": {"up.2": "down.0.up.weight"}}
"""What of a model is in another stage than the one that keeps a parameter that it reads, too."""


def untied(name: str, model: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy whose later stages have parameters of their own for those that they share, by the names of these."""
    copied, twins = copy.deepcopy(model) if name in APART else model, dict[str, nn.Parameter]()
    for path, shared in APART.get(name, {}).items():
        of, twin = copied.get_parameter(shared), nn.Parameter(copied.get_parameter(shared).detach().clone())
        twins[shared] = twin
        for module in copied.get_submodule(path).modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                if parameter is of:
                    setattr(module, key, twin)
    return copied, twins


def batch_of(name: str, rank: int, step: int, rows: int = 2 * MICROBATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    if "gpt" in name:
        tokens = torch.randint(0, 64, (rows, 16), generator=source)
        return tokens, tokens.roll(1, 1)
    return torch.randn(rows, 4, 5, generator=source), torch.randn(rows, 4, 2, generator=source)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(model, GPT):
        loss: torch.Tensor = model(x, y)
        return loss
    return ((model(x) - y) ** 2).mean() * SCALE


def mesh_of(pipeline: int, data: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pipeline, data), mesh_dim_names=("pp", "dp"))


class Reference:
    """Plain PyTorch on one device: the micro-batches of all data-parallel ranks, summed in the documented order."""

    def __init__(self, name: str, stage: int, data: int, replicas: int = 1) -> None:
        self.name, self.stage, self.data, self.model, self.replicas = name, stage, data, model_of(name), replicas
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def gradients(self, rank: int, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], torch.Tensor]:
        """Of each micro-batch; of what other stages read of parameters, too; and the mean loss."""
        found, others, total = [], [], torch.zeros(())
        model, twins = untied(self.name, self.model)
        parts = [one.chunk(MICROBATCHES) for one in batch_of(self.name, rank, step)]
        for x, y in zip(*parts, strict=True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=next(model.parameters()).dtype is torch.bfloat16):
                loss = loss_of(model, x, y)
            (loss / MICROBATCHES).backward()
            named = {name: model.get_parameter(name) for name, _ in self.model.named_parameters()}
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in named.items()})
            others.append({name: p.grad.clone() for name, p in twins.items() if p.grad is not None})
            total = total + loss.detach()
        return found, others, total / MICROBATCHES

    def train(self, step: int) -> list[torch.Tensor]:
        """Take a step; gives the losses of all data-parallel ranks."""
        ranks = [self.gradients(rank, step) for rank in range(self.data)]
        for name, parameter in self.model.named_parameters():
            # What other stages compute is added up there, and comes behind all micro-batches.
            rows = [[one[name] for one in found] for found, _, _ in ranks]
            if name in ranks[0][1][0]:
                for row, (_, others, _) in zip(rows, ranks, strict=True):
                    row.append(in_order([one[name] for one in others]))
            if rows[0][0] is None:
                parameter.grad = None
            else:
                size = len(rows) // self.replicas
                parameter.grad = mean([self.inside(rows[at : at + size]) for at in range(0, len(rows), size)])
        self.optimizer.step()
        return [loss for *_, loss in ranks]

    def inside(self, rows: list[list[Any]]) -> Any:
        """Of the ranks of a replica: sums over micro-batches, averaged, or averages, summed over micro-batches."""
        if self.stage < 2:
            return mean([in_order(row) for row in rows])
        return in_order([mean(list(column)) for column in zip(*rows, strict=True)])


def in_order(tensors: list[Any]) -> Any:
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total


def mean(tensors: list[Any]) -> Any:
    return in_order(tensors) / len(tensors)


def trains(
    rank: int,
    name: str,
    pipeline: int,
    data: int,
    schedule: str,
    stage: int,
    options: dict[str, Any],
    replicas: int | None = None,
) -> list[str]:
    """What is not as in the reference after three steps."""
    if replicas is None:
        mesh = mesh_of(pipeline, data)
    else:
        sizes, names = (pipeline, replicas, data // replicas), ("pp", "dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    one_level = stage == 0 or options.get("shard") == "flat"
    reference, model = Reference(name, stage, data, 1 if one_level else replicas or 1), model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {**UNITS.get(name, {}), **options}
    step = zcompile.train_step(
        model,
        loss_of,
        optimizer,
        mesh=mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        stage=stage,
        backend="eager",
        **options,
    )
    assert isinstance(step, PipelinedStep)
    wrong, own = [], rank % data
    for number in range(3):
        loss, losses = step(*batch_of(name, own, number)), reference.train(number)
        if not torch.equal(loss, losses[own]):
            wrong.append(f"the loss of step {number}: {loss} and {losses[own]}")
    wanted = dict(reference.model.state_dict())
    kept = {n: p for n, p in model.named_parameters() if not p.is_meta}
    # Data-parallel ranks have statistics of their own batches; the reference those of all, one after the other.
    buffers = {n: b for n, b in model.named_buffers() if not b.is_meta and n in wanted and data == 1}
    wrong += [f"{n}: {b} and {wanted[n]}" for n, b in buffers.items() if not torch.equal(b, wanted[n])]
    for parameter_name, parameter in kept.items():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(full, wanted[parameter_name]):
            wrong.append(f"{parameter_name}: {(full - wanted[parameter_name]).abs().max()}")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(p) for p in held} != {id(p) for p in kept.values()}:
        wrong.append("the optimizer holds other parameters than this rank's")
    return [*wrong, *(["no parameters"] if not kept else [])]


WAYS = [
    (name, pipeline, data, schedule, stage)
    for name in ("gpt", "skips", "gpt tied", "skips tied", "norms")
    for pipeline, data in ((2, 1), (2, 2), (4, 1), (1, 2))
    for schedule in ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
    for stage in range(4)
    if not (schedule == "dualpipev" and pipeline == 4)  # it wants a micro-batch for each stage
    and not (name in APART and pipeline == 1 and schedule not in ("interleaved1f1b", "zbvzerobubble", "dualpipev"))
    and not (
        ("gpt" in name or name == "norms") and pipeline == 4 and schedule in ("interleaved1f1b", "zbvzerobubble")
    )  # has six units
]


@quickly(
    "name, pipeline, data, schedule, stage",
    WAYS,
    [
        ("skips", 2, 1, "interleaved1f1b", 2),
        ("gpt tied", 2, 1, "1f1b", 1),
    ],
    pairs=False,
)
def test_a_pipeline_trains_as_one_process_bit_for_bit(
    threads: Threads, name: str, pipeline: int, data: int, schedule: str, stage: int
) -> None:
    found = threads.run(pipeline * data, trains, name, pipeline, data, schedule, stage, {})
    assert found == [[]] * (pipeline * data)


WITH = [
    {"prefetch": 0},
    {"prefetch": "auto"},
    {"bucket": 64},
    {"split": ["up.0"]},
    {"units": ["down.*", "up.*"]},
    {"checkpoint": "unit"},
    {"memory_limit": "1 MB"},
    {"memory_limit": "1 MB", "checkpoint": "unit", "prefetch": 0},
]


@pytest.mark.slow
@quickly("options, schedule", [*itertools.product(WITH, ["1f1b", "zbvzerobubble"])], [], pairs=False)
def test_options_change_no_bit(threads: Threads, options: dict[str, Any], schedule: str) -> None:
    if schedule == "zbvzerobubble" and "split" in options:
        options = {"split": ["down.1", "up.0", "up.1"]}
    assert threads.run(4, trains, "skips", 2, 2, schedule, 3, options) == [[]] * 4


def in_low_precision(rank: int, name: str, pipeline: int, data: int, stage: int, reduce_dtype: Any) -> list[str]:
    """What is not as in plain PyTorch, with bfloat16 gradients that are added up in the dtype they are reduced in."""
    reference, model = Reference(name, stage, data), model_of(name)
    master = reference.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    low = {"dtype": torch.bfloat16, "reduce_dtype": reduce_dtype, "stage": stage, "backend": "eager"}
    step = zcompile.train_step(
        model, loss_of, optimizer, mesh=mesh_of(pipeline, data), microbatches=MICROBATCHES, **low
    )
    for number in range(3):
        step(*batch_of(name, rank % data, number))
        reference.model = copy.deepcopy(master).bfloat16()
        ranks = [reference.gradients(of, number) for of in range(data)]
        for parameter_name, parameter in master.named_parameters():
            rows = [[one[parameter_name].to(reduce_dtype) for one in found] for found, _, _ in ranks]
            for row, (_, others, _) in zip(rows, ranks, strict=True):
                if parameter_name in others[0]:
                    row.append(in_order([one[parameter_name].to(reduce_dtype) for one in others]))
            if stage < 2:
                parameter.grad = mean([in_order(row) for row in rows]).float()
            else:
                columns = zip(*rows, strict=True)
                parameter.grad = in_order([mean(list(column)).float() for column in columns])
        reference.optimizer.step()
    wanted, full = dict(master.named_parameters()), dict[str, torch.Tensor]()
    for parameter_name, one in model.named_parameters():
        if not one.is_meta:
            full[parameter_name] = one.full_tensor() if isinstance(one, DTensor) else one
    assert full
    return [name for name, value in full.items() if not torch.equal(value, wanted[name])]


@pytest.mark.slow
@quickly(
    "name, pipeline, data, stage, reduce_dtype",
    [
        (name, pipeline, data, stage, dtype)
        for name in ("gpt", "gpt tied")
        for pipeline, data in ((2, 1), (2, 2))
        for stage in range(4)
        for dtype in (torch.float32, torch.bfloat16)
    ],
    [("gpt tied", 2, 1, 3, torch.float32)],
    pairs=False,
)
def test_gradients_are_added_up_in_the_dtype_that_they_are_reduced_in(
    threads: Threads, name: str, pipeline: int, data: int, stage: int, reduce_dtype: Any
) -> None:
    found = threads.run(pipeline * data, in_low_precision, name, pipeline, data, stage, reduce_dtype)
    assert found == [[]] * (pipeline * data)


def gathers(rank: int) -> list[object]:
    """Of a step, without a limit, with one that allows everything, and what is said of one that allows nothing."""
    found: list[object] = []
    for limit in (None, "1 MB", "1 KB"):
        model = model_of("skips")
        step = zcompile.train_step(
            model,
            loss_of,
            torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh_of(1, 2),
            microbatches=MICROBATCHES,
            stage=3,
            backend="eager",
            memory_limit=limit,
        )
        assert isinstance(step, PipelinedStep)
        try:
            step.prepare(*batch_of("skips", 0, 0))
        except zcompile.OptionError as error:
            found.append(str(error))
            continue
        assert step.program is not None
        units = {op_of(node, AllGather).unit for node in step.program.nodes(AllGather)}
        found.append(len(step.program.nodes(AllGather)) / len(units))
    return found


@pytest.mark.slow
def test_units_stay_full_over_micro_batches_as_far_as_memory_allows(threads: Threads) -> None:
    for free, generous, refused in threads.run(2, gathers):
        assert free > 4
        assert generous == 1
        assert str(refused).startswith("memory_limit: 1000 B is less than the ")


def doubles(rank: int, shape: tuple[int, ...]) -> list[bool]:
    """In float64, with a loss of this shape."""
    model, plain = model_of("skips").double(), model_of("skips").double()
    x, y = (one.double() for one in batch_of("skips", 0, 0))

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y).view(shape)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = mesh_of(2, 1)
    step = zcompile.train_step(model, loss_fn, optimizer, mesh=mesh, microbatches=MICROBATCHES, backend="eager")
    loss = step(x, y)
    wanted = [loss_fn(plain, *part) for part in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)]
    for one in wanted:
        (one / MICROBATCHES).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    full = {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    same = [torch.equal(value, plain.get_parameter(name)) for name, value in full.items()]
    return [*same, torch.equal(loss, in_order([one.detach() for one in wanted]) / MICROBATCHES), loss.shape == shape]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (1,)])
def test_losses_of_other_dtypes_and_shapes(threads: Threads, shape: tuple[int, ...]) -> None:
    assert all(map(all, threads.run(2, doubles, shape)))


def from_meta(rank: int) -> tuple[float, list[str]]:
    with torch.device("meta"):
        model = GPT(layers=2, width=16, heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh_of(2, 1), microbatches=2, backend="eager")
    torch.manual_seed(0)
    losses = [float(step(*batch_of("gpt", 0, 0))) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    return losses[0], [name for name, parameter in model.named_parameters() if not parameter.is_meta]


def from_meta_alone(rank: int) -> float:
    with torch.device("meta"):
        model = GPT(layers=2, width=16, heads=2)
    torch.manual_seed(0)
    compiled = zcompile.compile(model, backend="eager")
    parts = [one.chunk(2) for one in batch_of("gpt", 0, 0)]
    return float(in_order([compiled(*part).detach() for part in zip(*parts, strict=True)]) / 2)


@pytest.mark.slow
def test_a_model_on_meta_gets_the_values_of_its_code_where_it_is_kept(threads: Threads) -> None:
    (first, names), (second, others) = threads.run(2, from_meta)
    assert first == second == threads.run(1, from_meta_alone)[0]
    assert {*names}.isdisjoint(others)
    assert {*names, *others} == {name for name, _ in GPT(layers=2, width=16, heads=2).named_parameters()}


def programs(rank: int, stage: int, **options: Any) -> dict[str, Any]:
    model = model_of("gpt")
    step = zcompile.train_step(
        model,
        loss_of,
        torch.optim.SGD(model.parameters(), lr=0.1),
        mesh=mesh_of(2, 2),
        microbatches=MICROBATCHES,
        stage=stage,
        backend="eager",
        **options,
    )
    assert isinstance(step, PipelinedStep)
    assert step.program is None
    before = repr(step)
    step(*batch_of("gpt", rank % 2, 0))
    assert step.program is not None
    kinds = (AllGather, Reduce, Sum, SumAverages, Send)
    return {kind.__name__: len(step.program.nodes(kind)) for kind in kinds} | {
        "repr": before,
        "text": str(step.program),
        "units": len(step.program.layout.units),
    }


def text_with(rank: int, options: dict[str, Any]) -> str:
    return str(programs(rank, 1, **options)["text"])


@pytest.mark.slow
@quickly("stage", [1, 2, 3], [3])
def test_what_a_stage_of_zero_sends_in_a_pipeline(threads: Threads, stage: int) -> None:
    for rank, found in enumerate(threads.run(4, programs, stage)):
        units = found["units"]
        assert found["repr"] == f"PipelinedStep(GPT, stages {rank // 2} of 2, 4 micro-batches)"
        assert found["AllGather"] == (units if stage < 3 else found["AllGather"])
        assert stage < 3 or found["AllGather"] > MICROBATCHES * units
        assert found["Reduce"] == units * (1 if stage == 1 else MICROBATCHES)
        assert found["Sum"] == (units * (MICROBATCHES - 1) if stage == 1 else 0)
        assert found["SumAverages"] == (0 if stage == 1 else units * (MICROBATCHES - 1))
        assert found["Send"] == MICROBATCHES
        assert "bucket=" not in found["text"]
        actions = re.findall(r"^    # (\w+)$", found["text"], re.MULTILINE)
        assert actions[:4] == [["0F0", "0F1", "0B0", "0F2"], ["1F0", "1B0", "1F1", "1B1"]][rank // 2]


@pytest.mark.slow
def test_messages_are_of_the_size_that_is_asked_for(threads: Threads) -> None:
    assert all("bucket=512" in text for text in threads.run(4, text_with, {"bucket": 512}))


def clips(rank: int, name: str, pipeline: int, data: int, stage: int, schedule: str) -> list[float]:
    """How far from the reference, whose norm is that of all gradients, losses, norms and parameters are."""
    mesh, reference, model = mesh_of(pipeline, data), Reference(name, stage, data), model_of(name)
    reference.optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.5)
    norms: list[torch.Tensor] = []

    def clip(*_: Any) -> None:
        norms.append(nn.utils.clip_grad_norm_(reference.model.parameters(), 0.01))

    reference.optimizer.register_step_pre_hook(clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    made = {"microbatches": MICROBATCHES, "backend": "eager", "schedule": schedule, "stage": stage}
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, clip_grad_norm=0.01, **made)
    assert isinstance(step, PipelinedStep)
    found = []
    for number in range(3):
        loss = step(*batch_of(name, mesh["dp"].get_local_rank(), number))
        found.append(float(loss - reference.train(number)[mesh["dp"].get_local_rank()]))
        assert step.grad_norm is not None
        assert norms[-1] > 0.01
        found.append(float(step.grad_norm / norms[-1] - 1))
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is None
        if not parameter.is_meta:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.append(float((full - reference.model.get_parameter(parameter_name)).abs().max()))
    return found


@pytest.mark.slow
@quickly(
    "name, pipeline, data, stage, schedule",
    [("skips", 2, 2, 0, "1f1b"), ("gpt tied", 2, 2, 3, "zbvzerobubble"), ("skips", 4, 1, 1, "gpipe")],
    [("skips", 2, 2, 0, "1f1b")],
    pairs=False,
)
def test_gradients_are_clipped_by_the_norm_of_all_stages(
    threads: Threads, name: str, pipeline: int, data: int, stage: int, schedule: str
) -> None:
    for found in threads.run(pipeline * data, clips, name, pipeline, data, stage, schedule):
        assert max(map(abs, found)) < 1e-5


def unheld(rank: int) -> list[float]:
    """A trained parameter that no optimizer holds keeps no gradient for the next step."""
    model, found = model_of("skips"), []
    held = [parameter for name, parameter in model.named_parameters() if "first" not in name]
    made = {"mesh": mesh_of(2, 1), "microbatches": MICROBATCHES, "backend": "eager", "clip_grad_norm": 1.0}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(held, lr=0.001), **made)
    for number in range(2):
        found.append(float(step(*batch_of("skips", 0, number))))
    return found


@pytest.mark.slow
def test_a_parameter_that_no_optimizer_holds_keeps_no_gradient(threads: Threads) -> None:
    first, second = threads.run(2, unheld)
    assert first == second
    assert all(map(math.isfinite, first))


def held(rank: int, options: dict[str, Any]) -> int:
    """The most bytes of activations and gradients that the program of a rank holds, as predicted."""
    model = GPT(layers=6, width=64, heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = {"mesh": mesh_of(2, 1), "microbatches": 8, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, optimizer, **made, **options)
    assert isinstance(step, PipelinedStep)
    step.prepare(*batch_of("gpt", 0, 0, 256))
    assert step.program is not None
    return peak_bytes(step.program)


@pytest.mark.slow
@quickly("schedule", ["1f1b", "gpipe"], ["1f1b"])
def test_what_is_computed_again_is_not_held(threads: Threads, schedule: str) -> None:
    """Where other micro-batches run between forward and backward, that is so of the last unit of a stage, too."""
    saved = threads.run(2, held, {"schedule": schedule})
    again = threads.run(2, held, {"schedule": schedule, "checkpoint": "unit"})
    assert all(less < 0.6 * more for less, more in zip(again, saved, strict=True))


# -- bad input --------------------------------------------------------------------------------------------------------


class Broken(Skips):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("a graph break")
        return super().forward(x)


class Short(nn.Module):
    """Two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Far(Skips):
    """The last stage writes to what the first one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x + self.ema)
        self.ema.lerp_(result.detach().mean(), 0.5)
        return result


def not_scalar(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


def two(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return loss_of(model, x, y), y


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -((model(x) - y) ** 2).sum()


def summed_classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = model(x).flatten(0, 1)
    return nn.functional.cross_entropy(found, y.flatten(0, 1).argmax(1), reduction="sum").view(1)


def detached(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x, y).detach()


Mistake = tuple[Callable[[], nn.Module], Any, dict[str, Any], int, str]
MISTAKES: dict[str, Mistake] = {
    "units": (Short, loss_of, {"schedule": "interleaved1f1b"}, 8, "OptionError: schedule: has 4 stages, and the"),
    "rows": (Skips, loss_of, {}, 6, "OptionError: microbatches: is 4, which does not divide a batch of 6"),
    "schedule": (Skips, loss_of, {"schedule": "2f2b"}, 8, "OptionError: schedule: '2f2b' is no schedule"),
    "few": (Skips, loss_of, {"schedule": "dualpipev", "microbatches": 2}, 8, "OptionError: microbatches: is 2: "),
    "split": (Skips, loss_of, {"split": ["middle"]}, 8, "OptionError: split: names 'middle', which is no unit"),
    "length": (Skips, loss_of, {"split": ["up.0", "up.1"]}, 8, "OptionError: split: has 2 units, and 2 stages"),
    "break": (Broken, loss_of, {}, 8, "CaptureError: "),
    "buffer": (Far, loss_of, {}, 8, "CaptureError: ema: is a buffer that stage 1 writes to and stage 0 reads"),
    "loss": (Skips, not_scalar, {}, 8, "OptionError: loss_fn: gives a tensor of [2, 4, 2]"),
    "results": (Skips, two, {}, 8, "OptionError: loss_fn: gives 2 results"),
    "sum": (Skips, summed, {}, 8, "OptionError: loss_fn: gives a sum over the batch"),
    "classes": (Skips, summed_classes, {}, 8, "OptionError: loss_fn: gives a sum over the batch"),
    "detached": (Skips, detached, {}, 8, "OptionError: loss_fn: gives a loss that depends on no parameter"),
    "option": (Skips, loss_of, {"arenas": True}, 8, "OptionError: arenas: is not combined with a pipe"),
    "auto": (Skips, loss_of, {"shard": "auto"}, 8, "OptionError: shard: 'auto' is not combined with a pipe"),
    "unknown": (Skips, loss_of, {"stages": 2}, 8, "OptionError: stages: is no option"),
    "half": (Skips, loss_of, {"dtype": torch.float16}, 8, "OptionError: dtype: is float16, whose gradients want"),
    "both": (
        Skips,
        loss_of,
        {"checkpoint": 0.5, "offload_activations": "disk:/tmp"},
        8,
        "OptionError: checkpoint: is a budget, which does not count on what is offloaded",
    ),
    "offload": (
        Skips,
        loss_of,
        {"offload_optimizer": "cpu"},
        8,
        "OptionError: offload_optimizer: is 'cpu', and the model",
    ),
}


def mistaken(rank: int) -> dict[str, tuple[str, float]]:
    mesh = mesh_of(2, 1)
    found = {}
    for what, (make, loss_fn, options, rows, _) in MISTAKES.items():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        started = time.perf_counter()
        try:
            given = {"microbatches": MICROBATCHES, "backend": "eager", **options}
            step = zcompile.train_step(model, loss_fn, optimizer, mesh=mesh, **given)
            step(*batch_of("skips", 0, 0, rows))
            found[what] = "no error", 0.0
        except zcompile.ZcompileError as error:
            same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            text = f"{type(error).__name__}: {error}" if same else "the model was changed"
            found[what] = text, time.perf_counter() - started
    return found


@pytest.mark.slow
def test_what_cannot_be_meant_is_the_same_typed_error_on_every_rank(ranks: Ranks) -> None:
    for found in ranks.run(2, mistaken):
        for what, (*_, message) in MISTAKES.items():
            assert found[what][0].startswith(message), (what, found[what][0])
            assert found[what][1] < AT_ONCE


def means(rank: int) -> list[str]:
    """Which losses that are means, or of one micro-batch, are refused."""

    def divided(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((model(x) - y) ** 2).sum() / y.numel()

    def regular(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y) + sum(parameter.square().sum() for parameter in model.parameters())

    refused = []
    for loss_fn, microbatches in ((divided, 4), (regular, 4), (summed, 1)):
        model = model_of("skips")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made: dict[str, Any] = {"mesh": mesh_of(2, 1), "microbatches": microbatches, "backend": "eager"}
        try:
            step = zcompile.train_step(model, loss_fn, optimizer, **made)
            step(*batch_of("skips", 0, 0))
        except zcompile.OptionError as error:
            refused.append(f"{loss_fn.__name__}: {error}")
            continue
        plain = model_of("skips")
        loss_fn(plain, *batch_of("skips", 0, 0)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for name, one in model.named_parameters():
            if not one.is_meta and not torch.allclose(whole(one), plain.get_parameter(name), atol=1e-5):
                refused.append(f"{loss_fn.__name__}: {name} is not as without a pipeline")
    return refused


@pytest.mark.slow
def test_losses_that_are_means_are_taken(threads: Threads) -> None:
    assert threads.run(2, means) == [[], []]


def test_options_of_a_pipeline_want_one() -> None:
    model = Skips()
    with pytest.raises(zcompile.OptionError, match="are for a pipeline, and the mesh has no dimension 'pp'"):
        zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters()), microbatches=2)


def different(rank: int, what: str) -> tuple[str, float]:
    """Rank 1 has something else."""
    mesh, mine = mesh_of(2, 1), rank == 1
    model = model_of("skips")
    table: str | ActionTable = "2f2b" if what == "schedule" and mine else "1f1b"
    if what == "table" and mine:
        table = ActionTable.parse("0F0, 0F1, 0B0, 0B1\n1F0, 1F1, 1B0, 1B1")
    options: dict[str, Any] = {"split": ["up.0"]} if what == "split" and mine else {}
    started = time.perf_counter()
    try:
        step = zcompile.train_step(
            model,
            loss_of,
            torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            schedule=table,
            microbatches=2,
            stage=2 if what == "stage" and mine else 3,
            backend="eager",
            **options,
        )
        step(*batch_of("skips", 0, 0, 6 if what == "batch" and mine else 8))
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - started
    return "no error", 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("stage", "AgreementError: the options and the traced step: line 1 differs: rank 0: 'stage 3"),
        ("batch", "AgreementError: the options and the traced step: line "),
        ("split", "AgreementError: the options and the traced step: line 4 differs: rank 0: 'split None"),
        ("table", "AgreementError: the options and the traced step: line 3 differs: rank 0: '1F0, 1B0, "),
    ],
)
def test_ranks_that_differ_are_told_before_anything_runs(ranks: Ranks, what: str, message: str) -> None:
    for found, seconds in ranks.run(2, different, what):
        assert found.startswith(message), found
        assert seconds < AT_ONCE


def test_what_one_rank_alone_has_wrong_is_told_to_the_others(ranks: Ranks) -> None:
    (other, seconds), (own, _) = ranks.run(2, different, "schedule")
    assert own.startswith("OptionError: schedule: '2f2b' is no schedule")
    assert other.startswith(
        "AgreementError: a pipelined train step: rank 1 failed first: OptionError: schedule: '2f2b'"
    )
    assert seconds < AT_ONCE


@contextlib.contextmanager
def changed(what: str, model: Any) -> Iterator[None]:
    """Something is not as it was at the first step."""
    first = next(p for p in model.parameters() if not p.is_meta)
    if what == "mode":
        model.eval()
    elif what == "frozen":
        first.requires_grad_(False)
    elif what == "hook":
        hook = model.register_forward_hook(lambda *_: None)
    elif what == "module":
        model.down.append(nn.Identity())
    values = {"attribute": (vars(model), "scale"), "list": (model.factors, 0), "global": (globals(), "SCALE")}
    held: Any
    held, key = values.get(what, ({}, ""))
    if held:
        held[key] = 0.5
    try:
        yield
    finally:
        model.train()
        first.requires_grad_(True)
        if what == "hook":
            hook.remove()
        elif what == "module":
            del model.down[-1]
        if held:
            held[key] = 1.0


def refusals(rank: int, data: int, changes: Sequence[str]) -> dict[str, tuple[str, float]]:
    """What is said where rank 0 changes something after the first step, and the seconds until it is."""
    model = model_of("skips")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = mesh_of(dist.get_world_size() // data, data)
    step = zcompile.train_step(model, loss_of, optimizer, mesh=mesh, microbatches=MICROBATCHES, backend="eager")
    step(*batch_of("skips", rank % data, 0))
    said = {}
    for what in changes:
        mine = what if rank == 0 else ""
        rows = {"rows": 6, "size": MICROBATCHES}.get(mine, 2 * MICROBATCHES)
        with changed(mine, model):
            started = time.perf_counter()
            with pytest.raises(zcompile.ZcompileError) as found:
                step(*batch_of("skips", rank % data, 1, rows))
        said[what] = f"{type(found.value).__name__}: {found.value}", time.perf_counter() - started
    return said


CHANGES = {
    "rows": "OptionError: microbatches: is 4, which does not divide a batch of 6",
    "size": r"OptionError: batch: has x torch.float32 \[1, 4, 5\], .* traced with x torch.float32 \[2, 4, 5\]",
    "mode": "ModelError: Skips: is evaluating now, and was training at the first step",
    "frozen": "ModelError: unused: is frozen now, and was trained at the first step",
    "module": "ModelError: Skips: has other modules or hooks than at the first step",
    "hook": "ModelError: Skips: has other modules or hooks than at the first step",
    "attribute": "ModelError: Skips: computes something else than at the first step: .*0.5.* in place of .*1.0",
    "list": r"ModelError: Skips: computes something else .*: \[0.5, 1.0\] in place of \[1.0, 1.0\]",
    "global": "ModelError: Skips: computes something else than at the first step: .*0.5.* in place of .*1.0",
}


@pytest.mark.slow
@pytest.mark.usefixtures("without_group")
def test_what_was_traced_must_not_change() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for what, (found, _) in refusals(0, 1, list(CHANGES)).items():
        assert re.match(CHANGES[what], found), what


@pytest.mark.slow
@quickly("what, data", [(what, data) for what in CHANGES for data in (1, 2)], [("rows", 1)], pairs=False)
def test_the_others_are_told_of_what_has_changed(ranks: Ranks, what: str, data: int) -> None:
    for rank, said in enumerate(ranks.run(2 * data, refusals, data, [what])):
        found, seconds = said[what]
        assert re.match("AgreementError: the step: rank 0 failed there: " if rank else CHANGES[what], found), found
        assert seconds < AT_ONCE


class Dropped(nn.Module):
    """Draws in the first stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.nn.functional.dropout(self.first(x), 0.5))
        return result


def draws(rank: int) -> tuple[list[float], list[float]]:
    """Losses, and numbers that each rank draws between steps."""
    mesh, numbers, losses = mesh_of(2, 2), [], []
    torch.manual_seed(0)
    model = Dropped()
    made = {"mesh": mesh, "microbatches": 2, "backend": "eager", "units": ["first", "last"]}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.0), **made)
    for _ in range(2):
        x, y = torch.rand(4, 4, 5), torch.zeros(4, 4, 2)
        losses.append(float(step(x, y)))
        numbers.append(float(torch.rand(())))
    return losses, numbers


@pytest.mark.slow
def test_random_numbers_of_ranks_differ_and_generators_stay_equal(threads: Threads) -> None:
    """So a batch that all ranks draw is still one batch in the next step."""
    found = threads.run(4, draws)
    assert len({str(numbers) for _, numbers in found}) == 1
    losses = [one for one, _ in found]
    assert losses[0] == losses[2]
    assert losses[1] == losses[3]
    assert losses[0] != losses[1], "data-parallel ranks, which were given the same batch, drop other values"


def others_data(rank: int) -> str:
    """Each rank reads data by its number in the world."""
    model = model_of("skips")
    made = {"mesh": mesh_of(2, 2), "microbatches": MICROBATCHES, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), **made)
    try:
        step(*batch_of("skips", rank, 0))
    except zcompile.AgreementError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_ranks_along_the_pipeline_must_be_given_the_same_batch(ranks: Ranks) -> None:
    for found in ranks.run(4, others_data):
        assert found.startswith("the first batch: is not the same on ranks 0, 2 along 'pp'")
        assert "samplers count the ranks along 'dp' alone" in found


def closures(rank: int) -> list[float]:
    """A loss reads a tensor and a number beside its arguments: how far losses are from the plain model's."""
    weight, model, plain = torch.tensor([1.0, 2.0]), model_of("skips"), model_of("skips")
    mesh, found = mesh_of(2, 1), []

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (((model(x) - y) * weight) ** 2).mean()

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.001) for one in (model, plain)]
    step = zcompile.train_step(model, loss_fn, optimizers[0], mesh=mesh, microbatches=MICROBATCHES, backend="eager")
    for number in range(4):
        x, y = batch_of("skips", 0, number)
        if number == 2:
            weight.mul_(0.5)
        if number == 3:
            weight = weight + 1
        loss = step(x, y)
        parts = [loss_fn(plain, *part) / MICROBATCHES for part in zip(x.chunk(4), y.chunk(4), strict=True)]
        in_order(parts).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        found.append(float(loss - in_order(parts).detach()))
    return found


@pytest.mark.slow
def test_tensors_of_closures_are_read_as_they_are(threads: Threads) -> None:
    for found in threads.run(2, closures):
        assert max(map(abs, found)) < 1e-5


def outside(rank: int) -> str:
    """The loss has a parameter of its own, which would get no gradient."""
    mesh, model, temperature = mesh_of(2, 1), model_of("skips"), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y) * temperature

    step = zcompile.train_step(model, loss_fn, optimizer, mesh=mesh, microbatches=MICROBATCHES, backend="eager")
    try:
        step(*batch_of("skips", 0, 0))
    except zcompile.ZcompileError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_parameter_that_is_not_the_models_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(2, outside):
        assert found.startswith("loss_fn: computes with a tensor that is trained, and is no parameter of the model")


def dies(rank: int) -> tuple[str, float]:
    warnings.simplefilter("ignore")
    mesh, model = mesh_of(3, 1), model_of("gpt")
    made = {"mesh": mesh, "microbatches": MICROBATCHES, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), **made)
    step(*batch_of("gpt", 0, 0))
    started = time.perf_counter()
    if rank == 1:
        time.sleep(12)
        return "", 0.0
    try:
        step(*batch_of("gpt", 0, 1))
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - started
    return "no error", 0.0


def stalls(rank: int) -> str:
    """Rank 1 goes on to its fourth message of a step, and no further."""
    warnings.simplefilter("ignore")
    mesh, model = mesh_of(3, 1), model_of("gpt")
    made = {"mesh": mesh, "microbatches": MICROBATCHES, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), **made)
    assert isinstance(step, PipelinedStep)
    step(*batch_of("gpt", 0, 0))
    links, sent = step._ranks.links, 0
    plain = links.send

    def send(value: torch.Tensor, to: int) -> Any:
        nonlocal sent
        sent += 1
        if sent == 4:
            time.sleep(12)
            raise SystemError("gone")
        return plain(value, to)

    if rank == 1:
        links.send = send  # type: ignore[method-assign]
    try:
        step(*batch_of("gpt", 0, 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
def test_a_rank_that_is_gone_in_the_middle_is_named_with_line_and_microbatch(ranks: Ranks) -> None:
    first, own, last = ranks.run(3, stalls, group=5)
    assert own == "SystemError: gone"
    for found, line in ((first, r"m1_grad_output = wait\(m1_grad_output_recv\)"), (last, r"m2_\w+_out = wait\(m2_")):
        assert re.search(rf"GroupError: line \d+ of step \w+, `{line}", found), found
        assert "rank 1 never came" in found


@pytest.mark.slow
def test_a_rank_that_leaves_in_the_middle_is_named(ranks: Ranks) -> None:
    for rank, (found, seconds) in enumerate(ranks.run(3, dies, group=5)):
        if rank != 1:
            assert "rank 1" in found
            assert seconds < AT_ONCE
            assert math.isfinite(seconds)


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
    wrong = [name for name, one, other in pairs if not torch.equal(whole(one), whole(other))]
    return wrong, len(programs[1].nodes(Offload)), *map(peak_bytes, programs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
        with mock.patch("zcompile.pipelining.first_step.free_bytes", lambda _, at=free - before: at):
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
        if not one.is_meta and not torch.equal(whole(one), whole(other.get_parameter(name)))
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
    pairs=False,
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
