"""Code of a model that hands on a parameter as it is, to who would read it after the call, when it has no memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.cases import quickly

KEPT: list[Any] = []
TABLE: dict[str, Any] = {}


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    weight: Any


class HandsOn(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.kept, self.items = kind, nn.Linear(4, 4), None, []
        self.register_buffer("buffer", torch.zeros(4))

    def forward(self, x: torch.Tensor, out: list[Any]) -> Any:
        return getattr(self, self.kind)(x, self.linear.weight, out)

    def returned(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return self.linear(x), weight

    def returned_unused(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return x + 1, self.linear.bias

    def returned_in_containers(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return {"y": self.linear(x), "more": [(weight,)]}

    def returned_in_a_dataclass(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return Result(self.linear(x), [weight])

    def returned_in_a_closure(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return self.linear(x), lambda: weight.sum()

    def returned_data(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return self.linear(x), weight.data

    def all_parameters(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return self.linear(x), list(self.parameters())

    def put_on_a_result(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        y = self.linear(x)
        y.weight = weight  # type: ignore[attr-defined]
        return y

    def kept_as_an_attribute(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        self.kept = [weight]
        return self.linear(x)

    def kept_as_a_parameter(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        self.again = weight
        return self.linear(x)

    def kept_in_a_list(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        self.items.append(weight)
        return self.linear(x)

    def kept_in_a_global(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        KEPT.append(weight)
        return self.linear(x)

    def kept_in_a_table(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        TABLE["weight"] = weight
        return self.linear(x)

    def kept_in_an_argument(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        out.append(weight)
        return self.linear(x)

    def a_view(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        return self.linear(x), weight[0]

    def a_buffer(self, x: torch.Tensor, weight: torch.Tensor, out: list[Any]) -> Any:
        self.buffer = weight[0].detach()
        return self.linear(x)


KINDS = [name for name, value in vars(HandsOn).items() if callable(value) and name not in ("__init__", "forward")]


@quickly("kind", KINDS, KINDS[::4])
def test_a_parameter_that_outlives_its_call_is_refused_where_it_is_traced(kind: str) -> None:
    given: list[Any] = []
    for stage, trains in ((3, True), (0, False)):
        model = HandsOn(kind)
        compiled = zcompile.compile(model, stage=stage, backend="eager")
        with (
            torch.set_grad_enabled(trains),
            pytest.raises(
                zcompile.CaptureError, match=r"linear\.(weight|bias): .* is(, which is)? not full after"
            ) as caught,
        ):
            compiled(torch.randn(2, 4), given)
        assert caught.value.fix.endswith(".clone()")
        assert not [*given, *KEPT, *TABLE, *model.items]
        assert model.kept is None


def test_copies_and_modules_are_handed_on() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            temporary = [self.linear.weight]
            return self.linear(x), temporary[0].clone(), self.linear

    model = Copies()
    weight = model.linear.weight.detach().clone()
    compiled = zcompile.compile(model, backend="eager")
    y, copied, module = compiled(torch.randn(2, 4))
    (y.sum() + copied.sum()).backward()
    assert torch.equal(copied, weight)
    assert module is model.linear
    assert compiled.linear.bias.grad is not None
