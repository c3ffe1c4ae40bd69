"""backend="eager": models whose kernels lay out, or take, what the fakes that are traced do not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

import zcompile
from tests.cases import quickly
from tests.threads import Threads
from zcompile.engine.eager_regions import fit_kernels
from zcompile.torch_internals.sizes import FakeTensorMode

aten = torch.ops.aten


class Turned(nn.Module):
    """Modules with dimensions exchanged between them."""

    def __init__(self, *parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.order = [None if isinstance(part, nn.Module) else part for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        left = iter(self.parts)
        for turn in self.order:
            x = next(left)(x) if turn is None else x.permute(turn)
        return x


ROWS, IMAGE = (0, 2, 1), (0, 3, 1, 2)
TRANSPOSED: dict[str, Callable[[], nn.Module]] = {
    "at the end": lambda: Turned(nn.Linear(8, 8), ROWS, nn.BatchNorm1d(8)),
    "between": lambda: Turned(nn.Linear(8, 8), ROWS, nn.BatchNorm1d(8), ROWS, nn.Linear(8, 4)),
    "flat": lambda: Turned(nn.Linear(8, 8), ROWS, nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(48, 4)),
    "before groups": lambda: Turned(nn.Linear(8, 8), ROWS, nn.BatchNorm1d(8), nn.GroupNorm(2, 8)),
    "after a convolution": lambda: Turned(ROWS, nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), ROWS, nn.LayerNorm(8)),
    "image": lambda: Turned(nn.Linear(8, 8), nn.Unflatten(1, (2, 3)), IMAGE, nn.BatchNorm2d(8), nn.Conv2d(8, 4, 2)),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)),
    "layer alone": lambda: nn.LayerNorm(8),
    "layer without bias": lambda: nn.Sequential(nn.LayerNorm(8, bias=False), nn.Linear(8, 8)),
    "root mean square": lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)),
    "group": lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.Linear(8, 8)),
    "instance": lambda: nn.Sequential(nn.InstanceNorm1d(6, affine=True), nn.Linear(8, 8)),
    "batch": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(8, 8)),
    "layers": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
}


def trained(model: nn.Module, call: Callable[[Tensor], Tensor], oracle: bool) -> dict[str, Tensor]:
    """Results and gradients, oneself's of two ranks, or those of plain PyTorch averaged over both batches."""
    torch.manual_seed(1)
    batches = torch.randn(2, 4, 6, 8)
    mine = list(batches) if oracle else [batches[torch.distributed.get_rank()]]
    for x in mine:
        y = call(x)
        weights = torch.arange(y.numel()).view(y.shape).cos()
        ((y.float() * weights).sum() / len(mine)).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}  # type: ignore[union-attr]


