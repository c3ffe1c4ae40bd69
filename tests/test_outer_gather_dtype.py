"""Shards that travel outside in fewer bits (qwZ of ZeRO++): what is computed with, sent, kept, said and refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from benchmarks.mutants.lines import respell
from tests.cases import quickly
from tests.compare import differing, full, parameters
from tests.dumps import assert_proven_and_replayed
from tests.hybrids import (
    PLAN,
    Breaking,
    Shape,
    Values,
    adamw,
    mesh_of,
    one_process,
    recorded,
    saved,
    through_torch_compile,
    train,
)
from tests.models import batch, make, update
from tests.ranks import on_ranks, on_threads, run_apart
from tests.rounding import EACH, rounded
from tests.test_checker import texts_of
from tests.threads import Threads
from zcompile import OptionError, ProgramError, ProofError, facts
from zcompile.cost.memory import live_bytes
from zcompile.ir.axis import axes_of
from zcompile.ir.layout import STAGES, Hybrid, Layout, Param, padded_to_blocks, shard_wire_bytes, wire_bytes
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import GatherOutside, WaitSecondary
from zcompile.ir.tensor_type import human_bytes
from zcompile.model.units import Precision, make_layout
from zcompile.proof.checker import prove
from zcompile.proof.checker_texts import CAPTURE, FORWARD
from zcompile.proof.ranks import check_texts
from zcompile.runtime.low_precision import decode_shards, encode_shards
from zcompile.schedule.options import Options
from zcompile.tools.tracing import trace

INT8, BF16 = torch.int8, torch.bfloat16
WIRES = (BF16, INT8)
HYBRIDS = ("hfsdp", "hpz")
Choice = tuple[str, int, int]
"""How both axes divide, the stage, and the units that are gathered ahead."""
ALL = [(shard, stage, prefetch) for shard in HYBRIDS for stage in (1, 2, 3) for prefetch in (0, 2)]


def arriving(value: torch.Tensor, ranks: int, wire: torch.dtype, computed: torch.dtype | None = None) -> torch.Tensor:
    """By hand, as docs/several_machines.md says it: a parameter of which each rank has sent its rows in `wire`."""
    computed = (computed or value.dtype) if value.is_floating_point() else value.dtype
    if value.dim() == 0 or not value.is_floating_point() or computed.itemsize <= wire.itemsize:
        return value.to(computed)
    numel = -(-len(value) // ranks) * math.prod(value.shape[1:])
    if wire is INT8 and -(-numel // EACH) * (EACH + 4) >= numel * computed.itemsize:
        return value.to(computed)
    return torch.cat([rounded(rows, wire) for rows in value.chunk(ranks)]).to(computed)


# -- what is sent -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300), min_size=1, max_size=3),
    st.sampled_from(WIRES),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_what_arrives_is_as_near_as_is_said(numbers: list[list[float]], wire: torch.dtype, dtype: torch.dtype) -> None:
    """Of each of several shards of a message, alike whatever it travels with."""
    shards = [torch.tensor(some, dtype=dtype) for some in numbers]
    numels = [len(shard) for shard in shards]
    sent = encode_shards(torch.cat(shards), numels, wire)
    assert sent.dtype is torch.uint8
    assert sent.shape == (sum(shard_wire_bytes(numel, wire) for numel in numels),)
    found = decode_shards(torch.stack([sent, sent]), numels, wire, dtype)
    assert torch.equal(found[0], found[1])
    for value, one in zip(shards, found[0].split(numels), strict=True):
        assert torch.equal(
            one, decode_shards(encode_shards(value, [len(value)], wire)[None], [len(value)], wire, dtype)[0]
        )
        largest = torch.cat([block.abs().max().expand(len(block)) for block in value.split(EACH)])
        limit = value.abs() / 2**8 if wire is BF16 else largest / 254 * (1 + 1e-5)
        assert bool(((one - value).abs() <= limit + 1e-37).all())


@pytest.mark.parametrize("numel", [1, 65, 66, 255, 256, 257])
def test_a_shard_is_encoded_where_that_is_fewer_bytes(numel: int) -> None:
    of = Param("p", (4 * numel,), torch.float32, shards=4)
    assert shard_wire_bytes(numel, INT8) == wire_bytes(padded_to_blocks(numel), INT8) == -(-numel // 256) * 260
    assert shard_wire_bytes(numel, BF16) == 2 * numel
    assert of.gathered_as(INT8).outer_gather_dtype is (INT8 if numel >= 66 else None)
    assert of.gathered_as(BF16).outer_gather_dtype is BF16
    for left in (replace(of, dtype=torch.int64), replace(of, dtype=BF16), replace(of, compute_dtype=BF16)):
        assert left.gathered_as(BF16).outer_gather_dtype is None
    assert replace(of, shards=0).gathered_as(BF16).outer_gather_dtype is None


# -- bits -------------------------------------------------------------------------------------------------------------


def arrived(kind: str, shape: Shape, wire: torch.dtype) -> Values:
    """One process: gradients at parameters as they arrive, averaged in order, and an optimizer of what they were."""
    ranks = shape[0] * shape[1]
    return one_process(kind, shape, arriving=lambda value: arriving(value, ranks, wire) if shape[0] > 1 else value)


def sweep(
    rank: int, kind: str, shape: Shape, wire: torch.dtype, choices: list[Choice], options: dict[str, Any]
) -> list[str]:
    """What differs from the reference."""
    want, found = arrived(kind, shape, wire), list[str]()
    for shard, stage, prefetch in choices:
        how: dict[str, Any] = {"shard": shard, "stage": stage, "prefetch": prefetch, **options}
        got = train(rank, kind, shape, outer_gather_dtype=wire, **how)
        found += [f"{shard} {stage} {prefetch}: {name}" for name in differing(got, want)]
    return found


FEW = [("hpz", 3, 1), ("hfsdp", 3, 2), ("hpz", 2, 0), ("hfsdp", 1, 1)]


@pytest.mark.slow
@quickly(
    "kind, shape, wire",
    [
        (kind, shape, wire)
        for kind, shape in (("gpt", (2, 2)), ("tied", (2, 2)), ("conv", (3, 1)), ("mlp", (2, 2)), ("conv", (1, 3)))
        for wire in WIRES
        if (kind, wire) != ("mlp", INT8)  # of which all shards are tiny
    ],
    [("mlp", (2, 2), BF16)],
    slow=[("conv", (3, 1), INT8), ("tied", (2, 2), BF16)],
)
def test_a_step_is_one_at_what_arrives_for_what_was_sent(
    threads: Threads, kind: str, shape: Shape, wire: torch.dtype
) -> None:
    found = threads.run(shape[0] * shape[1], sweep, kind, shape, wire, FEW, {})
    assert found == [[]] * len(found)


@quickly("wire", WIRES, [], slow=())
def test_every_stage_and_depth(threads: Threads, wire: torch.dtype) -> None:
    assert threads.run(4, sweep, "gpt", (2, 2), wire, ALL, {}) == [[]] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_six_ranks(shape: Shape) -> None:
    for kind, wire in (("gpt", INT8), ("mlp", BF16)):
        assert run_apart(6, sweep, kind, shape, wire, FEW, {}) == [[]] * 6


OPTIONS: dict[str, dict[str, Any]] = {
    "train step": {"by_step": True},
    "arenas": {"arenas": True},
    "checkpoints": {"checkpoint": "unit"},
    "a limit": {"memory_limit": "2 MiB"},
    "a bucket": {"bucket": 1024},
    "one unit": {"units": ["blocks"]},
}


@pytest.mark.slow
@quickly("name", list(OPTIONS), ["train step"], slow=())
def test_other_options_change_no_bits(threads: Threads, name: str) -> None:
    choices = [("hpz", 3, 1), ("hfsdp", 2, 2)][: 1 if name == "a limit" else 2]
    assert threads.run(4, sweep, "gpt", (2, 2), INT8, choices, OPTIONS[name]) == [[]] * 4


@pytest.mark.slow
def test_shards_may_be_on_a_disk(threads: Threads, tmp_path: Path) -> None:
    options = {"offload_parameters": f"disk:{tmp_path}"}
    assert threads.run(4, sweep, "gpt", (2, 2), INT8, [("hpz", 3, 1), ("hfsdp", 3, 1)], options) == [[]] * 4


# -- what is computed with --------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Rows of many elements, a tiny bias, numbers that are no floats and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 130), nn.Linear(130, 1)
        self.places = nn.Parameter(torch.randint(0, 130, (600,)), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x)) * self.scale
        return ((self.last(inner) + inner[:, self.places].sum(1, keepdim=True) - y) ** 2).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: make("gpt", 0), "mixed": Mixed, "broken": Breaking}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def computed(rank: int, kind: str, wire: torch.dtype, options: dict[str, Any]) -> list[str]:
    """What differs, loss and gradients, from a model that has the values by hand and gathers them as they are.

    All ranks have one batch: what one of them computes, the others do.
    """
    plain, own, given_ = built(kind), built(kind), batch("gpt" if kind == "gpt" else "mlp", 0, 0)
    low = options.get("dtype")
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(arriving(param, 4, wire, low))
    found, results = list[str](), []
    for model, more in ((plain, {}), (own, {"outer_gather_dtype": wire})):
        compiled = zcompile.compile(model, mesh=mesh_of((2, 2)), backend="eager", **options, **more)
        loss = compiled(*given_)
        loss.backward()
        grads = {name: param.grad for name, param in compiled.named_parameters() if param.grad is not None}
        with torch.no_grad():
            results.append([loss.detach(), compiled(*given_), *(full(grad) for grad in grads.values())])
    everyone = [torch.zeros(()) for _ in range(4)]
    torch.distributed.all_gather(everyone, results[1][0].float())
    found += [] if len({float(one) for one in everyone}) == 1 else [f"ranks differ: {everyone}"]
    return found + [f"{n}" for n, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]


COMPUTED: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("gpt", INT8, {"shard": "hpz"}),
    ("gpt", INT8, {"shard": "hfsdp", "dtype": BF16}),
    ("gpt", BF16, {"shard": "hpz", "stage": 1}),
    ("mixed", INT8, {"shard": "hfsdp"}),
    ("mixed", BF16, {"shard": "hpz", "stage": 2}),
    ("broken", BF16, {"shard": "hpz"}),
    ("broken", BF16, {"shard": "hfsdp", "stage": 2}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zcompile")
@quickly("kind, wire, options", COMPUTED, [COMPUTED[5]], pairs=False)
def test_every_rank_computes_with_what_the_others_got(
    threads: Threads, kind: str, wire: torch.dtype, options: dict[str, Any]
) -> None:
    """Of its own rows, too, in the forward, the backward and an evaluation."""
    assert threads.run(4, computed, kind, wire, options) == [[]] * 4


@pytest.mark.slow
@on_threads(4)
def test_where_nothing_travels_in_fewer_bits_it_does_not_appear(rank: int) -> None:
    """In a unit that is computed in bfloat16 anyway, and on one node, where numbers and texts are as without it."""
    found = []
    for shape, options in (((2, 2), {"dtype": BF16}), ((1, 4), {})):
        both = []
        for more in ({}, {"outer_gather_dtype": BF16}):
            how: dict[str, Any] = {"shard": "hpz", **options, **more}
            compiled = zcompile.compile(make("mlp", 0), mesh=mesh_of(shape), backend="eager", **how)
            loss = compiled(*batch("mlp", rank, 0))
            loss.backward()
            text = compiled._engine.runtime.steps[0].program.text(regions=True)
            both.append((loss, text))
        found.append(torch.equal(both[0][0], both[1][0]) and both[0][1] == both[1][1])
    assert found == [True, True], "in bfloat16 anyway, and on one node"
    assert "wire=" not in text
    assert "gathered in" not in text


# -- what is sent and kept --------------------------------------------------------------------------------------------


def by_hand(kind: str, wire: torch.dtype) -> int:
    """Bytes that one of 2x2 ranks sends outside, in a forward: its part of each parameter, to one other."""
    total = 0
    for param in make(kind).parameters():
        if param.dim():
            numel = -(-len(param) // 4) * math.prod(param.shape[1:])
            encoded = 2 * numel if wire is BF16 else -(-numel // EACH) * (EACH + 4)
            total += min(4 * numel, encoded)
    return total


@pytest.mark.slow
@quickly(
    "shard, stage, wire",
    [(shard, stage, wire) for shard in HYBRIDS for stage in (1, 3) for wire in WIRES],
    [("hpz", 3, INT8)],
    pairs=False,
)
@on_threads(4)
def test_bytes_outside_are_as_foretold_and_by_hand(rank: int, shard: str, stage: int, wire: torch.dtype) -> None:
    """Bytes outside of two steps, each with two evaluations before the optimizer's; and those that are foretold."""
    how: dict[str, Any] = {"shard": shard, "stage": stage, "outer_gather_dtype": wire}
    compiled = zcompile.compile(make("gpt"), mesh=mesh_of((2, 2)), backend="eager", **how)
    optimizer, counts = adamw(compiled), []
    axes = compiled.traffic.axes

    def spent(run: Callable[[], Any]) -> int:
        before = axes["replicate"].bytes if "replicate" in axes else 0
        run()
        return axes["replicate"].bytes - before

    def evaluate() -> None:
        with torch.no_grad():
            compiled(*batch("gpt", rank, 0))

    for step in range(2):
        counts.append(spent(lambda step=step: compiled(*batch("gpt", rank, step)).backward()))  # type: ignore[misc]
        counts.append(spent(evaluate))
        for param in compiled.parameters():
            assert param.data is not None  # whoever has it may write: copies are compared with the shards
        counts.append(spent(evaluate))
        update(optimizer)
    program = compiled._engine.runtime.steps[0].program
    forward = program.phase(Phase.FORWARD).volumes()
    lives, gathers = live_bytes(program), program.nodes(GatherOutside)
    encoded = sum(op_of(node, GatherOutside).encoded_bytes(program.layout) for node in gathers)
    changes = sum(program.memory(node) - data(node).nbytes for node in (*gathers, *program.nodes(WaitSecondary)))
    one = {
        "counts": counts,
        "step": program.volumes()["replicate"],
        "forward": forward["replicate"],
        "encoded": encoded,
        "changes": changes,
        "peak": max(lives.values()),
        "explained": compiled.explain(),
    }
    first, evaluated, compared, second, *_ = one["counts"]
    kept = shard == "hfsdp" or stage == 1
    assert one["forward"] == by_hand("gpt", wire)
    assert first == second == one["step"]
    assert evaluated == compared == (0 if kept else one["forward"])
    assert 0 < one["encoded"] <= 2 * one["forward"]
    assert one["changes"] == 0, "what arrives encoded is there from a gather to its wait"
    assert human_bytes(one["step"]) in one["explained"]


