from __future__ import annotations

import copy
import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import GPT
from tests.pipelines import APART, MICROBATCHES, Reference, batch_of, in_order, loss_of, mean, mesh_of, model_of, trains
from tests.threads import Threads
from zcompile.cost.memory import peak_bytes
from zcompile.ir.operation import op_of
from zcompile.ir.ops import AllGather, Reduce, Send, Sum, SumAverages
from zcompile.pipelining.step import PipelinedStep

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
