"""Primary shards over both axes of a mesh, and secondary ones inside: HFSDP, hpZ, and all ranks as one axis."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zcompile
from tests.cases import quickly
from tests.compare import parameters
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
    train,
)
from tests.models import batch, make
from tests.ranks import Ranks, on_ranks, on_threads, run_apart
from tests.threads import Threads
from zcompile import GroupError, OptionError, PipelineError, ProgramError
from zcompile.ir.operation import Data, Phase, op_of
from zcompile.ir.ops import AllGather, GatherInside, GatherOutside, Group, ReduceOutside, Release, Update, WaitGather
from zcompile.report.explain import peak_full_bytes
from zcompile.runtime.tensors.parameter import ShardedParameter

HYBRIDS = ("hfsdp", "hpz")


def choice(shard: str, stage: int, prefetch: int) -> dict[str, Any]:
    return {"shard": shard, "stage": stage, "prefetch": prefetch}


ALL = [choice(shard, stage, prefetch) for shard in HYBRIDS for stage in (1, 2, 3) for prefetch in range(3)]


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_by_two_equals_the_sum_in_order_bit_for_bit(ranks: Ranks) -> None:
    choices = [choice("hfsdp", 3, 2), choice("hpz", 3, 1)]
    assert ranks.run(4, sweep, "tied", (2, 2), choices) == [[]] * 4


@quickly("kind", KINDS, [], slow=["tied"])
def test_two_by_two_equals_the_sum_in_order_in_every_stage(threads: Threads, kind: str) -> None:
    assert threads.run(4, sweep, kind, (2, 2), [*ALL, choice("flat", 2, 1), choice("flat", 3, 2)]) == [[]] * 4


@pytest.mark.slow
@quickly(
    "shape, kind",
    [((3, 1), "mlp"), ((1, 3), "mlp"), ((4, 1), "conv"), ((1, 4), "conv")],
    [((3, 1), "mlp")],
    slow=[((1, 4), "conv")],
)
def test_dimensions_of_one_and_worlds_of_three(threads: Threads, shape: Shape, kind: str) -> None:
    choices = [choice("hfsdp", 3, 1), choice("hpz", 3, 1), choice("hpz", 1, 1)]
    found = threads.run(shape[0] * shape[1], sweep, kind, shape, choices)
    assert found == [[]] * len(found)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_six_ranks(shape: Shape) -> None:
    assert run_apart(6, sweep, "mlp", shape, ALL) == [[]] * 6


@quickly(
    "stage, synchronised, shard",
    [
        (stage, synchronised, shard)
        for shard in HYBRIDS
        for stage in (1, 2, 3)
        for synchronised in ([False, True], [True, False, True], [True, True])
    ],
    [(3, [True, True], "hpz")],
    pairs=False,
)
def test_gradients_are_accumulated(threads: Threads, stage: int, synchronised: list[bool], shard: str) -> None:
    assert threads.run(4, accumulated, stage, (2, 2), synchronised, shard) == [[]] * 4


@pytest.mark.slow
@quickly(
    "stage, prefetch, shard",
    [(stage, prefetch, shard) for stage in (1, 2, 3) for prefetch in (0, 2) for shard in HYBRIDS],
    [(3, 2, "hfsdp")],
    pairs=False,
)
def test_a_train_step_updates_as_the_loop_does(threads: Threads, stage: int, prefetch: int, shard: str) -> None:
    assert threads.run(4, compare_steps, stage, prefetch, shard) == [[]] * 4


@pytest.mark.slow
@quickly("name, shard", [*itertools.product(OPTIONS, HYBRIDS)], [], pairs=False)
def test_other_options_change_no_bits(threads: Threads, name: str, shard: str) -> None:
    assert threads.run(4, beside, name, shard) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("shard", HYBRIDS)
def test_shards_and_activations_may_be_on_a_disk(threads: Threads, shard: str, tmp_path: Path) -> None:
    assert threads.run(4, on_a_disk, str(tmp_path), shard) == [[]] * 4


@pytest.mark.slow
@quickly("shard", HYBRIDS, ["hpz"])
def test_what_runs_as_plain_python_is_averaged_over_both_axes(threads: Threads, shard: str) -> None:
    assert threads.run(4, broken, shard) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("shard", HYBRIDS)
@on_ranks(4)
def test_the_backend_of_torch_compile_takes_it(rank: int, shard: str) -> list[str]:
    return through_torch_compile(rank, "mlp", one_process("mlp", (2, 2)), stage=3, shard=shard)


@pytest.mark.slow
@quickly(
    "shape, shard",
    [(shape, shard) for shape in ((2, 1, 2), (1, 2, 2), (2, 2, 1)) for shard in (*HYBRIDS, "flat")],
    [((2, 1, 2), "hpz")],
    pairs=False,
)
def test_it_stands_beside_tensor_parallelism(ranks: Ranks, shape: tuple[int, int, int], shard: str) -> None:
    assert ranks.run(4, divided, shape, 3, shard) == [[]] * 4


# -- what is sent and kept --------------------------------------------------------------------------------------------


def sent_by(rank: int, shard: str, stage: int) -> dict[str, Any]:
    """Bytes along each axis: of each of two steps, of an evaluation before and after the second, and as predicted."""
    compiled = zcompile.compile(make("gpt"), mesh=mesh_of((2, 2)), backend="eager", shard=shard, stage=stage)
    optimizer, counts = adamw(compiled), []
    before = {name: (axis.bytes, axis.messages) for name, axis in compiled.traffic.axes.items()}

    def count() -> dict[str, int]:
        found = {name: axis.bytes - before.get(name, (0, 0))[0] for name, axis in compiled.traffic.axes.items()}
        before.update({name: (axis.bytes, axis.messages) for name, axis in compiled.traffic.axes.items()})
        counts.append(found)
        return found

    for step in range(2):
        compiled(*batch("gpt", rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        count()
        for _ in range(2):
            with torch.no_grad():
                compiled(*batch("gpt", rank, step))
            count()
    program = compiled._engine.runtime.steps[0].program
    parameter = next(param for param in compiled.parameters() if isinstance(param, DTensor))
    return {
        "counts": counts,
        "step": program.volumes(),
        "forward": program.phase(zcompile.ir.operation.Phase.FORWARD).volumes(),
        "outside": [len(program.nodes(kind)) for kind in (GatherOutside, GatherInside, ReduceOutside)],
        "placements": parameter.placements,
        "rows": parameter.to_local().shape[0],
        "full": (peak_full_bytes(program), sum(program.layout.gathered_bytes(u.name) for u in program.layout.units)),
    }


@pytest.mark.slow
@quickly(
    "shard, stage", [(shard, stage) for shard in HYBRIDS for stage in (1, 3)], [("hfsdp", 3), ("hpz", 3)], pairs=False
)
def test_what_goes_over_each_axis_is_as_predicted(threads: Threads, shard: str, stage: int) -> None:
    for one in threads.run(4, sent_by, shard, stage):
        step, forward = one["step"], one["forward"]
        first, stale, current, second, *_ = one["counts"]
        kept = shard == "hfsdp" or stage == 1  # what the evaluation has gathered outside serves the second step
        assert first == step
        assert stale["replicate"] == forward["replicate"] > 0
        assert current["replicate"] == (0 if kept else forward["replicate"])
        assert second["replicate"] == step["replicate"] - (forward["replicate"] if kept else 0)
        assert second["shard"] == step["shard"] - (forward["shard"] if stage == 1 else 0)
        assert one["outside"][0] == one["outside"][2] > 0
        assert one["placements"] == (Shard(0),)
        assert one["full"][0] <= one["full"][1], "secondary shards are no full parameters"


# -- kept secondary shards --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shard", HYBRIDS)
@on_threads(4)
def test_writes_to_parameters_are_noticed(rank: int, shard: str) -> list[str]:
    """Parameters are written to between forwards, in ways that no optimizer tells."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    plain = make("mlp")
    params, found = dict(plain.named_parameters()), []
    for number in range(4):
        with torch.no_grad():
            want, got = plain(*batch("mlp", rank, 0)), compiled(*batch("mlp", rank, 0))
            found += [] if torch.equal(want, got) else [f"call {number}: {want} {got}"]
            for param in compiled.parameters():
                if number == 0:
                    param.mul_(0.5)
                elif number == 1:
                    param.data.mul_(0.5)
                elif rank == 3 and isinstance(param, DTensor):  # of one rank's part alone
                    param.to_local().data.mul_(0.5)
            if number < 2:
                for param in params.values():
                    param.mul_(0.5)
            else:
                for name, value in parameters(compiled).items():
                    params[name].copy_(value)
    return found