@pytest.mark.slow
@quickly(
    "shard, stage", [(shard, stage) for shard in HYBRIDS for stage in (1, 3)], [("hfsdp", 3), ("hpz", 1)], pairs=False
)
@on_threads(4)
def test_writes_to_parameters_are_noticed(rank: int, shard: str, stage: int) -> list[str]:
    """What differs from parameters by hand after writes, in ways that no optimizer tells, on one rank or on all."""
    how: dict[str, Any] = {"shard": shard, "stage": stage, "outer_gather_dtype": INT8}
    compiled = zcompile.compile(make("gpt", 0), mesh=mesh_of((2, 2)), backend="eager", **how)
    plain, found = make("gpt", 0), []
    for number in range(4):
        values = parameters(compiled)
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(arriving(values[name], 4, INT8))
            want, got = plain(*batch("gpt", rank, 0)), compiled(*batch("gpt", rank, 0))
            found += [] if torch.equal(want, got) else [f"call {number}: {want} {got}"]
            for param in compiled.parameters():
                if number == 0:
                    param.mul_(0.5)
                elif number == 1:
                    param.data.mul_(0.75)
                elif rank == 3 and isinstance(param, DTensor):
                    param.to_local().data.add_(0.1)
    return found


def saved_in_fewer_bits(rank: int, folder: str) -> Values:
    return saved(rank, folder, "hpz", "gpt", outer_gather_dtype=INT8)


