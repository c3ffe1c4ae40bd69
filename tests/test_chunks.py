"""Wide values in chunks of rows: losses as users write them, against the same steps without chunks."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests import pipelines
from tests.cases import quickly
from tests.compare import full, gradients
from tests.models import GPT
from tests.threads import Threads
from zcompile import OptionError, ResultError
from zcompile.cost.hardware import CPU
from zcompile.cost.memory import peak_bytes
from zcompile.ir.axis import axes_of
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import data
from zcompile.ir.placement import PARTIAL
from zcompile.model.units import make_layout
from zcompile.passes.chunk_rows import chunk_rows
from zcompile.proof.dumps import prove_dump
from zcompile.report.dumps import write_dump
from zcompile.schedule.pipeline import Journal
from zcompile.tools.tracing import trace

WORDS, WIDTH, LENGTH, BATCH = 96, 8, 10, 4
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """An embedding, a layer, and a head that is much wider than both."""

    def __init__(self, loss: Loss, *, tied: bool = False, frozen: bool = False, rank: int = 0) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=rank > 0)
        self.teacher = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank or 1, bias=False), nn.Linear(rank or 1, WORDS, bias=False)
        self.loss, self.rank = loss, rank
        if tied:
            self.head.weight = self.tokens.weight
        self.head.weight.requires_grad_(not frozen)

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.tokens(tokens)))

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        logits: Tensor = self.head(hidden)
        return logits + self.up(self.down(hidden)) if self.rank else logits

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self, tokens, targets)


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.view(-1, logits.size(-1)), targets.reshape(-1)


def cross_entropy(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(model.logits(tokens), targets), ignore_index=-1)


def transposed(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(tokens).transpose(1, 2), targets, ignore_index=-1)


def smoothed(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(*flat(model.logits(tokens), targets), ignore_index=-1, label_smoothing=0.1)


def capped(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = 3 * torch.tanh(model.logits(tokens) / 3)
    return F.cross_entropy(*flat(logits, targets), ignore_index=-1)


def with_z_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits, targets = flat(model.logits(tokens).float(), targets)
    z = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, targets, ignore_index=-1) + 1e-2 * (z**2).mean()


def shifted_labels(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """As in transformers today, with the number of items in a batch of several micro-batches."""
    logits = model.logits(tokens).float()
    labels = F.pad(targets.masked_fill(targets < 0, -100), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(*flat(logits, labels), ignore_index=-100, reduction="sum") / 77


def shifted_logits(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """As in transformers before."""
    logits = model.logits(tokens)[..., :-1, :].contiguous()
    return F.cross_entropy(*flat(logits, targets[..., 1:].contiguous()), ignore_index=-1)


def distilled(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    student, teacher = model.logits(tokens), model.teacher(model.hidden(tokens))
    return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


def weighted(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(*flat(model.logits(tokens), targets.clamp(min=0)), reduction="none")
    weights = torch.sigmoid(tokens.float().view(-1) / 50)
    return (each * weights).sum() / weights.sum()


def preferred(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """DPO: what is chosen and what is rejected, by the sums of log-probabilities of their tokens."""
    logps = F.log_softmax(model.logits(tokens), -1)
    picked = logps.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (picked * (targets >= 0)).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def squared(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model.logits(tokens), model.teacher(model.hidden(tokens)).detach())


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        *(cross_entropy, transposed, smoothed, capped, with_z_loss, shifted_labels, shifted_logits, distilled),
        *(weighted, preferred, squared),
    )
}
AHEAD = LOSSES.keys() - {"preferred"}
"""Losses whose gradients are known but for one number."""
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "lora": {"rank": 2},
}


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    targets[0, :3] = -1
    return tokens, targets


def made(loss: str, head: str = "plain") -> Model:
    torch.manual_seed(0)
    return Model(LOSSES[loss], **HEADS[head])


def trained(model: nn.Module, compiled: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        loss = compiled(tokens, targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return losses, {name: grad.clone() for name, grad in gradients(model).items() if grad is not None}


def against_whole(rank: int, loss: str, head: str, **options: Any) -> Any:
    """The compiled model, after three steps that were those of the same without chunks."""
    model, plain = made(loss, head), made(loss, head)
    rows = 2 * LENGTH if loss == "shifted_logits" else 12  # logits that are cut leave the sequences as rows
    compiled = zcompile.compile(model, backend="eager", chunk=rows, **options)
    found = trained(model, compiled)
    whole = trained(plain, zcompile.compile(plain, backend="eager", **options))
    assert found[0] == pytest.approx(whole[0], rel=1e-5)
    assert found[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return compiled


def program_of(compiled: Any) -> zcompile.Program:
    return compiled._engine.runtime.steps[0].program  # type: ignore[no-any-return]


def loops(program: zcompile.Program) -> list[Any]:
    return [region for region in program.regions.values() if region.rows]


@quickly(
    "loss, head",
    [(loss, head) for loss in LOSSES for head in HEADS],
    [("cross_entropy", "plain"), ("distilled", "tied"), ("with_z_loss", "frozen"), ("preferred", "lora")],
)
def test_losses_are_those_without_chunks(without_group: None, loss: str, head: str) -> None:
    """No value with the words of all rows is saved; gradients that are known but for a number come with the forward."""
    program = program_of(against_whole(0, loss, head))
    wide = BATCH * (LENGTH - 1) * WORDS
    types = [found for node in program.graph.nodes if (found := data(node).type) is not None]
    assert all(math.prod(found.shape) < wide for found in types), "no wide value is between regions"
    assert len(loops(program)) == (1 if loss in AHEAD else 2)


def in_stage(rank: int, stage: int, loss: str, head: str) -> int:
    compiled = against_whole(rank, loss, head, stage=stage, prefetch=1)
    program = program_of(compiled)
    units = [unit.name for unit in program.layout.units if any("head" in param.name for param in unit.params)]
    lines = [node for node in program.graph.nodes if type(data(node).op).__name__ == "AllGather"]
    return sum(data(node).op.unit in units for node in lines)


@quickly(
    "stage, loss, head",
    [(s, one, h) for s in range(4) for one in ("cross_entropy", "preferred", "distilled") for h in HEADS],
    [(3, "cross_entropy", "plain"), (2, "distilled", "tied")],
)
def test_every_stage_computes_the_same_in_chunks(threads: Threads, stage: int, loss: str, head: str) -> None:
    assert threads.run(2, in_stage, stage, loss, head)


BESIDE: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": "unit"},
    "budget": {"checkpoint": 0.9},
    "arenas": {"arenas": True},
    "arenas, checkpoint": {"arenas": True, "checkpoint": "unit", "stage": 2},
    "offload": {"offload_activations": "disk"},
    "parameters": {"offload_parameters": "disk"},
    "mixed": {"dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "hybrid": {"replicas": 2},
    "hpz": {"replicas": 2, "shard": "hpz"},
    "inductor": {"backend": "inductor"},
}


def beside(rank: int, name: str, folder: str) -> str:
    """Two micro-batches, then a step, twice: in chunks and without."""
    options, found = {"backend": "eager", **BESIDE[name]}, []
    options |= {key: f"disk:{folder}" for key, value in options.items() if value == "disk"}
    replicas = options.pop("replicas", 0)
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
    for chunk in (16, None):
        torch.manual_seed(0)
        model = GPT(layers=2, width=16, context=LENGTH, vocabulary=WORDS)
        compiled = zcompile.compile(model, chunk=chunk, **options)
        optimizer, losses = torch.optim.SGD(compiled.parameters(), lr=0.1), []
        for step in range(2):
            with compiled.no_sync():
                compiled(*(value.clamp(min=0) for value in batch(10 * rank + step))).backward()
            losses.append(compiled(*(value.clamp(min=0) for value in batch(10 * rank + step + 5))))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        has_loops = any(loops(step.program) for step in compiled._engine.runtime.steps)
        assert has_loops is (chunk is not None)
        found.append(
            ([loss.detach() for loss in losses], {n: full(p.detach()).clone() for n, p in model.named_parameters()})
        )
    close = {"rtol": 2e-2, "atol": 2e-3} if "dtype" in options else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(*found, **close)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_chunks_go_beside_other_options(threads: Threads, name: str, tmp_path: Path) -> None:
    world = 4 if "replicas" in BESIDE[name] else 2
    assert threads.run(world, beside, name, str(tmp_path)) == [""] * world


def in_order(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and head, turn by turn: each for 1 in place of the factor, the sum in order."""
    total, parts = None, []
    for start in range(0, len(hidden), rows):
        h, t = hidden[start : start + rows], targets[start : start + rows]
        logps = F.log_softmax(h @ weight.t(), 1)
        valid = (t != -1).unsqueeze(1)
        ones = torch.zeros_like(logps).scatter(1, torch.where(valid, t.unsqueeze(1), 0), -1.0)
        dlogps = ones * torch.where(valid, torch.ones(()), 0.0)
        dlogits = torch.ops.aten._log_softmax_backward_data(dlogps, logps, 1, torch.float32)
        part = dlogits.t() @ h
        total = part if total is None else total + part
        parts.append(dlogits @ weight)
    assert total is not None
    return torch.cat(parts) * factor, total * factor


