"""torch.amp.GradScaler: an overflow on one rank is one on all, and the scale goes up and down as for a plain model."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from tests.as_fsdp2.plain import Net, adam, average, differing, mean_square, numbers, pair, parameters
from tests.cases import quickly
from tests.ranks import on_threads

CASES = [(stage, hybrid, clips) for stage in (3, 2, 1, 0) for hybrid in (False, True) for clips in (False, True)]


@quickly("stage, hybrid, clips", CASES, [(0, False, False)], pairs=False)
@on_threads(lambda hybrid: 4 if hybrid else 3)
def test_steps_are_skipped_and_scales_set_as_for_a_plain_model(
    rank: int, stage: int, hybrid: bool, clips: bool
) -> list[str]:
    """The second of five steps overflows on the last rank, and the third on the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    plain, compiled = pair(Net, stage=stage, mesh=mesh)
    optimizers = [adam(model) for model in (plain, compiled)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    last = torch.distributed.get_world_size() - 1
    found, scales = [], []
    for step in range(5):
        x = numbers(rank, step)
        if (step, rank) in ((1, last), (2, 0)):
            x[0, 0] = math.inf
        for model, optimizer, scaler in zip((plain, compiled), optimizers, scalers, strict=True):
            scaler.scale(mean_square(model, x)).backward()
            if model is plain:
                average(plain)
            if clips:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scalers[1].get_scale())
        if scalers[0].get_scale() != scales[-1]:
            found.append(f"step {step}, scale: {scales[-1]} in place of {scalers[0].get_scale()}")
        found += differing(parameters(compiled), parameters(plain), f"step {step}")
    assert scales == [8.0, 4.0, 2.0, 2.0, 4.0]
    return found