@on_threads(4)
def test_gathers_outside_of_programs_keep_no_secondary_shards(rank: int) -> list[str]:
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard="hfsdp", stage=3)
    with compiled.unsharded():
        assert not any(isinstance(param, DTensor) for param in compiled.parameters())
    return [name for name, shards in compiled._engine.runtime.shards.items() if shards.secondary]


WAYS: Mapping[str, Callable[[DTensor], object]] = {
    "data of detached": lambda param: param.detach().data.mul_(0.5),
    "rows": lambda param: param.to_local().mul_(0.5),
    "data of rows": lambda param: param.to_local().data.mul_(0.5),
    "rows of detached": lambda param: param.detach().to_local().mul_(0.5),
    "rows of detached data": lambda param: param.detach().data.detach().to_local().mul_(0.5),
    "numpy": lambda param: np.multiply(rows := param.detach().to_local().numpy(), 0.5, out=rows),
    "lists": lambda param: torch._foreach_mul_([param.detach()], 0.5),
    "detached": lambda param: param.detach().mul_(0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "stage"), [("hfsdp", 3), ("hsdp", 2)])
@on_threads(4)
def test_writes_to_what_a_parameter_shows_are_noticed(rank: int, shard: str, stage: int) -> list[str]:
    """Rows are written to in each of WAYS, between two calls."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard=shard, stage=stage)
    plain, found = make("mlp"), []
    with torch.no_grad():
        for way, write in WAYS.items():
            compiled(*batch("mlp", rank, 0))
            for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
                if isinstance(one, ShardedParameter):
                    one.zcompile_exposed = False  # by an earlier way
                    write(one)
                else:
                    one.mul_(0.5)
                other.mul_(0.5)
            found += [] if torch.equal(plain(*batch("mlp", rank, 0)), compiled(*batch("mlp", rank, 0))) else [way]
    return found


@pytest.mark.slow
@on_threads(4)
def test_who_only_reads_makes_nobody_compare(rank: int, tmp_path: Path) -> list[str]:
    """What makes ranks compare copies ever after, of what reads parameters and does not write to them."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard="hfsdp")
    optimizer, found = adamw(compiled), []
    compiled(*batch("mlp", rank, 0)).backward()
    reading: Mapping[str, Callable[[], object]] = {
        "clip": lambda: nn.utils.clip_grad_norm_(compiled.parameters(), 1.0),
        "step": optimizer.step,
        "save": lambda: compiled.save_checkpoint(f"{tmp_path}/ours", optimizer),
        "load": lambda: compiled.load_checkpoint(f"{tmp_path}/ours", optimizer),
        "full state": compiled.full_state_dict,
        "save by torch": lambda: dcp.save(compiled.state_dict(), checkpoint_id=f"{tmp_path}/torch"),
        "values": lambda: [param.full_tensor() for param in compiled.parameters() if isinstance(param, DTensor)],
        "tracker": lambda: [param.detach().cpu() for param in compiled.parameters()],
    }
    for name, read in reading.items():
        read()
        found += [name] if any(getattr(param, "zcompile_exposed", False) for param in compiled.parameters()) else []
    return found