def one_sequence(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model.hidden(tokens)), targets, ignore_index=-1)


def test_gradients_are_added_up_turn_by_turn(without_group: None) -> None:
    """Bit for bit what plain PyTorch gives in that order."""
    torch.manual_seed(0)
    model = Model(one_sequence)
    plain = copy.deepcopy(model)
    tokens, targets = (value.flatten() for value in batch())
    compiled = zcompile.compile(model, backend="eager", chunk=16)
    compiled(tokens, targets).backward()
    hidden = plain.hidden(tokens).detach().requires_grad_()
    rows = loops(program_of(compiled))[0].rows.size
    factor = torch.ones(()) / (targets != -1).sum().float()
    dhidden, dweight = in_order(hidden.detach(), plain.head.weight.detach(), targets, rows, factor)
    plain.hidden(tokens).backward(dhidden)
    found = gradients(model)
    assert rows == 14  # three turns of 40 rows, the last one shorter
    assert torch.equal(found["head.weight"], dweight)
    assert torch.equal(found["layer.weight"], plain.layer.weight.grad)  # type: ignore[arg-type]


def test_sums_of_16_bits_are_added_up_in_32(without_group: None) -> None:
    torch.manual_seed(0)
    model = Model(one_sequence)
    compiled = zcompile.compile(model, backend="eager", chunk=4, dtype=torch.bfloat16)
    tokens, targets = (value.flatten() for value in batch())
    compiled(tokens, targets).backward()
    (region,) = loops(program_of(compiled))
    sums = [region.result_type(i) for i, gives in enumerate(region.rows.gives) if gives is PARTIAL]
    assert [type_.dtype for type_ in sums] == [torch.bfloat16]


