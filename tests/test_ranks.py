"""Ranks that disagree get a typed error, each of them, and nobody hangs; ranks that may differ do."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.cases import quickly
from tests.compare import full
from tests.models import GPT, batch, make, update
from tests.ranks import AT_ONCE, Ranks, on_ranks
from zcompile.facts import verify
from zcompile.ir.program import Program
from zcompile.schedule.pipeline import Pass


def refusal(call: Any) -> tuple[str, str, float]:
    """Type and message of the error that `call` ends in, and its seconds."""
    started = time.perf_counter()
    try:
        call()
    except zcompile.ZcompileError as error:
        return type(error).__name__, str(error), time.perf_counter() - started
    return "", "no error", time.perf_counter() - started


@on_ranks(2)
def test_ranks_with_different_models(rank: int) -> None:
    kind, message, seconds = refusal(
        lambda: zcompile.compile(GPT(layers=2, width=32 + 8 * rank, heads=4), backend="eager")
    )
    assert kind == "AgreementError"
    assert "rank 0: 'tokens.weight [64, 32]" in message
    assert "rank 1: 'tokens.weight [64, 40]" in message
    assert seconds < AT_ONCE


def different_options(rank: int) -> tuple[str, str, float]:
    return refusal(lambda: zcompile.compile(make("mlp"), stage=2 + rank, backend="eager"))


def test_ranks_with_different_options(ranks: Ranks) -> None:
    assert all("stage 2" in message and "stage 3" in message for _, message, _ in ranks.run(2, different_options))


MISTAKES: Mapping[tuple[int, ...], Sequence[tuple[dict[str, Any], dict[str, Any], str]]] = {
    (2,): [
        ({}, {"stage": 5}, "OptionError: stage: 5 "),
        ({}, {"outer_dtype": torch.int8}, "OptionError: outer_dtype: "),
        ({}, {"units": ["layer.*"]}, "OptionError: units: "),
        ({}, {"whole": ["no.such.*"]}, "OptionError: whole: "),
        ({}, {"shard": "hfsdp"}, "OptionError: shard: "),
    ],
    (2, 2): [
        ({}, {"stage": 5}, "OptionError: stage: 5 "),  # before there is a group of all four
        ({"shard": "auto"}, {"units": ["layer.*"]}, "OptionError: units: "),
        ({"shard": "hpz"}, {"outer_gather_dtype": torch.float16}, "OptionError: outer_gather_dtype: "),
    ],
}
"""Meshes, what all ranks ask for over them, what rank 1 does beside, and what that is."""


def mistaken_on_one_rank(rank: int, sizes: tuple[int, ...]) -> list[tuple[str, str, float]]:
    """What each rank says of MISTAKES; then all go on together."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    found = []
    for alike, mistaken, _ in MISTAKES[sizes]:
        options = {**alike, **mistaken} if rank == 1 else alike
        found.append(refusal(lambda options=options: zcompile.compile(make("mlp"), mesh=mesh, **options)))
    kept = make("mlp")
    kept(*batch("mlp", 0, 0)).backward()
    found.append(refusal(lambda: zcompile.compile(kept if rank == 1 else make("mlp"), mesh=mesh)))
    zcompile.compile(make("mlp"), mesh=mesh, backend="eager")(*batch("mlp", rank, 0)).backward()
    return found


