"""Copies of a compiled model, and averages of weights over them: torch.optim.swa_utils on shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import zcompile
from tests.cases import quickly
from tests.compare import differing, full
from tests.models import batch, make, update
from tests.optimizer_cases import AVERAGES
from tests.ranks import Ranks, on_ranks, on_threads
from tests.threads import Threads

STEPS = 3
Values = dict[str, torch.Tensor]


class Normed(nn.Module):
    """Rows that no world divides, a tied layer, a scalar, and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 7)
        self.again = self.first
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.again(torch.tanh(self.last(torch.relu(self.norm(self.first(x))))))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def state_of(module: nn.Module) -> Values:
    return {name: full(value) for name, value in module.state_dict().items()}


def averaged_over_ranks(model: nn.Module) -> None:
    """Gradients summed in the order of ranks, then divided, as zcompile's are on gloo."""
    for param in model.parameters():
        assert param.grad is not None
        parts = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, param.grad)
        param.grad = sum(parts[1:], parts[0]) / len(parts)


def averaged(model: nn.Module, rank: int, options: dict[str, Any], *, plain: bool) -> tuple[AveragedModel, nn.Module]:
    """An average of the model's weights behind each of several steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = AveragedModel(model, **options)
    for step in range(STEPS):
        model(data(rank, step)).square().mean().backward()
        if plain:
            averaged_over_ranks(model)
        update(optimizer)
        average.update_parameters(model)
    return average, model


def evaluated(average: nn.Module, x: torch.Tensor) -> torch.Tensor:
    average.eval()
    with torch.no_grad():
        result: torch.Tensor = average(x)
    return result


def against_plain(rank: int, kind: str, options: dict[str, Any]) -> list[str]:
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "SWA": dict,
        "SWA of buffers, too": lambda: {"use_buffers": True},
        "EMA by multi_avg_fn": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "EMA by multi_avg_fn, of buffers, too": lambda: {
            "multi_avg_fn": get_ema_multi_avg_fn(0.9),
            "use_buffers": True,
        },
        "EMA by avg_fn": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    }
    theirs, reference = averaged(normed(), rank, made[kind](), plain=True)
    ours, compiled = averaged(zcompile.compile(normed(), backend="eager", **options), rank, made[kind](), plain=False)
    found = [f"average: {name}" for name in differing(state_of(ours), state_of(theirs))]
    found += [f"model: {name}" for name in differing(state_of(compiled), state_of(reference))]
    x = data(9, 9)
    if not torch.equal(evaluated(ours, x), evaluated(theirs, x)):
        found.append("what it computes")
    ours.train(), theirs.train()
    for average in (ours, theirs):
        update_bn([data(9, step) for step in range(2)], average)
    found += [f"update_bn: {name}" for name in differing(state_of(ours), state_of(theirs))]
    if not torch.equal(evaluated(ours, x), evaluated(theirs, x)):
        found.append("what it computes behind update_bn")
    with CommDebugMode() as messages:
        ours.update_parameters(compiled)
    if messages.get_total_counts():
        found.append("an update communicates")
    return found


CASES = [(world, kind, stage) for world in (1, 2, 3) for kind in AVERAGES for stage in range(4)]
QUICK = [
    (2, "SWA", 3),
    (3, "EMA by multi_avg_fn, of buffers, too", 1),
    (2, "EMA by avg_fn", 0),
    (1, "SWA of buffers, too", 2),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zcompile. graph break")  # update_bn lets batch normalization read a number
@quickly("world, kind, stage", CASES, QUICK[1:2], pairs=False)
def test_averages_of_shards_have_the_bits_of_plain_ones(threads: Threads, world: int, kind: str, stage: int) -> None:
    assert threads.run(world, against_plain, kind, {"stage": stage}) == [[]] * world


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:zcompile. graph break")
def test_averages_of_matrices_with_owners(threads: Threads) -> None:
    options = {"whole": ["first.weight", "last.weight"]}
    assert threads.run(2, against_plain, "EMA by multi_avg_fn, of buffers, too", options) == [[]] * 2


@pytest.mark.slow
@quickly("way", ["plain", "hybrid", "disk", "bfloat16", "frozen"], ["hybrid", "frozen"])
@on_threads(lambda way: 4 if way == "hybrid" else 2)
def test_a_copy_trains_apart_from_its_original_and_as_it(rank: int, way: str, tmp_path: Any) -> list[str]:
    """A copy trains as the original goes on, and apart from it."""
    folder = str(tmp_path)
    options: dict[str, Any] = {}
    if way == "hybrid":
        options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), "shard": "hfsdp"}
    elif way == "disk":
        options = {"offload_parameters": f"disk:{folder}"}
    elif way == "bfloat16":
        options = {"dtype": torch.bfloat16}
    model = make("tied")
    if way == "frozen":
        model.positions.requires_grad_(False)
    compiled = zcompile.compile(model, backend="eager", **options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)

    def step(trained: nn.Module, by: torch.optim.Optimizer, number: int) -> torch.Tensor:
        loss = trained(*batch("tied", rank, number))
        loss.backward()
        update(by)
        return loss.detach()

    step(compiled, optimizer, 0)
    copied, its = copy.deepcopy((compiled, optimizer))
    assert all(p is q for p, q in zip(copied.parameters(), its.param_groups[0]["params"], strict=True))
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in compiled.parameters()]
    before = state_of(copied)
    losses = [step(compiled, optimizer, number) for number in (1, 2)]
    found = differing(state_of(copied), before)
    again = [step(copied, its, number) for number in (1, 2)]
    assert copied.head.weight is copied.tokens.weight
    return (
        found
        + differing(state_of(copied), state_of(compiled))
        + ["a loss" for one, other in zip(losses, again, strict=True) if not torch.equal(one, other)]
    )


@pytest.mark.slow
@on_ranks(4)
def test_averages_beside_tensor_parallelism(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compiled = zcompile.compile(model, mesh=mesh["dp"], backend="eager")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank // 2))
    average = AveragedModel(compiled, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    average.update_parameters(compiled)
    first = state_of(compiled)
    compiled(x).square().mean().backward()
    optimizer.step()
    average.update_parameters(compiled)
    want = {name: first[name].lerp(value, 0.5) for name, value in state_of(compiled).items()}
    with average.module.unsharded():
        pass
    assert evaluated(average, x).shape == (3, 4)
    return differing(state_of(average.module), want)


@pytest.mark.slow
@on_threads(2)
def test_an_average_is_saved_as_any_compiled_model(rank: int, tmp_path: Any) -> list[str]:
    folder = str(tmp_path / "average")
    average, _ = averaged(zcompile.compile(normed(), backend="eager"), rank, {}, plain=False)
    average.module.save_checkpoint(folder)
    other = AveragedModel(zcompile.compile(Normed(), stage=1, backend="eager"))
    other.module.load_checkpoint(folder)
    fresh = AveragedModel(zcompile.compile(Normed(), backend="eager"))
    fresh.load_state_dict(average.state_dict())
    assert fresh.n_averaged == STEPS
    return differing(state_of(other.module), state_of(average.module)) + differing(state_of(fresh), state_of(average))


@pytest.mark.slow
def test_hooks_attributes_and_the_mode_are_copied() -> None:
    model = normed()
    model.note = {"kept": [1]}
    compiled = zcompile.compile(model, backend="eager")
    compiled.eval()
    compiled.register_forward_hook(lambda module, _, result: 2 * result)
    copied = copy.deepcopy(compiled)
    assert not copied.training
    assert copied.note == model.note
    assert copied.note is not model.note
    x = data(0, 0)
    assert torch.equal(copied(x), compiled(x))
    assert copied.again is copied.first
    assert copied.programs
    wrapper = copy.deepcopy(nn.ModuleDict({"model": compiled}))
    assert torch.equal(wrapper["model"](x), compiled(x))


def test_a_copy_is_neither_dumped_nor_recorded_over_its_original(tmp_path: Any) -> None:
    compiled = zcompile.compile(normed(), backend="eager", dump=tmp_path / "dump", record=tmp_path / "record")
    copied = copy.deepcopy(compiled)
    copied(data(0, 0)).sum().backward()
    assert not list((tmp_path / "dump").glob("*"))
    assert not list((tmp_path / "record").rglob("*.pt"))


def test_what_cannot_be_copied_says_so() -> None:
    compiled = zcompile.compile(normed(), backend="eager")
    with pytest.raises(zcompile.ModelError, match=r"Normed: is compiled, and a shallow copy would share its shards"):
        copy.copy(compiled)
    with pytest.raises(zcompile.ModelError, match="Linear: is a module of a compiled model, and cannot be copied"):
        copy.deepcopy(compiled.first)
    with compiled.unsharded(), pytest.raises(zcompile.StateError, match=r"within unsharded\(\)"):
        copy.deepcopy(compiled)
    copy.deepcopy(compiled)


def alone(rank: int) -> str:
    compiled = zcompile.compile(normed(), backend="eager")
    if rank == 0:
        with pytest.raises(zcompile.ZcompileError) as raised:
            copy.deepcopy(compiled)
        return str(raised.value)
    return ""


@pytest.mark.slow
def test_a_copy_that_one_rank_makes_alone_is_an_error_with_its_name(ranks: Ranks) -> None:
    found, _ = ranks.run(2, alone, group=4)
    assert "rank 1" in found
