"""Tokens divided over ranks: the training of one process, in every stage."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from typer.testing import CliRunner

import zcompile
from examples.gpt import GPT, GPTConfig
from tests.cases import quickly
from tests.compare import differing, full, gradients, parameters
from tests.ranks import Ranks, run_apart
from tests.threads import Threads
from zcompile import AgreementError, GroupError, OptionError, ZcompileError
from zcompile.cost.roofline import ring_bytes
from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Send
from zcompile.ir.side_effects import is_ring
from zcompile.proof.dumps import prove_dump
from zcompile.tools import command_line
from zcompile.tools.llama import Llama, LlamaShape

WORDS, LENGTH, BATCH = 32, 8, 3
Shape = tuple[tuple[int, ...], tuple[str, ...]]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=WORDS, context=16, layers=2, heads=4, width=16))


def batch(data: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + data)
    drawn = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def trained(
    rank: int, data: int, ranks: int, options: dict[str, Any], shape: Shape | None = None, make: Any = gpt
) -> str:
    """Two steps, whose losses and gradients are those of one process on the batches of all data-parallel ranks."""
    sizes, names = shape or ((data, ranks), ("dp", "sp"))
    model, plain, mesh = beside(sizes, names, make)
    options = {"backend": "eager", "sequence": "ulysses", **options}
    compiled = zcompile.compile(model, mesh=mesh[names], **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (compiled, plain)]
    near = {"rtol": 3e-2, "atol": 3e-3} if "dtype" in options else {"rtol": 1e-4, "atol": 1e-6}
    own = rank // (mesh.size() // data)
    for step in range(2):
        loss = compiled(*batch(own, step))
        loss.backward()
        for index in range(data):
            wanted = plain(*batch(index, step))
            (wanted / data).backward()
            if index == own:
                torch.testing.assert_close(loss, wanted, **near)
        torch.testing.assert_close(gradients(model), gradients(plain), **near)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compiled.eval()
    with torch.no_grad():
        arguments = batch(0, 0)[: 1 if make is gpt else 2]
        found, wanted = compiled(*arguments).float(), plain(*arguments)
    if "dtype" in options:  # on some CPUs single logits of plain PyTorch in bfloat16 differ by more than 3e-3, too
        assert (found - wanted).norm() <= 1e-2 * wanted.norm()
    else:
        torch.testing.assert_close(found, wanted, **near)
    if "dump" in options and rank == 0:
        assert all(verdict.proof for verdict in prove_dump(Path(options["dump"])))
    return ""


def beside(sizes: tuple[int, ...], names: tuple[str, ...], make: Any) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """A model, the same as plain PyTorch, and the mesh, which has a dimension "tp" if `make` gives a plan, too."""
    made = make()
    plain, plan = made if isinstance(made, tuple) else (made, None)
    mesh = init_device_mesh("cpu", (*sizes, 2) if plan else sizes, mesh_dim_names=(*names, "tp") if plan else names)
    model = copy.deepcopy(plain)
    return parallelize_module(model, mesh["tp"], plan) if plan else model, plain, mesh


@quickly(
    "data, ranks, stage",
    [(*shape, stage) for shape in ((1, 2), (2, 2), (1, 4)) for stage in range(4)],
    [(1, 2, 3)],
    pairs=False,
)
def test_a_divided_sequence_trains_as_one_process(threads: Threads, data: int, ranks: int, stage: int) -> None:
    assert threads.run(data * ranks, trained, data, ranks, {"stage": stage}) == [""] * data * ranks


@quickly(
    "data, ranks, stage",
    [(*shape, stage) for shape in ((1, 2), (2, 2), (1, 4)) for stage in range(4)],
    [(1, 2, 3)],
    slow=[(1, 2, 0), (2, 2, 3), (1, 4, 2)],
)
def test_keys_and_values_go_round(threads: Threads, data: int, ranks: int, stage: int) -> None:
    options = {"stage": stage, "sequence": "ring"}
    assert threads.run(data * ranks, trained, data, ranks, options) == [""] * data * ranks


def grouped() -> nn.Module:
    """A model whose queries share two heads of keys and values."""
    torch.manual_seed(0)
    return Llama(LlamaShape(layers=1, width=16, hidden=24, heads=4, key_heads=2), WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_queries_may_share_fewer_heads_than_ranks(threads: Threads, how: str, tmp_path: Path) -> None:
    options = {"stage": 3, "sequence": how, "dump": str(tmp_path)}
    assert threads.run(4, trained, 1, 4, options, None, grouped) == [""] * 4


def recorded(rank: int, how: Any, folder: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    options = {"sequence": how, "stage": 3, "backend": "eager", "record": folder}
    zcompile.compile(gpt(), mesh=mesh, **options)(*batch(0, 0)).backward()


@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_a_rank_of_a_sequence_runs_again_alone(threads: Threads, how: str, tmp_path: Path) -> None:
    threads.run(2, recorded, how, str(tmp_path))
    result = CliRunner().invoke(command_line.app, ["replay", str(tmp_path), "--rank", "1"])
    assert result.exit_code == 0, result.output
    assert "values recomputed, all equal, bit for bit" in result.output


def in_a_step(rank: int) -> int:
    """The bytes that a rank is foretold to receive in the rings of a step."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "sp"))
    compiled = zcompile.compile(gpt(), mesh=mesh, sequence="ring", dtype=torch.bfloat16, backend="eager")
    compiled(*batch(0, 0)).backward()
    program = compiled.programs[0]
    called = [program.regions[op.region] for node in program.graph.nodes if isinstance(op := data(node).op, Call)]
    return sum(ring_bytes(node, 4) for region in called for node in region.graph.nodes if is_ring(node))


