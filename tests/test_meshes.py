"""Which meshes data parallelism takes, and what it says of those that would let ranks train apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from tests.hybrids import PLAN, small
from tests.ranks import Ranks, on_ranks
from tests.refusals import error_of
from zcompile import GroupError


def trained(rank: int, model: nn.Module, mesh: DeviceMesh | None) -> list[float]:
    """A weight after one step on a batch that each rank of the data-parallel mesh has for itself."""
    compiled = zcompile.compile(model, mesh=mesh, backend="eager")
    place = rank if mesh is None else mesh.get_local_rank()
    torch.optim.SGD(compiled.parameters(), lr=0.1).zero_grad()
    compiled(torch.full((2, 4), float(place + 1))).square().sum().backward()
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    weight: torch.Tensor = compiled.full_state_dict(rank0_only=False)["2.weight"]
    found: list[float] = weight.flatten().tolist()
    return found


def plainly(ranks: int) -> list[float]:
    model = small()
    for rank in range(ranks):
        (model(torch.full((2, 4), float(rank + 1))).square().sum() / ranks).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weight: list[float] = model[2].weight.detach().flatten().tolist()
    return weight


def refused(make: Callable[[], object]) -> str:
    return error_of(lambda: make(), GroupError)


@on_ranks(4)
def test_a_dimension_of_a_larger_mesh_is_refused_with_both_meshes_and_the_ways_out(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    part, nameless = mesh["shard"], init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.barrier()  # a rank that is done at once would close its connections while others are still connecting
    part, backend, whole = (
        refused(lambda: zcompile.compile(small(), mesh=part, backend="eager")),
        refused(lambda: zcompile.backend(mesh=part, backend="eager")),
        refused(lambda: zcompile.compile(small(), mesh=nameless, backend="eager")),
    )
    assert part == backend
    assert "DeviceMesh((shard=2)" in part
    assert "DeviceMesh((replicate=2, shard=2)" in part
    assert "train separately" in part
    assert "init_device_mesh('cpu', (world,)), or none" in part
    assert "DeviceMesh.from_group(mesh['shard'].get_group(), 'cpu')" in part
    assert "do not say which one replicates the shards" in whole
    assert "mesh_dim_names=('replicate', 'shard')" in whole


def whole(rank: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    flat = mesh._flatten()
    narrow = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    return [trained(rank, small(), one) for one in (None, flat, narrow["dp"])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_ranks_flattened_or_beside_dimensions_of_one_train_together(ranks: Ranks) -> None:
    want = plainly(4)
    for found in ranks.run(4, whole):
        for one in found:
            assert one == pytest.approx(want, abs=1e-6)


@pytest.mark.slow
@on_ranks(4)
def test_groups_that_are_meant_train_by_themselves(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    assert refused(lambda: zcompile.compile(small(), mesh=mesh["dp"], backend="eager"))
    found = trained(rank, small(), DeviceMesh.from_group(mesh["dp"].get_group(), "cpu"))
    assert found == pytest.approx(plainly(2), abs=1e-6)


def divided(rank: int, shape: tuple[int, int, int], suffix: str) -> tuple[str, list[float]]:
    """DTensor remembers meshes of processes whose groups are gone by their names: `suffix` makes new ones."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=(f"pp{suffix}", f"dp{suffix}", f"tp{suffix}"))
    model = parallelize_module(small(), mesh[f"tp{suffix}"], PLAN)
    found: list[float] = []

    def train() -> None:
        found.extend(trained(rank, model, mesh[f"dp{suffix}"]))

    return refused(train), found


@pytest.mark.parametrize(
    ("shape", "suffix"), [pytest.param((1, 2, 2), "_a", marks=pytest.mark.slow), ((1, 2, 1), "_b")]
)
def test_a_tensor_parallel_dimension_counts_and_one_of_size_one_does_not(
    ranks: Ranks, shape: tuple[int, int, int], suffix: str
) -> None:
    for error, found in ranks.run(torch.Size(shape).numel(), divided, shape, suffix):
        assert not error
        assert found == pytest.approx(plainly(shape[1]), abs=1e-6)


def test_a_third_dimension_beside_a_tensor_parallel_one_is_refused(ranks: Ranks) -> None:
    for error, _ in ranks.run(4, divided, (2, 1, 2), "_c"):
        assert re.search(r"DeviceMesh\(\(dp_c=1\).*a dimension of DeviceMesh\(\(pp_c=2, dp_c=1, tp_c=2\)", error)
        assert "DeviceMesh.from_group([mesh['dp_c'].get_group(), mesh['tp_c'].get_group()], 'cpu'" in error


@pytest.mark.slow
@on_ranks(4)
def test_pipeline_stages_of_tensor_parallel_models_have_meshes_of_their_own(rank: int) -> None:
    """As the error says: a mesh of the groups of data and tensor parallelism alone, for each pipeline stage."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp_d", "dp_d", "tp_d"))
    groups = [mesh["dp_d"].get_group(), mesh["tp_d"].get_group()]
    members = torch.tensor(dist.get_process_group_ranks(groups[1])).view(1, 2)
    own = DeviceMesh.from_group(groups, "cpu", mesh=members, mesh_dim_names=("dp_d", "tp_d"))
    found = trained(rank, parallelize_module(small(), own["tp_d"], PLAN), own["dp_d"])
    assert found == pytest.approx(plainly(1), abs=1e-6)


@pytest.mark.slow
@on_ranks(4)
def test_a_process_group_that_was_made_again(rank: int, tmp_path: Path) -> None:
    """Train, destroy the process group, and train in one whose groups have other names."""
    for number in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        compiled = zcompile.compile(small(), mesh=mesh, backend="eager")
        compiled(torch.ones(2, 4)).sum().backward()
        whole = [param.grad.detach().full_tensor() for param in compiled.parameters()]
        whole += [(param.grad + param.grad).full_tensor() for param in compiled.parameters()]
        assert all(tensor.isfinite().all() for tensor in whole)
        if number == 0:
            dist.destroy_process_group()
            shared = dist.FileStore(str(tmp_path / "store"), 4)
            dist.init_process_group("gloo", store=shared, rank=rank, world_size=4)
            dist.new_group([0, 1, 2, 3])
