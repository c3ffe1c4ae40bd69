"""Checkpoints: numbers that stay what they are, budgets that are kept, and choices as cheap as any."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.cases import quickly
from tests.models import GPT, batch
from tests.ranks import on_threads
from tests.test_training import STEPS, train, train_ddp
from tests.threads import Threads
from zcompile import OptionError, Program
from zcompile.cost.memory import peak_bytes
from zcompile.cost.roofline import aten_cost
from zcompile.ir.operation import Phase, op_of
from zcompile.ir.ops import Call
from zcompile.passes.common.recompute import SavedValueAnalysis
from zcompile.passes.common.recompute_choice import GAP, Problem, RecomputeChoice, choice
from zcompile.schedule.option_checks import checkpoint_of

# -- numbers ----------------------------------------------------------------------------------------------------------


UNITS = {"gpt": None, "conv": ["stages.*"]}


@pytest.mark.slow
@quickly("kind", ["gpt", "conv"], ["conv"])
@on_threads(2)
def test_recomputed_values_are_bit_for_bit_the_same(rank: int, kind: str) -> list[str]:
    """What differs from DDP's parameters after some steps, by setting."""
    found = ["unit", 0.9]
    want = train_ddp(rank, kind, STEPS)
    differing = []
    for checkpoint in found:
        got, _, _ = train(rank, kind, STEPS, checkpoint=checkpoint, units=UNITS[kind], backend="eager")
        differing += [f"{checkpoint} {name}" for name in want if not torch.equal(got[name], want[name])]
    return differing


def against_none(rank: int, kind: str, stage: int, backend: str) -> float:
    """The largest difference from training without checkpoints."""
    want, _, _ = train(rank, kind, 2, stage=stage, backend=backend)
    got, _, _ = train(rank, kind, 2, stage=stage, checkpoint="unit", backend=backend)
    return max((got[name] - want[name]).abs().max().item() for name in want)


@pytest.mark.slow
def test_in_an_odd_world_nothing_changes(threads: Threads) -> None:
    assert threads.run(3, against_none, "gpt", 1, "eager") == [0, 0, 0]


def test_what_the_next_unit_reads_is_not_computed_twice() -> None:
    parts = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()) for _ in range(3))
    program = traced(nn.Sequential(*parts), torch.ones(2, 8), checkpoint="unit", units=["*"])
    again = {region for call in program.nodes(Call, phase=Phase.BACKWARD) for region in [op_of(call, Call).region]}
    called = [node.target for name in again for node in program.regions[name].graph.nodes]
    assert torch.ops.aten.tanh.default in called
    assert torch.ops.aten.sigmoid.default not in called


@pytest.mark.nightly
def test_compiled_regions_recompute_the_same_up_to_rounding(threads: Threads) -> None:
    assert max(threads.run(3, against_none, "gpt", 3, "inductor")) < 1e-5


