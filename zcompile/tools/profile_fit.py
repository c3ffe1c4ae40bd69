"""Fitting: a profile whose rates are those that compiled regions reach, not those of a loop over one operation.

The cost model's own formula is fitted to regions that ran: the rates with which it comes nearest to all of them, in the
sense of least squares of the logarithms, weighted by the time that they took.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from scipy.optimize import least_squares
from torch.distributed.device_mesh import DeviceMesh

from zcompile.compile_model import compile
from zcompile.cost.hardware import Hardware
from zcompile.cost.roofline import region_seconds
from zcompile.cost.timeline import Spent
from zcompile.ir.region import Region
from zcompile.tools.gpt import GPT, GPTShape

FITTED = ("flops", "elementwise", "attention", "functions", "launch")
MOST = 8.0
"""Factor by which a rate may differ from what was measured alone."""
STEPS = 5
"""Of each reference model that count; one before them compiles."""


@dataclass(frozen=True)
class Reference:
    """A model whose regions are timed."""

    shape: GPTShape
    batch: int
    length: int
    vocabulary: int


REFERENCES = (
    Reference(GPTShape(2, 512, 8), batch=4, length=256, vocabulary=8192),
    Reference(GPTShape(2, 256, 4), batch=8, length=512, vocabulary=2048),
)


@dataclass(frozen=True)
class Observation:
    """A region that ran."""

    region: Region
    seconds: float
    """The median of its runs."""
    times: int
    """How often it runs in a step."""


def observe(mesh: DeviceMesh, reference: Reference, backend: str = "inductor") -> list[Observation]:
    """Train a reference model on this rank alone, and time its regions. `mesh`: of one rank."""
    torch.manual_seed(0)
    model = GPT(reference.shape, reference.length, reference.vocabulary)
    compiled = compile(model, mesh=mesh, stage=0, backend=backend)
    tokens, targets = torch.randint(0, reference.vocabulary, (2, reference.batch, reference.length))
    result: dict[str, list[float]] = defaultdict(list)
    for step in range(STEPS + 1):
        compiled(tokens, targets).backward()
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.sub_(1e-4)  # which ends the step
                parameter.grad = None
        for line in compiled.timeline.lines if step else ():
            if line.spent is Spent.COMPUTE:
                result[line.operation].append(line.seconds)
    regions = compiled.programs[0].regions
    return [
        Observation(regions[name], median(seconds), len(seconds) // STEPS)
        for name, seconds in result.items()
        if name in regions
    ]


def fit(hardware: Hardware, observations: Sequence[Observation]) -> Hardware:
    """`hardware` with the rates that the observations tell, none beyond `MOST` times what it was, or one `MOST`th."""
    whole = sum(seen.seconds * seen.times for seen in observations)
    weights = [math.sqrt(seen.seconds * seen.times / whole) for seen in observations]

    def residuals(logarithms: Sequence[float]) -> list[float]:
        tried = _scaled(hardware, logarithms)
        ratios = (region_seconds(seen.region, tried) / seen.seconds for seen in observations)
        return [weight * math.log(max(ratio, 1e-6)) for weight, ratio in zip(weights, ratios, strict=True)]

    bound = math.log(MOST)
    found = least_squares(residuals, [0.0] * len(FITTED), bounds=(-bound, bound), diff_step=0.02, max_nfev=40)
    return _scaled(hardware, found.x)


def _scaled(hardware: Hardware, logarithms: Sequence[float]) -> Hardware:
    """`hardware` with each of the fitted rates times the exponential of its logarithm."""
    products, *rest = map(math.exp, logarithms)
    factors = dict(zip(FITTED[1:], rest, strict=True))
    flops = {dtype: rate * products for dtype, rate in hardware.flops.items()}
    changes: dict[str, Any] = {name: getattr(hardware, name) * factor for name, factor in factors.items()}
    changes |= {share: min(changes[share], 1.0) for share in ("elementwise", "attention")}
    return replace(hardware, flops=flops, **changes)
