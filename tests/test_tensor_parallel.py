"""Tensor parallelism beside data parallelism: as on one device, whatever the stage; and what cannot be meant."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zcompile
from tests.cases import quickly
from tests.models import update
from tests.ranks import Ranks, on_ranks
from zcompile import CaptureError, GroupError, ModelError, OptionError, ParameterError
from zcompile.cost.forecast import Choice
from zcompile.ir.operation import Phase
from zcompile.ir.ops import Group
from zcompile.ir.side_effects import is_collective
from zcompile.proof.dumps import prove_dump
from zcompile.tools.planner import Rewriter
from zcompile.tools.tracing import trace

Values = dict[str, torch.Tensor]
STEPS = 2


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Feed(nn.Module):
    """Residual blocks over tokens; but for the hidden width, which torch wants so, no mesh divides their sizes."""

    def __init__(self, width: int = 9, hidden: int = 18, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Residual(width, hidden) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


MLPS = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
EVERYTHING = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    **MLPS,
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCES = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
PLANS: dict[str, dict[str, Any]] = {"mlps": MLPS, "everything": EVERYTHING, "sequences": SEQUENCES}


def feed(seed: int = 0) -> Feed:
    torch.manual_seed(seed)
    return Feed()


def tokens(step: int, rank: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    drawn = torch.randint(13, (4, length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def meshes(data: int, model: int, *, turned: bool = False) -> tuple[DeviceMesh, DeviceMesh]:
    names, sizes = (("tp", "dp"), (model, data)) if turned else (("dp", "tp"), (data, model))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh["dp"], mesh["tp"]


def reference(ranks: int, *, clip: bool = True) -> Values:
    """Plain training on the batches of all data-parallel ranks."""
    model = feed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(*tokens(step, rank)) / ranks).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def build(data: DeviceMesh, model: DeviceMesh, plan: str, **options: Any) -> zcompile.CompiledModule:
    return zcompile.compile(parallelize_module(feed(), model, PLANS[plan]), mesh=data, backend="eager", **options)


def train(
    data: DeviceMesh, model: DeviceMesh, plan: str, *, clip: bool = True, **options: Any
) -> zcompile.CompiledModule:
    compiled = build(data, model, plan, **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        compiled(*tokens(step, data.get_local_rank())).backward()
        if clip:
            nn.utils.clip_grad_norm_(compiled.parameters(), 0.5)
        optimizer.step()
    return compiled


def largest_difference(got: Values, want: Values) -> float:
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def sweep(rank: int, data: int, model: int, plan: str, stages: list[int]) -> list[float]:
    dp, tp = meshes(data, model)
    want = reference(data)
    compiled = [train(dp, tp, plan, stage=stage) for stage in stages]
    assert all("the model's own communication, within regions: " in one.explain() for one in compiled)
    program = compiled[0]._engine.runtime.steps[0].program
    assert zcompile.parse(program.text(regions=True)).text(regions=True) == program.text(regions=True)
    assert "int[]" not in str(program)
    return [largest_difference(one.full_state_dict(rank0_only=False), want) for one in compiled]


TRAINED = [(2, 2, "everything"), (2, 2, "sequences"), (1, 3, "mlps")]


@quickly("data, model, plan", TRAINED, TRAINED[1:2], pairs=False)
def test_training_equals_that_on_one_device(ranks: Ranks, data: int, model: int, plan: str) -> None:
    for found in ranks.run(data * model, sweep, data, model, plan, [3]):
        assert max(found) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("stages", [[3], [1, 2]])
@on_ranks(4)
def test_every_stage_has_the_same_bits(rank: int, stages: list[int]) -> list[str]:
    """Bits of the parameters in each stage against those of stage 0; names of what differs."""
    dp, tp = meshes(2, 2)
    want = train(dp, tp, "everything", clip=False, stage=0).full_state_dict(rank0_only=False)
    differing = []
    for stage in stages:
        got = train(dp, tp, "everything", clip=False, stage=stage).full_state_dict(rank0_only=False)
        differing += [f"stage {stage} {name}" for name in want if not torch.equal(got[name], want[name])]
    return differing


def planned(rank: int, choices: list[Choice]) -> list[tuple[str, str]]:
    """The text of the program that runs, and of that which a plan has of the model on meta."""
    dp, tp = meshes(2, 2)
    found = []
    for choice in choices:
        passes = zcompile.pipeline(stage=choice.stage, prefetch=choice.prefetch, checkpoint=choice.checkpoint)
        compiled = build(dp, tp, "everything", stage=choice.stage, dtype=choice.dtype, passes=passes)
        compiled(*tokens(0, dp.get_local_rank())).backward()
        with torch.device("meta"):
            model = parallelize_module(Feed(), tp, PLANS["everything"])
        program = Rewriter(model, trace(model, tokens(0, 0), dtype=choice.dtype, fuses=False), None).program(choice, 2)
        assert [str(axis) for axis in program.layout.axes] == ["shard 2, stride 2", "tensor 2"]
        assert all(isinstance(parameter, DTensor) for parameter in model.embed.parameters())
        found += [
            (program.phase(phase).text(regions=True), running.text(regions=True))
            for phase, running in zip((Phase.FORWARD, Phase.BACKWARD), compiled.programs, strict=True)
        ]
    return found


def forecast(rank: int) -> tuple[str, int, int]:
    with torch.device("meta"):
        plain, divided = Feed(), parallelize_module(Feed(), meshes(2, 2)[1], PLANS["everything"])
    few: dict[str, Any] = {"worlds": [2], "stages": [3], "prefetches": [1], "checkpoints": [None], "dtypes": [None]}
    whole, parts = (zcompile.plan(model, tokens(0, 0), **few) for model in (plain, divided))
    return str(parts), whole.best(2).parameters, parts.best(2).parameters


def unplanned(rank: int) -> list[str]:
    """What is said of models that cannot be planned."""
    said = []

    def plan(model: nn.Module) -> None:
        try:
            zcompile.plan(model, tokens(0, 0), stages=[3], prefetches=[1], dtypes=[None])
        except ModelError as error:
            said.append(str(error))

    # torch remembers equal meshes, of groups that have ended, too: names of its own keep them apart.
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    gpus = DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False)
    with torch.device("meta"):
        plan(parallelize_module(Feed(), one["first"], MLPS))
        model = Feed()
        weight = DTensor.from_local(model.head.weight.detach(), gpus, [Replicate()], run_check=False)
        model.head.weight = nn.Parameter(weight)
        plan(model)
        model = parallelize_module(Feed(), one["second"], MLPS)
        model.register_buffer("scale", model.blocks[0].up.weight.detach())
        plan(model)
    return said


def test_what_cannot_be_planned_is_said(ranks: Ranks) -> None:
    order, device, buffer = ranks.run(4, unplanned)[0]
    assert "whose ranks are not consecutive" in order
    assert "on a cuda mesh" in device
    assert "scale: is a buffer and a DTensor" in buffer


@pytest.mark.slow
@on_ranks(4)
def test_dtensors_on_meta_are_traced_as_those_with_memory(rank: int) -> None:
    """Before torch 2.13 names are numbered otherwise the first time, in which DTensor computes layouts."""
    _, tp = meshes(2, 2)
    plan, found = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()}, []
    for device in ("cpu", "cpu", "meta"):
        with torch.device(device):
            model = parallelize_module(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), tp, plan)
            x = DTensor.from_local(torch.ones(3, 6), tp, [Shard(0)], run_check=False)
        found.append(trace(model, (x,)).text(regions=True))
    real, meta = found[1:]
    assert "f32[3, 6]" in real
    assert real == meta


@pytest.mark.slow
@on_ranks(4)
def test_both_links_are_measured_where_the_schedule_is_chosen(rank: int) -> None:
    # torch remembers equal meshes, of groups that have ended, too: names of its own keep them apart.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("measured_dp", "measured_tp"))
    compiled = build(mesh["measured_dp"], mesh["measured_tp"], "mlps", prefetch="auto")
    compiled(*tokens(0, mesh["measured_dp"].get_local_rank())).backward()
    links = compiled._engine.hardware.links
    members, bandwidths = [link.members for link in links], [link.bandwidth for link in links]
    assert members == [2, 0]
    assert all(1e5 < bandwidth < 1e13 for bandwidth in bandwidths)


@pytest.mark.slow
def test_a_plan_is_of_a_part_of_the_model(ranks: Ranks) -> None:
    text, whole, part = ranks.run(4, forecast)[0]
    assert "fastest that fits: zcompile.compile(model, mesh=mesh['dp'], stage=3, prefetch=1)" in text
    assert "2 ranks for each of 2 parts of the model" in text
    assert whole / 2 < part < whole  # norms and biases are not divided


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [Choice(3, 1, None, None), Choice(2, 0, "unit", torch.bfloat16)],
    ids=str,
)
def test_a_plan_has_the_program_that_runs(ranks: Ranks, choice: Choice) -> None:
    for found in ranks.run(4, planned, [choice]):
        assert len(found) == 2
        assert all(plan == running for plan, running in found)
        assert all('"tp": "tensor 2"' in plan for plan, _ in found)


@pytest.mark.slow
@on_ranks(4)
def test_checkpoints_and_arenas_have_the_same_bits(rank: int) -> list[str]:
    dp, tp = meshes(2, 2)
    want = train(dp, tp, "everything").full_state_dict(rank0_only=False)
    differing = []
    sweep: tuple[dict[str, Any], ...] = ({"checkpoint": "unit", "arenas": True}, {"checkpoint": 0.7})
    for options in sweep:
        got = train(dp, tp, "everything", **options).full_state_dict(rank0_only=False)
        differing += [f"{options} {name}" for name in want if not torch.equal(got[name], want[name])]
    return differing


@on_ranks(4)
def test_the_first_ranks_values_count(rank: int) -> None:
    """The first data-parallel rank's values count; other ranks' may be others, and differ between them."""
    dp, tp = meshes(2, 2)
    model = parallelize_module(feed(0 if dp.get_local_rank() == 0 else 10 + rank), tp, EVERYTHING)
    full = zcompile.compile(model, mesh=dp, backend="eager").full_state_dict(rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in feed().state_dict().items())


@pytest.mark.slow
@on_ranks(4)
def test_train_steps_and_micro_batches(rank: int) -> list[str]:
    """A train step, and micro-batches, against what they stand for."""
    dp, tp = meshes(2, 2)
    want = train(dp, tp, "everything", clip=False).full_state_dict(rank0_only=False)
    model = parallelize_module(feed(), tp, EVERYTHING)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = zcompile.train_step(model, None, optimizer, mesh=dp, backend="eager")
    for number in range(STEPS):
        step(*tokens(number, dp.get_local_rank()))
    got = step.model.full_state_dict(rank0_only=False)
    differing = [f"train_step {name}" for name in want if not torch.equal(got[name], want[name])]
    for stage in (0, 1):
        found = []
        for held in (True, False):
            compiled = build(dp, tp, "everything", stage=stage)
            if held:
                with compiled.no_sync():
                    compiled(*tokens(0, rank // 2)).backward()
            else:
                compiled(*tokens(0, rank // 2)).backward()
            compiled(*tokens(1, rank // 2)).backward()
            found.append({name: param.grad for name, param in compiled.named_parameters()})
        for name in found[0]:
            one, other = (values[name] for values in found)
            one, other = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in (one, other))
            if not torch.allclose(one, other, atol=1e-7):
                differing.append(f"stage {stage} {name}")
    return differing


# -- activations in parts ---------------------------------------------------------------------------------------------


def wide() -> Feed:
    torch.manual_seed(0)
    return Feed(width=65, hidden=66)


def parts_apart(rank: int, data: int, model: int, folder: Path, options: dict[str, Any]) -> tuple[list[str], int, int]:
    """Gradients of two backwards with activations kept in parts and whole; what differs, and the bytes of both."""
    dp, tp = meshes(data, model)
    found: list[Values] = []
    kept = 0
    for more in ({}, {"partition_activations": True, **options}):
        divided = parallelize_module(wide(), tp, EVERYTHING)
        compiled = zcompile.compile(divided, mesh=dp, checkpoint="unit", backend="eager", **more)
        for step in range(2):
            loss = compiled(*tokens(step, dp.get_local_rank(), length=64))
            if more:
                offload = compiled._engine.runtime.offloads[Group("tp")]
                values = [slot.handle.handle for slot in offload._slots.values()]
                kept = sum(value.nbytes for value in values)
            loss.backward(retain_graph=step == 1)
        loss.backward()
        found.append({name: param.grad.to_local() for name, param in compiled.named_parameters()})
    whole = len(values) * 4 * 64 * 65 * 4
    return [name for name in found[0] if not torch.equal(found[0][name], found[1][name])], kept, whole


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(2, 2), (1, 3)])
def test_activations_in_parts_give_the_same_bits(ranks: Ranks, tmp_path: Path, data: int, model: int) -> None:
    for differing, kept, whole in ranks.run(data * model, parts_apart, data, model, tmp_path, {}):
        assert differing == []
        assert whole > 0
        assert kept == pytest.approx(whole / model, rel=0.001)


@pytest.mark.nightly
@on_ranks(4)
def test_parts_go_with_schedules_that_are_chosen(rank: int) -> None:
    """Whether there are parts where a schedule is chosen from a program, with another size at the second call."""
    # Names of its own, as in `chosen`.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("choosing_dp", "choosing_tp"))
    dp, tp = mesh["choosing_dp"], mesh["choosing_tp"]
    found = []
    choices: tuple[dict[str, Any], ...] = ({"prefetch": "auto"}, {"memory_limit": "1 GiB"})
    for options in choices:
        divided = parallelize_module(wide(), tp, EVERYTHING)
        compiled = zcompile.compile(divided, mesh=dp, backend="eager", partition_activations=True, **options)
        for length in (64, 68):
            compiled(*tokens(0, dp.get_local_rank(), length=length)).backward()
        found += [bool(step.program.nodes(Group)) for step in compiled._engine.runtime.steps]
    assert found == [True] * 4


def limited(rank: int) -> list[str]:
    """Errors under a limit that is enough for some tensor-parallel ranks, which have smaller parts, but not for all."""
    dp, tp = meshes(2, 2)
    plan = {key: EVERYTHING[key] for key in ("embed", "head")}
    errors, limit = list[str](), 1000
    for _ in range(2):
        torch.manual_seed(0)
        divided = parallelize_module(Feed(vocabulary=1001, width=64, hidden=128), tp, plan)
        compiled = zcompile.compile(divided, mesh=dp, backend="eager", memory_limit=limit)
        with pytest.raises(OptionError) as caught:
            compiled(*tokens(0, dp.get_local_rank()))
        errors.append(str(caught.value))
        limit = int(errors[0].partition("at least ")[2].split()[0]) - 1
    return errors


@pytest.mark.slow
def test_a_limit_that_one_rank_cannot_keep_is_refused_on_all(ranks: Ranks) -> None:
    found = ranks.run(4, limited)
    assert all(errors == found[0] for errors in found)


@pytest.mark.slow
def test_parts_on_a_disk_give_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    options = {"offload_activations": f"disk:{tmp_path}"}
    for differing, kept, whole in ranks.run(4, parts_apart, 2, 2, tmp_path, options):
        assert differing == []
        assert kept == whole / 2


def test_activations_in_parts_want_a_model_parallel_mesh() -> None:
    with pytest.raises(OptionError, match="partition_activations: is for models that a model-parallel mesh divides"):
        zcompile.compile(feed(), partition_activations=True)
    with pytest.raises(OptionError, match=r"partition_activations: is not an option of zcompile\.backend"):
        zcompile.backend(partition_activations=True)  # type: ignore[call-arg]


# -- DTensors in and out ----------------------------------------------------------------------------------------------


class Scored(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


@pytest.mark.slow
@on_ranks(2)
def test_dtensors_go_in_and_come_out(rank: int) -> None:
    """A model that takes and gives DTensors, its loss outside, and one with its loss inside; against the plain one."""
    dp, tp = meshes(1, 2)

    def plain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 13))

    torch.manual_seed(1)
    x, y, differences = torch.randn(7, 5), torch.randint(13, (7,)), []
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    model = plain()
    F.cross_entropy(model(x), y).backward()
    for inside in (False, True):
        divided: nn.Module = parallelize_module(plain(), tp, plan)
        compiled = zcompile.compile(Scored(divided) if inside else divided, mesh=dp, backend="eager")
        with loss_parallel():
            if inside:
                loss = compiled(x, y)
            else:
                logits = compiled(distribute_tensor(x, tp, [Replicate()]))
                assert logits.placements == (Shard(1),)
                assert logits.shape == (7, 13)
                loss = F.cross_entropy(logits, y)
            loss.backward()
        grads = [param.grad.full_tensor() for param in compiled.parameters()]
        differences += [float((g - p.grad).abs().max()) for g, p in zip(grads, model.parameters(), strict=True)]
    assert max(differences) < 1e-6


class Worded(nn.Module):
    """A head that is divided over the words, as is its loss; `flat`: over the tokens of all sequences at once."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.tokens, self.layer, self.head = nn.Embedding(96, 8), nn.Linear(8, 8), nn.Linear(8, 96, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(self.tokens(tokens)))
        logits = self.head(hidden.flatten(0, 1) if self.flat else hidden)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)


