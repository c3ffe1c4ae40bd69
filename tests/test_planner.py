"""Plans: their programs are those that would run, without ranks, memory or a group; and what cannot be planned."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks
from zcompile import CaptureError, ModelError, OptionError, ProfileError
from zcompile.cost.forecast import Choice
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import MemoryKind, model_state, peak_bytes
from zcompile.cost.simulator import simulate
from zcompile.ir.layout import STAGES, Hybrid
from zcompile.model.units import axes_over, make_layout
from zcompile.report.plan_page import plan_page_text
from zcompile.tools.gpt import GPT, SHAPES, shape_of
from zcompile.tools.planner import Rewriter
from zcompile.tools.tracing import trace

FEW: dict[str, Any] = {"stages": [1, 3], "prefetches": [1], "dtypes": [None]}
"""Choices enough for what does not depend on them."""
RATES = Hardware.of(flops=1e9, memory_bandwidth=1e9, latency=1e-5, bandwidth=1e8)


def texts(rank: int, kind: str, choice: Choice) -> list[str]:
    """The program that a rank runs; of Inductor's passes, without its compile time."""
    passes = zcompile.pipeline(stage=choice.stage, prefetch=choice.prefetch, checkpoint=choice.checkpoint)
    compiled = zcompile.compile(make(kind), stage=choice.stage, dtype=choice.dtype, passes=passes, backend="eager")
    compiled(*batch(kind, rank, 0)).backward()
    return [program.text(regions=True) for program in compiled.programs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "choice"),
    [
        (2, Choice(3, 2, None, None)),
        (3, Choice(1, 1, "unit", torch.bfloat16)),
        (1, Choice(2, 0, None, None)),
    ],
    ids=str,
)
def test_the_program_of_a_plan_is_the_one_that_runs(ranks: Ranks, world: int, choice: Choice) -> None:
    runs = ranks.run(world, texts, "gpt", choice)[0]
    model, (tokens, targets) = make("gpt"), batch("gpt", 0, 0)
    rewriter = Rewriter(model, trace(model, (tokens, targets), dtype=choice.dtype, fuses=False), None)
    program = rewriter.program(choice, min(world, 2))
    planned = replace(program, layout=program.layout.over(world))
    assert [planned.phase(phase).text(regions=True) for phase in planned.phases] == runs


@pytest.mark.slow
def test_meshes_of_two_levels_are_compared_with_all_ranks_in_one() -> None:
    model, args = make("gpt"), batch("gpt", 0, 0)
    plan = zcompile.plan(
        model, args, worlds=[16, 3], replicas=[1, 4], stages=[0, 3], prefetches=[1], checkpoints=[None], dtypes=[None]
    )
    found = {(one.world, one.choice.stage, one.choice.replicas, one.choice.hybrid): one for one in plan.forecasts}
    over = {(16, 3, 4, hybrid) for hybrid in Hybrid}
    one_axis = {(world, stage, 1, Hybrid.HSDP) for world in (16, 3) for stage in (0, 3)}
    assert set(found) == one_axis | over, "four do not divide three"
    flat, hybrid, hfsdp, hpz = (
        found[16, 3, 1, "hsdp"],
        found[16, 3, 4, "hsdp"],
        found[16, 3, 4, "hfsdp"],
        found[16, 3, 4, "hpz"],
    )
    assert hybrid.parameters > 3 * flat.parameters, "a rank keeps what four ranks share"
    assert flat.parameters == hfsdp.parameters == hpz.parameters
    assert hfsdp.nbytes > flat.nbytes, "secondary shards are kept beside"
    mesh = "mesh=init_device_mesh('cuda', (4, 4), mesh_dim_names=('replicate', 'shard'))"
    assert plan.line(hybrid) == f"zcompile.compile(model, {mesh}, stage=3, prefetch=1)"
    assert plan.line(hpz) == f"zcompile.compile(model, {mesh}, stage=3, prefetch=1, shard='hpz')"
    assert "3, hpz on 4 nodes" in str(plan)


@pytest.mark.slow
def test_owners_are_compared_with_rows_and_recommended_alone() -> None:
    model, args = make("gpt"), batch("gpt", 0, 0)
    plan = zcompile.plan(
        model, args, worlds=[4], replicas=[1, 2], whole=["blocks.*.*.weight"], checkpoints=[None], **FEW
    )
    assert {(one.choice.owners, one.choice.replicas, one.choice.hybrid) for one in plan.forecasts} == {
        *((owners, 1, "hsdp") for owners in (True, False)),
        *((owners, 2, "hsdp") for owners in (True, False)),
        *((False, 2, hybrid) for hybrid in ("hfsdp", "hpz")),
    }
    assert plan.best(4).choice.owners
    assert "whole=['blocks.*.*.weight']" in plan.line(plan.best(4))
    assert {plan.verdict(one) for one in plan.forecasts if not one.choice.owners} == {"rows"}