def loaded(rank: int, folder: str) -> Values:
    compiled = zcompile.compile(make("gpt", 5), backend="eager")
    compiled.load_checkpoint(folder, adamw(compiled))
    return parameters(compiled)


@pytest.mark.slow
def test_a_checkpoint_has_what_the_optimizer_keeps(threads: Threads, tmp_path: Path) -> None:
    folder, want = str(tmp_path / "saved"), arrived("gpt", (2, 2), INT8)
    for values in threads.run(4, saved_in_fewer_bits, folder):
        assert not differing(values, want)
    assert not differing(torch.load(f"{folder}.pt"), want)
    for values in threads.run(2, loaded, folder):
        assert not differing(values, want)


# -- programs and proofs ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def layout_of(wire: torch.dtype | None = INT8, world: int = 4) -> Layout:
    axes, precision = axes_of(world, replicas=2), Precision(outer_gather_dtype=wire)
    with torch.device("meta"):
        return make_layout(Net(), STAGES[3], axes, None, precision, hybrid=Hybrid.HPZ)


@functools.cache
def program_of(wire: torch.dtype | None = INT8) -> tuple[zcompile.Program, zcompile.Program]:
    """The step as it was traced, and as it runs."""
    with torch.device("meta"):
        net, x = Net(), torch.empty(8, 64)
    traced = replace(trace(net, (x,)), layout=layout_of(wire))
    return traced, Options(shard="hpz", prefetch=1, outer_gather_dtype=wire).pipeline().run(traced)