@pytest.mark.slow
@on_ranks(2)
def test_a_loss_that_is_divided_over_words_is_computed_in_chunks(rank: int) -> None:
    """Its maxima and sums are reduced in each turn: what is picked is, for all rows."""
    words_in_chunks(rank, Worded(), ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), sent=2)


@pytest.mark.slow
@on_ranks(2)
def test_logits_that_are_gathered_are_computed_in_chunks(rank: int) -> None:
    """Each turn gathers those of its rows, along their first dimension: that of the sequences, or of the tokens."""
    for flat in (False, True):
        words_in_chunks(rank, Worded(flat=flat), ColwiseParallel(output_layouts=Replicate()), sent=1)


def words_in_chunks(rank: int, model: nn.Module, head: ColwiseParallel, sent: int) -> None:
    """Train a divided model against the plain one, and prove it from its text; `sent`: its messages in a turn."""
    dp, tp = meshes(1, 2)
    torch.manual_seed(0)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    tokens, targets = torch.randint(96, (4, 10)), torch.randint(-1, 96, (4, 10))
    divided = parallelize_module(copy.deepcopy(model), tp, {"head": head})
    with TemporaryDirectory() as folder:
        compiled = zcompile.compile(divided, mesh=dp, backend="eager", chunk=12, dump=folder)
        with loss_parallel() if not head.use_local_output else nullcontext():
            loss = compiled(tokens, targets)
            loss.backward()
        proofs = [*prove_dump(Path(folder))] if rank == 0 else []
    wanted = model(tokens, targets)
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, wanted)
    for param, same in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), same.grad)
    (program,) = (step.program for step in compiled._engine.runtime.steps)
    (loop,) = (region for region in program.regions.values() if region.rows)
    assert len([node for node in loop.graph.nodes if is_collective(node)]) == sent
    assert all(verdict.proof for verdict in proofs), proofs
    assert len(proofs) == (rank == 0)