@pytest.mark.parametrize("sizes", MISTAKES)
def test_a_mistake_of_one_rank_is_told_to_the_others_at_once(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    found = ranks.run(math.prod(sizes), mistaken_on_one_rank, sizes)
    problems = [*(problem for _, _, problem in MISTAKES[sizes]), "ModelError: "]
    for rank, told in enumerate(found):
        for (kind, message, seconds), problem in zip(told, problems, strict=True):
            if rank == 1:
                assert f"{kind}: {message}".startswith(problem)
            else:
                assert f"rank 1 failed first: {problem}" in message
            assert seconds < AT_ONCE, "nobody waits for the group's timeout"


@on_ranks(2)
def test_a_rank_that_comes_late_is_waited_for_without_a_word(rank: int) -> None:
    """How often a rank waited by the store's own function, which has warnings written when it ends in vain."""
    called, wait = [], dist.PrefixStore.wait
    dist.PrefixStore.wait = lambda *args: called.append(args) or wait(*args)  # type: ignore[method-assign, func-returns-value]
    try:
        if rank == 1:
            time.sleep(0.5)
        zcompile.compile(make("mlp"), backend="eager")
    finally:
        dist.PrefixStore.wait = wait  # type: ignore[method-assign]
    assert len(called) == 0


def one_rank_missing(rank: int) -> tuple[str, str, float]:
    if rank == 1:
        time.sleep(3)
        return "", "", 0.0
    return refusal(lambda: zcompile.compile(make("mlp"), backend="eager"))


@pytest.mark.slow
def test_a_rank_that_never_comes(ranks: Ranks) -> None:
    (kind, message, seconds), _ = ranks.run(2, one_rank_missing, group=2)
    assert kind == "AgreementError"
    assert "rank 1 did not arrive within 2 s" in message
    assert seconds < AT_ONCE


def swapped_gathers(program: Program) -> Program:
    """The first two gathers in the other order: right on one rank, a deadlock or garbage on two."""
    program = program.copy()
    first, second = [n for n in program.graph.nodes if n.name.endswith("_gather")][:2]
    first.prepend(second)
    return program


@pytest.mark.slow
@on_ranks(2)
def test_two_collectives_swapped_on_one_rank(rank: int) -> None:
    from zcompile.facts import GATHERED_BEFORE_USE, WAITS_SUNK

    step = Pass("swap", swapped_gathers, (GATHERED_BEFORE_USE, WAITS_SUNK)) if rank == 1 else None
    compiled = zcompile.compile(make("gpt"), backend="eager", passes={"swap": step} if step else None)
    kind, message, seconds = refusal(lambda: compiled(*batch("gpt", rank, 0)))
    assert kind == "AgreementError"
    assert "rank 0: 'forward: all_gather tokens" in message
    assert "rank 1: 'forward: all_gather blocks.0" in message
    assert re.search(r"\(line \d+: `tokens_gather = all_gather\(tokens\)`\); rank 1: ", message)
    assert seconds < AT_ONCE


def one_rank_evaluates(rank: int) -> tuple[str, str, float]:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    with torch.set_grad_enabled(rank == 0):
        return refusal(lambda: compiled(*batch("mlp", rank, 0)))


@pytest.mark.slow
def test_one_rank_trains_while_the_other_evaluates(ranks: Ranks) -> None:
    assert {kind for kind, _, _ in ranks.run(2, one_rank_evaluates)} == {"AgreementError"}


@pytest.mark.slow
@quickly("kind, stage", [("mlp", 3), ("gpt", 3), ("gpt", 0)], [("mlp", 3)], pairs=False)
@on_ranks(2)
def test_batches_of_different_sizes_on_the_ranks(rank: int, kind: str, stage: int) -> None:
    compiled = zcompile.compile(make(kind), stage=stage, backend="eager")
    reference = DistributedDataParallel(make(kind))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (compiled, reference)]
    for step in range(5):
        # Sizes change at different times on the two ranks: one meets a new program when the other does not.
        data = batch(kind, rank, step, size=3 + rank + (step >= 2 + rank))
        for model, optimizer in zip((compiled, reference), optimizers, strict=True):
            model(*data).backward()
            update(optimizer)
    pairs = zip(compiled.parameters(), reference.parameters(), strict=True)
    assert max(float((full(ours) - theirs).abs().max()) for ours, theirs in pairs) < 1e-6


@pytest.mark.slow
@on_ranks(3)
def test_clipping_takes_the_global_norm(rank: int) -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    reference = DistributedDataParallel(make("mlp"))
    for model in (compiled, reference):
        model(*batch("mlp", rank, 0)).backward()
    ours = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 0.01)
    theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert float(ours.full_tensor()) == pytest.approx(float(theirs), rel=1e-5)


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((3,), float(rank)))
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("turns", torch.full((2, 3), complex(rank, 1)).t())