def outgrown(rank: int) -> tuple[int, int, int]:
    """Secondary shards that are kept, those left once a step is known of, and how often the ranks have compared any."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard="hfsdp")
    optimizer, freshness = adamw(compiled), compiled._engine.runtime.freshness
    with mock.patch.object(freshness, "compare", wraps=freshness.compare) as compare:
        for step in range(3):
            compiled(*batch("mlp", rank, step)).backward()
            optimizer.step()
        kept = [one.memory for shards in freshness.units.values() for one in shards.secondary.values()]
        memory = [weakref.ref(one) for one in kept]
        del kept
        freshness.drop_stale_copies()
        return len(memory), sum(one() is not None for one in memory), compare.call_count


@pytest.mark.slow
def test_a_step_frees_kept_secondary_shards_and_leaves_none_to_compare(threads: Threads) -> None:
    for kept, left, comparisons in threads.run(4, outgrown):
        assert kept > 0
        assert left == comparisons == 0


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "stage"), [("hfsdp", 3), ("flat", 2)])
@on_threads(4)
def test_writes_to_what_state_dict_gives_are_noticed(rank: int, shard: str, stage: int) -> list[str]:
    """What `state_dict` gives is written to: by who lets it go at once, and by who holds it."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard=shard, stage=stage)
    plain, found, held = make("mlp"), [], compiled.state_dict()
    for number in range(4):
        with torch.no_grad():
            want, got = plain(*batch("mlp", rank, 0)), compiled(*batch("mlp", rank, 0))
        found += [] if torch.equal(want, got) else [f"call {number}: {want} {got}"]
        for state in (plain.state_dict(), held if number % 2 else compiled.state_dict()):
            for value in state.values():
                value.mul_(0.5)
    return found


