from __future__ import annotations

import pytest
import torch

import zcompile
from tests.cases import quickly
from tests.models import batch, make
from tests.passes.programs import CHAIN, GATHERED, OUTLINED, at_stage, parsed
from tests.ranks import Ranks
from zcompile import OptionError
from zcompile.cost.hardware import Hardware
from zcompile.cost.memory import peak_bytes
from zcompile.cost.simulator import step_seconds
from zcompile.engine.calibration import measure
from zcompile.facts import REGIONS_OUTLINED
from zcompile.ir.operation import Phase
from zcompile.ir.ops import AllGather
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.schedule.decision import LEAST_PACKED, choose, fit
from zcompile.schedule.default_pipeline import Schedule
from zcompile.schedule.option_checks import bytes_of
from zcompile.schedule.pipeline import Pass, Pipeline
from zcompile.torch_internals.sizes import FakeTensorMode

LINE = Hardware.of(flops=1e9, memory_bandwidth=1e18, bandwidth=1e6)


def outlined_at(schedule: Schedule) -> Pipeline:
    """The stage's passes from where regions are outlined."""
    full = zcompile.pipeline(stage=3, prefetch=schedule.prefetch, small=schedule.small)
    skipped = ("split_phases", "assign_units", "defer_weights", "outline_regions")
    start = Pass("outlined", lambda program: program, ensures=(REGIONS_OUTLINED,))
    return Pipeline(full.stage, (start, *(step for step in full.passes if step.name not in skipped)))


def test_gathers_ahead_hide_behind_compute() -> None:
    program = parsed(CHAIN, GATHERED)
    seconds = [step_seconds(schedule_prefetch(program, prefetch=depth), LINE) for depth in (0, 1, 2)]
    assert seconds[0] > seconds[1] >= seconds[2]


def test_a_step_takes_its_compute_and_what_no_compute_hides() -> None:
    program = parsed(CHAIN, GATHERED)
    sent = 4 * 32 / 1e6  # three units in the forward and one more in the backward, half of 64 bytes each
    flops = 8 * 2 * 8 * 4 * 4 / 1e9  # 3 products forward, 5 backward
    assert step_seconds(program, LINE) == pytest.approx(sent + flops)


@pytest.mark.parametrize(("bandwidth", "prefetch"), [(float("inf"), 0), (64 / 0.5e-6 / 2, 1)])
def test_the_least_depth_that_hides_what_can_be_hidden_is_chosen(bandwidth: float, prefetch: int) -> None:
    hardware = Hardware.of(flops=2 * 8 * 4 * 4 / 1e-6, memory_bandwidth=1e18, bandwidth=bandwidth)
    assert choose(parsed(CHAIN, OUTLINED), outlined_at, hardware) == Schedule(prefetch, LEAST_PACKED, 64 * 2**20)


def test_a_slow_group_packs_larger_parameters_and_sends_larger_pieces() -> None:
    slow = Hardware.of(flops=1e9, memory_bandwidth=1e10, latency=1e-3, bandwidth=1e8)
    chosen = choose(parsed(CHAIN, OUTLINED), outlined_at, slow)
    assert (chosen.small, chosen.bucket) == (5_000_000, 2_000_000)


def test_what_is_measured_while_a_graph_is_traced_is_the_machine() -> None:
    communicator = zcompile.compile(make("mlp"), backend="eager")._engine.runtime.communicator
    with FakeTensorMode():
        traced = measure(communicator)
    real = measure(communicator)
    assert real.flops["float32"] / 10 < traced.flops["float32"] < real.flops["float32"] * 10
    assert real.memory_bandwidth / 10 < traced.memory_bandwidth < real.memory_bandwidth * 10


def test_a_depth_beyond_the_memory_limit_is_no_choice() -> None:
    hardware = Hardware.of(flops=2 * 8 * 4 * 4 / 1e-6, memory_bandwidth=1e18, bandwidth=64 / 0.5e-6 / 2)
    program = parsed(CHAIN, OUTLINED)
    deeper, _ = fit(program, outlined_at, Schedule(1), 10_000)
    for limit, prefetch in [(1, 0), (deeper - 1, 0), (deeper, 1)]:
        assert choose(program, outlined_at, hardware, limit).prefetch == prefetch


def auto(rank: int, stage: int) -> tuple[Schedule, int, float]:
    torch.manual_seed(0)
    compiled = zcompile.compile(make("gpt"), stage=stage, prefetch="auto", backend="eager")
    loss = compiled(*batch("gpt", rank, 0))
    loss.backward()
    return compiled._engine.schedule, compiled.traffic.bytes, loss.item()