def test_the_program_of_a_hybrid_plan_is_that_of_its_axes() -> None:
    model, args = make("mlp"), batch("mlp", 0, 0)
    rewriter = Rewriter(model, trace(model, args), None)
    small = rewriter.program(Choice(3, 1, None, None, 2), 4, 2)
    large = replace(small, layout=small.layout.over(24, 3))
    assert [str(axis) for axis in large.layout.axes] == ["replicate 3, stride 8", "shard 8"]
    assert large.volumes()["replicate"] == 2 * sum(param.shard_numel * 4 for param in large.layout.params) * 2 // 3
    own = make_layout(model, STAGES[3], axes_over(model, 24, 3))
    assert {param.name: param.shards for param in own.params} == {p.name: p.shards for p in large.layout.params}


@pytest.mark.slow
def test_figures_are_those_of_the_program() -> None:
    model = make("gpt")
    plan = zcompile.plan(model, batch("gpt", 0, 0), worlds=[1, 4], hardware=RATES, **FEW)
    forecast = next(f for f in plan.of(4) if f.choice == Choice(3, 1, "unit", None))
    rewriter = Rewriter(model, trace(model, batch("gpt", 0, 0)), None)
    program = rewriter.program(forecast.choice, 2)
    program = replace(program, layout=program.layout.over(4))
    state, timeline = model_state(program.layout), simulate(program, RATES, steps=True)
    assert (forecast.parameters, forecast.optimizer) == (state.parameters, state.moments)
    assert sum(forecast.held.values()) == peak_bytes(program)
    assert forecast.nbytes == state.parameters + state.moments + peak_bytes(program)
    assert (forecast.seconds, forecast.exposed) == (timeline.seconds, timeline.exposed)
    assert 0 <= (forecast.hidden_share or 0) <= 1


@pytest.mark.slow
def test_sharding_more_takes_less_memory_and_prefetch_less_time() -> None:
    plan = zcompile.plan(make("gpt"), batch("gpt", 0, 0), worlds=[8], hardware=RATES, dtypes=[None], checkpoints=[None])
    by_stage = [next(f for f in plan.of(8) if f.choice.stage == stage).nbytes for stage in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert by_stage[3] < by_stage[0]
    depths = [f.exposed for f in plan.of(8) if f.choice.stage == 3]
    assert depths == sorted(depths, reverse=True)


@pytest.mark.slow
def test_the_fastest_that_fits_is_recommended_in_a_line_that_compiles() -> None:
    model = make("gpt")
    generous = zcompile.plan(model, batch("gpt", 0, 0), worlds=[2], hardware=RATES, memory_limit="1 GB", **FEW)
    best = generous.best(2)
    assert best.seconds == min(forecast.seconds for forecast in generous.of(2))
    assert f"fastest that fits: {best.choice}" in str(generous)
    assert isinstance(eval(str(best.choice), {"zcompile": zcompile, "torch": torch, "model": model}), nn.Module)
    least = min(forecast.nbytes for forecast in generous.of(2))
    tight = replace(generous, memory_limit=least)
    assert tight.best(2).nbytes == least


@pytest.mark.slow
def test_a_limit_that_nothing_meets_says_what_comes_nearest() -> None:
    plan = zcompile.plan(make("gpt"), batch("gpt", 0, 0), worlds=[2], hardware=RATES, memory_limit=1000, **FEW)
    least = min(plan.of(2), key=lambda forecast: forecast.nbytes)
    with pytest.raises(
        OptionError, match=r"memory_limit: 1e-06 GB fits no choice on 2 ranks: the least is .*more"
    ) as raised:
        plan.best(2)
    assert str(least.choice) in raised.value.fix
    assert "fits no choice on 2 ranks" in str(plan)
    assert plan.as_dict()["recommended"] == {"2": None}


def test_a_checkpoint_without_effect_is_left_out() -> None:
    plan = zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware=RATES, dtypes=[None])
    assert {forecast.choice.checkpoint for forecast in plan.forecasts} == {None}


def test_a_plan_without_a_choice_is_refused() -> None:
    with pytest.raises(OptionError, match=r"checkpoints: \['unit'\] have no effect on this model"):
        zcompile.plan(nn.Linear(4, 4), (torch.ones(2, 4),), hardware=RATES, checkpoints=["unit"])


