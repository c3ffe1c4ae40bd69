"""Mixed precision: what is computed, gathered and averaged in which dtype; against plain modules that are cast."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.as_fsdp2.plain import Block, Net, differing, full, numbers, parameters
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_threads
from tests.threads import Threads


class Router(nn.Linear):
    """Scores, and weights that make one of them."""

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        scores = super().forward(x) * options["temperature"]
        return scores, scores.softmax(-1)


class KeptByHand(Router):
    """Computes in the dtype of its parameters, by code of its own."""

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.weight.dtype
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(dtype), options={"temperature": options["temperature"].to(dtype)})


class Routed(nn.Module):
    """A layer whose results are weighed, in one graph or in several, some of them computed again."""

    def __init__(self, router: type[Router], breaks: bool) -> None:
        super().__init__()
        self.breaks, self.router = breaks, router(7, 7)
        self.layer, self.first = nn.Linear(7, 7), nn.Linear(7, 7)

    def weighed(self, x: torch.Tensor) -> torch.Tensor:
        scores, weights = self.router(self.first(x), options={"temperature": x.detach().abs().mean()})
        return self.layer(x) * weights + 0.1 * scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            print(end="")
        return checkpoint(self.weighed, x, use_reentrant=False)


def routed(router: type[Router], breaks: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Routed(router, breaks) for _ in range(2)), nn.Linear(7, 3))


def kept(rank: int, stage: int, breaks: bool, backend: str = "eager") -> list[str]:
    """A model with two routers that are kept, beside the model whose code does it, gradients averaged by hand."""
    master, model = routed(KeptByHand, breaks), routed(Router, breaks)
    compiled = zcompile.compile(model, stage=stage, dtype=torch.bfloat16, keep_dtype=["*.router"], backend=backend)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (master, compiled)]
    found: list[str] = []
    tolerance = 0 if backend == "eager" else 1e-2
    for step in range(3):
        x = numbers(rank, step)
        for name, grad in by_hand(master, torch.bfloat16, torch.float32, [x]).items():
            master.get_parameter(name).grad = grad
        compiled(x).float().square().mean().backward()
        ours = {name: full(param.grad) for name, param in compiled.named_parameters()}
        theirs = {name: param.grad for name, param in master.named_parameters()}
        found += differing(ours, theirs, f"step {step}, gradient", tolerance)
        update(*optimizers)
    for again in (compiled, copy.deepcopy(compiled)):
        scores, weights = again[0].router(x.bfloat16(), options={"temperature": x.mean()})
        with again.unsharded():
            results = again(x), again[0].router(x.bfloat16(), options={"temperature": x.mean()})[0]
        low = cast(master, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            want = low(x), low[0].router(x.bfloat16(), options={"temperature": x.mean()})[0]
        got = {"result": results[0], "scores in full": results[1], "scores": scores}
        found += differing(
            got, {"result": want[0], "scores in full": want[1], "scores": want[1]}, "evaluation", tolerance
        )
        assert (scores.dtype, weights.dtype) == (torch.float32, torch.float32)
        again(x).float().sum().backward()
        assert all(param.grad is not None for param in again.parameters()), "a copy calls its own modules"
    return found


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with low parameters, but for those of batch normalization and of modules that are kept by hand."""
    low = copy.deepcopy(model)
    for module in low.modules():
        if not isinstance(module, (nn.BatchNorm1d, KeptByHand)):
            for param in module.parameters(recurse=False):
                param.data = param.data.to(dtype)
    return low


def averaged(grad: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The mean over ranks, taken in `dtype` and given in float32."""
    grad = grad.clone() if dtype is None else grad.to(dtype)
    dist.all_reduce(grad)
    return (grad / dist.get_world_size()).float()


def by_hand(
    master: nn.Module, dtype: torch.dtype, reduce_dtype: torch.dtype | None, batches: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of micro-batches, computed with cast parameters under autocast and summed as averages in float32."""
    sums: dict[str, torch.Tensor] = {}
    for x in batches:
        low = cast(master, dtype)
        with torch.autocast("cpu", dtype):
            loss = low(x).float().square().mean()
        loss.backward()
        for buffer, kept in zip(low.buffers(), master.buffers(), strict=True):
            kept.copy_(buffer)
        for name, param in low.named_parameters():
            mean = averaged(param.grad, reduce_dtype)
            sums[name] = sums[name] + mean if name in sums else mean
    return sums


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(7)) for _ in range(2))
        self.first, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
        self.register_buffer("table", torch.linspace(0, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) + self.table
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {"net": Net, "normed": Normed}


CASES = [(kind, dtype, micro) for kind in MODELS for dtype in (None, torch.bfloat16) for micro in (1, 2)]


@quickly("kind, reduce_dtype, micro", CASES, [("net", None, 1)], pairs=False)
@on_threads(2)
def test_numbers_are_those_of_cast_parameters_and_averages_in_the_dtype_of_the_reduction(
    rank: int, kind: str, reduce_dtype: torch.dtype | None, micro: int
) -> list[str]:
    torch.manual_seed(0)
    master = MODELS[kind]()
    compiled = zcompile.compile(copy.deepcopy(master), dtype=torch.bfloat16, reduce_dtype=reduce_dtype, backend="eager")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (master, compiled)]
    found = []
    for step in range(3):
        batches = [numbers(rank, 10 * step + part) for part in range(micro)]
        for name, grad in by_hand(master, torch.bfloat16, reduce_dtype or torch.float32, batches).items():
            master.get_parameter(name).grad = grad
        for x in batches:
            compiled(x).float().square().mean().backward()
        ours = {name: full(param.grad) for name, param in compiled.named_parameters()}
        theirs = {name: param.grad for name, param in master.named_parameters()}
        assert all(grad.dtype == torch.float32 for grad in ours.values())
        found += differing(ours, theirs, f"step {step}, gradient", 0)
        update(*optimizers)
        found += differing(parameters(compiled), parameters(master), f"step {step}, parameter", 0)
        found += differing(dict(compiled.named_buffers()), dict(master.named_buffers()), f"step {step}, buffer", 0)
    return found