def limited(rank: int, limit: int | str | None, prefetch: int | str) -> tuple[list[str], int]:
    """What communicates in a step of ranks with batches of unequal sizes, and what it takes on this one."""
    torch.manual_seed(0)
    compiled = zcompile.compile(make("gpt"), prefetch=prefetch, memory_limit=limit, backend="eager")
    with torch.no_grad():
        compiled(*batch("gpt", rank, 0))  # which chooses nothing: it has no backward
    for step in range(2):
        tokens = torch.zeros(2 + 3 * rank + step, 8, dtype=torch.int64)
        compiled(tokens, tokens).backward()
    program = compiled._engine.runtime.steps[-1].program
    return program.communications(), peak_bytes(program)


def gathered_again(communications: list[str]) -> int:
    return sum(line.startswith("backward: all_gather") for line in communications)


@pytest.fixture(scope="module")
def unlimited(ranks: Ranks) -> list[tuple[list[str], int]]:
    return ranks.run(2, limited, None, 0)


@quickly("prefetch", [0, "auto"], [], slow=[0])
def test_ranks_keep_what_fits_on_all_of_them(
    ranks: Ranks, unlimited: list[tuple[list[str], int]], prefetch: int | str
) -> None:
    (most, _), (_, least) = unlimited
    (some, _), (same, _) = ranks.run(2, limited, least + 20_000, prefetch)
    (none, _), _ = ranks.run(2, limited, "1 GiB", prefetch)
    assert some == same
    assert gathered_again(most) > gathered_again(some) > gathered_again(none) == 0


def over(rank: int, limit: int) -> str:
    with pytest.raises(OptionError) as caught:
        limited(rank, limit, 0)
    return str(caught.value)


@pytest.mark.slow
def test_a_step_over_the_limit_is_refused_on_every_rank(ranks: Ranks, unlimited: list[tuple[list[str], int]]) -> None:
    (_, first), (_, second) = unlimited
    assert first < second
    for message in ranks.run(2, over, (first + second) // 2):
        assert "memory_limit" in message


class Broken(torch.nn.Sequential):
    """Each of its layers is a program of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            print(end="")
        return x


def broken() -> Broken:
    return Broken(*(torch.nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.slow
def test_programs_of_one_model_keep_nothing_over_the_turn_each_for_itself() -> None:
    compiled = zcompile.compile(broken(), backend="eager")
    with pytest.warns(UserWarning, match="graph break"):
        compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    programs = [step.program for step in compiled._engine.runtime.steps]
    assert [len(program.nodes(AllGather, phase=Phase.BACKWARD)) for program in programs] == [1, 1, 1]


class TiedFirst(torch.nn.Module):
    """The backward reads the embedding for the first head, and again for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.linear = torch.nn.Linear(6, 6)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, size) for size in (11, 2, 6))
        self.heads[0].weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.linear(self.embedding(x)))
        return [head(hidden) for head in self.heads]


def test_a_unit_that_is_gathered_again_before_it_is_released_is_kept() -> None:
    compiled = zcompile.compile(TiedFirst(), prefetch=3, memory_limit="1 MiB", backend="eager")
    sum(out.sum() for out in compiled(torch.arange(6))).backward()
    backward = compiled.programs[1].text()
    assert "release(embedding_full" in backward
    assert "all_gather(embedding)" not in backward


def test_a_model_in_several_programs_cannot_keep_a_limit() -> None:
    compiled = zcompile.compile(broken(), memory_limit="1 GiB", backend="eager")
    with pytest.warns(UserWarning, match="graph break"), pytest.raises(OptionError, match="memory_limit"):
        compiled(torch.ones(2, 4))


@pytest.mark.parametrize(
    "options", [{"memory_limit": "1 GiB"}, {"arenas": True}, {"cuda_graphs": True}, {"prefetch": "auto"}]
)
def test_what_a_whole_pipeline_would_ignore_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        zcompile.compile(torch.nn.Linear(2, 2), passes=zcompile.pipeline(), **options)


@pytest.mark.slow
def test_all_ranks_take_the_schedule_of_the_first(ranks: Ranks) -> None:
    found = ranks.run(3, auto, 3)
    assert len({schedule for schedule, *_ in found}) == 1
    assert isinstance(found[0][0], Schedule)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (None, None),
        (7, 7),
        ("12B", 12),
        ("2 KiB", 2048),
        ("1.5MB", 1_500_000),
        ("3 GiB", 3 * 2**30),
    ],
)
def test_sizes_are_numbers_or_texts(size: object, count: int | None) -> None:
    assert bytes_of("memory_limit", size) == count


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "12", "2 gb", "GiB", "1e3 B", "5 iB", "9" * 400 + "B"])
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(OptionError, match="memory_limit"):
        zcompile.pipeline(memory_limit=size)  # type: ignore[arg-type]


def test_a_program_of_another_stage_has_no_gathers_to_hide() -> None:
    program = parsed(at_stage(CHAIN, 1), OUTLINED)
    assert step_seconds(program, LINE) == pytest.approx(8 * 2 * 8 * 4 * 4 / 1e9)