UNITS = """\
axes = {"replicate": "replicate 2, stride 2", "shard": "shard 2"}
stage = 3
hybrid = "hpz"
units = {
    "layers.0": [
        "layers.0.bias f32[64]",
        "layers.0.weight f32[64, 64] gathered in i8",
    ],
    "layers.1": [
        "layers.1.bias f32[64]",
        "layers.1.weight f32[64, 64] gathered in i8",
    ],
}
"""
GATHERS = """\
    layers_0_outside = all_gather(layers_0, replicate, wire=torch.int8)  # u8[8448]    +10.28 KiB    layers.0
    layers_1_outside = all_gather(layers_1, replicate, wire=torch.int8)  # u8[8448]    +10.28 KiB    layers.1
    layers_0_secondary = wait(layers_0_outside)                   # &u8[8448]          -2.031 KiB    layers.0
    del layers_0_outside
    layers_0_gather = all_gather(layers_0, layers_0_secondary)    #                    +16.25 KiB    layers.0
    del layers_0_secondary
"""
COMMUNICATIONS = [
    "forward: all_gather layers.0 (layers.0.bias f32[64], layers.0.weight i8[64, 64]) over replicate in i8",
    "forward: all_gather layers.1 (layers.1.bias f32[64], layers.1.weight i8[64, 64]) over replicate in i8",
    "forward: all_gather layers.0 (layers.0.bias f32[64], layers.0.weight f32[64, 64]) from secondary shards",
]


