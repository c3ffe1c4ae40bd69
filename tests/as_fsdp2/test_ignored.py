"""Ignored parameters: each rank's own, in values, gradients and steps, beside shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zcompile
from tests.as_fsdp2.plain import Net, adam, differing, gradients, mean_square, numbers, parameters
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_ranks, on_threads

IGNORED = ("first.weight", "blocks.1.up.weight", "blocks.1.up.bias")


CASES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in range(4)),
    (3, {"checkpoint": "unit"}),
    (3, {"units": ["blocks.*"], "prefetch": 0}),
]


@pytest.mark.slow
@quickly("stage, options", CASES, [CASES[4]], pairs=False)
@on_threads(3)
def test_ignored_parameters_are_left_alone_as_by_ddp(rank: int, stage: int, options: dict[str, Any]) -> list[str]:
    """Against DistributedDataParallel that leaves out the same parameters, which differ between the ranks."""
    torch.manual_seed(0)
    plain = Net()
    with torch.no_grad():
        for name in IGNORED:
            plain.get_parameter(name).mul_(1 + rank)
    model = copy.deepcopy(plain)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, list(IGNORED))
    ddp = DistributedDataParallel(plain)
    compiled = zcompile.compile(model, stage=stage, ignore=list(IGNORED), backend="eager", **options)
    found = [name for name in IGNORED if isinstance(compiled.get_parameter(name), DTensor)]
    optimizers = []
    for one in (ddp.module, compiled):
        own = [param for name, param in one.named_parameters() if name in IGNORED]
        rest = [param for name, param in one.named_parameters() if name not in IGNORED]
        optimizers += [torch.optim.AdamW(own, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    for step in range(3):
        for one in (ddp, compiled):
            mean_square(one, numbers(rank, step)).backward()
        found += differing(gradients(compiled), gradients(ddp.module), f"step {step}, gradient")
        update(*optimizers)
        found += differing(parameters(compiled), parameters(ddp.module), f"step {step}, parameter")
    return found


@pytest.mark.slow
@on_ranks(2)
def test_shards_and_ignored_parameters_may_be_in_one_optimizer(rank: int) -> list[str]:
    """Beside shards in one optimizer, which steps both; and a unit of nothing but ignored parameters."""
    torch.manual_seed(0)
    plain = Net()
    compiled = zcompile.compile(copy.deepcopy(plain), ignore=["blocks.0.*.*"], backend="eager")
    optimizers = [adam(model) for model in (plain, compiled)]
    found = []
    for step in range(2):
        for model in (plain, compiled):
            mean_square(model, numbers(rank, step)).backward()
        for name, param in plain.named_parameters():
            if not name.startswith("blocks.0"):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        update(*optimizers)
        found += differing(parameters(compiled), parameters(plain), f"step {step}")
    return found