# -- state ------------------------------------------------------------------------------------------------------------


def save(rank: int, folder: Path) -> Values:
    dp, tp = meshes(2, 2)
    compiled = build(dp, tp, "everything")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    compiled(*tokens(0, dp.get_local_rank())).backward()
    update(optimizer)
    compiled.save_checkpoint(folder / "checkpoint", optimizer, extra=rank)
    compiled.save_full_state_dict(folder / "full.pt")
    compiled(*tokens(1, dp.get_local_rank())).backward()
    optimizer.step()
    return compiled.full_state_dict(rank0_only=False)


def resume(rank: int, folder: Path, data: int, model: int) -> tuple[Values, Values]:
    dp, tp = meshes(data, model or 1)
    plain = feed(seed=1)
    divided = parallelize_module(plain, tp, EVERYTHING) if model else plain
    compiled = zcompile.compile(divided, mesh=dp, stage=2, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    compiled.load_checkpoint(folder / "checkpoint", optimizer)
    loaded = compiled.full_state_dict(rank0_only=False)
    for number in range(2 // data):
        (compiled(*tokens(1, dp.get_local_rank() + number)) * data / 2).backward()
    optimizer.step()
    first = torch.load(folder / "full.pt") if rank == 0 else None
    after = compiled.full_state_dict(rank0_only=False)
    compiled.load_full_state_dict(first)
    again = compiled.full_state_dict(rank0_only=False)
    assert all(torch.equal(loaded[name], again[name]) for name in loaded)
    return loaded, after


@pytest.mark.nightly
def test_checkpoints_load_on_other_meshes(ranks: Ranks, tmp_path: Path) -> None:
    want = ranks.run(4, save, tmp_path)[0]
    saved = torch.load(tmp_path / "full.pt")
    for data, model in ((2, 2), (1, 3), (2, 0)):
        for loaded, after in ranks.run(data * max(model, 1), resume, tmp_path, data, model):
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
            assert largest_difference(after, want) < 2e-6


@pytest.mark.slow
@on_ranks(4)
def test_an_optimizer_from_before_keeps_its_state(rank: int) -> None:
    dp, tp = meshes(2, 2)
    found = []
    for early in (True, False):
        model = parallelize_module(feed(), tp, EVERYTHING)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(*tokens(0, 0)).backward()
        if early:
            update(optimizer)
            compiled = zcompile.compile(model, optimizer=optimizer, mesh=dp, backend="eager")
        else:
            for param in model.parameters():  # as a Partial gradient would be in the other way
                if isinstance(param.grad, DTensor):
                    param.grad = param.grad.redistribute(placements=param.placements)
            update(optimizer)
            compiled = model
        compiled(*tokens(1, 0)).backward()
        optimizer.step()
        named = compiled.named_parameters()
        found.append({n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in named})
    assert largest_difference(*found) < 2e-6


# -- what cannot be meant ---------------------------------------------------------------------------------------------


class Breaking(Residual):
    """Its code breaks the graph, and reads a parameter of its own."""

    def __init__(self, scale: DTensor) -> None:
        super().__init__(9, 18)
        self.scale = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.full_tensor() if len(str(x.sum().item())) else 1.0
        return super().forward(x) * scale


def wrong(rank: int, case: str) -> str:
    dp, tp = meshes(2, 2, turned=case == "the other order")
    model, mesh, options = feed(), dp, dict[str, Any]()
    if case == "differing":
        torch.manual_seed(tp.get_local_rank())
        nn.init.normal_(model.norm.weight)
    model = parallelize_module(model, tp, MLPS)
    match case:
        case "no mesh":
            mesh = None
        case "on meta":
            model = model.to("meta")
        case "its own mesh":
            mesh = tp
        case "another mesh":
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        case "weights":
            options = {"weights": feed().state_dict()}
        case "empty":
            model.head = nn.Linear(9, 1)
            model = parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())})
        case "several meshes":
            param = nn.Parameter(distribute_tensor(torch.ones(4), dp, [Shard(0)]))
            model.register_parameter("other", param)
        case "a buffer":
            model.register_buffer("table", distribute_tensor(torch.ones(4), tp, [Shard(0)]))
        case "twice":
            model = zcompile.compile(model, mesh=dp, backend="eager")
        case "a break":
            torch.manual_seed(0)
            model.blocks[1] = Breaking(distribute_tensor(torch.ones(9), tp, [Replicate()]))
        case "held":
            held = model.blocks[0].up.weight
    try:
        compiled = zcompile.compile(model, mesh=mesh, backend="eager", **options)
        if case == "held":
            held.sum()
        compiled(*tokens(0, 0))
    except zcompile.ZcompileError as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("the other order", GroupError, "the data-parallel one before it"),
        ("on meta", ModelError, "is on the meta device, and the model is tensor-parallel"),
        ("no mesh", GroupError, "mesh=mesh['dp']"),
        ("its own mesh", GroupError, "parameters are divided over"),
        pytest.param("another mesh", GroupError, "cannot be combined with", marks=pytest.mark.slow),
        pytest.param("weights", OptionError, "load_full_state_dict afterwards", marks=pytest.mark.slow),
        ("differing", ModelError, "norm.weight"),
        pytest.param(
            "empty",
            ModelError,
            "head.weight: has 1 rows on dim 0, which leave some of 2 ranks without any",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "several meshes", ModelError, "divide all parameters over one tensor-parallel mesh", marks=pytest.mark.slow
        ),
        ("a buffer", ModelError, "table: is a buffer and a DTensor"),
        pytest.param("twice", ModelError, "is sharded by zcompile already", marks=pytest.mark.slow),
        ("held", ParameterError, "is held from before zcompile.compile"),
        pytest.param(
            "a break",
            CaptureError,
            "blocks.1.scale: is tensor-parallel, and the code of blocks.1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_meant_is_an_error_on_every_rank(
    ranks: Ranks, case: str, kind: type[Exception], text: str
) -> None:
    for found in ranks.run(4, wrong, case):
        assert found.startswith(kind.__name__)
        assert text in found


def one_evaluates_more(rank: int, data: int, stage: int) -> str:
    dp, tp = meshes(data, 2)
    compiled = build(dp, tp, "everything", stage=stage)
    batch = tokens(0, dp.get_local_rank())
    with torch.no_grad():
        compiled(*batch)
    compiled(*batch).backward()
    try:
        if rank == 0:
            with torch.no_grad():
                compiled(*batch)
        for _ in range(2):
            compiled(*batch).backward()
    except zcompile.AgreementError as error:
        return str(error)
    except zcompile.GroupError:
        return "a rank is gone"
    return "no error"


@pytest.mark.slow
@quickly("data, stage", [(1, 3), (2, 0)], [(1, 3)])
def test_tensor_parallel_ranks_that_are_out_of_step_are_told(ranks: Ranks, data: int, stage: int) -> None:
    answers = ranks.run(2 * data, one_evaluates_more, data, stage, group=15)
    for message in answers[:2]:  # the peers of the first mesh
        assert message.startswith("the ranks are out of step: ")
        assert "rank 0: run " in message
        assert ", an evaluation" in message
    assert "no error" not in answers