def test_a_program_says_who_travels_how() -> None:
    """A rank's 1024 elements of a weight travel as 1040 bytes, of which it gets two; the bias as it is."""
    _, program = program_of()
    text = program.text(regions=True)
    assert text.lstrip().startswith(UNITS)
    assert GATHERS in text
    assert program.communications()[:3] == COMMUNICATIONS
    assert zcompile.parse(text).text(regions=True) == text
    (first, *_) = program.nodes(GatherOutside)
    traffic = program.traffic(first)
    assert traffic is not None
    assert (traffic.payload, traffic.copied) == (2 * (4 * 16 + 4 * 260), 0)
    away = replace(program.layout, away=True)
    copied = op_of(first, GatherOutside).traffic(first, away)
    assert copied == replace(traffic, copied=4 * (16 + 1024)), "floats come from the host, and are encoded then"


def test_over_other_ranks_it_is_decided_anew() -> None:
    layout = layout_of()

    def kinds(of: Layout) -> dict[str, torch.dtype | None]:
        return {param.name: param.outer_gather_dtype for param in of.params if param.name.startswith("layers.0")}

    assert kinds(layout) == {"layers.0.weight": INT8, "layers.0.bias": None}
    assert kinds(layout.over(64, 4)) == {"layers.0.weight": None, "layers.0.bias": None}, "64 elements a rank"
    assert kinds(layout.over(64)) == {"layers.0.weight": None, "layers.0.bias": None}
    assert kinds(layout.over(8, 2)) == kinds(layout)