def late(rank: int, shard: str) -> list[str]:
    """A step comes between a forward and its backward: its gradients are those of the parameters of the forward."""
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(*batch("mlp", rank, 0)).backward()
    held = compiled(*batch("mlp", rank, 1))
    optimizer.step()
    optimizer.zero_grad()
    compiled(*batch("mlp", rank, 2)).backward()
    optimizer.zero_grad()
    try:
        held.backward()
    except RuntimeError as error:
        return [f"{type(error).__name__}"]
    return [type(param.grad).__name__ for param in compiled.parameters()][:1]


@pytest.mark.slow
def test_a_step_between_a_forward_and_its_backward(threads: Threads) -> None:
    found = {shard: threads.run(4, late, shard) for shard in ("hsdp", *HYBRIDS)}
    assert found["hfsdp"] == found["hpz"] == found["hsdp"]


@pytest.mark.slow
def test_a_retained_graph_runs_backward_twice(threads: Threads) -> None:
    assert threads.run(4, twice, "hpz") == threads.run(4, twice, "hfsdp") == [[]] * 4


def twice(rank: int, shard: str) -> list[str]:
    compiled = zcompile.compile(make("mlp"), mesh=mesh_of((2, 2)), backend="eager", shard=shard)
    loss = compiled(*batch("mlp", rank, 0))
    loss.backward(retain_graph=True)
    once = {name: param.grad.full_tensor().clone() for name, param in compiled.named_parameters() if _is_sharded(param)}  # type: ignore[union-attr]
    loss.backward()
    twice = {name: param.grad.full_tensor() for name, param in compiled.named_parameters() if _is_sharded(param)}  # type: ignore[union-attr]
    return [name for name in once if not torch.equal(2 * once[name], twice[name])]


def _is_sharded(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@quickly("shard", HYBRIDS, ["hpz"])
def test_a_checkpoint_loads_in_other_layouts(ranks: Ranks, shard: str, tmp_path: Path) -> None:
    ways = [(4, (2, 2), "hfsdp"), (3, None, None), (4, (2, 2), "hsdp")]
    assert_loads_elsewhere(ranks, str(tmp_path / "saved"), ways, shard)


@pytest.mark.slow
@quickly(
    "shard, stage", [(shard, stage) for shard in HYBRIDS for stage in (2, 3)], [("hpz", 3), ("hfsdp", 3)], pairs=False
)
def test_a_step_is_proven_across_ranks_and_replayed(threads: Threads, shard: str, stage: int, tmp_path: Path) -> None:
    threads.run(4, recorded_with, str(tmp_path), shard, stage)
    assert_proven_and_replayed(tmp_path, 4)


def recorded_with(rank: int, folder: str, shard: str, stage: int) -> None:
    """Of so few units that the backward has to gather some of them inside."""
    recorded(rank, folder, shard=shard, stage=stage, prefetch=0)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "says"),
    [
        ({"shard": "hfspd"}, (2, 2), "shard: 'hfspd' is unknown"),
        ({"shard": "hpz", "stage": 0}, (2, 2), "and stage 0 divides nothing"),
        ({"shard": "hpz"}, None, "and all ranks are along one"),
        ({"shard": "hfsdp", "whole": ["layers.0.weight"]}, (2, 2), "and whole= keeps some with one rank"),
    ],
)
@on_threads(4)
def test_what_cannot_be_meant_is_refused(rank: int, options: dict[str, Any], shape: Shape | None, says: str) -> None:
    mesh = mesh_of(shape) if shape else None
    with pytest.raises(OptionError, match=re.escape(says)):
        zcompile.compile(make("mlp"), mesh=mesh, backend="eager", **options)


