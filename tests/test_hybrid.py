"""Hybrid sharding: shards repeat along one dimension of the mesh, and gradients are averaged over both, in order."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from tests.cases import quickly
from tests.compare import differing, parameters
from tests.dumps import assert_proven, assert_replayed
from tests.models import batch, make
from tests.ranks import Ranks, on_threads
from tests.threads import Threads
from zcompile import AgreementError, GroupError
from zcompile.engine.calibration import measure
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.ops import ReduceOutside
from zcompile.runtime.groups import Communicator

STEPS = 3
Values = dict[str, torch.Tensor]
Shape = tuple[int, int]


def mesh_of(shape: Shape) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Summed in their order, then divided."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


def reference(kind: str, shape: Shape, batches: int = 1, *, flat: bool = False) -> Values:
    """One process: gradients of all ranks, averaged over those that shard in their order, then over the replicas.

    `batches`: of how many micro-batches a step is, whose gradients are added on each rank. `flat`: averaged at once.
    """
    model = make(kind)
    optimizer = adamw(model)
    params = dict(model.named_parameters())
    ranks = [(outer, inner) for outer in range(shape[0]) for inner in range(shape[1])]
    buffers = {rank: {name: b.clone() for name, b in model.named_buffers()} for rank in ranks}
    for step in range(STEPS):
        grads: dict[Shape, Values] = {}
        for rank in ranks:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[rank][name])
            for micro in range(batches):
                model(*batch(kind, rank[0] * shape[1] + rank[1], batches * step + micro)).backward()
            grads[rank] = {name: param.grad for name, param in params.items() if param.grad is not None}
            buffers[rank] = {name: b.clone() for name, b in model.named_buffers()}
            model.zero_grad()
        for name, param in params.items():
            mine = [[grads[outer, inner][name] for inner in range(shape[1])] for outer in range(shape[0])]
            param.grad = mean([*itertools.chain.from_iterable(mine)]) if flat else mean([mean(row) for row in mine])
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in params.items()}


def train(rank: int, kind: str, shape: Shape, **options: object) -> Values:
    """Other values on other ranks: rank 0's must win."""
    compiled = zcompile.compile(make(kind, seed=rank), mesh=mesh_of(shape), backend="eager", **options)  # type: ignore[arg-type]
    optimizer = adamw(compiled)
    for step in range(STEPS):
        compiled(*batch(kind, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(compiled)


def sweep(rank: int, kind: str, shape: Shape, choices: list[tuple[int, int]]) -> list[str]:
    want, flat = reference(kind, shape), reference(kind, shape, flat=True)
    found = []
    for stage, prefetch in choices:
        got = train(rank, kind, shape, stage=stage, prefetch=prefetch)
        found += [f"stage {stage} prefetch {prefetch}: {n}" for n in differing(got, want if stage else flat)]
    return found


ALL = [(stage, prefetch) for stage in range(4) for prefetch in range(3)]
KINDS = ("gpt", "mlp", "conv", "tied")


@pytest.mark.slow
def test_two_by_two_equals_the_sum_in_order_bit_for_bit(ranks: Ranks) -> None:
    assert ranks.run(4, sweep, "mlp", (2, 2), [(1, 0), (3, 2)]) == [[]] * 4


@pytest.mark.slow
@quickly("kind", KINDS, ["mlp"], slow=())
def test_two_by_two_equals_the_sum_in_order_in_every_stage(threads: Threads, kind: str) -> None:
    assert threads.run(4, sweep, kind, (2, 2), ALL) == [[]] * 4


@pytest.mark.slow
@quickly(
    "shape, kind",
    [((3, 1), "mlp"), ((1, 3), "mlp"), ((4, 1), "conv"), ((1, 4), "conv")],
    [((3, 1), "mlp")],
    pairs=False,
)
def test_dimensions_of_one_and_worlds_of_three(threads: Threads, shape: Shape, kind: str) -> None:
    found = threads.run(shape[0] * shape[1], sweep, kind, shape, [(1, 1), (3, 1)])
    assert found == [[]] * len(found)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_six_ranks(shape: Shape) -> None:
    pool = Ranks(6)
    try:
        assert pool.run(6, sweep, "mlp", shape, ALL) == [[]] * 6
    finally:
        pool.close()


# -- what it is made of -----------------------------------------------------------------------------------------------


def looked_at(rank: int) -> dict[str, object]:
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager")
    before = {name: axis.bytes for name, axis in compiled.traffic.axes.items()}
    compiled(*batch("mlp", rank, 0)).backward()
    parameter = dict(compiled.named_parameters())["layers.0.weight"]
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    backward = compiled.programs[1]
    norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1e9)
    return {
        "placements": parameter.placements,
        "grad": parameter.grad.placements,
        "local": parameter.to_local().detach().clone(),
        "volumes": compiled.programs[0].volumes(),
        "step": compiled._engine.runtime.steps[0].program.volumes(),
        "sent": {name: axis.bytes - before.get(name, 0) for name, axis in compiled.traffic.axes.items()},
        "averages": len(backward.nodes(ReduceOutside)),
        "norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        "explained": compiled.explain(),
        "axes": compiled.layout.axes,
    }


@pytest.mark.slow
def test_shards_repeat_along_one_dimension_and_traffic_is_counted_by_axis(threads: Threads) -> None:
    found = threads.run(4, looked_at)
    for one in found:
        assert one["placements"] == one["grad"] == (Replicate(), Shard(0))
        assert one["volumes"]["replicate"] == 0, "a forward gathers inside only"
        assert one["step"] == one["sent"]
        assert one["averages"] == 4
        assert one["axes"] == (Axis("replicate", AxisKind.REPLICATE, 2, 2), Axis("shard", AxisKind.SHARD, 2))
        assert "world 4 (2 times 2 shards)" in one["explained"]
    assert torch.equal(found[0]["local"], found[2]["local"])
    assert torch.equal(found[1]["local"], found[3]["local"])
    assert len({one["norm"] for one in found}) == 1


def accumulated(rank: int, stage: int, shape: Shape, synchronised: list[bool], shard: str | None = None) -> list[str]:
    """Several micro-batches a step, of which some are held back where the stage keeps full gradients."""
    compiled = zcompile.compile(make("mlp", seed=rank), mesh=mesh_of(shape), backend="eager", stage=stage, shard=shard)
    optimizer, count = adamw(compiled), len(synchronised)
    for step in range(STEPS):
        for micro, averages in enumerate(synchronised):
            with contextlib.nullcontext() if averages else compiled.no_sync():
                compiled(*batch("mlp", rank, count * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    want, got = reference("mlp", shape, batches=count), parameters(compiled)
    return [name for name in want if not torch.allclose(got[name], want[name], atol=1e-6)]


@quickly(
    "stage, shape, synchronised",
    [
        (stage, shape, synchronised)
        for stage in range(4)
        for shape in ((2, 2), (4, 1))
        for synchronised in ([False, True], [True, False, True], [False, True, False, True], [True, True])
    ],
    [(3, (2, 2), [False, True])],
    pairs=False,
)
def test_gradients_are_accumulated(threads: Threads, stage: int, shape: Shape, synchronised: list[bool]) -> None:
    assert threads.run(4, accumulated, stage, shape, synchronised) == [[]] * 4


def stepped(rank: int, **options: Any) -> Values:
    model = zcompile.compile(make("mlp", seed=rank), mesh=mesh_of((2, 2)), backend="eager", **options)
    step = zcompile.train_step(model, lambda model, *batch: model(*batch), adamw(model))
    for number in range(STEPS):
        step(*batch("mlp", rank, number))
    return parameters(model)


def compare_steps(rank: int, stage: int, prefetch: int, shard: str | None = None) -> list[str]:
    options: dict[str, Any] = {"stage": stage, "prefetch": prefetch, "shard": shard}
    return differing(stepped(rank, **options), train(rank, "mlp", (2, 2), **options))


@pytest.mark.slow
@quickly("stage, prefetch", [(stage, prefetch) for stage in (1, 2, 3) for prefetch in (0, 2)], [(3, 2)], pairs=False)
def test_a_train_step_updates_as_the_loop_does(threads: Threads, stage: int, prefetch: int) -> None:
    assert threads.run(4, compare_steps, stage, prefetch) == [[]] * 4


# -- beside other options ---------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": torch.bfloat16},
    "bf16 reduced": {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "arenas": {"arenas": True},
    "checkpoints": {"checkpoint": "unit"},
    "a limit": {"memory_limit": "2 MiB"},
    "a bucket": {"bucket": 4096},
    "prefetch by the cost model": {"prefetch": "auto"},
}


def beside(rank: int, name: str, shard: str | None = None) -> list[str]:
    """What differs from stage 1 in the same precision, whose shards repeat: it shares no gather with stage 3."""
    options = OPTIONS[name]
    want = train(rank, "gpt", (2, 2), stage=1, **{k: v for k, v in options.items() if k in ("dtype", "reduce_dtype")})
    return differing(train(rank, "gpt", (2, 2), stage=3, shard=shard, **options), want)


@pytest.mark.slow
@quickly("name", list(OPTIONS), list(OPTIONS)[:1], slow=list(OPTIONS)[3:4])
def test_other_options_change_no_bits(threads: Threads, name: str) -> None:
    assert threads.run(4, beside, name) == [[]] * 4


def on_a_disk(rank: int, folder: str, shard: str | None = None) -> list[str]:
    place = f"disk:{folder}"
    got = train(rank, "mlp", (2, 2), offload_parameters=place, offload_activations=place, shard=shard)
    return differing(got, reference("mlp", (2, 2)))


@pytest.mark.slow
def test_shards_and_activations_may_be_on_a_disk(threads: Threads, tmp_path: Path) -> None:
    assert threads.run(4, on_a_disk, str(tmp_path)) == [[]] * 4


@pytest.mark.slow
@on_threads(4)
def test_an_overflow_on_one_rank_is_every_ranks(rank: int) -> None:
    """The scale after a step in which one rank's gradients overflow, and whether a parameter has changed."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", dtype=torch.float16)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before, scales = parameters(compiled), []
    for step in range(2):
        x, y = batch("mlp", rank, step)
        loss = compiled(x * (1e30 if rank == 3 and step == 0 else 1.0), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if step == 0:
            unchanged = not differing(parameters(compiled), before)
    assert (scales, unchanged) == ([512.0, 512.0], True)


class Breaking(nn.Module):
    """Its code breaks the graph; a scalar and rows that ranks divide, which plain Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 1)
        self.scale, self.gain = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.linspace(0.1, 0.9, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.gain
        torch.compiler.disable(print)(end="")
        return ((self.last(x) * self.scale - y) ** 2).mean()


def broken(rank: int, shard: str | None = None) -> list[str]:
    torch.manual_seed(0)
    model = Breaking()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    compiled = zcompile.compile(model, mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    compiled(*batch("mlp", rank, 0)).backward()
    grads = {n: p.grad for n, p in compiled.named_parameters() if p.grad is not None}
    torch.manual_seed(0)
    alone = Breaking()
    assert all(torch.equal(p, plain[n]) for n, p in alone.named_parameters())
    rows = []
    for other in range(4):
        alone(*batch("mlp", other, 0)).backward()
        rows.append({n: p.grad for n, p in alone.named_parameters()})
        alone.zero_grad()
    want = {n: mean([mean([rows[0][n], rows[1][n]]), mean([rows[2][n], rows[3][n]])]) for n in rows[0]}  # type: ignore[list-item]
    got = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.slow
def test_what_runs_as_plain_python_is_averaged_over_both_axes(threads: Threads) -> None:
    assert threads.run(4, broken) == [[]] * 4


def through_torch_compile(rank: int, shard: str | None = None) -> list[str]:
    model = make("mlp", seed=0)
    backend = zcompile.backend(stage=3, mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    optimizer = adamw(model)
    step = torch.compile(model, backend=backend)
    for number in range(STEPS):
        step(*batch("mlp", rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = reference("mlp", (2, 2))
    shards = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in backend.shards().items()}
    return [n for n in want if not any(torch.equal(want[n], s) for s in shards.values() if s.shape == want[n].shape)]


@pytest.mark.slow
def test_the_backend_of_torch_compile_takes_the_mesh(ranks: Ranks) -> None:
    assert ranks.run(4, through_torch_compile) == [[]] * 4


# -- state ------------------------------------------------------------------------------------------------------------


def saved(rank: int, folder: str, shard: str | None = None) -> Values:
    compiled = zcompile.compile(make("mlp", seed=rank), mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    optimizer = adamw(compiled)
    for step in range(2):
        compiled(*batch("mlp", rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled.save_checkpoint(folder, optimizer)
    compiled.save_full_state_dict(f"{folder}.pt")
    return parameters(compiled)


def loaded(rank: int, folder: str, shape: Shape | None, shard: str | None = None) -> tuple[Values, Values]:
    """What a checkpoint gives in another layout, and the parameters after one more step on the same batch."""
    mesh, stage = None if shape is None else mesh_of(shape), 2 if shape is None else 3
    compiled = zcompile.compile(make("mlp", seed=5), mesh=mesh, backend="eager", stage=stage, shard=shard)
    optimizer = adamw(compiled)
    compiled.load_checkpoint(folder, optimizer)
    found = parameters(compiled)
    compiled(*batch("mlp", 0, 2)).backward()
    optimizer.step()
    return found, parameters(compiled)


@pytest.mark.slow
def test_a_checkpoint_loads_in_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    values = ranks.run(4, saved, folder)[0]
    assert not differing(torch.load(f"{folder}.pt"), values)
    after: list[Values] = []
    for world, shape in ((4, (2, 2)), (3, None), (1, None), (2, (2, 1))):
        for found, stepped in ranks.run(world, loaded, folder, shape):
            assert not differing(found, values)
            after.append(stepped)
    for one in after:
        assert all(torch.allclose(one[name], after[0][name], atol=1e-6) for name in one)


def replayed(rank: int, folder: str, **options: Any) -> None:
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", record=folder, **options)
    optimizer = adamw(compiled)
    compiled(*batch("mlp", rank, 0)).backward()
    optimizer.step()
    compiled(*batch("mlp", rank, 1)).backward()
    compiled.dump(f"{folder}/dump", all_ranks=True)


@pytest.mark.slow
def test_a_step_is_proven_across_ranks_and_replayed(threads: Threads, tmp_path: Path) -> None:
    threads.run(4, replayed, str(tmp_path))
    assert_proven(tmp_path / "dump")
    assert_replayed(tmp_path, 4)


# -- beside tensor parallelism ----------------------------------------------------------------------------------------

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def divided(rank: int, shape: tuple[int, int, int], stage: int, shard: str | None = None) -> list[str]:
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def given_to(index: int, step: int) -> torch.Tensor:
        return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + index))

    model = parallelize_module(small(), mesh[names[2]], PLAN)
    compiled = zcompile.compile(model, mesh=mesh[names[:2]], backend="eager", stage=stage, shard=shard)
    plain = small()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (compiled, plain)]
    data = shape[0] * shape[1]
    for step in range(STEPS):
        compiled(given_to(rank // shape[2], step)).square().mean().backward()
        for index in range(data):
            (plain(given_to(index, step)).square().mean() / data).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = compiled.full_state_dict(rank0_only=False)
    return [name for name, want in plain.state_dict().items() if not torch.allclose(got[name], want, atol=1e-6)]


@pytest.mark.slow
@quickly(
    "shape, stage",
    [((2, 1, 2), 3), ((1, 2, 2), 3), ((2, 2, 1), 3), ((2, 1, 2), 0), ((2, 1, 2), 2)],
    [((2, 1, 2), 3)],
    pairs=False,
)
def test_it_stands_beside_tensor_parallelism(ranks: Ranks, shape: tuple[int, int, int], stage: int) -> None:
    assert ranks.run(4, divided, shape, stage) == [[]] * 4


@pytest.mark.slow
@quickly("shard", ["hsdp", "hfsdp", "hpz", "flat"], ["hfsdp"], slow=())
def test_all_three_dimensions_of_two(shard: str) -> None:
    pool = Ranks(8)
    try:
        assert pool.run(8, divided, (2, 2, 2), 3, shard) == [[]] * 8
    finally:
        pool.close()


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(rank: int, names: tuple[str, str]) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    dist.barrier()  # a rank that is done at once would close its connections while others are still connecting
    try:
        zcompile.compile(make("mlp"), mesh=mesh, backend="eager")
    except GroupError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("names", [("outer", "inner"), ("a_shard", "b_shard"), ("replicate", "pp")])
def test_dimensions_have_to_say_what_they_are_for(threads: Threads, names: tuple[str, str]) -> None:
    for error in threads.run(4, refused, names):
        assert "its dimensions do not say which of them repeats the shards that the other one divides" in error
        assert "mesh_dim_names=('replicate', 'shard')" in error


def disagreeing(rank: int) -> str:
    """Of two meshes that all ranks have made, half of them compile with the one, half with the other."""
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    flat = {id(mesh): mesh._flatten() for mesh in (one, other)}
    assert len(flat) == 2
    dist.barrier()
    try:
        zcompile.compile(make("mlp"), mesh=one if rank < 2 else other, backend="eager")
    except (AgreementError, GroupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_disagree_on_the_mesh_are_told(ranks: Ranks) -> None:
    for error in ranks.run(4, disagreeing, group=10):
        assert error


def calibrated(rank: int) -> list[list[tuple[int, bool]]]:
    """The levels of a network that ranks have measured for a mesh."""
    found = []
    for mesh in (mesh_of((2, 2)), mesh_of((4, 1)), mesh_of((1, 4))):
        links = measure(Communicator(mesh, torch.device("cpu"))).links
        found.append([(link.members, 0 < link.bandwidth < float("inf")) for link in links])
    return found


@pytest.mark.slow
def test_each_level_of_the_network_is_measured(ranks: Ranks) -> None:
    two, across, inside = [(2, True), (0, True)], [(0, True)], [(4, True), (0, False)]
    assert ranks.run(4, calibrated) == [[two, across, inside]] * 4


def leaving(rank: int) -> str:
    """Rank 3 does not take part in the second step."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager")
    optimizer = adamw(compiled)
    for step in range(2):
        if rank == 3 and step == 1:
            return ""
        try:
            compiled(*batch("mlp", rank, step)).backward()
        except GroupError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return "all went well"


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_by_all_others(ranks: Ranks) -> None:
    *others, last = ranks.run(4, leaving, group=8)
    assert last == ""
    for error in others:
        assert "rank 3" in error, others


def out_of_step(rank: int) -> str:
    """Rank 1 evaluates once more than the others."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager")
    compiled(*batch("mlp", rank, 0)).backward()
    try:
        if rank == 1:
            with torch.no_grad():
                compiled(*batch("mlp", rank, 1))
        compiled(*batch("mlp", rank, 1)).backward()
    except AgreementError as error:
        return str(error)
    return "all went well"


@pytest.mark.slow
def test_ranks_out_of_step_are_told_along_both_dimensions(ranks: Ranks) -> None:
    for error in ranks.run(4, out_of_step, group=10):
        assert "rank 1: " in error
        assert "out of step" in error


class Choosing(nn.Module):
    """Which of its branches a rank runs depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(4, 1)
        self.takes_other = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.other(x) if self.takes_other else self.first(x)
        return (self.last(x) - y).square().mean()


def choosing(rank: int, names: tuple[str, str], others: list[int]) -> str:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), Choosing()
    model.takes_other = rank in others
    compiled = zcompile.compile(model, mesh=mesh, backend="eager", units=["first", "other", "last"])
    try:
        compiled(*batch("mlp", rank, 0)).backward()
    except AgreementError as error:
        return str(error)
    return "all went well"


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("replicate", "shard"), pytest.param(("shard", "replicate"), marks=pytest.mark.slow)]
)
@quickly("others, named", [([1, 3], "rank 0"), ([2, 3], "rank 0"), ([3], "rank 3")], [([3], "rank 3")], pairs=False)
def test_ranks_that_run_other_programs_are_told_along_any_dimension(
    ranks: Ranks, names: tuple[str, str], others: list[int], named: str
) -> None:
    """Whether these differ along the one dimension, or the other, or both."""
    for error in ranks.run(4, choosing, names, others, group=10):
        assert "the program's communications: message" in error
        assert "differs" in error
        assert named in error


@pytest.mark.slow
@on_threads(4)
def test_shards_that_repeat_are_no_whole_gradients(rank: int) -> None:
    """How often float16 gradients that are all sharded are compared over the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    compiled = zcompile.compile(model, mesh=mesh_of((2, 2)), backend="eager", dtype=torch.float16)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        compiled(torch.ones(2, 6)).float().square().mean().backward()
    assert called.call_count == 0


@pytest.mark.slow
@on_threads(4)
def test_lbfgs_flattens_what_the_shards_divide(rank: int) -> None:
    """Two shards divide two rows, however often they repeat."""
    torch.manual_seed(0)
    compiled, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(compiled.state_dict())
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    compiled = zcompile.compile(compiled, mesh=mesh_of((2, 2)), backend="eager")
    for model in (compiled, plain):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    got = parameters(compiled)
    assert all(torch.allclose(got[name], want, atol=1e-5) for name, want in plain.named_parameters())


@on_threads(4)
def test_a_part_of_a_mesh_is_refused_with_all_of_its_groups_or_the_whole(rank: int) -> None:
    names = ("pp", "dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dist.barrier()

    def said(part: DeviceMesh) -> str:
        try:
            zcompile.compile(make("mlp"), mesh=part, backend="eager")
        except GroupError as error:
            return str(error)
        return ""

    part, shard = said(mesh[names[1:]]), said(two["shard"])
    assert "[mesh['dp_replicate'].get_group(), mesh['dp_shard'].get_group()]" in part
    assert "give that mesh itself, " in shard