def test_an_evaluation_that_returns_logits_is_as_it_was(without_group: None) -> None:
    """A training step computes them in chunks, and an evaluation of the same model returns them."""

    def either(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model, tokens, targets) if model.training else model.logits(tokens)

    torch.manual_seed(0)
    model = Model(either)
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend="eager", chunk=12)
    compiled(*batch()).backward()
    compiled.eval()
    with torch.no_grad():
        found = compiled(*batch())
    assert torch.equal(found, plain.eval()(*batch()))
    assert "chunk_rows: not in chunks" in compiled.explain()


def with_logits(model: Any, tokens: Tensor, targets: Tensor) -> Any:
    logits = model.logits(tokens)
    return F.cross_entropy(*flat(logits, targets), ignore_index=-1), {"logits": logits, "hidden": model.hidden(tokens)}


READS: list[Callable[[Any], Any]] = [
    lambda logits: logits.argmax(-1),
    lambda logits: torch.argmax(logits, -1),
    lambda logits: logits[:, :-1],
    lambda logits: logits + 1,
    lambda logits: torch.ones(3) - logits,
    lambda logits: logits == torch.ones(3),
    lambda logits: float(logits),
    lambda logits: bool(logits),
    lambda logits: torch.stack([logits]),
    list,
]


def test_logits_beside_a_loss_are_not_kept_and_refuse_to_be_read(without_group: None) -> None:
    torch.manual_seed(0)
    model = Model(with_logits)
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend="eager", chunk=12)
    loss, others = compiled(*batch())
    loss.backward()
    wanted, expected = plain(*batch())
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert torch.equal(others["hidden"], expected["hidden"])
    assert loops(program_of(compiled))
    torch.testing.assert_close(gradients(compiled), gradients(plain))
    for read in READS:
        with pytest.raises(ResultError, match=r"result 1 of the model \(.*test_chunks.py:\d+\): was not kept"):
            read(others["logits"])
    assert "NotKept: result 1" in repr(others["logits"])
    assert not hasattr(others["logits"], "dtype")
    with torch.no_grad():
        assert torch.equal(compiled(*batch())[1]["logits"], expected["logits"])


def test_a_training_step_in_which_nothing_is_wide_is_refused(without_group: None) -> None:
    def returned(model: Any, tokens: Tensor, targets: Tensor) -> Any:
        return model.logits(tokens)  # for a loss outside of the model

    compiled = zcompile.compile(Model(returned), backend="eager", chunk=12)
    with pytest.raises(
        OptionError, match=r"(?s)chunk: has no effect: .*: is returned.*Fix: let the model return the loss"
    ):
        compiled(*batch())


