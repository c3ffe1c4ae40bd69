"""Calls of which nothing is known but that they run: refused with their lines, and run by plain Python."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcompile

DECORATORS: Any = importlib.import_module("torch._dynamo.decorators")
NEEDS_LEAVES = pytest.mark.skipif(not hasattr(DECORATORS, "leaf_function"), reason="torch has no leaf functions")


def doubled() -> Callable[[torch.Tensor], torch.Tensor]:
    @DECORATORS.leaf_function
    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)

    double.register_fake(lambda x: (x * 2,))
    return lambda x: double(x)[0]


def printed() -> Callable[[torch.Tensor], torch.Tensor]:
    def show(x: torch.Tensor) -> torch.Tensor:
        torch.ops.higher_order.print("seen")
        return x * 2

    return show


class Inner(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor], *, breaks: bool) -> None:
        super().__init__()
        self.layer, self.call, self.breaks = nn.Linear(4, 4), call, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            print(end="")
        return self.layer(self.call(x))


def model(call: Callable[[torch.Tensor], torch.Tensor], *, breaks: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Inner(call, breaks=breaks))


CALLS = {"leaf": pytest.param(doubled, "invoke_leaf_function", marks=NEEDS_LEAVES), "print": (printed, "print")}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("make", "called"), CALLS.values(), ids=CALLS)
def test_an_opaque_call_is_refused_with_its_line(make: Callable[[], Any], called: str, trains: bool) -> None:
    compiled = zcompile.compile(model(call := make(), breaks=False), backend="eager")
    with torch.set_grad_enabled(trains), pytest.raises(zcompile.CaptureError) as refused:
        compiled(torch.ones(2, 4))
    lines, first = inspect.getsourcelines(call)
    assert refused.value.subject == "1", "the module's path"
    assert refused.value.problem.startswith(f"calls {called} at {__file__}:")
    line = int(refused.value.problem.partition(f"{__file__}:")[2].partition(",")[0])
    assert line in range(first, first + len(lines))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "called"), CALLS.values(), ids=CALLS)
def test_plain_python_makes_opaque_calls(make: Callable[[], Any], called: str) -> None:
    compiled = zcompile.compile(model(make(), breaks=True), backend="eager")
    plain, x = model(lambda x: x * 2, breaks=False), torch.ones(2, 4)
    with pytest.warns(UserWarning, match="graph break"):
        compiled(x).square().sum().backward()
    plain(x).square().sum().backward()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).grad.full_tensor(), value.grad)