def test_a_ring_sends_what_is_foretold(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = list[int](), dist.all_to_all_single

    def counting(arriving: Tensor, block: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(block.nbytes)
        return send(arriving, block, *args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counting)
    assert threads.run(4, in_a_step) == [sum(sent) // 4] * 4 != [0] * 4


def in_parts(model: Any, tokens: Tensor, targets: Tensor, parts: int) -> Tensor:
    """The loss of the plain model, computed in the order of ranks that divide tokens, and heads for attention."""
    positions = model.positions(torch.arange(tokens.shape[1]))
    xs = [model.tokens(t) + p for t, p in zip(tokens.chunk(parts, 1), positions.chunk(parts), strict=True)]
    for block in model.blocks:
        given = [block.attention.project(block.norm_attention(x)).chunk(3, -1) for x in xs]
        of_all = (torch.cat(one, 1).unflatten(-1, (4, -1)).transpose(1, 2) for one in zip(*given, strict=True))
        some = zip(*(one.chunk(parts, 1) for one in of_all), strict=True)
        mixed = [F.scaled_dot_product_attention(*heads, is_causal=True) for heads in some]
        seen = torch.cat(mixed, 1).transpose(1, 2).flatten(2).chunk(parts, 1)
        xs = [x + block.attention.out(one) for x, one in zip(xs, seen, strict=True)]
        xs = [x + block.mlp(block.norm_mlp(x)) for x in xs]
    scores = [F.log_softmax(model.head(model.norm(x)).flatten(0, 1), 1) for x in xs]
    picked = [one.gather(1, t.reshape(-1, 1)) for one, t in zip(scores, targets.chunk(parts, 1), strict=True)]
    first, *others = [one.neg().sum() for one in picked]
    total: Tensor = sum(others, first)
    return total / targets.numel()


def of_the_same_bits(rank: int, stage: int) -> list[str]:
    """After three steps, the parameters that differ from those of the plain model in the order of the ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    model = gpt()
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, mesh=mesh, sequence="ulysses", stage=stage, backend="eager")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (compiled, plain)]
    for step in range(3):
        losses = compiled(*batch(0, step)), in_parts(plain, *batch(0, step), 2)
        assert torch.equal(*losses), losses
        for optimizer, loss in zip(optimizers, losses, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return differing(parameters(model), parameters(plain))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_numbers_are_those_of_one_process_in_the_order_of_the_ranks(threads: Threads, stage: int) -> None:
    assert threads.run(2, of_the_same_bits, stage) == [[], []]


@quickly(
    "shape, shard, stage",
    [
        (shape, shard, stage)
        for shape in (((2, 2), ("replicate", "sp")), ((2, 1, 2), ("replicate", "shard", "sp")))
        for shard in ("hsdp", "hpz", "hfsdp", "flat")
        for stage in (1, 3)
    ],
    [],
    slow=[(((2, 2), ("replicate", "sp")), "hsdp", 3), (((2, 1, 2), ("replicate", "shard", "sp")), "hpz", 1)],
)
def test_replicas_divide_their_sequences(threads: Threads, shape: Shape, shard: str, stage: int) -> None:
    assert threads.run(4, trained, 2, 2, {"stage": stage, "shard": shard}, shape) == [""] * 4


@pytest.mark.nightly
def test_replicas_divide_shards_and_sequences(threads: Threads) -> None:
    shape = (2, 2, 2), ("replicate", "shard", "sp")
    assert threads.run(8, trained, 4, 2, {"stage": 3}, shape) == [""] * 8


def llama() -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """A model that tensor parallelism divides, and how; its norms are computed of all tokens that a rank has."""
    torch.manual_seed(0)
    projections = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
    plan = {f"layers.*.attention.{name}": style for name, style in projections.items()}
    plan |= {f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"layers.*.attention.output": RowwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}
    return small_llama(), {**plan, "head": ColwiseParallel(output_layouts=Replicate())}


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return Llama(LlamaShape(layers=2, width=16, hidden=24, heads=4, key_heads=4), WORDS)


def llama_in_parts() -> tuple[nn.Module, Mapping[str, ParallelStyle]]:
    """The same, whose norms are computed of some tokens on each tensor-parallel rank."""
    return small_llama(), Llama.tp_plan


@pytest.mark.nightly
def test_replicas_have_tensor_parallel_ranks() -> None:
    assert run_apart(8, trained, 2, 2, {"stage": 3}, ((2, 2), ("replicate", "sp")), llama) == [""] * 8


@quickly("make, stage", [(llama, 3), (llama, 0), (llama_in_parts, 2)], [], slow=[(llama, 3)])
def test_tensor_parallel_ranks_divide_their_sequences(ranks: Ranks, make: Any, stage: int, tmp_path: Path) -> None:
    options = {"stage": stage, "dump": str(tmp_path), "checkpoint": "unit"}
    assert ranks.run(4, trained, 1, 2, options, ((1, 2), ("dp", "sp")), make) == [""] * 4


def loaded(rank: int) -> None:
    """Each rank reads a part of a batch; the parts of ranks that read fewer tokens than others are refused."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    whole: dict[str, Any] = {"batch": batch(0, 0), "scale": torch.ones(BATCH)}
    whole["weights"] = torch.arange(BATCH * LENGTH * 2).view(BATCH, LENGTH, 2)
    part = zcompile.sequence_slice(whole, mesh)
    torch.testing.assert_close(part["batch"][1], whole["batch"][1].chunk(2, 1)[rank])
    torch.testing.assert_close(zcompile.sequence_gather(part, mesh), whole)
    for fewer in (part["weights"][:, rank:], part["weights"].to(torch.int32) if rank else part["weights"]):
        with pytest.raises(AgreementError, match="the parts of a batch differ: rank 0 has"):
            zcompile.sequence_gather(fewer, mesh)
    with pytest.raises(OptionError, match=r"batch: has a tensor \[1, 5\], whose dimension 1 2 ranks cannot divide"):
        zcompile.sequence_slice(torch.ones(1, 5), mesh)
    with pytest.raises(OptionError, match="dim: is -1"):
        zcompile.sequence_slice(torch.ones(1, 4), mesh, dim=-1)
    with pytest.raises(GroupError, match=r"(?s)mesh: .*no dimension divides tokens.*name one of them 'sp'"):
        zcompile.sequence_slice(part, mesh["dp"])


def test_each_rank_reads_its_part_of_a_batch(threads: Threads) -> None:
    threads.run(2, loaded)


class Flexible(nn.Module):
    """Attention whose scores a graph of its own changes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.tokens(tokens).unflatten(-1, (4, -1)).transpose(1, 2)
        seen: Tensor = flex_attention(query, query, query, score_mod=lambda score, b, h, i, j: score - (i - j) * h)  # type: ignore[assignment]
        return seen.sum()


def flexible(rank: int, how: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    compiled = zcompile.compile(Flexible(), mesh=mesh, sequence=how, stage=0, backend="eager").eval()
    with torch.no_grad(), pytest.raises(OptionError, match=r"cannot divide flex_attention .*graphs of its own"):
        compiled(batch(0, 0)[0])


@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_attention_with_graphs_of_its_own_is_refused(threads: Threads, how: str) -> None:
    threads.run(2, flexible, how)


BESIDE: dict[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": "unit"},
    "arenas": {"arenas": True, "stage": 2},
    "bf16": {"dtype": torch.bfloat16},
    "limit": {"memory_limit": "1 MiB"},
    "chunk": {"chunk": 6},
    "inductor": {"backend": "inductor"},
    "ring-checkpoint": {"sequence": "ring", "checkpoint": "unit"},
    "ring-chunk": {"sequence": "auto", "chunk": 6},
    "ring-inductor": {"sequence": "ring", "backend": "inductor", "arenas": True, "stage": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_other_options_go_beside_a_divided_sequence(threads: Threads, name: str, tmp_path: Path) -> None:
    assert threads.run(2, trained, 1, 2, {**BESIDE[name], "dump": str(tmp_path)}) == ["", ""]


def behind_torch_compile(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    model = gpt()
    plain = copy.deepcopy(model)
    backend = zcompile.backend(mesh=mesh, sequence="ulysses", stage=3, backend="eager")
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    for one in (compiled, plain):
        one(*batch(0, 0)).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-6)
    return ""


@pytest.mark.slow
def test_a_backend_divides_sequences(threads: Threads) -> None:
    assert threads.run(2, behind_torch_compile) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ulysses", "ring"])
def test_real_ranks_divide_sequences(ranks: Ranks, how: str) -> None:
    assert ranks.run(4, trained, 2, 2, {"stage": 3, "sequence": how}) == [""] * 4


def stepped(rank: int, stage: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model = gpt()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    step = zcompile.train_step(
        model,
        lambda model, tokens, targets: model(tokens, targets),
        optimizers[0],
        mesh=mesh,
        sequence="ulysses",
        stage=stage,
        backend="eager",
        clip_grad_norm=0.5,
    )
    for number in range(3):
        step(*batch(mesh["dp"].get_local_rank(), number))
        for index in range(2):
            (plain(*batch(index, number)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizers[1].step()
        optimizers[1].zero_grad()
    for param, same in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.detach()), same.detach(), rtol=1e-3, atol=1e-5)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_train_steps_divide_sequences(threads: Threads, stage: int) -> None:
    assert threads.run(4, stepped, stage) == [""] * 4


def two(data: int, number: int) -> list[Tensor]:
    """The batch of two micro-batches."""
    return [torch.cat(pair) for pair in zip(batch(data, number), batch(data + 50, number), strict=True)]


def piped(rank: int, sizes: tuple[int, int, int], options: dict[str, Any], make: Any = gpt) -> str:
    """Two steps of a pipeline, whose stages send each other parts of values, and an evaluation."""
    model, plain, mesh = beside(sizes, ("pp", "dp", "sp"), make)
    own, near = mesh["dp"].get_local_rank(), {"rtol": 1e-4, "atol": 1e-5}
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    step = zcompile.train_step(
        model,
        lambda model, tokens, targets: model(tokens, targets),
        optimizers[0],
        mesh=mesh,
        microbatches=2,
        **{"backend": "eager", "schedule": "1f1b", "sequence": "ulysses", **options},
    )
    for number in range(2):
        loss = step(*two(own, number))
        for index in range(sizes[1]):
            wanted = plain(*two(index, number))
            (wanted / sizes[1]).backward()
            if index == own:
                torch.testing.assert_close(loss, wanted.detach(), **near)
        optimizers[1].step()
        optimizers[1].zero_grad()
    whole = step.full_state_dict(rank0_only=False)
    torch.testing.assert_close(dict(whole), dict(plain.state_dict()), **near)
    torch.testing.assert_close(step.evaluate(*two(own, 5)), plain(*two(own, 5)).detach(), **near)
    assert step.program is not None
    sent = {str(data(node).type) for node in step.program.nodes(Send)}
    assert {text for text in sent if text.startswith(f"f32[{BATCH},")} == {f"f32[{BATCH}, {LENGTH // sizes[2]}, 16]"}
    if "dump" in options and rank == 0:
        assert all(verdict.proof for verdict in prove_dump(Path(options["dump"])))
    return ""


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"stage": 3, "checkpoint": "unit"},
                {"stage": 2, "chunk": 6, "schedule": "gpipe"},
                {"stage": 3, "sequence": "ring"},
                {"stage": 0, "schedule": "interleavedzerobubble", "stages_per_rank": 2},
            )
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_stages_of_a_pipeline_send_parts(threads: Threads, options: dict[str, Any], tmp_path: Path) -> None:
    assert threads.run(4, piped, (2, 1, 2), {**options, "dump": str(tmp_path)}) == [""] * 4


@pytest.mark.nightly
def test_stages_with_data_parallel_ranks_send_parts(threads: Threads) -> None:
    assert threads.run(8, piped, (2, 2, 2), {"stage": 2}) == [""] * 8


@pytest.mark.nightly
def test_stages_have_tensor_parallel_ranks() -> None:
    assert run_apart(8, piped, (2, 1, 2), {"stage": 2}, llama) == [""] * 8


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequence": "rings"}, "sequence: has no value 'rings'"),
        ({"sequence": "ulysses"}, r"(?s)mesh: .*do not say over which ranks.*Fix: .*mesh_dim_names=\('dp', 'sp'\)"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(without_group: None, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ZcompileError, match=problem):
        zcompile.compile(gpt(), backend="eager", **options)


class Communicating(nn.Module):
    """A model with a collective of its own, over the ranks that divide its tokens."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.model, self.group = gpt(), group

    def forward(self, tokens: Tensor) -> Tensor:
        sent = torch.ops._c10d_functional.all_reduce(self.model.tokens(tokens), "sum", self.group)
        return torch.ops._c10d_functional.wait_tensor(sent).square().mean()


def communicating(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    model = Communicating(mesh.get_group("sp").group_name)
    compiled = zcompile.compile(model, mesh=mesh, sequence="ulysses", backend="eager")
    with pytest.raises(OptionError) as raised:
        compiled(batch(0, 0)[0])
    return str(raised.value)


@pytest.mark.slow
def test_collectives_of_a_model_are_refused(threads: Threads) -> None:
    for text in threads.run(2, communicating):
        assert "sequence: cannot divide all_reduce" in text
        assert "test_sequences.py" in text


def mistaken(rank: int) -> str:
    """Ranks that divide the same tokens are given different ones."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "sp"))
    model = gpt()
    options: dict[str, Any] = {"mesh": mesh, "sequence": "ulysses", "microbatches": 2, "backend": "eager"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = zcompile.train_step(model, lambda model, *batch: model(*batch), optimizer, **options)
    with pytest.raises(AgreementError) as raised:
        step(*two(mesh["sp"].get_local_rank(), 0))
    return str(raised.value)


@pytest.mark.slow
def test_ranks_of_one_sequence_in_a_pipeline_have_the_same_batch(threads: Threads) -> None:
    for text in threads.run(4, mistaken):
        assert "is not the same on ranks 0, 1, 2, 3 along 'pp' and 'sp'" in text


def unequal(rank: int, fewer: int) -> str:
    """Ranks of one group are given batches of different lengths, after steps of two lengths."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    compiled = zcompile.compile(gpt(), mesh=mesh, sequence="ulysses", backend="eager")
    tokens, targets = batch(0, 0)
    for length in (8, 4):
        compiled(tokens[:, :length].contiguous(), targets[:, :length].contiguous()).backward()
        compiled.zero_grad()
    length = 8 - fewer * rank
    with pytest.raises(AgreementError if fewer == 4 or rank == 0 else OptionError) as raised:
        compiled(tokens[:, :length].contiguous(), targets[:, :length].contiguous())
    return str(raised.value)


@pytest.mark.slow
def test_ranks_with_batches_of_different_lengths_are_told(threads: Threads) -> None:
    for text in threads.run(2, unequal, 4):
        assert "the batch: differs on ranks that divide its tokens" in text
        assert "give all ranks of 'sp' the same batch" in text
    told, own = threads.run(2, unequal, 1)  # a length of seven cannot be divided at all
    assert "rank 1 has none: sequence no input is (batch, tokens)" in told
    assert own.startswith("sequence: no input is (batch, tokens), of tokens that 2 ranks can divide.")


def sampled_apart(rank: int, steps: bool) -> str:
    """Ranks of one group are given other batches of the same length, as by a sampler that counts them all."""
    mesh, model = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")), gpt()
    options: dict[str, Any] = {"mesh": mesh, "sequence": "ulysses", "stage": 3, "backend": "eager"}
    if steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run: Any = zcompile.train_step(model, lambda model, *batch: model(*batch), optimizer, **options)
    else:
        run = zcompile.compile(model, **options)
    run(*batch(0, 0))
    before = parameters(model)
    with pytest.raises(AgreementError) as raised:
        run(*batch(rank, 1))
    assert not differing(parameters(model), before)
    return str(raised.value)


@pytest.mark.parametrize("steps", [False, True])
def test_ranks_with_other_batches_are_told_in_the_first_runs(threads: Threads, steps: bool) -> None:
    for text in threads.run(2, sampled_apart, steps):
        assert "the batch: differs on ranks that divide its tokens" in text
