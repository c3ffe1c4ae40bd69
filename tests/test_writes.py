"""Writes to parameters that no optimizer makes: full copies of before are not used any more."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import zcompile
from tests.models import batch, make
from tests.ranks import Ranks, on_ranks
from zcompile.runtime.shards import UnitShards


def local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


WRITES: dict[str, Callable[[Sequence[nn.Parameter]], object]] = {
    "in place": lambda params: [param.mul_(2) for param in params],
    "detached": lambda params: [param.detach().mul_(2) for param in params],
    "local": lambda params: [local(param).mul_(2) for param in params],
    "list": lambda params: torch._foreach_mul_(params, 2),
    "local list": lambda params: torch._foreach_mul_([local(param) for param in params], 2),
    "new data": lambda params: [setattr(param, "data", param.detach() * 2) for param in params],
    "data": lambda params: [param.data.mul_(2) for param in params],
}


def both() -> tuple[zcompile.CompiledModule, nn.Module]:
    plain = make("mlp")
    return zcompile.compile(copy.deepcopy(plain), stage=2, backend="eager"), plain


def differs(compiled: nn.Module, plain: nn.Module) -> bool:
    one, other = (model(*batch("mlp", 0, 0)) for model in (compiled, plain))
    return not torch.allclose(one, other, rtol=1e-5)


@torch.no_grad()
def unseen(rank: int) -> list[str]:
    """The ways to write that an evaluation does not see which comes behind another one."""
    found = []
    for way, write in WRITES.items():
        compiled, plain = both()
        compiled(*batch("mlp", 0, 0))
        for model in (compiled, plain):
            write(list(model.parameters()))
        found += [way] if differs(compiled, plain) else []
    return found


def test_every_write_is_seen(ranks: Ranks) -> None:
    assert ranks.run(2, unseen) == [[], []]


@torch.no_grad()
def unseen_through_what_was_taken(rank: int) -> list[int]:
    compiled, plain = both()
    taken = [[param.data for param in model.parameters()] for model in (compiled, plain)]
    found = []
    for number in range(2):
        compiled(*batch("mlp", 0, 0))
        for data in itertools.chain(*taken):
            data.mul_(2)
        found += [number] if differs(compiled, plain) else []
    return found


def test_a_write_through_what_was_taken_long_ago_is_seen(ranks: Ranks) -> None:
    assert ranks.run(2, unseen_through_what_was_taken) == [[], []]


@torch.no_grad()
def unseen_of_one_rank(rank: int) -> bool:
    """Rank 1 alone reads and writes what it has, as code does that runs on one rank."""
    compiled, plain = both()
    compiled(*batch("mlp", 0, 0))
    full = {name: param.clone() for name, param in plain.named_parameters()}
    if rank == 1:
        for param in compiled.parameters():
            if param.dim():
                param.data.mul_(2)
    for name, param in plain.named_parameters():
        if param.dim():
            rows = -(-param.shape[0] // 2)
            param[rows:] = full[name][rows:] * 2
    return differs(compiled, plain)


def test_a_write_of_one_rank_is_seen_by_all(ranks: Ranks) -> None:
    assert ranks.run(2, unseen_of_one_rank) == [False, False]


@pytest.mark.slow
@on_ranks(2)
def test_nothing_is_compared_where_nothing_was_written(rank: int) -> None:
    """In two steps and evaluations after them, and in a train step."""
    count = 0

    def counted(unit: UnitShards) -> torch.Tensor:
        nonlocal count
        count += 1
        return ordinary(unit)

    ordinary, UnitShards.copies_differ = UnitShards.copies_differ, counted  # type: ignore[method-assign]
    try:
        compiled, _ = both()
        optimizer = torch.optim.AdamW(compiled.parameters(), foreach=True)
        for number in range(2):
            compiled(*batch("mlp", 0, number)).backward()
            optimizer.step()
            with torch.no_grad():
                compiled(*batch("mlp", 0, 0))
                compiled(*batch("mlp", 0, 0))
        model = make("mlp")
        step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters(), fused=True), backend="eager")
        for number in range(3):
            step(*batch("mlp", 0, number))
    finally:
        UnitShards.copies_differ = ordinary  # type: ignore[method-assign]
    assert count == 0


def test_what_is_no_shard_is_refused() -> None:
    param = next(param for param in zcompile.compile(make("mlp"), backend="eager").parameters() if param.dim())
    with pytest.raises(zcompile.ParameterError, match=r"param\.copy_\(value\)"):
        param.data = torch.zeros(3)
    with pytest.raises(zcompile.ParameterError, match=r"torch\.float16"):
        param.data = param.detach().half()
    with pytest.raises(zcompile.ParameterError, match=r"param\.copy_\(value\)"):
        param.data = DTensor.from_local(torch.zeros(param.shape), param.device_mesh, [Replicate()])
