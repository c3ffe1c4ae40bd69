"""Layouts: every element leaves once and arrives once, where it belongs, and is divided by the number of ranks.

Parameters and gradients hold the numbers of their elements; the runtime's own functions shard, pack, send, reduce and
gather them in worlds of 1 to 8. What is wanted is torch's: `torch.chunk`, sums by hand, `DTensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zcompile
from tests.cases import quickly
from tests.index_layouts import (
    CPU,
    Case,
    LocalCommunicator,
    Steps,
    adopted,
    alone,
    around,
    battery,
    local_ranks,
    numbers,
    part,
    place,
    rows_of,
    together,
    wrong,
)
from tests.ranks import Ranks, on_ranks
from zcompile.ir.axis import axes_of
from zcompile.ir.layout import STAGES, Param, Unit
from zcompile.model.sharding import shard_model
from zcompile.model.units import make_layout
from zcompile.runtime import messages
from zcompile.runtime.arena import Places
from zcompile.runtime.backend_collectives import BackendCollectives
from zcompile.runtime.collectives import Member
from zcompile.runtime.executor import all_reduce, fetch, offload, reduce_scatter, wait
from zcompile.runtime.groups import Communicator
from zcompile.runtime.offload.activation_storage import DeviceStorage, ShardStorage
from zcompile.runtime.offloaded_activations import OffloadedActivations
from zcompile.runtime.shards import UnitShards
from zcompile.runtime.tensors.owned import part_of
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.torch_internals.dtensor import local_tensor

LOW = (torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "none")


@st.composite
def params(draw: st.DrawFn, world: int, low: torch.dtype | None, *, owned: bool = True) -> tuple[Param, ...]:
    """Some parameters, of few elements where they are cast to a dtype that holds few numbers exactly."""
    found: list[Param] = []
    left = 250 if low else 60_000
    reduced = draw(st.sampled_from([None, torch.float32, low])) if low else None
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9 if number else 17), max_size=3)))
        if not low and draw(st.integers(0, 9)) == 9:
            shape = (draw(st.integers(1, 9)), 4099)  # too large to be packed, in a unit that has small ones
        numel = torch.Size(shape).numel()
        if numel > left:
            continue
        left -= numel
        casts = low is not None and draw(st.booleans())
        dtype = torch.float32 if casts or low else draw(st.sampled_from([torch.float32, torch.float64]))
        shards = world if shape and numel and draw(st.integers(0, 4)) < 4 else 0
        mixed = (low, reduced) if casts else (None, None)
        owner = draw(st.integers(0, world - 1)) if owned and shards and draw(st.integers(0, 2)) == 0 else None
        found.append(Param(f"p{number}", shape, dtype, True, shards, *mixed, owner))
    return tuple(found) or (Param("p", (3, 2), torch.float32, True, world),)


@st.composite
def cases(draw: st.DrawFn, least: int = 1, most: int = 8, *, levels: bool = False) -> Case:
    """`levels`: of two axes, of powers of two ranks: averages along each of them are then divided without rounding."""
    world, low = draw(st.integers(least, most)), draw(st.sampled_from([None, None, *LOW]))
    outer = draw(st.sampled_from([2, 4])) if levels else 1
    world = outer * draw(st.sampled_from([1, 2, 4])) if levels else world
    given_ = draw(params(world, low, owned=not levels))
    wire = draw(st.sampled_from([None, torch.bfloat16, torch.int8])) if levels else None
    given_ = tuple(replace(p, outer_gather_dtype=wire if p.shards and draw(st.booleans()) else None) for p in given_)
    kinds: dict[tuple[object, ...], list[list[int]]] = {}
    for index, param in enumerate(given_):
        dtypes = (param.dtype, param.compute_dtype, param.reduction_dtype, param.outer_gather_dtype)
        kind = (*dtypes, bool(param.shards), param.owner)
        groups = kinds.setdefault(kind, [[]])
        if groups[-1] and draw(st.integers(0, 2)) == 0:
            groups.append([])
        draw(st.sampled_from(groups)).append(index)
    packed = sorted(tuple(group) for groups in kinds.values() for group in groups if group)
    layouts = tuple(draw(st.sampled_from(LAYOUTS)) for _ in given_)
    return Case(
        world,
        Unit("u", given_, messages=tuple(packed)),
        dtype=low,
        reduce_dtype=next((param.reduction_dtype for param in given_ if param.reduction_dtype), None),
        bucket=draw(st.none() | st.integers(1, 400)),
        room=draw(st.none() | st.integers(0, 40).map(lambda few: 64 * few)),
        gradients=layouts,
        hot=draw(st.integers(0, world - 1)) if low else None,
        held=low is None and draw(st.booleans()),
        outer=outer,
    )


def run(case: Case) -> list[str]:
    _, ranks = local_ranks(case.world, case.outer)
    found = together([battery(case, communicator) for communicator in ranks])
    return [f"rank {rank}: {problem}" for rank, problems in enumerate(found) for problem in problems]


@pytest.mark.slow
@given(cases())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_element_arrives_where_it_belongs(case: Case) -> None:
    assert run(case) == []


@pytest.mark.slow
@given(cases(levels=True))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_element_arrives_over_two_axes(case: Case) -> None:
    assert run(case) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@given(cases(levels=True))
@settings(max_examples=2500, suppress_health_check=[HealthCheck.too_slow])
def test_every_element_of_many_cases_arrives_over_two_axes(case: Case) -> None:
    assert run(case) == []


@pytest.mark.slow
@given(cases(levels=True).filter(lambda case: case.hot is None))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_packed_at_once_as_on_gpus_arrives_over_two_axes(case: Case) -> None:
    with mock.patch.object(messages, "is_gpu", return_value=True):
        assert run(case) == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@given(cases())
@settings(max_examples=2500, suppress_health_check=[HealthCheck.too_slow])
def test_every_element_of_many_cases_arrives_where_it_belongs(case: Case) -> None:
    assert run(case) == []


@pytest.mark.slow
@given(cases().filter(lambda case: case.hot is None))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_packed_at_once_as_on_gpus_arrives_where_it_belongs(case: Case) -> None:
    with mock.patch.object(messages, "is_gpu", return_value=True):
        assert run(case) == []


def reduction(case: Case, communicator: LocalCommunicator) -> Steps[None]:
    bound, rank = adopted(case, communicator), communicator.rank
    communicator.switch.sent.clear()
    grads = [case.gradient(index, rank) for index in range(len(case.unit.params))]
    started = reduce_scatter(bound, grads, dtype=case.reduce_dtype, bucket=case.bucket)
    yield
    wait(started)


@given(cases(2))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_every_element_of_a_gradient_leaves_once_for_the_rank_that_keeps_it(case: Case) -> None:
    switch, ranks = local_ranks(case.world)
    parts = [reduction(case, communicator) for communicator in ranks]
    for rank, steps in enumerate(parts):
        next(steps)
        for to in range(case.world):
            mine = [(i, case.gradient(i, rank)) for i, param in enumerate(case.unit.params) if param.shards]
            wanted = numbers(part(case, i, grad, to).double() for i, grad in mine if grad is not None)
            assert (
                numbers(row.double() for sender, target, row in switch.sent if (sender, target) == (rank, to)) == wanted
            )


def test_a_gradient_is_divided_by_the_number_of_ranks_and_each_counts_once() -> None:
    """By figures: of three ranks with 1, 10 and 100, for every way in which a reduction is sent."""
    for shape, bucket, messages_ in (((6,), None, ((0,),)), ((4,), 4, ((0,),)), ((2, 2), None, ((0, 1),))):
        unit = Unit(
            "u", tuple(Param(name, shape, torch.float32, True, 3) for name in "pq")[: len(messages_[0])], (), messages_
        )
        for reduce in (reduce_scatter, all_reduce):
            _, ranks = local_ranks(3)
            bounds = [adopted(Case(3, unit), communicator) for communicator in ranks]
            given_ = [[torch.full(shape, 10.0**rank) for _ in unit.params] for rank in range(3)]
            options = {"bucket": bucket} if reduce is reduce_scatter else {}
            started = [reduce(bound, grads, **options) for bound, grads in zip(bounds, given_, strict=True)]  # type: ignore[operator]
            found = [tensor for one in started for tensor in one.wait().tensors.values()]
            assert {number for tensor in found for number in tensor.flatten().tolist()} == {37.0}


# -- over a process group ---------------------------------------------------------------------------------------------


def over_gloo(rank: int, world: int, some: list[Case]) -> list[list[str]]:
    """What is wrong by exchanges, and by the backend's own collectives."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for native in (False, True):
        communicator = Communicator(mesh, CPU)
        if native:
            member = Member(communicator.group, CPU, rank, world, communicator.traffic, communicator.waits)
            communicator.collectives = BackendCollectives(member, averages=False)
        found += [alone(battery(case, communicator)) for case in some]
    return found