@pytest.mark.parametrize("chunk", [0, -1, True, 1.5, "many", "0 B"])
def test_what_is_no_number_of_rows_is_refused(chunk: Any) -> None:
    with pytest.raises(OptionError, match="is not a number of rows"):
        zcompile.compile(Model(cross_entropy), chunk=chunk)


def test_a_step_in_chunks_is_trained_as_by_a_loop(without_group: None) -> None:
    """`train_step`, whose optimizer runs as gradients come."""
    model, plain = made("cross_entropy"), made("cross_entropy")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    step = zcompile.train_step(model, lambda m, t, y: m(t, y), optimizers[0], backend="eager", chunk=12)
    for number in range(2):
        loss = step(*batch(number))
        wanted = plain(*batch(number))
        wanted.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    for name, value in plain.state_dict().items():
        found = model.get_parameter(name).full_tensor()  # type: ignore[operator]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


def test_a_program_in_chunks_is_read_as_it_is_printed(without_group: None) -> None:
    program = program_of(against_whole(0, "preferred", "lora"))
    text = program.text(regions=True)
    assert zcompile.parse(text).text(regions=True) == text


@quickly(
    "loss, head", [*product(LOSSES, HEADS)], [("cross_entropy", "plain"), ("distilled", "lora"), ("preferred", "tied")]
)
def test_a_loop_is_proven_from_its_text(loss: str, head: str, tmp_path: Path) -> None:
    model, journal = made(loss, head), Journal()
    traced = trace(model, batch(), fuses=False, chunks=True)
    traced = replace(traced, layout=make_layout(model, STAGES[3], axes_of(2)))
    program = zcompile.pipeline(stage=3, chunk=2 * LENGTH if loss == "shifted_logits" else 12).run(traced, journal)
    assert loops(program)
    write_dump(tmp_path, [journal], "", CPU)
    (verdict,) = prove_dump(tmp_path)
    assert verdict.error is None, verdict.error


class Alike(nn.Module):
    """Each token is compared with all others: of two values that are one, a loop takes one in rows, the other whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, other = (torch.tanh(self.layer(x)) for _ in range(2))
        return F.cross_entropy(one @ other.T, torch.arange(len(x)))


def test_a_loop_takes_one_value_in_rows_and_as_a_whole(without_group: None) -> None:
    torch.manual_seed(0)
    model, x = Alike(), torch.randn(24, WIDTH)
    wanted = model(x)
    wanted.backward()
    expected = model.layer.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    compiled = zcompile.compile(model, backend="eager", chunk=8)
    found = compiled(x)
    found.backward()
    assert loops(program_of(compiled))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(model)["layer.weight"], expected)


@pytest.mark.slow
def test_a_budget_is_kept_by_chunks_or_refused() -> None:
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    model = GPT(layers=1, width=16, context=64, vocabulary=2048)
    traced = trace(model, (tokens, tokens), fuses=False, chunks=True)

    def peak(chunk: str | None) -> int:
        return peak_bytes(zcompile.pipeline(stage=0, partition="default", chunk=chunk).run(traced))

    most = peak(None)
    assert peak(f"{most} B") == most
    assert peak(f"{most // 2} B") <= most // 2
    with pytest.raises(OptionError, match=r"chunk: 9\.766 KiB is less than the .* that this step takes at the least"):
        peak("10000 B")


@pytest.mark.slow
def test_auto_chooses_rows_by_what_adding_up_takes_and_fewer_where_memory_is_short() -> None:
    def traced(*shape: int) -> zcompile.Program:
        tokens = torch.zeros(shape, dtype=torch.int64)
        model = GPT(layers=1, width=16, context=512, vocabulary=2048)
        return trace(model, (tokens, tokens), fuses=False, chunks=True)

    many, few = traced(16, 512), traced(2, 16)
    chosen = chunk_rows(many)
    assert chosen.notes == ("chunk_rows: mm, 64 MiB, is computed for 16 of 512 rows at once, 2 MiB",)
    assert not chunk_rows(few).modules
    most = peak_bytes(zcompile.pipeline(stage=0, partition="default").run(many))
    short = zcompile.pipeline(stage=0, partition="default", chunk="auto", free=most // 20).run(many)
    assert len(loops(short)) == 3
    assert peak_bytes(short) <= most // 20


def test_a_batch_of_few_rows_is_computed_at_once(without_group: None) -> None:
    compiled = zcompile.compile(made("cross_entropy"), backend="eager", chunk=BATCH * LENGTH)
    compiled(*batch()).backward()
    assert not loops(program_of(compiled))
    assert "has 40 rows, which are few" in compiled.explain()


def test_values_with_more_rows_are_chunked_behind_the_widest_with_few() -> None:
    """The head is of the last tokens alone, the layer before it of all."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8192)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.down(torch.relu(self.up(x)))[:, -1]), targets)

    traced = trace(Last(), (torch.zeros(4, 64, WIDTH), torch.zeros(4, dtype=torch.int64)), fuses=False, chunks=True)
    found = chunk_rows(traced, rows=32)
    assert [note.split(",")[0] for note in found.notes[:1]] == ["chunk_rows: addmm"]
    assert any("has 4 rows, which are few" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt tied"])
def test_the_last_stage_of_a_pipeline_computes_its_loss_in_chunks(threads: Threads, name: str) -> None:
    plain, chunked = (threads.run(2, in_a_pipeline, name, chunk) for chunk in (None, 16))
    for (loops_of, losses, parameters), (none, wanted, expected) in zip(chunked, plain, strict=True):
        assert none == 0
        torch.testing.assert_close(losses, wanted)
        torch.testing.assert_close(parameters, expected)
        assert loops_of
    assert chunked[1][0] > 0


def in_a_pipeline(rank: int, name: str, chunk: int | None) -> tuple[int, Tensor, dict[str, Tensor]]:
    model = pipelines.model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"mesh": pipelines.mesh_of(2, 1), "microbatches": 2, "backend": "eager", "chunk": chunk}
    step = zcompile.train_step(model, pipelines.loss_of, optimizer, **options)
    losses = [step(*pipelines.batch_of(name, 0, number)) for number in range(3)]
    parameters = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    assert step.program is not None
    return len(loops(step.program)), torch.stack(losses), parameters