def recorded_in_fewer_bits(rank: int, folder: str, options: dict[str, Any]) -> None:
    recorded(rank, folder, "gpt", **options)


DUMPED: list[dict[str, Any]] = [
    {"shard": "hpz", "outer_gather_dtype": INT8},
    {"shard": "hfsdp", "outer_gather_dtype": INT8, "dtype": BF16, "outer_dtype": INT8},
    {"shard": "hfsdp", "outer_gather_dtype": BF16, "stage": 2},
]


@pytest.mark.slow
@quickly("options", DUMPED, DUMPED[1:2])
def test_a_step_is_proven_across_ranks_and_replayed(threads: Threads, options: dict[str, Any], tmp_path: Path) -> None:
    threads.run(4, recorded_in_fewer_bits, str(tmp_path), options)
    assert_proven_and_replayed(tmp_path, 4)


def other_wire(program: zcompile.Program, wire: torch.dtype | None) -> zcompile.Program:
    """The first gather outside sends as another one."""
    program = program.copy()
    node = program.nodes(GatherOutside)[0]
    respell(program, node, replace(op_of(node, GatherOutside), wire=wire))
    return program


@pytest.mark.parametrize(
    ("said", "wire", "wants"), [(INT8, None, "torch.int8"), (INT8, BF16, "torch.int8"), (None, INT8, "None")]
)
def test_a_program_that_gathers_otherwise_is_refused_with_its_line(
    said: torch.dtype | None, wire: torch.dtype | None, wants: str
) -> None:
    _, program = program_of(said)
    with pytest.raises(ProgramError) as caught:
        zcompile.verify(other_wire(program, wire), [facts.WELL_FORMED], "here")
    line = str(caught.value)
    assert f"layers_0_outside sends shards of layers.0 as {wire}; want {wants}" in line
    assert "--> " in line
    assert "layers_0_outside = all_gather(layers_0, replicate" in line.partition("--> ")[2].split("\n")[0]


@pytest.mark.parametrize(("said", "wire", "proven"), [(INT8, None, False), (INT8, BF16, False), (INT8, INT8, True)])
def test_values_are_casts_of_parameters(said: torch.dtype, wire: torch.dtype | None, proven: bool) -> None:
    """In the forward, and in the backward, which reads the same secondary shards."""
    traced, program = program_of(said)
    found = [str(one) for one in zcompile.computes(traced).violations(other_wire(program, wire))]
    assert bool(found) is not proven
    for part in () if proven else ("layers.0.weight torch.float32, sent in i8", "region_0"):
        assert any(part in one for one in found), found


TEXT_MISTAKES = {
    (FORWARD, ", wire=torch.int8", ""): "gathers layers.0 in its own dtype; its units say i8",
    (FORWARD, "wire=torch.int8", "wire=torch.bfloat16"): "gathers layers.0 in bf16; its units say i8",
    (CAPTURE, " gathered in i8", ""): "gathers layers.0 in i8; its units say nothing",
}