def test_what_is_given_twice_is_planned_once() -> None:
    twice: dict[str, Any] = {"worlds": [2, 2], "stages": [3, 3], "prefetches": [1, 1], "dtypes": [None]}
    plan = zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware=RATES, **twice)
    assert len(plan.forecasts) == 1


@pytest.mark.slow
def test_names_are_printed_as_they_are() -> None:
    plan = zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware=RATES, **FEW)
    for name in ("fac.py:one", "file[red].py:make", "models[/x].py:make"):
        assert f"{name}: {plan.parameters}" in str(replace(plan, model=name))


def test_hardware_that_takes_no_time() -> None:
    endless = Hardware.of(flops=math.inf, memory_bandwidth=math.inf)
    plan = zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware=endless, **FEW)
    assert plan.forecasts[0].rate == math.inf
    assert "best" in str(plan)
    assert "the fastest that fits" in plan_page_text(plan)


def test_progress_is_told_from_beginning_to_end() -> None:
    told: list[tuple[int, int]] = []
    progress = lambda what, done, total: told.append((done, total))  # noqa: E731
    zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware=RATES, dtypes=[None], stages=[3], progress=progress)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]


# -- tracing ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_left_as_it_was() -> None:
    model = make("gpt")
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    trace(model, batch("gpt", 0, 0))
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(after is before[name] for name, after in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_model_on_meta_is_traced_as_one_with_memory() -> None:
    real, tokens = make("gpt"), batch("gpt", 0, 0)
    with torch.device("meta"):
        meta = make("gpt")
    found = [trace(model, given).text() for model, given in [(real, tokens), (meta, [t.to("meta") for t in tokens])]]
    assert found[0] == found[1]
    assert all(parameter.is_meta for parameter in meta.parameters())


@pytest.mark.slow
def test_two_models_of_one_class_are_traced_apart() -> None:
    small, large = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in (4, 8))
    for _ in range(12):  # beyond torch.compile's limit of recompilations
        assert "[3, 4]" in trace(small, (torch.ones(3, 4),)).text()
        assert "[3, 8]" in trace(large, (torch.ones(3, 8),)).text()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Breaks(), CaptureError, "test_planner.py.*breaks the graph"),
        (Frozen(), CaptureError, "Frozen: has no backward"),
        (nn.ReLU(), ModelError, "ReLU: has no parameters"),
    ],
    ids=["a graph break", "nothing trained", "no parameters"],
)
def test_what_cannot_be_traced(model: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zcompile.plan(model, (torch.ones(2, 4),), hardware=RATES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worlds": []}, "worlds: .* are not numbers of ranks"),
        ({"worlds": [0]}, "worlds: .* are not numbers of ranks"),
        ({"stages": [4]}, "stage: 4 is not a ZeRO stage"),
        ({"stages": []}, "plan: has nothing to compare"),
        ({"prefetches": [-1]}, "prefetch: -1 is not a number of units"),
        ({"dtypes": [torch.int64]}, "dtype: torch.int64 is not a dtype"),
        ({"memory_limit": "much"}, "memory_limit: 'much' is not a size"),
        ({"checkpoints": ["often"]}, "checkpoint: 'often' is not a setting"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        zcompile.plan(make("mlp"), batch("mlp", 0, 0), **{"hardware": RATES, **options})


def test_hardware_that_nobody_knows() -> None:
    with pytest.raises(ProfileError, match="a1000: is not a profile"):
        zcompile.plan(make("mlp"), batch("mlp", 0, 0), hardware="a1000")


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "124m"])
def test_a_gpt_has_the_parameters_of_its_name(name: str) -> None:
    with torch.device("meta"):
        model = GPT(shape_of(name), 1024)
    said = float(name[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[name[-1]]
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(said, rel=0.04)


def test_a_gpt_of_ones_own_shape() -> None:
    assert (shape_of("3x128").layers, shape_of("3x128").width, shape_of("3x128").heads) == (3, 128, 2)
    for name in ("3x100", "0x128", "8.5b", ""):
        with pytest.raises(OptionError, match="is not a known size"):
            shape_of(name)


@pytest.mark.slow
def test_held_kinds_are_those_of_the_table() -> None:
    plan = zcompile.plan(make("gpt"), batch("gpt", 0, 0), worlds=[2], hardware=RATES, **FEW)
    text = str(plan)
    for kind in (MemoryKind.FULL, MemoryKind.ACTIVATIONS):
        assert str(kind).split()[0] in text