@pytest.mark.slow
@quickly("world", [2, 3, 4], [3])
def test_every_element_arrives_over_gloo_where_it_belongs(ranks: Ranks, world: int) -> None:
    drawn: list[Case] = []

    @given(cases(world, world))
    @settings(max_examples=30, database=None, derandomize=True, phases=[Phase.generate])
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    assert len(drawn) >= 20
    for found in ranks.run(world, over_gloo, world, drawn):
        assert [problem for problems in found for problem in problems] == []


# -- shards of a model ------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A scalar, an empty parameter, fewer rows than ranks, a tied parameter, a buffer; all hold indices."""

    def __init__(self, shapes: list[tuple[int, ...]], begin: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in shapes)
        for block, shape in zip(self.blocks, shapes, strict=True):
            numel = torch.Size(shape).numel()
            block.weight = nn.Parameter(torch.arange(begin, begin + numel, dtype=torch.float32).view(shape))
            block.tied = block.weight
            begin += numel
        self.scalar = nn.Parameter(torch.tensor(float(begin)))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.arange(begin, begin + 5))


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@pytest.mark.slow
@given(st.integers(1, 8), SHAPES)
@settings(max_examples=60)
def test_a_model_is_sharded_as_torch_divides_with_the_values_of_the_first_rank(
    world: int, shapes: list[tuple[int, ...]]
) -> None:
    wanted = Odd(shapes)
    kept: dict[str, list[torch.Tensor]] = {name: [] for name, _ in wanted.named_parameters()}
    _, ranks = local_ranks(world)
    for communicator in ranks:
        model = Odd(shapes, begin=1 if communicator.rank == 0 else 1000)
        layout = make_layout(model, STAGES[3], axes_of(world))
        shard_model(model, layout, communicator)
        assert torch.equal(model.seen, wanted.seen)
        for name, full in wanted.named_parameters():
            shard = model.get_parameter(name)
            mine = rows_of(full, world, communicator.rank) if layout.param(name).shards else full
            assert wrong(name, local_tensor(shard).detach(), mine.detach()) == []
            assert shard.shape == full.shape
            kept[name].append(local_tensor(shard).detach())
        for block in model.blocks:
            assert block.tied is block.weight
    for name, full in wanted.named_parameters():
        if full.dim() and full.numel():
            assert numbers(kept[name]) == numbers([full.detach()]), "every element is kept once"


