"""Methods that are called between steps and write to parameters: gathered, run, and written back into the shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.cases import quickly
from tests.compare import parameters
from tests.models import update
from tests.ranks import Ranks
from tests.refusals import error_of
from tests.threads import Threads

X = torch.randn(4, 7, generator=torch.Generator().manual_seed(5))


class Lora(nn.Module):
    """A layer with an adapter, and methods that write."""

    scale: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 7)), nn.Parameter(torch.randn(7, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale + x @ self.a.T @ self.b.T

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight.add_(self.b @ self.a)
        self.a.fill_(0.1)
        self.b.zero_()

    def assign(self) -> None:
        self.a.data = self.a.data * 2 + self.b.data.T
        self.scale.data = self.scale.data + 1

    @torch.no_grad()
    def augment(self) -> None:
        self.a *= 3
        self.b[1:3] = 4.0

    def initialise(self) -> None:
        nn.init.normal_(self.a)
        nn.init.orthogonal_(self.b)

    @torch.no_grad()
    def absent(self) -> torch.Tensor:
        self.a.add_(1)
        return self.a.sum()

    def replace(self) -> None:
        self.a = nn.Parameter(torch.zeros(2, 7))

    def reshape(self) -> None:
        self.a.data = torch.zeros(3, 7)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Lora(), Lora()])
        self.rate = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.rate.mean()

    def merge_all(self) -> None:
        for layer in self.layers:
            layer.merge()  # type: ignore[operator]

    @torch.no_grad()
    def merge_more(self) -> None:
        """Code that has read what another method writes, and has written what another one reads."""
        first, second = self.layers
        self.rate.mul_(first.base.weight[0, 0])
        first.b.mul_(2)
        first.merge()
        second.base.weight.add_(first.base.weight * self.rate[0])
        second.b.add_(second(X).mean())


WRITES: dict[str, Callable[[Any], object]] = {
    "merge": lambda model: model.layers[0].merge(),
    "assign": lambda model: model.layers[0].assign(),
    "augment": lambda model: model.layers[1].augment(),
    "initialise": lambda model: model.layers[1].initialise(),
    "result": lambda model: model.layers[0].absent(),
    "all": lambda model: model.merge_all(),
    "more": lambda model: model.merge_more(),
}


def made() -> Two:
    torch.manual_seed(0)
    return Two()


def wrong(compiled: nn.Module, plain: nn.Module) -> list[str]:
    here = parameters(compiled)
    return [name for name, value in parameters(plain).items() if not torch.allclose(here[name], value, rtol=1e-4)]


def trained(rank: int, options: dict[str, Any], ways: list[str], nodes: int = 1) -> list[str]:
    """Where parameters, or what is computed of them, are not those of plain PyTorch after steps with writes between."""
    if nodes > 1:
        options = {**options, "mesh": init_device_mesh("cpu", (nodes, 2), mesh_dim_names=("replicate", "shard"))}
    found = []
    for way in ways:
        plain = made()
        compiled = zcompile.compile(copy.deepcopy(plain), backend="eager", **options)
        for model in (compiled, plain):
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.001)
            for step in range(2):
                model(X).square().mean().backward()
                update(optimizer)
                with torch.no_grad():
                    model(X)  # stages 1 and 2 keep what this has gathered
                torch.manual_seed(step)
                WRITES[way](model)
        found += [f"{way}: {name}" for name in wrong(compiled, plain)]
        if not torch.allclose(compiled(X), plain(X), rtol=1e-3, atol=1e-5):
            found.append(f"{way}: outputs")
    return found


@pytest.mark.slow
@quickly(
    "options, ways",
    [
        *(({"stage": stage}, list(WRITES)) for stage in range(4)),
        ({"stage": 3}, ["more", "assign", "initialise"]),
        ({"stage": 2}, ["augment"]),
        ({"stage": 3, "whole": ["layers.0.base.weight", "layers.1.b"]}, list(WRITES)),
    ],
    [({"stage": 2}, ["augment"])],
    slow=[
        ({"stage": 3}, ["more", "assign", "initialise"]),
        ({"stage": 3, "whole": ["layers.0.base.weight", "layers.1.b"]}, list(WRITES)),
    ],
)
def test_methods_write_as_in_plain_pytorch(threads: Threads, options: dict[str, Any], ways: list[str]) -> None:
    assert threads.run(2, trained, options, ways) == [[], []]


class Extra(Lora):
    """Methods that write to what they are given, one of them in the place of a module's own."""

    def note(self, seen: list[torch.Tensor]) -> None:
        seen.append(self.a.sum())

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}rank"] = torch.tensor(len(self.a))


def test_methods_of_modules_that_keep_their_dtype_compute_in_it(without_group: None) -> None:
    for way in (WRITES["merge"], WRITES["all"]):
        plain = made()
        compiled = zcompile.compile(
            copy.deepcopy(plain), backend="eager", dtype=torch.bfloat16, keep_dtype=["layers.*"]
        )
        for model in (compiled, plain):
            with torch.no_grad():
                model(X)
            way(model)
        assert wrong(compiled, plain) == []


def test_methods_of_modules_that_keep_their_dtype_write_to_what_they_are_given(without_group: None) -> None:
    plain = nn.Sequential(Extra())
    compiled: Any = zcompile.compile(copy.deepcopy(plain), backend="eager", dtype=torch.bfloat16, keep_dtype=["0"])
    assert list(compiled.state_dict()) == list(plain.state_dict())
    seen: list[torch.Tensor] = []
    compiled[0].note(seen)
    torch.testing.assert_close(seen[0], plain[0].a.sum())  # type: ignore[union-attr, operator]


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["hsdp", "hfsdp", "hpz"])
def test_methods_write_on_hybrid_meshes(threads: Threads, shard: str) -> None:
    assert threads.run(4, trained, {"shard": shard}, ["merge", "initialise"], 2) == [[]] * 4


def apart(rank: int) -> tuple[list[float], list[str]]:
    """What ranks have that draw other numbers; and errors of ranks of which one alone writes."""
    compiled: Any = zcompile.compile(made(), stage=3, backend="eager")
    torch.manual_seed(rank)
    compiled.layers[1].initialise()
    drawn = parameters(compiled)["layers.1.a"].flatten().tolist()
    torch.manual_seed(0)
    plain = made()
    torch.manual_seed(0)
    plain.layers[1].initialise()  # type: ignore[operator]
    return drawn, wrong(compiled, plain)


def test_ranks_that_draw_other_numbers_have_the_first_ones(ranks: Ranks) -> None:
    (one, differ), (two, also) = ranks.run(2, apart)
    assert one == two
    assert differ == also == []


def test_what_shards_cannot_have_is_refused() -> None:
    compiled: Any = zcompile.compile(made(), stage=3, backend="eager", dtype=torch.bfloat16)
    before = parameters(compiled)
    layer = compiled.layers[0]
    rounded, replaced, reshaped = error_of(layer.merge), error_of(layer.replace), error_of(layer.reshape)
    assert rounded.startswith("layers.0.a: is torch.bfloat16 in the model's code and torch.float32 otherwise")
    assert replaced.startswith("layers.0.a: was replaced or removed while it is full")
    assert reshaped.startswith("layers.0.a: has shape [2, 7], and its .data would have [3, 7]")
    assert all(torch.equal(value, before[name]) for name, value in parameters(compiled).items())
