"""Plans over meshes: forecasts are those of the programs that would run, and the search finds the fastest that fits."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import zcompile
from tests.cases import diagonal, quickly
from tests.models import GPT
from tests.ranks import Ranks
from zcompile import GroupError, MeshForecast, ModelError, OptionError
from zcompile.cost.divided import DividedPipeline, PipelineSetting
from zcompile.cost.hardware import CPU, GPU, Link, load_profile
from zcompile.cost.held_bytes import most_held
from zcompile.cost.memory import model_state, peak_bytes
from zcompile.cost.pipeline_forecast import forecast, least_seconds, state_bytes
from zcompile.cost.pipeline_forecast import peak_bytes as forecast_bytes
from zcompile.cost.simulator import simulate_pipeline
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.ir.program import Program
from zcompile.model.units import Precision, make_layout
from zcompile.pipelining.action_tables import action_table
from zcompile.pipelining.program import PipelinePlace, choose_starts, rewrite
from zcompile.schedule.options import Options
from zcompile.tools.llama import Llama, LlamaShape, shape_of
from zcompile.tools.traced_units import TracedUnits
from zcompile.tools.tracing import trace
from zcompile.tools.unit_costs import UnitStages, costs_of_units

H100 = load_profile("h100")
SMALL = LlamaShape(6, 512, 1024, 8, 4)


@functools.cache
def llama(shape: LlamaShape = SMALL, rows: int = 1, length: int = 256) -> tuple[Llama, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        tokens = torch.empty(rows, length, dtype=torch.int64)
        return Llama(shape, 2048), (tokens, tokens)


_UNITS = dict[tuple[Any, ...], TracedUnits]()


def kept_units(model: nn.Module, args: Any, kwargs: Any, dtype: Any, units: Any, *others: Any) -> TracedUnits:
    """Those of the same question before: what plans compare is traced once for all tests."""
    hardware, plan, loss_fn = others
    key = model, tuple(map(id, args)), dtype, str(units), str(hardware), None if plan is None else tuple(plan), loss_fn
    return _UNITS.setdefault(key, TracedUnits(model, args, kwargs, dtype, units, hardware, plan, loss_fn))


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.tools.mesh_planner.TracedUnits", kept_units)


@functools.cache
def traced(kind: str) -> tuple[nn.Module, Program]:
    model, args = llama()
    if kind == "tied":
        with torch.device("meta"):
            model = GPT(layers=6, width=256, heads=4)  # type: ignore[assignment]
            args = (torch.empty(1, 16, dtype=torch.int64),) * 2  # type: ignore[assignment]
    return model, trace(model, args, dtype=torch.bfloat16, device="cuda")


@functools.cache
def costs(kind: str, checkpoint: bool) -> Any:
    return costs_of_units(UnitStages.of(traced(kind)[1], H100, H100), checkpoint=checkpoint)


Case = tuple[str, str, int, int, int, bool, int]
"""Model, schedule, ranks along the pipeline axis, micro-batches, ZeRO stage, checkpoint, data-parallel ranks."""


def programs_of(case: Case) -> list[Program]:
    kind, schedule, ranks, microbatches, stage, checkpoint, data = case
    model, step = traced(kind)
    axes = (Axis("pp", AxisKind.PIPELINE, ranks, data), Axis("dp", AxisKind.SHARD, data))
    layout = make_layout(model, STAGES[stage], axes, None, Precision(torch.bfloat16))
    step = replace(step, layout=layout)
    table = action_table(schedule, ranks, microbatches)
    starts = choose_starts(step, table, None, H100)
    options = Options(stage=stage, dtype=torch.bfloat16, checkpoint="unit" if checkpoint else None, prefetch=2)
    places = [PipelinePlace(table, rank, "pp", starts) for rank in range(ranks)]
    return [rewrite(step, place, options, H100).program for place in places]


def divided(case: Case) -> DividedPipeline:
    kind, schedule, ranks, microbatches, stage, checkpoint, data = case
    table, found = action_table(schedule, ranks, microbatches), costs(kind, checkpoint)
    names = choose_starts(traced(kind)[1], table, None, H100)
    axis = Axis("pp", AxisKind.PIPELINE, ranks, data)
    setting = PipelineSetting(found, H100, STAGES[stage], (Axis("dp", AxisKind.SHARD, data),), axis)
    return setting.at(table, [0, *map(found.names.index, names)])


CASES: list[Case] = [
    ("llama", "1f1b", 2, 4, 1, False, 4),
    ("llama", "gpipe", 2, 4, 0, True, 1),
    ("llama", "interleaved1f1b", 2, 4, 3, True, 4),
    ("tied", "interleavedzerobubble", 2, 3, 2, False, 2),
]
WEIGHTS_APART: Case = ("llama", "interleavedzerobubble", 3, 6, 0, False, 1)
MANY: list[Case] = [
    ("llama", schedule, ranks, 6, stage, checkpoint, data)
    for schedule, ranks in (("gpipe", 2), ("1f1b", 3), ("interleaved1f1b", 3), ("interleavedzerobubble", 3))
    for stage in range(4)
    for checkpoint in (False, True)
    for data in (1, 4)
]
MANY += [("llama", "zbvzerobubble", 2, 6, stage, False, 4) for stage in range(4)]
MANY += [("tied", "1f1b", 2, 4, stage, True, 4) for stage in range(4)]


@pytest.mark.slow
@quickly("case", [*CASES, *MANY], CASES[::6], slow=[*CASES[3::6], WEIGHTS_APART])
def test_a_forecast_is_near_what_the_programs_take(case: Case) -> None:
    programs, pipeline = programs_of(case), divided(case)
    found, lines = forecast(pipeline), simulate_pipeline(programs, H100)
    assert found.seconds == pytest.approx(max(line.seconds for line in lines), rel=0.08)
    assert found.seconds >= least_seconds(pipeline) * (1 - 1e-9)
    for number, (rank, program) in enumerate(zip(found.ranks, programs, strict=True)):
        state = model_state(program.layout)
        assert (rank.parameters, rank.optimizer) == (state.parameters, state.moments)
        assert sum(most_held(pipeline, number).values()) == pytest.approx(peak_bytes(program), rel=0.15)
        assert rank.nbytes == pytest.approx(state.parameters + state.moments + peak_bytes(program), rel=0.1)
    assert forecast_bytes(pipeline) == found.nbytes >= state_bytes(pipeline)


@pytest.mark.slow
def test_a_limit_is_seen_as_soon_as_it_is_passed() -> None:
    pipeline = divided(CASES[0])
    most = forecast_bytes(pipeline)
    assert forecast_bytes(pipeline, most) == most
    assert most >= forecast_bytes(pipeline, most - 1) > most - 1
    assert forecast_bytes(pipeline, most / 2) > most / 2


# -- units that stand for others -----------------------------------------------------------------------------------


def units_of(model: nn.Module, args: tuple[Any, ...], plan: Any = None) -> TracedUnits:
    return TracedUnits(model, args, {}, torch.bfloat16, None, H100, plan)


@pytest.mark.slow
def test_a_few_units_stand_for_all_that_are_equal() -> None:
    model, args = llama()
    few = units_of(model, args)
    large = few.costs(1, 2, checkpoint=True)
    step = trace(*llama(rows=2), dtype=torch.bfloat16, device="cuda")
    whole = costs_of_units(UnitStages.of(step, GPU, H100))
    assert [len(units.names) for units, _ in few._whole.values()] == [8]
    assert [len(units.names) for units in few._traced.values()] == [4]
    assert large.names == whole.names
    assert large.plain == whole.units
    assert large.work == whole.work


class Odd(nn.Module):
    """Blocks that are not what one of them would be alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(6 if self.kind == "counted" else len(self.blocks)):
            x = self.blocks[number](x).relu()
            if self.kind == "scaled":
                x = x * (1 / len(self.blocks)) if number % 2 else x
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counted", "scaled"])
def test_a_model_is_traced_as_a_whole_where_few_of_its_blocks_are_not_the_same(kind: str) -> None:
    units = units_of(Odd(kind), (torch.zeros(2, 32),))
    assert len(units.costs(1, 1, checkpoint=False).names) == 6
    assert len(units.costs(1, 2, checkpoint=False).names) == 6
    traced_as = {len(one.names) for one in units._traced.values()}
    assert traced_as == {6}