def meshes(data: int, tensor: int, rank: int) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """The data-parallel, tensor-parallel and joint mesh that a rank is in, without groups."""
    grid = torch.arange(data * tensor).view(data, tensor)
    at, column = divmod(rank, tensor)
    joint = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=rank)
    one = DeviceMesh("cpu", grid[:, column], mesh_dim_names=("dp",), _init_backend=False, _rank=rank)
    other = DeviceMesh("cpu", grid[at], mesh_dim_names=("tp",), _init_backend=False, _rank=rank)
    return one, other, joint


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 2))
@settings(max_examples=100)
def test_rows_of_a_tensor_parallel_part_are_divided_again(data: int, tensor: int, shape: list[int], dim: int) -> None:
    """Where both divide dim 0 (`_StridedShard`), where they divide different ones, and of what only one divides."""
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    outer = Shard(dim) if dim < len(shape) else Replicate()
    kept = []
    for rank in range(data * tensor):
        at, column = divmod(rank, tensor)
        chunks = torch.chunk(full, tensor, dim) if dim < len(shape) else [full] * tensor
        local = chunks[column] if column < len(chunks) else full.narrow(dim, 0, 0)
        _, other, joint = meshes(data, tensor, rank)
        source = DTensor.from_local(local, other, [outer], run_check=False, shape=full.shape, stride=full.stride())
        param = Param("p", tuple(local.shape), full.dtype, True, data if local.numel() else 0)
        placing = ModelParallel(other, joint, joint, frozenset()).sharded(param, source)
        start, stop = param.shard_rows(at)
        placed = placing.place(local[start:stop] if param.shards else local)
        mine = rows_of(local, data, at) if param.shards else local
        assert wrong("shard", placed.to_local(), mine) == []
        with mock.patch.object(DeviceMesh, "get_local_rank", lambda mesh, dim: mesh.get_coordinate()[dim]):  # no groups
            assert wrong("part of the whole", part_of(full, placed), mine) == []
        kept += [mine] if param.shards else []
    copies = 1 if dim < len(shape) else tensor
    assert numbers(kept) == sorted(numbers([full]) * copies), "every element is kept once"


STRIDED = [(7, 3), (8, 4), (1, 5), (3,), (13, 2, 2), (2, 9)]


