"""Pipelines of tensor-parallel models: as plain PyTorch with the same tensor parallelism and no pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from tests.cases import quickly
from tests.pipelines import MICROBATCHES, in_order, mean
from tests.ranks import Ranks
from tests.test_tensor_parallel import PLANS, Feed
from zcompile.pipelining.step import PipelinedStep

NAMES = ("pp", "dp", "tp")


def feed(mesh: DeviceMesh, plan: str) -> Feed:
    torch.manual_seed(0)
    model = Feed()
    parallelize_module(model, mesh["tp"], PLANS[plan])
    return model


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(0, 13, (2 * MICROBATCHES, 6), generator=source)
    return tokens, tokens.roll(1, 1)


def plain(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


class Reference:
    """Plain PyTorch, tensor-parallel: the micro-batches of all data-parallel ranks one after the other."""

    def __init__(self, mesh: DeviceMesh, plan: str, stage: int) -> None:
        self.model, self.stage, self.data = feed(mesh, plan), stage, mesh["dp"].size()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def train(self, step: int) -> list[float]:
        losses, rows = [], []
        for rank in range(self.data):
            found, total = [], torch.zeros(())
            for part in zip(*(one.chunk(MICROBATCHES) for one in batch_of(rank, step)), strict=True):
                self.model.zero_grad()
                loss = self.model(*part)
                (loss / MICROBATCHES).backward()
                found.append([p.grad for p in self.model.parameters()])
                total = total + plain(loss)
            losses.append(float(total / MICROBATCHES))
            rows.append(found)
        for index, parameter in enumerate(self.model.parameters()):
            own = [[one[index] for one in found] for found in rows]
            if self.stage < 2:
                parameter.grad = mean([in_order(row) for row in own])
            else:
                parameter.grad = in_order([mean(list(column)) for column in zip(*own, strict=True)])
        self.optimizer.step()
        return losses


def trains(
    rank: int, shape: tuple[int, int, int], plan: str, stage: int, schedule: str, made: dict[str, Any]
) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    reference, model = Reference(mesh, plan, stage), feed(mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step = zcompile.train_step(
        model,
        None,
        optimizer,
        mesh=mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        stage=stage,
        backend="eager",
        units=["embed", "blocks.*", "head"],
        **made,
    )
    assert isinstance(step, PipelinedStep)
    own, wrong = mesh["dp"].get_local_rank(), []
    for number in range(3):
        loss, losses = float(step(*batch_of(own, number))), reference.train(number)
        if abs(loss - losses[own]) > (1e-6 if plan == "sequences" else 0):
            wrong.append(f"the loss of step {number}: {loss} and {losses[own]}")
    wanted = {name: plain(p) for name, p in reference.model.named_parameters()}
    kept = {name: p for name, p in model.named_parameters() if not p.is_meta}
    for name, parameter in kept.items():
        full = plain(parameter)
        # Of what is divided along the sequence, plain PyTorch adds up partial gradients before it reduces them.
        same = torch.allclose(full, wanted[name], atol=1e-5) if plan == "sequences" else torch.equal(full, wanted[name])
        if not same:
            wrong.append(f"{name}: {(full - wanted[name]).abs().max()}")
    return [*wrong, *(["no parameters"] if not kept else [])]


WAYS = [
    (plan, stage, schedule)
    for plan in PLANS
    for schedule in ("1f1b", "interleavedzerobubble", "zbvzerobubble")
    for stage in range(4)
]


@pytest.mark.slow
@quickly("plan, stage, schedule", WAYS, [("sequences", 3, "zbvzerobubble"), ("mlps", 1, "1f1b")], slow=())
def test_a_pipeline_trains_as_tensor_parallelism_alone(ranks: Ranks, plan: str, stage: int, schedule: str) -> None:
    assert ranks.run(4, trains, (2, 1, 2), plan, stage, schedule, {}) == [[]] * 4


@pytest.mark.nightly
def test_three_dimensions_train_as_tensor_parallelism_alone() -> None:
    """Eight processes take a while to start on two cores."""
    pool = Ranks(8)
    try:
        for case in (
            ("everything", 1, "1f1b"),
            ("mlps", 3, "interleavedzerobubble"),
            ("everything", 2, "zbvzerobubble"),
        ):
            assert pool.run(8, trains, (2, 2, 2), *case, {}, timeout=250, group=240) == [[]] * 8, case
    finally:
        pool.close()


@quickly(
    "plan, schedule", [(p, s) for p in PLANS for s in ("1f1b", "zbvzerobubble")], [], slow=[("everything", "1f1b")]
)
def test_checkpoints_repeat_collectives_with_the_same_numbers(ranks: Ranks, plan: str, schedule: str) -> None:
    assert ranks.run(4, trains, (2, 1, 2), plan, 1, schedule, {"checkpoint": "unit"}) == [[]] * 4


@quickly("stage", [0, 2], [], slow=[2])
def test_clipping_takes_the_norm_over_all_dimensions(ranks: Ranks, stage: int) -> None:
    """By a norm that clips nothing: bits stay."""
    assert ranks.run(4, trains, (2, 1, 2), "everything", stage, "1f1b", {"clip_grad_norm": 1e9}) == [[]] * 4


def saves(rank: int, folder: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)
    model = feed(mesh, "everything")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    made: dict[str, Any] = {"microbatches": MICROBATCHES, "backend": "eager", "units": ["embed", "blocks.*", "head"]}
    step = zcompile.train_step(model, None, optimizer, mesh=mesh, **made)
    assert isinstance(step, PipelinedStep)
    for number in range(2):
        step(*batch_of(0, number))
    step.save_checkpoint(folder, optimizer)
    whole = step.full_state_dict(rank0_only=False)
    step(*batch_of(0, 2))
    again = step.full_state_dict(rank0_only=False)
    changed = any(not torch.equal(value, again[name]) for name, value in whole.items())
    step.load_checkpoint(folder, optimizer)
    back = step.full_state_dict(rank0_only=False)
    same = all(torch.equal(value, back[name]) for name, value in whole.items())
    shapes = {name: value.shape for name, value in Feed().state_dict().items()}
    return [changed, same, {name: value.shape for name, value in whole.items()} == shapes]


@pytest.mark.slow
def test_state_goes_through_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert all(map(all, ranks.run(4, saves, str(tmp_path / "checkpoint"))))


def misnamed(rank: int) -> list[str]:
    found = []
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        ("pp", "dp", "cp"): (2, 1, 2),
        ("pp", "tp"): (2, 2),
        ("dp", "pp", "tp"): (1, 2, 2),
        ("dp", "pp"): (2, 2),
    }
    for names, shape in shapes.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = feed(mesh, "mlps") if "tp" in names else Feed()
        try:
            zcompile.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, microbatches=2)
        except zcompile.GroupError as error:
            found.append(str(error))
    return found


def test_meshes_whose_dimensions_cannot_be_meant_are_refused(ranks: Ranks) -> None:
    for other, missing, order, plain in ranks.run(4, misnamed):
        assert "a pipeline is not combined with 'cp'" in other
        for text in (missing, order):
            assert "mesh_dim_names=('pp', 'dp', 'tp')" in text
        assert "mesh_dim_names=('pp', 'dp')" in plain