@on_ranks(2)
def test_buffers_are_those_of_rank_0(rank: int) -> None:
    compiled = zcompile.compile(Buffered(rank), backend="eager")
    assert compiled.table.tolist() == [0.0] * 3
    assert compiled.flags.tolist() == [True, True]
    assert float(compiled.turns.real.abs().sum()) == 0


@pytest.mark.slow
@on_ranks(2)
def test_a_step_on_one_rank_alone_is_known_at_the_next_run(rank: int) -> None:
    compiled = zcompile.compile(make("mlp"), stage=1, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for number in range(2):
        compiled(*batch("mlp", rank, 0)).backward()
        if rank == 0 or number == 0:  # the first one is compared with the others' at once
            optimizer.step()
    kind, message, _ = refusal(lambda: compiled(*batch("mlp", rank, 0)))
    assert kind == "AgreementError"
    assert "after 2 optimizer steps" in message
    assert "after 1 optimizer step" in message


def sub_mesh(rank: int) -> float:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    kind, message, _ = refusal(lambda: zcompile.compile(make("mlp"), mesh=mesh, backend="eager"))
    assert kind == "GroupError", message
    half = DeviceMesh.from_group(mesh.get_group("dp"), "cpu")  # other ranks may hold another model
    compiled = zcompile.compile(make("mlp"), mesh=half, backend="eager")
    loss = compiled(*batch("mlp", rank % 2, 0))
    loss.backward()
    return float(compiled.layers[0].weight.grad.full_tensor().abs().sum())


@pytest.mark.slow
def test_a_mesh_of_half_the_ranks(ranks: Ranks) -> None:
    a, b, c, d = ranks.run(4, sub_mesh)
    assert a == b == c == d


def test_facts_are_checked_without_ranks() -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    compiled(*batch("mlp", 0, 0))
    facts = [fact for step in compiled.pipeline.passes for fact in step.ensures]
    verify(compiled._engine.runtime.steps[0].program, facts, "the finished program")


@pytest.mark.slow
@on_ranks(2)
def test_arithmetic_on_a_sharded_parameter_is_refused_or_right(rank: int) -> None:
    """What user code gets that computes with a sharded parameter outside of the model's call."""
    compiled = zcompile.compile(make("mlp"), backend="eager")
    weight, plain = compiled.layers[0].weight, make("mlp").layers[0].weight
    loss = compiled(*batch("mlp", rank, 0))
    uses: list[Callable[[], object]] = [
        lambda: weight.sum(),
        lambda: loss + weight.sum(),
        lambda: weight.pow(2).mean(),
        lambda: torch.linalg.vector_norm(weight).item(),
        lambda: weight.detach() + torch.ones(13, 7),
        lambda: torch.from_dlpack(weight.detach()),
    ]
    refused = [refusal(use)[1].partition("\n")[0] for use in uses]
    with torch.no_grad():
        right = [weight.sum().item() - plain.sum().item(), weight.norm().item() - plain.norm().item()]
    right += [weight.detach().sum().item() - plain.sum().item(), weight.data.mean().item() - plain.mean().item()]
    right += [float((weight.full_tensor() - plain).abs().max())]
    term = weight.full_tensor().square().sum()
    (loss + term).backward()
    expected = make("mlp")
    for other in range(2):
        (expected(*batch("mlp", other, 0)) / 2).backward()
    right += [float((weight.grad.full_tensor() - expected.layers[0].weight.grad - 2 * plain).abs().max())]
    names = ["sum", "sum", "pow", "linalg_vector_norm", "add", "__dlpack__"]
    for message, name in zip(refused, names, strict=True):
        assert message.startswith("layers.0.weight: ")
        assert f"{name} reads this parameter outside of a program" in message
    assert max(map(abs, right)) < 1e-5


class Routed(nn.Module):
    """Experts of which each rank's data choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


def route(rank: int) -> str:
    compiled = zcompile.compile(Routed(), units=["experts.*"], backend="eager")
    try:
        compiled(torch.ones(2, 4), rank).sum().backward()
    except zcompile.AgreementError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_whose_data_choose_other_modules_are_told_what_to_do(ranks: Ranks) -> None:
    first, second = ranks.run(2, route)
    assert first == second
    assert "even if data choose them (experts, dropped layers)" in first
    assert "run all and weight their results" in first