def sharding_outside(rank: int, shard: str) -> tuple[str, list[str]]:
    """What is said of a mesh whose first dimension shards, or what differs where it may."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    dist.barrier()  # a rank that is done at once would close its connections while others are still connecting
    try:
        compiled = zcompile.compile(make("mlp"), mesh=mesh, backend="eager", shard=shard)
    except GroupError as error:
        return str(error), []
    want, got = make("mlp")(*batch("mlp", rank, 0)), compiled(*batch("mlp", rank, 0))
    return compiled.explain(), [] if torch.equal(want, got) else [f"{want} {got}"]


@pytest.mark.parametrize("shard", HYBRIDS)
def test_shards_must_be_inside_to_be_divided_further(threads: Threads, shard: str) -> None:
    for said, _ in threads.run(4, sharding_outside, shard):
        assert f"whose outer dimension shards, but shard='{shard}' needs the inner one to" in said


@pytest.mark.slow
def test_where_shards_are_not_inside_only_what_can_be_is_chosen(threads: Threads) -> None:
    for said, wrong in threads.run(4, sharding_outside, "auto"):
        assert 'shard="auto" is' in said
        assert "flat" in said
        assert "hpz" not in said
        assert wrong == []


# -- in fewer bits ----------------------------------------------------------------------------------------------------


def in_fewer_bits(rank: int, shard: str, wire: torch.dtype) -> list[str]:
    """What differs from "hsdp", which sends averages so: in int8 other elements share a scale."""
    got, want = (train(rank, "mlp", (2, 2), shard=one, outer_dtype=wire) for one in (shard, "hsdp"))
    close = 0.0 if wire is torch.bfloat16 else 2e-2
    return [name for name in want if not torch.allclose(got[name], want[name], atol=close, rtol=close)]


@pytest.mark.slow
@quickly("shard", HYBRIDS, ["hpz"])
def test_averages_travel_outside_in_fewer_bits(threads: Threads, shard: str) -> None:
    for wire in (torch.bfloat16, torch.int8):
        assert threads.run(4, in_fewer_bits, shard, wire) == [[]] * 4


# -- programs that are wrong ------------------------------------------------------------------------------------------


def over_the_wrong_axis(program: zcompile.Program) -> None:
    node = program.nodes(GatherOutside)[0]
    axis = program.layout.sharded.name
    group = program.add_placeholder(axis, Data(Group(axis)))
    node.replace_input_with(node.all_input_nodes[1], group)
    program.respell(node, replace(op_of(node, GatherOutside), axis=axis))


def of_another_unit(program: zcompile.Program) -> None:
    first, second = program.nodes(GatherInside)[:2]
    second.replace_input_with(second.all_input_nodes[1], first.all_input_nodes[1])


def of_primary_shards(program: zcompile.Program) -> None:
    node = program.nodes(GatherInside)[0]
    node.args = node.args[:1]
    program.respell(node, AllGather(op_of(node, GatherInside).unit))


def kept_otherwise(program: zcompile.Program) -> None:
    node = program.nodes(GatherOutside)[0]
    op = op_of(node, GatherOutside)
    program.respell(node, replace(op, keep=not op.keep))


def averaged_otherwise(program: zcompile.Program) -> None:
    node = program.nodes(ReduceOutside)[0]
    program.respell(node, replace(op_of(node, ReduceOutside), scatter=False))


def averaged_with_other_shards(program: zcompile.Program) -> None:
    first, second = program.nodes(ReduceOutside)[:2]
    first.update_arg(0, second.args[0])


def after_the_update(program: zcompile.Program) -> None:
    """In a train step a unit is gathered once more, from what was sent outside before it was stepped."""
    gathers = {op_of(node, GatherInside).unit: node for node in program.nodes(GatherInside)}
    update = next(node for node in program.nodes(Update) if op_of(node, Update).unit in gathers)
    gather = gathers[op_of(update, Update).unit]
    op, phase = op_of(gather, GatherInside), Phase.BACKWARD
    with program.graph.inserting_after(update):
        again = program.add(gather.args, Data(op, phase, source=op.unit), "again")
    with program.graph.inserting_after(again):
        full = program.add((again,), Data(WaitGather(op.unit), phase, source=op.unit), "full_again")
    with program.graph.inserting_after(full):
        program.add((full,), Data(Release(op.unit), phase, source=op.unit), "release_again")


MISTAKES = {
    over_the_wrong_axis: "which is not the outer one of two axes of data",
    of_another_unit: "and is given secondary shards of",
    of_primary_shards: "from what are not its secondary shards",
    kept_otherwise: "secondary shards of",
    averaged_otherwise: "gives each rank outside all of",
    averaged_with_other_shards: "and is given the shards of",
    after_the_update: "after its update",
}


@pytest.mark.slow
@pytest.mark.parametrize("shard", HYBRIDS)
@on_threads(2)
def test_wrong_programs_are_refused_with_their_lines(rank: int, shard: str) -> list[str]:
    found = []
    for mistake, says in MISTAKES.items():

        def wrong(program: zcompile.Program, mistake: Any = mistake) -> zcompile.Program:
            program = program.copy()
            mistake(program)
            return program

        passes = {"wrong": zcompile.Pass("wrong", wrong)}
        options: dict[str, Any] = {"mesh": mesh_of((2, 1)), "backend": "eager", "shard": shard, "passes": passes}
        compiled = zcompile.compile(make("mlp"), **options)
        step = zcompile.train_step(compiled, lambda model, *batch: model(*batch), adamw(compiled))
        try:
            step(*batch("mlp", rank, 0))
        except (ProgramError, PipelineError) as error:
            said = str(error)
        else:
            said = "all went well"
        found += [] if says in said and "-->" in said else [f"{mistake.__name__}: {said}"]
    return found
