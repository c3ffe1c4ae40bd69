"""Numbers of plain Python that a forward is given, changes and returns: call after call those of the plain model."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zcompile
from tests.cases import quickly
from zcompile.torch_internals.pytree import tree_leaves

CALLS = 12


class Numbers(nn.Module):
    """Has numbers in the places in which forwards keep them; `kind` says what is done with them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.child = kind, nn.Linear(4, 4), nn.Module()
        self.calls, self.tau, self.flag, self.mode, self.turn = 0, 1.0, False, "a", 1 + 1j
        self.table, self.log, self.cell = {"n": 0, "t": 1.0}, [0], [0, 1.0]
        self.child.count, self.child.scale = 0, 1.0

    def forward(self, x: torch.Tensor, given: float = 0.5) -> Any:
        return getattr(self, self.kind)(x, given)

    def numbers(self) -> tuple[Any, ...]:
        own = self.calls, self.tau, self.flag, self.mode, self.turn, self.table, self.log, self.cell
        return *own, self.child.count, self.child.scale

    def affine(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.tau = self.tau * 0.9 + 0.05
        return self.linear(x) * self.tau

    def annealed(self, x: torch.Tensor, _: float) -> torch.Tensor:
        y = self.linear(x) / self.tau
        self.tau = max(self.tau - 0.13, 0.5)
        return y

    def kept(self, x: torch.Tensor, given: float) -> torch.Tensor:
        self.tau = given
        return self.linear(x)

    def mixed(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.tau, self.calls = self.tau * 0.95, self.calls + 1
        return self.linear(x) * (torch.arange(4) * self.tau * self.calls)

    def cosine(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.calls += 1
        self.tau = math.cos(self.calls / 10)
        return self.linear(x) * self.tau

    def power(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.tau = self.tau**0.9 * 0.99
        return self.linear(x) * self.tau

    def slope(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.tau *= 0.9
        return F.leaky_relu(self.linear(x), self.tau)

    def size(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.tau *= 0.95
        return self.linear(x)[:, : int(self.tau * 3) + 1]

    def warm(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * (0.1 if self.calls < 3 else 1.0)

    def counted(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * min(1.0, self.calls / 10)

    def repeated(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.calls = (self.calls + 1) % 3
        for _ in range(self.calls):
            x = self.linear(x)
        return self.linear(x)

    def toggled(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.flag, self.mode = not self.flag, {"a": "b", "b": "c", "c": "a"}[self.mode]
        return self.linear(x) * (2.0 if self.flag else 1.0) * {"a": 1.0, "b": 2.0, "c": 3.0}[self.mode]

    def turned(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.turn *= 0.9j
        return (self.linear(x) * self.turn).real

    def held(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.table["n"] += 1
        self.table["t"] *= 0.9
        self.cell[1] *= 0.8
        return self.linear(x) * (self.table["n"] * self.table["t"] * self.cell[1])

    def logged(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.log.append(len(self.log))
        return self.linear(x) * len(self.log)

    def nested(self, x: torch.Tensor, _: float) -> torch.Tensor:
        self.child.count += 1
        self.child.scale *= 0.9
        return self.linear(x) * self.child.scale

    def returned(self, x: torch.Tensor, given: float) -> Any:
        self.tau, self.calls = self.tau * 0.9, self.calls + 1
        return self.linear(x), self.tau * 2, [self.calls], {"more": self.calls > 5}, given, given - 2


KINDS = [name for name, value in vars(Numbers).items() if callable(value) and not name.startswith("_")]
KINDS = [name for name in KINDS if name not in ("forward", "numbers")]
TRACED_AGAIN = {"power", "slope", "size", "turned", "logged"}
"""At each call, until the module runs as plain Python."""


def same(got: Any, want: Any) -> None:
    for ours, theirs in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert type(ours) is type(theirs)
            assert ours == theirs


@quickly(
    "kind, stage, trains",
    [(kind, stage, trains) for kind in KINDS for stage in (0, 3) for trains in (True, False)],
    [("affine", 3, True), ("held", 0, True), ("nested", 0, False), ("returned", 3, False)],
)
def test_each_call_has_the_numbers_of_the_plain_model(kind: str, stage: int, trains: bool) -> None:
    torch.manual_seed(0)
    plain = Numbers(kind)
    model = copy.deepcopy(plain)
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    with warnings.catch_warnings(), torch.set_grad_enabled(trains):
        warnings.simplefilter("ignore", UserWarning)  # which says that a model runs as plain Python
        for call in range(CALLS):
            x = torch.randn(2, 4)
            got, want = compiled(x, 0.5 + call / 7), plain(x, 0.5 + call / 7)
            same(got, want)
            same(model.numbers(), plain.numbers())
            if trains:
                tree_leaves(got)[0].sum().backward()
                tree_leaves(want)[0].sum().backward()
                same([full(p.grad) for p in compiled.parameters()], [p.grad for p in plain.parameters()])
    is_split = bool(compiled._engine.runtime.breaks)
    assert is_split == (kind in TRACED_AGAIN)
    assert is_split or len(compiled._engine.runtime.steps) <= 6


def full(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.mark.slow
def test_a_model_that_is_traced_too_often_says_so_once() -> None:
    compiled = zcompile.compile(Numbers("logged"), backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(CALLS):
            compiled(torch.randn(2, 4))
    assert ["Numbers" in str(one.message) and "recompile_limit" in str(one.message) for one in warned].count(True) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["affine", "returned", "mixed"])
def test_a_step_of_the_cache_has_the_numbers_of_its_own_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("ZCOMPILE_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        torch.compiler.reset()
        plain = Numbers(kind)
        compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
        for call in range(5):
            x = torch.randn(2, 4)
            same(compiled(x, 0.5 + call), plain(x, 0.5 + call))


@pytest.mark.slow
def test_a_train_step_counts_and_anneals() -> None:
    plain = Numbers("mixed")
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (plain, model)]
    step = zcompile.train_step(model, lambda m, x: m(x).square().sum(), optimizers[1], backend="eager")
    for _ in range(CALLS):
        x = torch.randn(2, 4)
        loss = plain(x).square().sum()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        same(step(x), loss.detach())
        same(model.numbers(), plain.numbers())


@pytest.mark.parametrize(
    ("kind", "place"),
    [("affine", "tau"), ("warm", "calls"), ("held", "table"), ("logged", "log"), ("nested", "child.count")],
)
@pytest.mark.usefixtures("without_group")
def test_a_pipelines_step_whose_code_changes_numbers_is_refused(kind: str, place: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Numbers(kind)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(
        model,
        lambda m, x: m(x).square().mean(),
        optimizer,
        mesh=mesh,
        schedule="gpipe",
        microbatches=1,
        backend="eager",
    )
    with pytest.raises(zcompile.CaptureError, match=f"^{place}: is changed by the step's Python code"):
        step(torch.randn(2, 4))


class Slots:
    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0


class Marks(nn.Module):
    """Changes what is not a tensor while it computes, and, unless it `leaves` it, changes it back."""

    def __init__(self, leaves: str = "") -> None:
        super().__init__()
        self.layer, self.leaves, self.busy, self.slots = nn.Linear(4, 4), leaves, False, Slots()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global DEPTH
        self.busy, self.slots.depth, DEPTH = True, 1, 1
        result: torch.Tensor = self.layer(x)
        self.busy = self.leaves == "busy"
        self.slots.depth, DEPTH = int(self.leaves == "slots"), int(self.leaves == "DEPTH")
        return result


DEPTH = 0


@pytest.mark.parametrize("leaves", ["", "busy", "slots", "DEPTH"])
@pytest.mark.usefixtures("without_group")
def test_what_a_pipelines_step_changes_back_is_not_changed(leaves: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Marks(leaves)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    step = zcompile.train_step(model, lambda m, x: m(x).mean(), optimizer, mesh=mesh, schedule="gpipe", backend="eager")
    with pytest.raises(zcompile.CaptureError, match=f"^{leaves}: is changed") if leaves else nullcontext():
        step(torch.randn(2, 4))


@pytest.mark.usefixtures("without_group")
def test_a_number_that_a_pipelines_step_was_not_traced_with_is_named() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    options: dict[str, Any] = {"mesh": mesh, "schedule": "gpipe", "microbatches": 1, "backend": "eager"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, lambda m, x, flag: m(x * (2 if flag else 1)).mean(), optimizer, **options)
    step(torch.randn(2, 4), flag=False)
    with pytest.raises(zcompile.OptionError, match="batch: has flag True, and its step was traced with flag False"):
        step(torch.randn(2, 4), flag=True)
