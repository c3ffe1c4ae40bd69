"""Averages that travel between replicas in fewer bits: what that changes, and by how much."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from benchmarks.mutants.lines import respell
from tests.cases import quickly
from tests.compare import differing, parameters
from tests.dumps import assert_proven, assert_replayed
from tests.hybrids import Rows, Shape, mean, mesh_of, one_process, train
from tests.models import batch, make
from tests.ranks import on_threads
from tests.rounding import EACH, rounded
from tests.threads import Threads
from zcompile import OptionError, PipelineError, ProgramError
from zcompile.ir.layout import padded_to_blocks, wire_bytes
from zcompile.ir.operation import data
from zcompile.ir.ops import ReduceOutside
from zcompile.runtime.groups import Communicator
from zcompile.runtime.low_precision import decode, encode

WIRES = (torch.bfloat16, torch.int8)


# -- what is sent -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600),
    st.sampled_from(WIRES),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_what_arrives_is_as_near_as_is_said(numbers: list[float], wire: torch.dtype, dtype: torch.dtype) -> None:
    values = torch.zeros(1, padded_to_blocks(len(numbers)), dtype=dtype)
    values[0, : len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
    sent = encode(values, wire)
    assert sent.shape == (1, wire_bytes(values.shape[1], wire))
    assert sent.dtype is torch.uint8
    found = decode(sent, wire, dtype)
    largest = values.view(-1, EACH).abs().amax(dim=1, keepdim=True).expand(-1, EACH).reshape(1, -1)
    limit = values.abs() / 2**8 if wire is torch.bfloat16 else largest / 254 * (1 + 1e-5)
    assert bool(((found - values).abs() <= limit + 1e-37).all())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(wire: torch.dtype, number: float) -> None:
    values = torch.ones(1, 2 * EACH)
    values[0, 3] = number
    found = decode(encode(values, wire), wire, torch.float32)
    assert not found[0, 3].isfinite()
    assert found[0, EACH:].isfinite().all()


def averaged(rank: int, wire: torch.dtype, numel: int) -> tuple[torch.Tensor, int]:
    """The average of what each rank draws, and the payload that is counted."""
    communicator = Communicator(init_device_mesh("cpu", (torch.distributed.get_world_size(),)), torch.device("cpu"))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    before = communicator.traffic.payload
    communicator.collectives.all_reduce(values, wire).wait()
    return values, communicator.traffic.payload - before


@quickly("wire, world", [(wire, world) for wire in WIRES for world in (2, 3, 4)], [(WIRES[0], 2), (WIRES[1], 3)])
def test_every_rank_gets_the_same_average(threads: Threads, wire: torch.dtype, world: int) -> None:
    for numel in (1, 255, 1000):
        found = threads.run(world, averaged, wire, numel)
        drawn = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
        each = padded_to_blocks(numel if world == 2 else -(-numel // world))
        want = mean([rounded(torch.cat([one, one.new_zeros(-numel % EACH)]), wire)[:numel] for one in drawn])
        if world > 2:
            want = torch.cat([rounded(part, wire) for part in want.split(each)])
        for values, payload in found:
            assert torch.equal(values, want)
            assert payload == 2 * (1 if world == 2 else world) * wire_bytes(each, wire)


# -- training ---------------------------------------------------------------------------------------------------------


def in_bfloat16(rows: Rows) -> torch.Tensor:
    """Averages over the ranks that shard travel in bfloat16, twice beyond two replicas."""
    inside = [mean(row) for row in rows]
    if inside[0].dim() == 0:
        return mean(inside)
    found = mean([rounded(one, torch.bfloat16) for one in inside])
    return rounded(found, torch.bfloat16) if len(rows) > 2 else found


def sweep(rank: int, kind: str, shape: Shape, choices: list[tuple[int, int]]) -> list[str]:
    want = one_process(kind, shape, average=in_bfloat16)
    found = []
    for stage, prefetch in choices:
        got = train(rank, kind, shape, stage=stage, prefetch=prefetch, outer_dtype=torch.bfloat16)
        found += [f"stage {stage} prefetch {prefetch}: {name}" for name in differing(got, want)]
    return found


@pytest.mark.slow
@quickly("shape, kind", [((2, 2), "gpt"), ((2, 2), "mlp"), ((3, 1), "mlp")], [((2, 2), "gpt")], pairs=False)
def test_bfloat16_between_replicas_is_that_rounding_and_no_other(threads: Threads, shape: Shape, kind: str) -> None:
    choices = [(1, 1), (2, 0), (3, 2)] if kind == "mlp" else [(3, 1)]
    assert threads.run(shape[0] * shape[1], sweep, kind, shape, choices) == [[]] * (shape[0] * shape[1])


def beside(rank: int, folder: str) -> tuple[float, float, dict[str, int], dict[str, int]]:
    """How far int8 is from float32, how far these move, and bytes along each axis: counted, and as programs say."""
    compiled = zcompile.compile(
        make("gpt", 0), mesh=mesh_of((2, 2)), backend="eager", outer_dtype=torch.int8, record=folder
    )
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    begun = parameters(compiled)
    before = {name: one.bytes for name, one in compiled.traffic.axes.items()}
    compiled(*batch("gpt", rank, 0)).backward()
    sent = {name: one.bytes - before.get(name, 0) for name, one in compiled.traffic.axes.items()}
    optimizer.step()
    got = parameters(compiled)
    compiled.dump(f"{folder}/dump", all_ranks=True)
    want = zcompile.compile(make("gpt", 0), mesh=mesh_of((2, 2)), backend="eager")
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    want(*batch("gpt", rank, 0)).backward()
    optimizer.step()
    other = parameters(want)
    apart = max(float((got[name] - other[name]).abs().max()) for name in got)
    moved = max(float((begun[name] - other[name]).abs().max()) for name in got)
    return apart, moved, sent, dict(sum((Counter(one.volumes()) for one in compiled.programs), Counter()))


@pytest.mark.slow
def test_int8_is_proven_replayed_and_counted(threads: Threads, tmp_path: Path) -> None:
    for apart, moved, sent, said in threads.run(4, beside, str(tmp_path)):
        assert 0 < apart <= moved / 100
        assert sent == said
        psi = 4 * sum(param.numel() for param in make("gpt").parameters())
        assert sent["replicate"] < 0.3 * psi / 2  # of float32 it would be half of what a node's rank keeps, sent once
    assert_proven(tmp_path / "dump")
    assert_replayed(tmp_path, 4)


@on_threads(2)
def test_a_program_that_sends_otherwise_is_refused(rank: int) -> None:
    """A pass that leaves out in what averages travel."""

    def forget(program: zcompile.Program) -> zcompile.Program:
        program = program.copy()
        for node in program.nodes(ReduceOutside):
            op = data(node).op
            assert isinstance(op, ReduceOutside), "it is one"
            respell(program, node, replace(op, wire=None))
        return program

    passes = {"forget": zcompile.Pass("forget", forget)}
    compiled = zcompile.compile(
        make("mlp", 0), mesh=mesh_of((2, 1)), backend="eager", outer_dtype=torch.int8, passes=passes
    )
    with pytest.raises((ProgramError, PipelineError)) as caught:
        compiled(*batch("mlp", rank, 0)).backward()
    said = str(caught.value)
    assert "want torch.int8" in said


class Mixed(nn.Module):
    """A unit of a matrix and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.scale * (x @ self.weight.T).sum(1, keepdim=True) - y).square().mean()