@pytest.mark.parametrize(("file", "old", "new"), list(TEXT_MISTAKES))
def test_a_text_that_gathers_otherwise_is_refused_with_its_line(file: str, old: str, new: str) -> None:
    texts = texts_of(*program_of())
    assert prove(texts).parameters == 4
    assert old in texts[file]
    with pytest.raises(ProofError) as caught:
        prove({**texts, file: texts[file].replace(old, new, 1)})
    assert TEXT_MISTAKES[file, old, new] in str(caught.value)
    assert "layers_0_outside = all_gather(layers_0, replicate" in str(caught.value)


def test_ranks_that_send_otherwise_are_told() -> None:
    text = program_of()[1].text(regions=True)
    check_texts(dict.fromkeys(range(4), text))
    other = text.replace(" gathered in i8", "", 1)
    with pytest.raises(ProofError, match=r"layers\.0\.weight f32\[64, 64\]\) over replicate in i8"):
        check_texts({**dict.fromkeys(range(3), text), 3: other})


# -- bad input --------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[str, Shape | None, dict[str, Any], str]] = [
    ("gpt", (2, 2), {"outer_gather_dtype": INT8}, "these options make none"),
    ("gpt", (2, 2), {"outer_gather_dtype": INT8, "shard": "hsdp"}, "these options make none"),
    ("gpt", (2, 2), {"outer_gather_dtype": INT8, "shard": "flat"}, "these options make none"),
    ("gpt", None, {"outer_gather_dtype": INT8}, "these options make none"),
    ("gpt", (2, 2), {"outer_gather_dtype": INT8, "stage": 0}, "these options make none"),
    ("gpt", (2, 2), {"outer_gather_dtype": torch.float32, "shard": "hpz"}, "is not a dtype in which shards can travel"),
    ("gpt", (2, 2), {"outer_gather_dtype": "int4", "shard": "hpz"}, "is not a dtype in which shards can travel"),
    ("mlp", (2, 2), {"outer_gather_dtype": INT8, "shard": "hpz"}, "would make no shard smaller"),
]


@pytest.mark.slow
@on_threads(4)
def test_what_cannot_be_meant_is_refused_alike_on_every_rank(rank: int) -> None:
    for kind, shape, options, says in REFUSED:
        mesh, model = mesh_of(shape) if shape else None, make(kind)
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(OptionError) as caught:
            zcompile.compile(model, mesh=mesh, backend="eager", **options)
        error, touches = str(caught.value), not all(map(torch.equal, before, model.parameters()))
        assert error.startswith("outer_gather_dtype: "), (options, error)
        assert says in error, (options, error)
        assert "Fix: " in error
        assert not touches, options
    with pytest.raises(OptionError, match=r"^shard: is 'hpz'.*all ranks are along one"):
        zcompile.compile(make("gpt"), backend="eager", outer_gather_dtype=INT8, shard="hpz")


# -- beside others ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_the_backend_of_torch_compile_takes_it(rank: int) -> list[str]:
    want = arrived("gpt", (2, 2), INT8)
    return through_torch_compile(rank, "gpt", want, shard="hpz", outer_gather_dtype=INT8)


@pytest.mark.slow
@on_ranks(4)
def test_it_stands_beside_tensor_parallelism(rank: int) -> list[str]:
    """Beside tensor parallelism, where rows of a rank's part travel: losses and gradients of values by hand."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))

    def small() -> nn.Module:
        torch.manual_seed(0)
        return parallelize_module(nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 40)), mesh["tp"], PLAN)

    plain, own, results = small(), small(), []
    with torch.no_grad():
        for param in plain.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(arriving(local, 2, INT8))
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank // 2))
    for model, more in ((plain, {}), (own, {"outer_gather_dtype": INT8})):
        how: dict[str, Any] = {"mesh": mesh["dp_replicate", "dp_shard"], "shard": "hpz", **more}
        compiled = zcompile.compile(model, backend="eager", **how)
        loss = compiled(x).square().mean()
        loss.backward()
        results.append([loss, *(full(p.grad) for p in compiled.parameters() if p.grad is not None)])
    return [str(n) for n, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)]
