"""torch's own tools around a compiled model: its profiler, its tracker of memory, transforms, wrappers."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import zcompile
from tests.models import batch, make, update
from tests.ranks import Ranks, on_ranks
from zcompile.cost.line_calls import lines_of
from zcompile.torch_internals.autograd import compiled_autograd
from zcompile.torch_internals.dtensor import local_tensor


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_profile_names_the_lines_of_the_program(rank: int, stage: int) -> None:
    """How often a profile of a step has what it should not as often as the programs have it."""
    compiled = zcompile.compile(make("tied"), stage=stage, backend="eager")
    compiled(*batch("tied", rank, 0)).backward()
    wanted = Counter(f"zcompile.{phase}" for program in compiled.programs for phase in program.phases)
    for program in compiled.programs:
        lines = [line for phase in program.phases for line in lines_of(program, phase)]
        wanted.update(f"zcompile.{line.operation} {line.unit}".rstrip() for line in lines)
    assert wanted[f"zcompile.{'all_reduce' if stage == 0 else 'reduce_scatter'} blocks.0"] == 1
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        compiled(*batch("tied", rank, 1)).backward()
    names = [event.name for event in taken.events() if event.name.startswith("zcompile.")]
    found = Counter(re.sub(r"^(zcompile\.(?:forward|backward)) \w{12}$", r"\1", name) for name in names)
    assert {one: (found[one], wanted[one]) for one in found | wanted if found[one] != wanted[one]} == {}


def taken(compiled: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    compiled(*batch("gpt", rank, step)).backward()
    update(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_memory_is_tracked_around_a_step(rank: int, stage: int) -> None:
    """What is tracked at the peak of steps, and the bytes of the shards; steps give what they give without it."""
    results = []
    for watch in (False, True):
        compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager")
        optimizer, tracker = torch.optim.AdamW(compiled.parameters(), lr=1e-2), MemTracker()
        tracker.track_external(compiled, optimizer)
        for step in range(2):
            with tracker if watch else contextlib.nullcontext():
                taken(compiled, optimizer, rank, step)
            tracker.reset_mod_stats()
        results.append([local_tensor(p).clone() for p in compiled.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    kinds = {str(getattr(kind, "value", kind)): value for kind, value in peak.items()}
    found = {**kinds, "shards": sum(shard.nbytes for shard in results[1])}
    assert found["shards"] <= found["Parameter"] < 1.1 * found["shards"]
    assert found["Optstate"] >= 2 * found["shards"]
    assert found["Activation"] > 0
    assert found["Total"] > found["Parameter"] + found["Optstate"] + found["Activation"]


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_transforms_of_torch_work_on_full_parameters(rank: int, stage: int) -> None:
    """What transforms of torch.func say outside of unsharded(), and what they give otherwise inside."""
    torch.manual_seed(0)
    plain, given, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4)
    given.load_state_dict(plain.state_dict())
    compiled, said = zcompile.compile(given, stage=stage, backend="eager"), list[str]()

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, values, (x,)).square().sum()

        return torch.func.grad(loss)({name: value.detach() for name, value in model.named_parameters()})

    def mapped(model: nn.Module) -> torch.Tensor:
        return torch.vmap(lambda row: model.weight @ row)(x).detach()

    def of_weight(model: nn.Module) -> torch.Tensor:
        return torch.func.grad(lambda weight: (x @ weight).sum())(model.weight.detach())

    def called(model: nn.Module) -> torch.Tensor:
        values = {name: value.detach() for name, value in model.named_parameters()}
        return torch.func.functional_call(model, values, (x,)).detach()

    for use in (called, gradients, mapped, of_weight):
        with pytest.raises((zcompile.ParameterError, RuntimeError)) as refused:
            use(given)
        said.append(f"{refused.type.__name__}: {refused.value}")
        with compiled.unsharded():
            torch.testing.assert_close(use(given), use(plain))
    compiled(x).sum().backward()
    called, gradients, mapped, of_weight = said
    assert re.match(r"ParameterError: weight: was replaced.*\n.*within compiled\.unsharded\(\)", called)
    assert re.match(r"CaptureError: Linear: is called within torch.func.*\n.*within compiled\.unsharded", gradients)
    assert "ParameterError: weight: matmul reads this parameter outside of a program" in mapped
    assert re.match("RuntimeError: .* got mixed torch.Tensor and DTensor", of_weight), "as docs/errors.md has it"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["dynamo", "none"])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_backward_under_compiled_autograd_is_refused(rank: int, stage: int, compiler: str) -> None:
    """What a backward under it says; those before and after are the usual ones."""
    compiled = zcompile.compile(make("mlp"), stage=stage, backend="eager")
    compiled(*batch("mlp", rank, 0)).backward()
    before = [local_tensor(p.grad).clone() if stage else p.grad.clone() for p in compiled.parameters()]
    loss = compiled(*batch("mlp", rank, 0))
    chosen = torch.compile(backend="eager") if compiler == "dynamo" else lambda graph: graph
    enabled = compiled_autograd._enable(chosen)
    with enabled, pytest.raises(zcompile.BackwardError) as refused:
        loss.backward()
    compiled(*batch("mlp", rank, 0)).backward()
    after = [local_tensor(p.grad) if stage else p.grad for p in compiled.parameters()]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, 2 * one)
    said = str(refused.value)
    assert re.match("backward: runs under torch's compiled autograd.*\n.*call backward outside", said)


X = torch.ones(3, 4)
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], object]] = {
    "jvp": lambda model: torch.func.jvp(model, (X,), (X,)),
    "vjp": lambda model: torch.func.vjp(model, X),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "vmap": lambda model: torch.func.vmap(model)(X),
    "forward mode": lambda model: dual(model),
}


def dual(model: Callable[..., Any]) -> object:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(X, X))


@pytest.mark.parametrize("way", TRANSFORMS)
def test_transforms_are_told_where_they_can_be_had(way: str) -> None:
    compiled = zcompile.compile(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), stage=3, backend="eager")
    for _ in range(2):
        with pytest.raises(zcompile.CaptureError, match=r"^Sequential: is called within torch.func(.|\n)*unsharded"):
            TRANSFORMS[way](compiled)
        compiled(X).sum().backward()
    with compiled.unsharded():
        TRANSFORMS[way](compiled)


def wrapped(rank: int) -> list[str]:
    found = []
    for stage in (0, 3):
        model = nn.Linear(4, 2)
        for one in (zcompile.compile(model, stage=stage, backend="eager"), model):
            with pytest.raises(zcompile.ModelError) as error:
                DistributedDataParallel(one)
            found.append(str(error.value))
    return found


def test_a_wrapper_that_averages_again_is_refused(ranks: Ranks) -> None:
    """As plain Accelerate puts around models."""
    for found in ranks.run(2, wrapped):
        assert all(re.match(r"Linear: is compiled, and (.|\n)*integrations\.accelerate", one) for one in found), found