def against_plain(rank: int, kind: str, name: str, stage: int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    reference = (TRANSPOSED if kind == "transposed" else NORMS)[name]()
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model = copy.deepcopy(reference)

    def plain(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result: Tensor = reference(x)
        return result

    expected = trained(reference, plain, oracle=True)
    compiled = zcompile.compile(model, stage=stage, backend="eager", dtype=dtype)
    found = trained(compiled, compiled, oracle=False)
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=largest * (1e-5 if dtype is None else 0.03))


@quickly(
    "name, stage", [*itertools.product(TRANSPOSED, [0, 3])], [*itertools.product(TRANSPOSED, [0, 3])][1::8], pairs=False
)
def test_a_normalization_of_a_transposed_value_trains_as_plain_pytorch(threads: Threads, name: str, stage: int) -> None:
    threads.run(2, against_plain, "transposed", name, stage, None)


@quickly("name, stage", [(name, stage) for name in NORMS for stage in (0, 3)], [(next(iter(NORMS)), 3)], pairs=False)
def test_a_normalization_first_trains_in_bfloat16(threads: Threads, name: str, stage: int) -> None:
    threads.run(2, against_plain, "norms", name, stage, torch.bfloat16)


class Attending(nn.Module):
    """An image to which a layer over its places is added, so that it lies with its channels last.

    The first normalization gives the second one that layout, and its fake a contiguous one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16)
        parts = [(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(2)]
        self.last = nn.Sequential(*parts[0], *parts[1])

    def forward(self, x: Tensor) -> Tensor:
        image: Tensor = self.first(x)
        places = self.layer(image.flatten(2).transpose(1, 2)).transpose(-1, -2).reshape(image.shape)
        result: Tensor = self.last(places + image)
        return result


def test_a_group_normalization_computes_in_the_layout_that_it_has_in_eager_mode() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(4, 3, 8, 8)
    compiled = zcompile.compile(copy.deepcopy(model), backend="eager")
    for called in (model, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            loss = called(x).square().sum()
        loss.backward()
    for param, found in zip(model.parameters(), compiled.parameters(), strict=True):
        assert isinstance(found.grad, DTensor)
        assert torch.equal(found.grad.full_tensor(), param.grad)


def graph_of(target: Any, recorded: Tensor, *args: Any) -> fx.Graph:
    """A region's graph with one operation on a value that was recorded so."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(recorded)
    graph.output(graph.call_function(target, (x, *args)))
    fit_kernels(graph)
    return graph


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.view.default, ([6, 2],)),
        (aten._unsafe_view.default, ([12],)),
        (aten.as_strided.default, ([2, 2], [4, 1])),
        (aten.view.dtype, (torch.float16,)),
        (aten.view_as_complex.default, ()),
    ],
    ids=str,
)
def test_what_reads_memory_finds_the_layout_that_was_recorded(target: Any, args: tuple[Any, ...]) -> None:
    recorded = torch.arange(12.0).view(2, 3, 2)
    otherwise = recorded.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    run = fx.GraphModule(nn.Module(), graph_of(target, recorded, *args))
    expected = target(recorded, *args)
    assert torch.equal(run(otherwise), expected)
    result = run(recorded)
    assert result.untyped_storage().data_ptr() == recorded.untyped_storage().data_ptr(), "what fits is not copied"


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a part of channels last": lambda x: x.contiguous(memory_format=torch.channels_last)[:, 2:, 1:],
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recorded", LAYOUTS)
def test_a_group_normalization_has_the_layout_that_it_has_in_eager_mode(recorded: str, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(2, 6, 5, 4)).detach().requires_grad_()
    sizes = x.shape[0], x.shape[1], x.shape[2:].numel(), 2
    given = LAYOUTS[recorded](torch.randn(2, 6, 5, 4))
    run = fx.GraphModule(nn.Module(), graph_of(aten.native_group_norm.default, given, None, None, *sizes, 1e-5))
    normal, mean, rstd = run(x.detach())
    plain = nn.functional.group_norm(x, 2)
    assert (normal.stride(), normal.tolist()) == (plain.stride(), plain.tolist())
    plain.backward(weight := torch.randn(plain.shape))

    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("gradient", "x", "mean", "rstd")]
    inputs[1].meta["val"] = FakeTensorMode().from_tensor(given)
    more = (None, *sizes, [True, False, False])
    graph.output(graph.call_function(aten.native_group_norm_backward.default, (*inputs, *more)))
    fit_kernels(graph)
    gradient, *_ = fx.GraphModule(nn.Module(), graph)(weight, x.detach(), mean, rstd)
    assert x.grad is not None
    assert torch.equal(gradient, x.grad)


def all_slices(x: Tensor) -> Tensor:
    return x[0] * x[1].sin() + x[2]


def all_but_one(x: Tensor) -> Tensor:
    return x[0] * x[2].sin()


def one_twice(x: Tensor) -> Tensor:
    return x[0] * x[1].sin() + x[2] * x[0].exp()


def behind(x: Tensor) -> Tensor:
    return x[..., 0].exp() * x[..., -1]


def of_two_dimensions(x: Tensor) -> Tensor:
    return (x[0] * x[1].sin() + x[2]).sum() * x[:, 0].sum()


def beside_the_whole(x: Tensor) -> Tensor:
    return all_slices(x) + x.exp().sum(0)


@pytest.mark.parametrize(
    ("function", "stacks"),
    [(all_slices, 1), (all_but_one, 0), (one_twice, 1), (behind, 1), (of_two_dimensions, 0), (beside_the_whole, 0)],
)
def test_gradients_of_all_slices_are_stacked(function: Callable[[Tensor], Tensor], stacks: int) -> None:
    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (result,) = torch.autograd.grad(function(leaf).sin().sum(), leaf)
        return result

    x = torch.randn(3, 4, 2)
    traced = make_fx(gradient, tracing_mode="fake")(x)
    want = traced(x)
    fit_kernels(traced.graph)
    traced.recompile()
    assert torch.equal(traced(x), want)
    assert [node.target for node in traced.graph.nodes].count(aten.stack.default) == stacks