class Dropping(nn.Module):
    """Its result tells all masks, and so do the gradients of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.2)


@quickly("backend", ["eager", "inductor"], ["eager"])
def test_recomputed_dropout_draws_the_same_numbers(backend: str) -> None:
    torch.manual_seed(0)
    compiled = zcompile.compile(Dropping(), checkpoint="unit", backend=backend)
    for _ in range(2):
        compiled.zero_grad()
        given = compiled(torch.ones(256))
        given.sum().backward()
        for param in compiled.parameters():
            torch.testing.assert_close(param.grad.full_tensor(), given.detach() / 2)
    masks = [node for node in compiled._engine.runtime.steps[0].program.saved() if node.meta["val"].dtype is torch.bool]
    assert len(masks) == 1, "the last unit's only: the others' are drawn again"


# -- budgets ----------------------------------------------------------------------------------------------------------


def traced(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Program:
    """The finished program of a training step in a world of one."""
    compiled = zcompile.compile(model, backend="eager", **options)  # type: ignore[arg-type]
    compiled(*inputs).sum().backward()
    return compiled._engine.runtime.steps[0].program


def again_flops(program: Program) -> int:
    """FLOPs of the step; what it has more than another is computed again."""
    called = (program.regions[op_of(call, Call).region] for call in program.nodes(Call))
    return sum(aten_cost(node)[0] for region in called for node in region.graph.nodes if node.op == "call_function")


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=3, width=32)


@pytest.mark.slow
def test_a_budget_is_kept_and_recomputation_falls_as_it_grows() -> None:
    inputs = batch("gpt", 0, 0, size=8)
    most = peak_bytes(traced(gpt(), *inputs))
    with pytest.raises(OptionError, match="at the least") as refused:
        traced(gpt(), *inputs, checkpoint=1)
    least = int(re.findall(r"at least (\d+) bytes", str(refused.value))[0])
    flops = []
    for share in range(3):
        budget = least + (most - least) * share // 2
        program = traced(gpt(), *inputs, checkpoint=budget)
        assert peak_bytes(program) <= budget
        flops.append(again_flops(program))
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1] == again_flops(traced(gpt(), *inputs))


def test_a_budget_is_refused_where_the_solver_finds_no_choice_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.passes.common.recompute_choice.SECONDS", 0.0)
    with pytest.raises(OptionError, match="at the least"):
        traced(gpt(), *batch("gpt", 0, 0), checkpoint=1)


@pytest.mark.slow
def test_a_share_is_one_of_the_peak() -> None:
    inputs = batch("gpt", 0, 0, size=8)
    most = peak_bytes(traced(gpt(), *inputs))
    assert 0.7 * most < peak_bytes(traced(gpt(), *inputs, checkpoint=0.8)) <= 0.8 * most


@pytest.mark.slow
def test_a_budget_is_for_training_not_for_evaluation() -> None:
    inputs = batch("gpt", 0, 0, size=8)
    budget = int(0.85 * peak_bytes(traced(gpt(), *inputs)))
    compiled = zcompile.compile(gpt(), checkpoint=budget, backend="eager")
    compiled(*inputs).backward()
    with torch.no_grad():
        compiled(*batch("gpt", 0, 0, size=64))
    assert peak_bytes(compiled._engine.runtime.steps[1].program) > budget


def activations(**options: object) -> Program:
    parts = (nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Sigmoid(), nn.Linear(64, 8)) for _ in range(6))
    return traced(nn.Sequential(*parts), torch.ones(64, 8), units=["*"], **options)


@pytest.mark.slow
def test_what_costs_no_flops_is_computed_again_only_as_far_as_it_must() -> None:
    most = activations()
    program = activations(checkpoint=peak_bytes(most) - 1)
    assert peak_bytes(program) < peak_bytes(most)
    assert again_flops(program) == again_flops(most)


@pytest.mark.slow
def test_auto_takes_what_the_device_has() -> None:
    inputs = batch("gpt", 0, 0)
    assert str(traced(gpt(), *inputs, checkpoint="auto")) == str(traced(gpt(), *inputs))


@pytest.mark.parametrize("checkpoint", ["units", "-3 MiB", "", -5, 0, 0.0, 1.0, -0.5, float("nan"), True, b"unit"])
def test_what_is_no_setting_is_refused(checkpoint: object) -> None:
    with pytest.raises(OptionError, match="checkpoint"):
        zcompile.compile(gpt(), checkpoint=checkpoint, backend="eager")  # type: ignore[arg-type]


def test_settings_are_read() -> None:
    found = [checkpoint_of(given) for given in (None, "unit", "auto", "1.5 KiB", 7, 0.25)]
    assert found == [None, "unit", "auto", 1536, 7, 0.25]


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(OptionError, match="no effect"):
        traced(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4), checkpoint="unit")


# -- choices ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = (nn.Tanh(), nn.GELU(), nn.Softmax(-1), nn.LayerNorm(8, elementwise_affine=False), nn.Identity())


class Layer(nn.Module):
    def __init__(self, activation: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.second(torch.sin(self.first(x))))


class Layers(nn.Module):
    def __init__(self, kinds: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def assigned(model: nn.Module, *inputs: torch.Tensor) -> Program:
    compiled = zcompile.compile(model, backend="eager")
    compiled(*inputs)
    return next(entry.after for entry in compiled.journals[0].entries if entry.name == "assign_units")


def seconds(problem: Problem, made: RecomputeChoice) -> float:
    return sum(problem.again_seconds(operation) for operation, run in problem.again if made.runs_again(operation, run))


@settings(max_examples=8, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.integers(0, len(ACTIVATIONS) - 1), st.integers(1, 40)), min_size=2, max_size=2),
    share=st.floats(0, 1),
    extra=st.lists(st.integers(0, 5000), min_size=2, max_size=2),
)
@pytest.mark.slow
def test_no_choice_within_the_budget_is_cheaper(kinds: list[tuple[int, int]], share: float, extra: list[int]) -> None:
    problem = Problem(SavedValueAnalysis(assigned(Layers(kinds), torch.ones(6, 8))), fused=False)
    analysis = problem.analysis
    beside = {run.index: extra[index % 2] for index, run in enumerate(analysis.runs)}
    free = [value for value in problem.saved if any(key[0] is analysis.operation(value) for key in problem.again)]
    assert len(free) < 14
    every = []
    for kept in itertools.product([False, True], repeat=len(free)):
        saved = {value for value, is_kept in zip(free, kept, strict=True) if is_kept}
        made = choice(analysis, lambda value, _, saved=saved: value in saved)
        every.append((max(held + beside[run] for run, held in problem.held(made).items()), seconds(problem, made)))
    least, most = min(peak for peak, _ in every), max(peak for peak, _ in every)
    budget = least + share * (most - least)
    found = problem.solve(budget, beside)
    assert found is not None
    assert max(held + beside[run] for run, held in problem.held(found).items()) <= budget + 1
    cheapest = min(cost for peak, cost in every if peak <= budget)
    assert seconds(problem, found) <= cheapest * (1 + GAP) + 1e-12
    assert problem.solve(least - 2, beside) is None
    smallest = problem.solve(None, beside)
    assert smallest is not None
    assert max(held + beside[run] for run, held in problem.held(smallest).items()) <= least + 1


@pytest.mark.slow
def test_nothing_runs_twice_where_one_run_is_enough() -> None:
    program = traced(gpt(), *batch("gpt", 0, 0), checkpoint="unit")
    for region in program.regions.values():
        lines = [(n.target, str(n.args), str(n.kwargs)) for n in region.graph.nodes if n.op == "call_function"]
        assert len(lines) == len(set(lines))
    assert program.nodes(phase=Phase.BACKWARD)
