"""What is wrong on any rank of a pipeline is told on all of them, before anything runs where that can be."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests import pipelines
from tests.cases import quickly
from tests.compare import full
from tests.pipelines import MICROBATCHES, Skips, batch_of, in_order, loss_of, mesh_of, model_of
from tests.ranks import AT_ONCE, Ranks, away, failed
from tests.shared_steps import own_steps
from tests.threads import Threads
from zcompile.ir.actions import ActionTable
from zcompile.pipelining.step import PipelinedStep


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
    "schedule": (Skips, loss_of, {"schedule": "2f2b"}, 8, "OptionError: schedule: '2f2b' is unknown"),
    "few": (Skips, loss_of, {"schedule": "dualpipev", "microbatches": 2}, 8, "OptionError: microbatches: is 2: "),
    "split": (Skips, loss_of, {"split": ["middle"]}, 8, "OptionError: split: names 'middle', which is not a unit"),
    "length": (Skips, loss_of, {"split": ["up.0", "up.1"]}, 8, "OptionError: split: has 2 units, and 2 stages"),
    "break": (Broken, loss_of, {}, 8, "CaptureError: "),
    "buffer": (Far, loss_of, {}, 8, "CaptureError: ema: is a buffer that stage 1 writes to and stage 0 reads"),
    "loss": (Skips, not_scalar, {}, 8, "OptionError: loss_fn: returns a tensor of [2, 4, 2]"),
    "results": (Skips, two, {}, 8, "OptionError: loss_fn: returns 2 results"),
    "sum": (Skips, summed, {}, 8, "OptionError: loss_fn: returns a sum over the batch"),
    "classes": (Skips, summed_classes, {}, 8, "OptionError: loss_fn: returns a sum over the batch"),
    "detached": (Skips, detached, {}, 8, "OptionError: loss_fn: gives a loss that depends on no parameter"),
    "option": (Skips, loss_of, {"arenas": True}, 8, "OptionError: arenas: cannot be combined with a pipe"),
    "auto": (Skips, loss_of, {"shard": "auto"}, 8, "OptionError: shard: 'auto' is not combined with a pipe"),
    "unknown": (Skips, loss_of, {"stages": 2}, 8, "OptionError: stages: is not an option"),
    "half": (Skips, loss_of, {"dtype": torch.float16}, 8, "OptionError: dtype: is float16, whose gradients need"),
    "both": (
        Skips,
        loss_of,
        {"checkpoint": 0.5, "offload_activations": "disk:/tmp"},
        8,
        "OptionError: checkpoint: is a budget, and offload_activations is given",
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
            if not one.is_meta and not torch.allclose(full(one), plain.get_parameter(name), atol=1e-5):
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
    assert own.startswith("OptionError: schedule: '2f2b' is unknown")
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
    values = {"attribute": (vars(model), "scale"), "list": (model.factors, 0), "global": (vars(pipelines), "SCALE")}
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
    with own_steps():
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
        assert found.startswith("loss_fn: reads a tensor that requires grad and is not a parameter of the model")


def dies(rank: int) -> tuple[str, str, float]:
    warnings.simplefilter("ignore")
    mesh, model = mesh_of(3, 1), model_of("gpt")
    made = {"mesh": mesh, "microbatches": MICROBATCHES, "backend": "eager"}
    step = zcompile.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), **made)
    step(*batch_of("gpt", 0, 0))
    return away() if rank == 1 else failed(lambda: step(*batch_of("gpt", 0, 1)))


def stalls(rank: int) -> tuple[str, str, float]:
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
            away()
            raise SystemError("gone")
        return plain(value, to)

    if rank == 1:
        links.send = send  # type: ignore[method-assign]
        with pytest.raises(SystemError, match="gone"):
            step(*batch_of("gpt", 0, 1))
        return "", "", 0.0
    return failed(lambda: step(*batch_of("gpt", 0, 1)))


@pytest.mark.slow
def test_a_rank_that_is_gone_in_the_middle_is_named_with_line_and_microbatch(ranks: Ranks) -> None:
    first, _, last = ranks.run(3, stalls, group=5)
    for (kind, found, _), line in (
        (first, r"m1_grad_output = wait\(m1_grad_output_recv\)"),
        (last, r"m2_\w+_out = wait\(m2_"),
    ):
        assert kind == "GroupError"
        assert re.search(rf"line \d+ of step \w+, `{line}", found), found
        assert "rank 1 never came" in found


@pytest.mark.slow
def test_a_rank_that_leaves_in_the_middle_is_named(ranks: Ranks) -> None:
    for rank, (kind, found, seconds) in enumerate(ranks.run(3, dies, group=5)):
        if rank != 1:
            assert kind
            assert "rank 1" in found
            assert seconds < AT_ONCE
            assert math.isfinite(seconds)