@pytest.mark.slow
@pytest.mark.usefixtures("without_group")
def test_checkpoints_save_no_more_than_the_input_of_a_divided_unit() -> None:
    model, args = llama(LlamaShape(2, 256, 512, 4, 2))
    saved = [units_of(model, args, Llama.tp_plan).costs(2, 1, checkpoint=some).units[1].saved for some in (False, True)]
    assert len(saved[0]) > 1
    (nbytes,) = saved[1].values()
    assert nbytes == 256 // 2 * 256 * 2, "half of the sequence"


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = Odd("plain")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    units_of(model, (torch.zeros(2, 32),)).costs(1, 1, checkpoint=False)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())


# -- the search ----------------------------------------------------------------------------------------------------


def found(**options: Any) -> zcompile.MeshPlan:
    """Without tensor parallelism, unless that is asked for."""
    model, args = llama()
    given: dict[str, Any] = {"world": 8, "times": [1], "memory_limit": "10 GB", "tensor_parallel": {}, **options}
    return zcompile.plan_meshes(model, args, **given)


@pytest.mark.nightly
def test_the_fastest_that_fits_is_found_by_looking_at_everything() -> None:
    """Of one mesh, all choices are forecast here without any bound, and compared."""
    plan = found(schedules=["1f1b", "gpipe", "interleaved1f1b"], stages=[1], memory_limit="0.5 GB")
    assert plan.forecasts
    for best in plan.forecasts:
        ranks, data, _ = best.choice.mesh
        every = dict[tuple[Any, ...], float]()
        for schedule, per_rank in (("1f1b", 1), ("gpipe", 1), ("interleaved1f1b", 2), ("interleaved1f1b", 4)):
            for checkpoint in (False, True):
                if ranks * per_rank > 8 or (ranks == 1 and schedule != "1f1b"):
                    continue
                table = action_table(schedule, ranks, 8 // data, per_rank)
                names = choose_starts(traced("llama")[1], table, None, GPU)
                units = costs("llama", checkpoint)
                axes = (Axis("dp", AxisKind.SHARD, data),)
                pipe = Axis("pp", AxisKind.PIPELINE, ranks, data)
                zero = STAGES[1 if data > 1 else best.choice.stage]
                one = PipelineSetting(units, H100, zero, axes, pipe).at(table, [0, *map(units.names.index, names)])
                if forecast_bytes(one) <= 0.5e9:
                    every[schedule, per_rank, checkpoint] = forecast(one).seconds
        assert best.seconds == min(every.values())
        assert best.nbytes <= 0.5e9


@pytest.mark.nightly
@pytest.mark.usefixtures("without_group")
def test_meshes_are_all_divisions_of_the_ranks() -> None:
    plan = found(schedules=["1f1b"], tensor_parallel=None)
    meshes = {one.choice.mesh for one in plan.forecasts}
    assert meshes == {(p, 8 // p // t, t) for t in (1, 2, 4) for p in (1, 2, 4, 8) if p * t <= 8}
    assert [one.seconds for one in plan.forecasts] == sorted(one.seconds for one in plan.forecasts)
    assert any("no tensor parallelism over 8 ranks" in note for note in plan.notes), "four heads of keys"
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("without_group")
def test_tensor_parallelism_stays_within_the_innermost_links() -> None:
    near = replace(H100, links=(Link("inside", 1e-6, 4e11, members=2), Link("outside", 1e-5, 5e10)))
    assert {
        one.choice.tensor for one in found(world=4, hardware=near, schedules=["1f1b"], tensor_parallel=None).forecasts
    } == {1, 2}


@pytest.mark.slow
def test_more_memory_is_never_slower_and_a_step_has_the_batch() -> None:
    tight, loose = found(memory_limit="0.16 GB"), found(memory_limit="8 GB")
    of = {one.choice.mesh: one for one in loose.forecasts}
    assert 0 < len(tight.forecasts) <= len(loose.forecasts)
    for one in tight.forecasts:
        assert one.nbytes <= 0.16e9
        assert one.seconds >= of[one.choice.mesh].seconds
    for one in found(global_batch=16, times=[1, 2]).forecasts:
        assert one.choice.microbatch_size * one.choice.microbatches * one.choice.data == 16


@pytest.mark.slow
@pytest.mark.usefixtures("without_group")
def test_the_lines_run_on_the_mesh_that_they_name() -> None:
    plan = found(schedules=["interleaved1f1b"], stages=[1], tensor_parallel=None)
    best = next(one for one in plan.forecasts if one.choice.mesh == (2, 2, 2))
    lines = plan.lines(replace(best, choice=replace(best.choice, checkpoint="unit")))
    assert lines == [
        "mesh = init_device_mesh('cuda', (2, 2, 2), mesh_dim_names=('pp', 'dp', 'tp'))",
        'parallelize_module(model, mesh["tp"], zcompile.tensor_parallel_plan(model))',
        "step = zcompile.train_step(model, None, optimizer, mesh=mesh, schedule='interleaved1f1b', microbatches=4, "
        f"stages_per_rank={best.choice.stages_per_rank}, stage=1, checkpoint='unit', dtype=torch.bfloat16)",
    ]
    assert lines[0] in "\n".join(plan.lines(best))
    assert plan.lines(plan.best())[-1] in str(plan)


def runs(rank: int, lines: list[str]) -> list[float]:
    """The losses of three steps on one batch."""
    torch.manual_seed(0)
    model = Llama(LlamaShape(2, 128, 256, 4, 2), 64)
    names: dict[str, Any] = {
        "zcompile": zcompile,
        "torch": torch,
        "model": model,
        "init_device_mesh": init_device_mesh,
        "parallelize_module": parallelize_module,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
    }
    if len(lines) == 3:  # the optimizer is made of what tensor parallelism leaves
        lines = [*lines[:2], "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)", lines[2]]
    exec("\n".join(lines), names)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    return [float(names["step"](tokens, tokens.roll(-1, 1))) for _ in range(3)]


@pytest.mark.nightly
@pytest.mark.usefixtures("without_group")
@quickly("mesh", [(2, 1, 2), (2, 2, 1), (1, 2, 2)], [(2, 1, 2)], slow=())
def test_what_is_printed_runs(ranks: Ranks, mesh: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model, tokens = Llama(LlamaShape(2, 128, 256, 4, 2), 64), torch.empty(1, 16, dtype=torch.int64)
    given: dict[str, Any] = {"dtype": None, "memory_limit": "1 GB", "global_batch": 4, "times": [1]}
    plan = zcompile.plan_meshes(model, (tokens, tokens), world=4, hardware=CPU, checkpoints=["unit"], **given)
    lines = plan.lines(next(one for one in plan.forecasts if one.choice.mesh == mesh))
    answers = ranks.run(4, runs, [*lines[:-1], lines[-1].removesuffix(")") + ", backend='eager')"])
    assert all(answer == answers[0] for answer in answers) or mesh[1] > 1
    for losses in answers:
        assert losses[2] < losses[1] < losses[0]


def of_sequences(**given: Any) -> zcompile.MeshPlan:
    with torch.device("meta"):
        model, tokens = Llama(LlamaShape(2, 128, 256, 4, 2), 64), torch.empty(1, 1024, dtype=torch.int64)
    options: dict[str, Any] = {"dtype": None, "memory_limit": "1 GB", "times": [1], "checkpoints": [None]}
    options |= {"tensor_parallel": {}, "schedules": ["1f1b"], "stages": [3]}
    return zcompile.plan_meshes(model, (tokens, tokens), world=2, hardware=CPU, **{**options, **given})


@pytest.mark.slow
def test_sequences_are_divided_where_data_parallelism_ends(ranks: Ranks) -> None:
    """Where the batch has fewer samples than there are ranks, and where nothing else fits; as printed, it runs."""
    plan, full = of_sequences(global_batch=1), of_sequences(global_batch=2)
    assert {one.choice.mesh for one in full.forecasts} == {(1, 2, 1), (2, 1, 1)}
    assert {one.choice.mesh for one in plan.forecasts} == {(2, 1, 1), (1, 1, 2, 1)}
    least = min(one.nbytes for one in full.forecasts)
    tight = of_sequences(global_batch=2, memory_limit=least - 1)
    assert {one.choice.mesh for one in tight.forecasts} == {(1, 1, 2, 1)}
    assert tight.as_dict()["forecasts"][0]["mesh"] == {"pp": 1, "dp": 1, "sp": 2, "tp": 1}
    lines = tight.lines(tight.best())
    assert lines[0] == "mesh = init_device_mesh('cpu', (1, 1, 2), mesh_dim_names=('pp', 'dp', 'sp'))"
    assert 'sequence="auto"' in lines[1]
    first, second = ranks.run(2, runs, [lines[0], lines[1].removesuffix(")") + ", backend='eager')"])
    assert first == second
    assert first[2] < first[1] < first[0]


@pytest.mark.slow
def test_what_fits_nowhere_is_said_with_what_comes_nearest() -> None:
    plan = found(memory_limit="1 MB", schedules=["1f1b"])
    assert plan.forecasts == []
    assert isinstance(plan.smallest, MeshForecast)
    with pytest.raises(OptionError, match=r"memory_limit: 0.001 GB fits no choice on 8 ranks: the least is .* GB more"):
        plan.best()
    generous = found(memory_limit=plan.smallest.nbytes, schedules=["1f1b"])
    assert [one.nbytes for one in generous.forecasts] == [plan.smallest.nbytes]
    assert found(memory_limit=plan.smallest.nbytes - 1, schedules=["1f1b"]).forecasts == []
    assert "fits no choice on 8 ranks" in str(plan)


@pytest.mark.slow
def test_a_plan_is_json() -> None:
    plan = found(schedules=["1f1b"], stages=[1])
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["recommended"] == plan.lines(plan.best())
    assert read["forecasts"][0]["mesh"] == dict(zip(("pp", "dp", "tp"), plan.best().choice.mesh, strict=True))
    assert sum(read["forecasts"][0]["bytes_by_kind"].values()) == plan.best().nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, "world: is 0"),
        ({"world": 8.0}, "world: is 8.0"),
        ({"global_batch": 0}, "global_batch: is 0"),
        ({"dtype": torch.float16}, "dtype: is float16"),
        ({"schedules": ["1f2b"]}, "schedules: has '1f2b'"),
        ({"schedules": []}, "schedules: has nothing to compare"),
        ({"stages": [4]}, "stage: "),
        ({"times": [0]}, "times: is 0"),
        ({"checkpoints": [0.5]}, "checkpoints: has 0.5"),
        ({"dtype": "bfloat16"}, "dtype: is 'bfloat16'"),
        ({"memory_limit": "much"}, "memory_limit: "),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        found(**options)


@pytest.mark.slow
def test_a_batch_that_nothing_divides_is_said() -> None:
    with pytest.raises(OptionError, match="global_batch: 8 ranks have no mesh on which 3 samples are micro-batches"):
        found(global_batch=3, times=[2]).best()


def test_tensors_without_common_rows_are_refused() -> None:
    model, (tokens, _) = llama()
    with pytest.raises(OptionError, match=r"args: has tensors of \[1, 2\] rows"):
        zcompile.plan_meshes(model, (tokens, torch.empty(2, 256, dtype=torch.int64, device="meta")), world=2)


@pytest.mark.usefixtures("without_group")
def test_parts_are_not_traced_beside_a_real_group(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(GroupError, match="process group: exists"):
            units_of(*llama(), plan=Llama.tp_plan).costs(2, 1, checkpoint=False)
        monkeypatch.setattr("zcompile.tools.mesh_planner.TracedUnits", TracedUnits)
        with pytest.raises(GroupError, match="process group: exists"):
            found(tensor_parallel=None)
    finally:
        dist.destroy_process_group()


class Towers(nn.Module):
    """Two that have nothing to do with each other, so that the second need not wait for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left = right = x
        for layer in self.left:
            left = layer(left).relu()
        for layer in self.right:
            right = layer(right).relu()
        return (left * right).sum()


@pytest.mark.slow
@diagonal(
    "model, schedule",
    [Odd("plain"), Towers()],
    ["1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"],
    pairs=False,
)
def test_no_step_is_faster_than_its_bound(model: nn.Module, schedule: str) -> None:
    width = 64 if isinstance(model, Towers) else 32
    units = units_of(model, (torch.zeros(2, width),)).costs(1, 1, checkpoint=False)
    axis, table = Axis("pp", AxisKind.PIPELINE, 2, 1), action_table(schedule, 2, 4)
    starts = [0, *(len(units.names) * stage // table.stages for stage in range(1, table.stages))]
    pipeline = PipelineSetting(units, H100, STAGES[0], (Axis("dp", AxisKind.SHARD, 1),), axis).at(table, starts)
    assert least_seconds(pipeline) <= forecast(pipeline).seconds * (1 + 1e-9)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).relu()
        return {"loss": x.mean(), "logits": x}


@pytest.mark.slow
def test_what_is_no_loss_is_refused_and_a_function_may_give_it() -> None:
    args = (torch.zeros(2, 32),)
    with pytest.raises(OptionError, match="loss_fn: returns 2 results"):
        zcompile.plan_meshes(Several(), args, world=2)
    plan = zcompile.plan_meshes(
        Several(), args, world=2, loss_fn=lambda model, x: model(x)["loss"], units=["blocks.*"], times=[1]
    )
    line = plan.lines(plan.best())[-1]
    assert line.startswith("step = zcompile.train_step(model, loss_fn, optimizer, mesh=mesh, ")
    assert line.endswith(", units=['blocks.*'])")


@pytest.mark.slow
@pytest.mark.usefixtures("without_group")
def test_a_plan_that_was_given_is_in_the_lines() -> None:
    plan = found(world=2, schedules=["1f1b"], stages=[1], tensor_parallel=Llama.tp_plan)
    divided_in_two = next(one for one in plan.forecasts if one.choice.tensor == 2)
    assert plan.lines(divided_in_two)[1] == 'parallelize_module(model, mesh["tp"], tensor_parallel)'


@pytest.mark.slow
def test_without_bfloat16_the_dtype_is_the_models_own() -> None:
    old = replace(H100, flops={"float32": 1e13, "float16": 1e14})
    plan = found(hardware=old, schedules=["1f1b"])
    assert {one.choice.dtype for one in plan.forecasts} == {None}
    assert any("float16 needs a GradScaler" in note for note in plan.notes)


# -- plans of tensor parallelism ----------------------------------------------------------------------------------


class Named(nn.Linear):
    tp_plan: ClassVar[Any] = {"a": "colwise", "b": RowwiseParallel()}


def test_a_plan_that_a_model_brings_along_is_one_for_parallelize_module() -> None:
    plan = zcompile.tensor_parallel_plan(Named(2, 2))
    assert [type(style) for style in plan.values()] == [ColwiseParallel, RowwiseParallel]
    assert all(isinstance(style, ParallelStyle) for style in zcompile.tensor_parallel_plan(llama()[0]).values())


@pytest.mark.parametrize(
    ("plan", "message"), [(None, "Named: has no tensor-parallel plan"), ({"a": "moe"}, "with 'moe' for 'a'")], ids=str
)
def test_a_model_without_a_plan_that_torch_knows_is_refused(plan: Any, message: str) -> None:
    model = type("Named", (nn.Linear,), {"tp_plan": plan})(2, 2)
    with pytest.raises(ModelError, match=message):
        zcompile.tensor_parallel_plan(model)


@pytest.mark.parametrize(("size", "parameters"), [("8b", 8_030_261_248), ("405b", 405_853_388_800)])
def test_llamas_have_the_sizes_of_their_names(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(shape_of(size))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_sizes_of_llamas_that_are_none() -> None:
    assert shape_of("4x512") == LlamaShape(4, 512, 1792, 8, 4)
    with pytest.raises(OptionError, match="llama:9b is not a known size"):
        shape_of("9b")