@dataclasses.dataclass
class Given:
    x: torch.Tensor
    index: torch.Tensor
    name: str = "a name"


class Seen(nn.Module):
    """Notes the dtypes that its layers meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("counted", torch.tensor(0))

    def forward(self, given: Given) -> dict[str, Any]:
        x = given.x
        for layer in self.layers:
            x = layer(x)
        weights = {"layer": self.layers[0].weight.dtype, "norm": self.norm.weight.dtype}
        kept = {"mean": self.mean.dtype, "counted": self.counted.dtype, "running": self.norm.running_mean.dtype}
        return {"x": x, "normed": self.norm(x), "index": given.index, "dtypes": {**weights, **kept}}


@pytest.mark.parametrize("output", [None, torch.float32])
def test_buffers_and_batch_norm_keep_their_dtype_and_integers_are_not_cast(output: torch.dtype | None) -> None:
    compiled = zcompile.compile(Seen(), dtype=torch.bfloat16, output_dtype=output, backend="eager")
    out = compiled(Given(numbers(0, 0), torch.arange(4)))
    low, high, whole = torch.bfloat16, torch.float32, torch.int64
    assert out["dtypes"] == {"layer": low, "norm": high, "mean": high, "counted": whole, "running": high}
    assert out["index"].dtype == whole
    assert out["x"].dtype == (output or low)
    assert {param.dtype for param in compiled.parameters()} == {high}
    out["x"].float().sum().backward()
    assert {param.grad.dtype for param in compiled.parameters() if param.grad is not None} == {high}


def sent(rank: int, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    compiled = zcompile.compile(model, dtype=dtype, reduce_dtype=reduce_dtype, prefetch=0, backend="eager")
    compiled(numbers(rank, 0, 4, 8)).float().square().mean().backward()
    return compiled.traffic.payload


@pytest.mark.slow
def test_gathers_are_sent_in_the_low_dtype_and_averages_in_that_of_the_reduction(threads: Threads) -> None:
    low = torch.bfloat16
    whole, mixed, all_low = (threads.run(2, sent, *dtypes)[0] for dtypes in ((None, None), (low, None), (low, low)))
    averages = 2 * 8 * 8 * 4
    assert mixed == (whole - averages) // 2 + averages
    assert all_low == whole // 2


@pytest.mark.slow
@quickly("reduce_dtype", [None, torch.float32], [torch.float32])
@on_threads(2)
def test_a_model_of_low_parameters_averages_in_the_dtype_of_the_reduction(
    rank: int, reduce_dtype: torch.dtype | None
) -> list[str]:
    """A model that is in bfloat16 itself, whose gradients are averaged in float32 or as they are."""
    torch.manual_seed(0)
    plain = Net().bfloat16()
    compiled = zcompile.compile(copy.deepcopy(plain), reduce_dtype=reduce_dtype, backend="eager")
    found = []
    for model in (plain, compiled):
        model(numbers(rank, 0).bfloat16()).square().mean().backward()
    for name, param in compiled.named_parameters():
        want = averaged(plain.get_parameter(name).grad, reduce_dtype).bfloat16()
        found += [] if param.grad.dtype == torch.bfloat16 and torch.equal(full(param.grad), want) else [name]
    return found


@pytest.mark.slow
@quickly(
    "stage, breaks",
    [(stage, breaks) for stage in range(4) for breaks in (False, True)],
    [(3, False)],
    slow=[(2, True)],
)
def test_modules_may_keep_their_dtype(threads: Threads, stage: int, breaks: bool) -> None:
    assert threads.run(2, kept, stage, breaks) == [[], []]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_modules_may_keep_their_dtype_under_inductor(threads: Threads, stage: int) -> None:
    assert threads.run(2, kept, stage, False, "inductor") == [[], []]