@pytest.mark.slow
@quickly("shapes", [STRIDED, STRIDED[:2]], [STRIDED[:2]], slow=())
@on_ranks(4)
def test_torch_makes_strided_shards_whole_again(rank: int, shapes: list[tuple[int, ...]]) -> list[str]:
    """What is wrong with tensor-parallel parameters that torch has divided, once they are sharded and made whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    communicator, found = Communicator(mesh["dp"], CPU), list[str]()
    parallel = ModelParallel(mesh["tp"], mesh, mesh["tp"], frozenset())
    for shape in shapes:
        full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
            source = nn.Parameter(distribute_tensor(full, mesh["tp"], [placement]))
            local = tuple(source.to_local().shape)
            empty = not torch.Size(local).numel()
            param = Param("p", local, full.dtype, True, 0 if empty else 2)
            shards = UnitShards(Unit("u", (param,)), communicator)
            shard = shards.adopt(param, source, parallel)
            if 2 * -(-shape[0] // 2) == shape[0]:  # torch divides strided rows evenly, or not at all
                found += wrong(f"{shape} {placement} whole", shard.full_tensor().detach(), full)
            mine = rows_of(source.to_local(), 2, mesh["dp"].get_local_rank()) if not empty else source.to_local()
            found += wrong(f"{shape} {placement} here", local_tensor(shard).detach(), mine.detach())
    return found


# -- activations ------------------------------------------------------------------------------------------------------


def activation(communicator: LocalCommunicator, values: list[torch.Tensor], held: list[int]) -> Steps[list[str]]:
    away = OffloadedActivations(ShardStorage(communicator, DeviceStorage()))
    tokens = [offload(value, away) for value in values]
    held += [kept.handle.handle.numel() for kept in away._slots.values()]
    arrivals = [fetch(token, away) for token in tokens]
    yield
    found = []
    for value, arrival in zip(values, arrivals, strict=True):
        again = wait(arrival)
        assert isinstance(again, torch.Tensor)
        found += wrong("activation", again, value)
        found += [] if again.stride() == value.stride() else ["an activation is laid out otherwise"]
    return found


@given(st.integers(1, 8), st.lists(st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=3), st.booleans())
@settings(max_examples=80)
def test_an_activation_of_which_each_rank_keeps_a_part_is_whole_again(
    world: int, shapes: list[list[int]], turned: bool
) -> None:
    values = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape in shapes]
    values = [value.transpose(0, -1) if turned and value.dim() > 1 else value for value in values]
    switch, ranks = local_ranks(world)
    held: list[list[int]] = [[] for _ in ranks]
    found = together([activation(one, values, mine) for one, mine in zip(ranks, held, strict=True)])
    assert found == [[]] * world
    assert all(mine == [-(-value.numel() // world) for value in values] for mine in held)
    sent = [row for sender, to, row in switch.sent if to == 0]
    assert numbers(sent) == numbers(values), "every element is kept by one rank"


# -- arenas -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from([torch.float32, torch.bfloat16])), max_size=6),
    st.integers(0, 900),
)
def test_tensors_at_one_place_lie_apart_and_nowhere_else(wanted: list[tuple[int, torch.dtype]], room: int) -> None:
    at = place(Case(1, Unit("u", ()), room=room))
    assert at is not None
    places = Places(at, CPU)
    made = [places.empty(numel, dtype) for numel, dtype in wanted]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert [tensor.tolist() for tensor in made] == [[float(n)] * numel for n, (numel, _) in enumerate(wanted)]
    assert around(at)


# -- state ------------------------------------------------------------------------------------------------------------


def saved(rank: int, folder: str, stage: int, shapes: list[tuple[int, ...]]) -> list[str]:
    compiled = zcompile.compile(Odd(shapes, begin=1 if rank == 0 else 1000), stage=stage, backend="eager")
    full = compiled.full_state_dict(rank0_only=False)
    compiled.save_checkpoint(folder)
    return compared(full, shapes)


def loaded(rank: int, folder: str, stage: int, shapes: list[tuple[int, ...]]) -> list[str]:
    compiled = zcompile.compile(Odd(shapes, begin=5000), stage=stage, backend="eager")
    compiled.load_checkpoint(folder)
    return compared(compiled.full_state_dict(rank0_only=False), shapes)


def compared(found: Mapping[str, torch.Tensor], shapes: list[tuple[int, ...]]) -> list[str]:
    wanted = Odd(shapes).state_dict()
    missing = [f"{sorted(found.keys() ^ wanted.keys())} are not the same"] if found.keys() != wanted.keys() else []
    return missing + [
        problem for name, value in wanted.items() if name in found for problem in wrong(name, found[name], value)
    ]


@pytest.mark.slow
def test_a_checkpoint_has_every_element_once_whatever_the_worlds(ranks: Ranks, tmp_path: Path) -> None:
    shapes = [(7, 3), (2, 5), (1,), (300, 70)]
    for world, stage in ((3, 3), (2, 1)):
        folder = str(tmp_path / f"of {world}")
        assert ranks.run(world, saved, folder, stage, shapes) == [[]] * world
        assert ranks.run(5 - world, loaded, folder, 3, shapes) == [[]] * (5 - world)