def test_communications_are_those_without_chunks() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    model = GPT(layers=2, width=16, vocabulary=512)
    traced = trace(model, (tokens, tokens), fuses=False, chunks=True)
    plain, chunked = (zcompile.pipeline(stage=3, partition="default", chunk=chunk).run(traced) for chunk in (None, 8))
    assert loops(chunked)
    assert chunked.communications() == plain.communications()


@pytest.mark.slow
def test_an_operation_of_a_turn_that_makes_nan_is_found(without_group: None, tmp_path: Path) -> None:
    model = made("cross_entropy")
    with torch.no_grad():
        model.head.weight[3, 2] = float("inf")
    compiled = zcompile.compile(model, backend="eager", chunk=12, record=tmp_path)
    compiled(*batch()).backward()
    command = [sys.executable, "-m", "zcompile", "replay", str(tmp_path), "--rank", "0", "--brief"]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "_in_chunks made it, from arguments without one, in" in text
    assert "aten._log_softmax.default(" in text


@pytest.mark.slow
def test_each_size_has_a_program_of_its_own(without_group: None) -> None:
    """More of them than torch compiles by itself; the last turn has fewer rows than the others."""
    torch.manual_seed(0)
    model = made("cross_entropy")
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend="eager", chunk=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(6, 16):
            tokens = torch.randint(WORDS, (BATCH, length))
            found, wanted = compiled(tokens, tokens), plain(tokens, tokens)
            torch.testing.assert_close(found, wanted)
            (found + wanted).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    steps = compiled._engine.runtime.steps
    assert [[region.rows.rows for region in loops(step.program)] for step in steps] == [[n] for n in range(6, 16)]


def test_sizes_that_torch_compile_makes_dynamic_are_refused(without_group: None) -> None:
    model = torch.compile(made("cross_entropy"), backend=zcompile.backend(backend="eager", chunk=12))
    model(*batch()).backward()
    with pytest.raises(Exception, match="chunk: needs sizes that are known, but has tokens") as found:
        model(*(value[:, :8] for value in batch()))
    assert "dynamic=False" in str(found.value)


def test_one_row_that_is_left_and_looks_like_none_is_refused(without_group: None) -> None:
    def squeezed(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.hidden(tokens.flatten())[:, None]).squeeze(), targets.flatten())

    compiled = zcompile.compile(Model(squeezed), backend="eager", chunk=3)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    compiled(tokens, tokens).backward()
    with pytest.raises(OptionError, match=r"has no effect: .* fails with fewer rows"):
        compiled(tokens[:, :7], tokens[:, :7])


def test_fewer_rows_than_a_turn_can_have_are_refused(without_group: None) -> None:
    compiled = zcompile.compile(made("cross_entropy"), backend="eager", chunk=3)
    with pytest.raises(OptionError, match=r"is computed for 8 rows at once at the least, and not 3"):
        compiled(*batch())
