"""Hybrid sharding: shards repeat along one dimension of the mesh, and gradients are averaged over both, in order."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import zcompile
from tests.cases import quickly
from tests.compare import differing, parameters
from tests.dumps import assert_proven_and_replayed
from tests.hybrids import (
    KINDS,
    OPTIONS,
    Shape,
    accumulated,
    adamw,
    assert_loads_elsewhere,
    beside,
    broken,
    compare_steps,
    divided,
    mesh_of,
    on_a_disk,
    one_process,
    recorded,
    sweep,
    through_torch_compile,
)
from tests.models import batch, make, update
from tests.ranks import Ranks, on_ranks, on_threads, run_apart
from tests.refusals import error_of, typed_error_of
from tests.threads import Threads
from zcompile import AgreementError, GroupError
from zcompile.engine.calibration import measure
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.ops import ReduceOutside
from zcompile.runtime.groups import Communicator

ALL = [{"stage": stage, "prefetch": prefetch} for stage in range(4) for prefetch in range(3)]


@pytest.mark.slow
def test_two_by_two_equals_the_sum_in_order_bit_for_bit(ranks: Ranks) -> None:
    assert ranks.run(4, sweep, "mlp", (2, 2), [ALL[3], ALL[11]]) == [[]] * 4


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
    found = threads.run(shape[0] * shape[1], sweep, kind, shape, [ALL[4], ALL[10]])
    assert found == [[]] * len(found)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_six_ranks(shape: Shape) -> None:
    assert run_apart(6, sweep, "mlp", shape, ALL) == [[]] * 6


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


@pytest.mark.slow
@quickly("stage, prefetch", [(stage, prefetch) for stage in (1, 2, 3) for prefetch in (0, 2)], [(3, 2)], pairs=False)
def test_a_train_step_updates_as_the_loop_does(threads: Threads, stage: int, prefetch: int) -> None:
    assert threads.run(4, compare_steps, stage, prefetch) == [[]] * 4


# -- beside other options ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@quickly("name", list(OPTIONS), list(OPTIONS)[:1], slow=list(OPTIONS)[3:4])
def test_other_options_change_no_bits(threads: Threads, name: str) -> None:
    assert threads.run(4, beside, name) == [[]] * 4


@pytest.mark.slow
def test_shards_and_activations_may_be_on_a_disk(threads: Threads, tmp_path: Path) -> None:
    assert threads.run(4, on_a_disk, str(tmp_path)) == [[]] * 4


@pytest.mark.slow
@on_threads(4)
def test_an_overflow_on_one_rank_is_every_ranks(rank: int) -> None:
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


@pytest.mark.slow
def test_what_runs_as_plain_python_is_averaged_over_both_axes(threads: Threads) -> None:
    assert threads.run(4, broken) == [[]] * 4


@pytest.mark.slow
@on_ranks(4)
def test_the_backend_of_torch_compile_takes_the_mesh(rank: int) -> list[str]:
    return through_torch_compile(rank, "mlp", one_process("mlp", (2, 2)), stage=3)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_loads_in_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    ways = [(4, (2, 2), None), (3, None, None), (1, None, None), (2, (2, 1), None)]
    assert_loads_elsewhere(ranks, str(tmp_path / "saved"), ways)


@pytest.mark.slow
def test_a_step_is_proven_across_ranks_and_replayed(threads: Threads, tmp_path: Path) -> None:
    threads.run(4, recorded, str(tmp_path))
    assert_proven_and_replayed(tmp_path, 4)


# -- beside tensor parallelism ----------------------------------------------------------------------------------------


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
    assert run_apart(8, divided, (2, 2, 2), 3, shard) == [[]] * 8


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("outer", "inner"), ("a_shard", "b_shard"), ("replicate", "pp")])
@on_threads(4)
def test_dimensions_have_to_say_what_they_are_for(rank: int, names: tuple[str, str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    dist.barrier()  # a rank that is done at once would close its connections while others are still connecting
    error = error_of(lambda: zcompile.compile(make("mlp"), mesh=mesh, backend="eager"), GroupError)
    assert "its dimension names do not say which one replicates the shards that the other one divides" in error
    assert "mesh_dim_names=('replicate', 'shard')" in error


@pytest.mark.slow
@on_ranks(4, group=10)
def test_ranks_that_disagree_on_the_mesh_are_told(rank: int) -> None:
    """Of two meshes that all ranks have made, half of them compile with the one, half with the other."""
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    flat = {id(mesh): mesh._flatten() for mesh in (one, other)}
    assert len(flat) == 2
    dist.barrier()
    error = typed_error_of(
        lambda: zcompile.compile(make("mlp"), mesh=one if rank < 2 else other, backend="eager"),
        (AgreementError, GroupError),
    )
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
        update(optimizer)
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


@pytest.mark.slow
@pytest.mark.parametrize("names", [("replicate", "shard"), ("shard", "replicate")])
@quickly("others, named", [([1, 3], "rank 0"), ([2, 3], "rank 0"), ([3], "rank 3")], [([3], "rank 3")], pairs=False)
@on_ranks(4, group=10)
def test_ranks_that_run_other_programs_are_told_along_any_dimension(
    rank: int, names: tuple[str, str], others: list[int], named: str
) -> None:
    """Whether these differ along the one dimension, or the other, or both."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), Choosing()
    model.takes_other = rank in others
    compiled = zcompile.compile(model, mesh=mesh, backend="eager", units=["first", "other", "last"])
    error = error_of(lambda: compiled(*batch("mlp", rank, 0)).backward(), AgreementError)
    assert "the program's communications: message" in error
    assert "differs" in error
    assert named in error


@pytest.mark.slow
@on_threads(4)
def test_shards_that_repeat_are_no_whole_gradients(rank: int) -> None:
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
        return error_of(lambda: zcompile.compile(make("mlp"), mesh=part, backend="eager"), GroupError)

    part, shard = said(mesh[names[1:]]), said(two["shard"])
    assert "[mesh['dp_replicate'].get_group(), mesh['dp_shard'].get_group()]" in part
    assert "give that mesh itself, " in shard
