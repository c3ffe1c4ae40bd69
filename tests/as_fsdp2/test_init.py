"""How a model is divided: which rows lie where, with whose values, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zcompile
from tests.as_fsdp2.plain import (
    Block,
    Net,
    average,
    beside,
    differing,
    gradients,
    mean_square,
    numbers,
    pair,
    parameters,
    three,
)
from tests.cases import quickly
from tests.ranks import Ranks, on_ranks, on_threads
from tests.refusals import typed_error_of
from zcompile import ModelError, OptionError, ParameterError

# -- shards -----------------------------------------------------------------------------------------------------------


@quickly("world", [2, 3], [3])
@on_threads()
def test_a_rank_has_the_rows_that_chunk_gives_it(rank: int, world: int) -> list[str]:
    """Each rank's part against `torch.chunk` of the plain parameter, the last ones of which may be empty."""
    plain, compiled = pair(Net)
    found = []
    for name, param in compiled.named_parameters():
        whole = plain.get_parameter(name).detach()
        chunks = whole.chunk(dist.get_world_size())
        want = chunks[rank] if rank < len(chunks) else whole[:0]
        same = isinstance(param, DTensor) and torch.equal(param.to_local(), want) and param.shape == whole.shape
        found += [] if same and list(param.placements) == [Shard(0)] else [name]
    return found


@pytest.mark.slow
@on_threads(4)
def test_a_mesh_of_two_dimensions_repeats_shards_along_the_first(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, compiled = pair(Net, mesh=mesh)
    found = []
    for name, param in compiled.named_parameters():
        assert isinstance(param, DTensor)
        want = plain.get_parameter(name).chunk(2)[rank % 2]
        same = list(param.placements) == [Replicate(), Shard(0)] and torch.equal(param.to_local(), want)
        found += [] if same else [name]
    return found


@quickly("hybrid", [False, True], [False])
@on_threads(lambda hybrid: 4 if hybrid else 3)
def test_all_ranks_start_from_the_first_ranks_values(rank: int, hybrid: bool) -> list[str]:
    """Ranks that built other values have the first rank's, of parameters and buffers."""
    torch.manual_seed(0)
    want = nn.Sequential(Block(), nn.BatchNorm1d(7))
    want[1].running_mean.add_(1.0)
    torch.manual_seed(rank)
    model = nn.Sequential(Block(), nn.BatchNorm1d(7))
    model[1].running_mean.add_(1.0 + rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    compiled = zcompile.compile(model, mesh=mesh, backend="eager")
    found = differing(parameters(compiled), parameters(want), "value")
    return found + differing(dict(compiled.named_buffers()), dict(want.named_buffers()), "buffer", 0)


@pytest.mark.slow
@on_threads(4)
def test_groups_of_ranks_train_models_of_their_own(rank: int) -> list[str]:
    """A mesh of some of the ranks: two models, trained by two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "dp"))["dp"]
    group = mesh.get_group()
    torch.manual_seed(rank // 2)
    plain = Net()
    compiled = zcompile.compile(copy.deepcopy(plain), mesh=DeviceMesh.from_group(group, "cpu"), backend="eager")
    for model in (plain, compiled):
        mean_square(model, numbers(rank, 0)).backward()
    average(plain, group)
    return differing(gradients(compiled), gradients(plain), "gradient")


# -- kinds of parameters ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of several dtypes and shapes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7, dtype=torch.float64)
        self.low = nn.Parameter(torch.randn(3, 7).bfloat16())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.cube = nn.Parameter(torch.randn(2, 3, 7))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.double()).float() * self.scale + self.low.float().sum(0)
        return y + self.cube.sum((0, 1)) * self.phase.abs().sum()


@on_ranks(2)  # two, whose sum in bfloat16 has one order
def test_parameters_of_several_dtypes_and_scalars_are_divided_together(rank: int) -> list[str]:
    plain, compiled = pair(Mixed)
    found = [n for n, p in compiled.named_parameters() if p.dtype != plain.get_parameter(n).dtype]
    return found + beside(plain, compiled, three(rank), tolerance=1e-5)


# -- on meta ----------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 7))
        self.register_buffer("table", torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(35.0).view(5, 7) / 35)
            self.table.copy_(torch.arange(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table) @ self.weight.t() @ self.weight


@quickly("way", ["code", "weights", "loaded", "sent"], ["code", "loaded"])
@on_threads(3)
def test_models_on_meta_get_values_from_their_code_or_from_a_state(rank: int, way: str) -> list[str]:
    """Values from the modules' own code, from a state of the plain model, and from one loaded later."""
    plain = nn.Sequential(*(Constant() for _ in range(3)))
    if way != "code":
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(2)
    with torch.device("meta"):
        model = nn.Sequential(*(Constant() for _ in range(3)))
    state = copy.deepcopy(plain.state_dict())
    compiled = zcompile.compile(model, weights=state if way == "weights" else None, backend="eager")
    if way == "loaded":
        compiled.load_state_dict(state)
    if way == "sent":
        compiled.load_full_state_dict(state if rank == 0 else None)
    found = differing(parameters(compiled), parameters(plain), "value", 0)
    found += differing(dict(compiled.named_buffers()), dict(plain.named_buffers()), "buffer", 0)
    return found + beside(plain, compiled, three(rank), tolerance=1e-4)


def test_a_model_on_meta_without_values_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(ModelError, match="weight: is on the meta device, and nothing gives it values"):
        zcompile.compile(Bare())


# -- what is refused --------------------------------------------------------------------------------------------------


def compiled_net(**options: Any) -> zcompile.CompiledModule:
    return zcompile.compile(Net(), backend="eager", **options)


def test_a_divided_model_is_not_moved_or_emptied() -> None:
    compiled = compiled_net()
    for move in (lambda: compiled.to("meta"), lambda: compiled.to_empty(device="meta")):
        with pytest.raises(ParameterError):
            move()
    compiled.to("cpu")
    compiled.float()


def test_a_model_without_parameters_runs() -> None:
    assert torch.equal(
        zcompile.compile(nn.ReLU(), backend="eager")(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0])
    )


@pytest.mark.parametrize("part", ["whole", "block", "around"])
def test_a_model_is_divided_once(part: str) -> None:
    """Again, a block of it again, or a model around it."""
    model = Net()
    compiled = zcompile.compile(model.blocks[0] if part == "around" else model, backend="eager")
    again: nn.Module = compiled
    if part == "block":
        again = compiled.blocks[0]
    if part == "around":
        model.blocks[0] = compiled
        again = model
    with pytest.raises((ModelError, ParameterError)):
        zcompile.compile(again, backend="eager")


def wrong_mesh(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return typed_error_of(lambda: zcompile.compile(Net(), mesh=mesh, backend="eager"))


def test_meshes_that_say_no_shape_of_data_parallelism_are_refused(ranks: Ranks) -> None:
    for shape, names in (((2, 1, 1), ("a", "b", "c")), ((1, 2), ("one", "other"))):
        for message in ranks.run(2, wrong_mesh, shape, names):
            assert "mesh" in message


def test_patterns_of_units_that_match_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="units"):
        compiled_net(units=["bloks.*"])
