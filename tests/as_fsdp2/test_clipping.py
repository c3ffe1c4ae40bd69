"""Clipping: the norm is that of all gradients of all ranks, and clipped gradients are the plain model's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zcompile
from tests.as_fsdp2.plain import Net, average, differing, full, gradients, mean_square, numbers, pair
from tests.cases import quickly
from tests.ranks import on_ranks, on_threads


def mesh_of(kind: str) -> torch.distributed.device_mesh.DeviceMesh | None:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "hybrid" else None


CASES = [
    (norm_type, foreach, mesh, stage)
    for norm_type in (1.0, 2.0, 3.0, math.inf)
    for foreach in (None, False, True)
    for mesh in ("one", "hybrid")
    for stage in (3, 2)
]


@pytest.mark.slow
@quickly(
    "norm_type, foreach, mesh, stage",
    CASES,
    [(2.0, None, "one", 3)],
    pairs=False,
)
@on_threads(lambda mesh: 4 if mesh == "hybrid" else 3)
def test_gradients_are_clipped_by_the_norm_of_all_ranks(
    rank: int, norm_type: float, foreach: bool | None, mesh: str, stage: int
) -> list[str]:
    plain, compiled = pair(Net, mesh=mesh_of(mesh), stage=stage)
    found, norms = [], []
    for model in (plain, compiled):
        mean_square(model, numbers(rank, 0)).backward()
        if model is plain:
            average(plain)
        norm = clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type, foreach=foreach)
        norms.append(full(norm))
    if not torch.allclose(norms[0], norms[1], rtol=1e-5):
        found.append(f"norms {norms}")
    assert norms[0] > 0.05, "the case clips"
    return found + differing(gradients(compiled), gradients(plain), "gradient")


@pytest.mark.slow
@on_threads(2)
def test_norms_may_be_taken_first_and_values_clipped(rank: int) -> list[str]:
    """The norm first, and clipping by a norm that is given; then by value."""
    plain, compiled = pair(Net)
    norms = []
    for model in (plain, compiled):
        mean_square(model, numbers(rank, 0)).backward()
        if model is plain:
            average(plain)
        norm = get_total_norm([param.grad for param in model.parameters()])
        norms.append(full(norm))
        clip_grads_with_norm_(model.parameters(), 0.05, norm)
        clip_grad_value_(model.parameters(), 0.005)
    found = [] if torch.allclose(*norms, rtol=1e-5) else ["norm"]
    return found + differing(gradients(compiled), gradients(plain), "gradient")


@pytest.mark.slow
@on_threads(3)
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(rank: int) -> list[str]:
    """A gradient that is infinite on one rank: an error on all of them, where it is asked for."""
    _, compiled = pair(Net)
    loss = mean_square(compiled, numbers(rank, 0))
    (loss * (math.inf if rank == 1 else 1.0)).backward()
    try:
        clip_grad_norm_(compiled.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return [] if "non-finite" in str(error) else [str(error)]
    return ["no error"]


@pytest.mark.slow
@on_ranks(4)
def test_the_norm_is_over_all_dimensions_of_a_mesh(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Net(width=6)
    for block in plain.blocks:
        block.up, block.down = nn.Linear(6, 4), nn.Linear(4, 6)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    compiled = zcompile.compile(
        parallelize_module(copy.deepcopy(plain), mesh["tp"], plan), mesh=mesh["dp"], backend="eager"
    )
    x = numbers(mesh["dp"].get_local_rank(), 0, 4, 6)
    norms = []
    for model in (plain, compiled):
        mean_square(model, x).backward()
        if model is plain:
            average(plain, mesh["dp"].get_group())
        norms.append(full(clip_grad_norm_(model.parameters(), 0.05)))
    found = [] if torch.allclose(*norms, rtol=1e-5) else [f"norms {norms}"]
    return found + differing(gradients(compiled), gradients(plain), "gradient")