def with_a_number(rank: int, folder: str) -> list[str]:
    torch.manual_seed(0)
    compiled = zcompile.compile(Mixed(), mesh=mesh_of((2, 1)), backend="eager", outer_dtype=torch.int8)
    compiled(*batch("mlp", rank, 0)).backward()
    compiled.dump(folder, all_ranks=True)
    torch.manual_seed(0)
    plain = Mixed()
    grads = []
    for other in range(2):
        plain(*batch("mlp", other, 0)).backward()
        grads.append({name: param.grad for name, param in plain.named_parameters()})
        plain.zero_grad()
    want = {"scale": mean([one["scale"] for one in grads])}  # type: ignore[misc]
    want["weight"] = mean([rounded(one["weight"].flatten(), torch.int8).view(6, 7) for one in grads])  # type: ignore[union-attr]
    got = {name: param.grad.full_tensor() for name, param in compiled.named_parameters()}
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.slow
def test_what_is_whole_on_every_rank_travels_as_it_is(threads: Threads, tmp_path: Path) -> None:
    assert threads.run(2, with_a_number, str(tmp_path)) == [[]] * 2
    assert_proven(tmp_path)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outer_dtype": torch.float32}, "is not a dtype in which averages can travel"),
        ({"outer_dtype": torch.int32}, "is not a dtype in which averages can travel"),
        ({"outer_dtype": torch.int8, "stage": 0}, "stage 0 has no shards"),
        ({"outer_dtype": torch.int8}, "all ranks shard along one"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, object], said: str) -> None:
    model: nn.Module = make("mlp")
    with pytest.raises(OptionError, match=said):
        zcompile.compile(model, **options)  # type: ignore[arg-type]
    model.zero_grad()
