"""Tensors that are more than their elements are refused by name, with the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from zcompile import ModelError
from zcompile.tools.tracing import trace
from zcompile.torch_internals.pytree import tree_map_only

aten = torch.ops.aten


class Quantised(torch.Tensor):
    """int8 with a scale, by torch's protocol of wrapper subclasses, as torchao has it."""

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)
        return made

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Quantised:
        scale = values.abs().max() / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Quantised:
        return Quantised(inner["q"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(args[0].q), func(args[0].scale))
        args, kwargs = tree_map_only(cls, lambda one: one.q * one.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Converting(nn.Parameter):
    """No protocol, but methods of its own, as bitsandbytes has it."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Marked(nn.Parameter):
    """A name for a parameter, and nothing else."""

    def loader(self) -> None: ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def frozen(model: Model) -> None:
    model.base.weight = nn.Parameter(Quantised.of(torch.randn(4, 4)), requires_grad=False)


def trained(model: Model) -> None:
    model.base.weight = nn.Parameter(Quantised.of(torch.randn(4, 4)))


def converting(model: Model) -> None:
    model.base.weight = Converting(torch.randn(4, 4))


def buffer(model: Model) -> None:
    model.base.register_buffer("table", Quantised.of(torch.randn(4, 4)))


def attribute(model: Model) -> None:
    model.base.table = Quantised.of(torch.randn(4, 4))


@pytest.mark.parametrize("put", [frozen, trained, converting, buffer, attribute])
@pytest.mark.parametrize("way", [zcompile.compile, lambda model: trace(model, (torch.ones(2, 4),))])
def test_a_subclass_is_refused_by_name(put: Callable[[Model], None], way: Callable[[Model], object]) -> None:
    model = Model()
    put(model)
    before = [*model.parameters(), *model.buffers()]
    with pytest.raises(ModelError, match=r"^base\.(weight|table): is a tests.test_tensor_kinds.(Quant|Conv)") as caught:
        way(model)
    assert "plain buffers" in caught.value.fix
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("put", [frozen, trained])
def test_the_backend_of_torch_compile_refuses_it_too(put: Callable[[Model], None]) -> None:
    model = Model()
    put(model)
    called = torch.compile(model, backend=zcompile.backend(backend="eager"))
    with pytest.raises(RuntimeError, match=r"ModelError: base\.weight: is a tests.test_tensor_kinds.Quantised"):
        called(torch.ones(2, 4))
    assert isinstance(model.base.weight, Quantised)


def test_a_subclass_that_is_only_a_name_is_sharded() -> None:
    model = Model()
    model.base.weight = Marked(torch.randn(4, 4))
    want = model(torch.ones(2, 4))
    assert torch.equal(zcompile.compile(model, backend="eager")(torch.ones(2, 4)), want)


def test_a_parameter_without_a_shape_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"^1\.weight: has no shape yet"):
        zcompile.compile(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))
