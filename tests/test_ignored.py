"""`ignore=`: parameters that each rank keeps as its own, values, gradients and steps."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import quickly
from tests.models import update
from tests.ranks import on_threads
from zcompile import OptionError, StateError


class Adapted(nn.Module):
    """Layers with an adapter each; `breaks`: in plain Python, as what is not traced runs."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.adapters = nn.ParameterList(torch.randn(6, 6) * 0.1 for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            if self.breaks:
                logging.getLogger("nobody").info("Dynamo breaks the graph here")
            x = torch.tanh(layer(x)) + x @ adapter
        return (self.scale * x).square().mean()


def is_own(name: str) -> bool:
    return name.startswith("adapters")


def different(rank: int, model: Adapted) -> Adapted:
    """Adapters of which each rank has its own."""
    with torch.no_grad():
        for adapter in model.adapters:
            adapter.mul_(1 + rank)
    return model


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = [param for name, param in model.named_parameters() if is_own(name)]
    rest = [param for name, param in model.named_parameters() if not is_own(name)]
    return [torch.optim.Adam(rest, lr=0.05), torch.optim.Adam(own, lr=0.05)]


def reference(rank: int, steps: int) -> Adapted:
    """Plain PyTorch: all gradients but those of adapters averaged by hand."""
    torch.manual_seed(0)
    model = different(rank, Adapted())
    both = optimizers(model)
    for step in range(steps):
        model(data(rank, step)).backward()
        for name, param in model.named_parameters():
            if not is_own(name):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        update(*both)
    return model


def wrong(model: nn.Module, want: nn.Module) -> list[str]:
    got = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return [name for name, param in want.named_parameters() if not torch.allclose(got[name], param, atol=1e-6)]


CASES = [(3, False), (0, False), (1, True), (2, False), (3, True), (0, True)]


@pytest.mark.slow
@quickly("stage, breaks", CASES, CASES[:3], pairs=False)
@on_threads(2)
def test_what_is_ignored_is_each_ranks_own(rank: int, tmp_path: Path, stage: int, breaks: bool) -> list[str]:
    folder = str(tmp_path / "checkpoint")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = different(rank, Adapted(breaks))
    compiled = zcompile.compile(model, stage=stage, ignore=["adapters.*"], backend="eager")
    both = optimizers(compiled)
    assert not any(isinstance(adapter, DTensor) for adapter in compiled.adapters)
    for step in range(2):
        compiled(data(rank, step)).backward()
        update(*both)
    compiled.save_checkpoint(folder, both[0], extra=both[1].state_dict())
    torch.manual_seed(7)
    again = zcompile.compile(Adapted(breaks), stage=stage, ignore=["adapters.*"], backend="eager")
    fresh = optimizers(again)
    fresh[1].load_state_dict(again.load_checkpoint(folder, fresh[0]))
    for one, steppers in ((compiled, both), (again, fresh)):
        one(data(rank, 2)).backward()
        for optimizer in steppers:
            optimizer.step()
    want = reference(rank, 3)
    return [*wrong(compiled, want), *(f"{name} after a load" for name in wrong(again, want))]


def test_it_is_an_input_of_the_program() -> None:
    compiled = zcompile.compile(Adapted(), ignore=["adapters.0"], backend="eager")
    compiled(data(0, 0)).backward()
    assert "adapters_0,  " in str(compiled.programs[0])
    assert "adapters.0" not in [param.name for param in compiled.layout.params]


def ignoring(**options: Any) -> zcompile.CompiledModule:
    return zcompile.compile(Adapted(), backend="eager", **options)


def test_what_cannot_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="ignore: 'adapter' matches no parameter"):
        ignoring(ignore=["adapter"])
    with torch.device("meta"):
        unmade = Adapted()
    with pytest.raises(OptionError, match=r"leaves adapters\.0 to you, which is on the meta device"):
        zcompile.compile(unmade, ignore=["adapters.*"])
    compiled = ignoring(ignore=["adapters.*"])
    optimizer = torch.optim.Adam(compiled.parameters())
    compiled(data(0, 0)).backward()
    optimizer.step()
    for act in (
        lambda: compiled.save_checkpoint(tmp_path / "checkpoint", optimizer),
        lambda: compiled.full_optimizer_state_dict(optimizer),
    ):
        with pytest.raises(StateError, match=r"adapters\.0: is left to you by ignore="):
            act()
    model = Adapted()
    with pytest.raises(OptionError, match=r"leaves the update of adapters\.0 to you"):
        zcompile.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), ignore=["adapters.*"])
    assert sorted(compiled.full_state_dict()) == sorted(copy.copy(compiled.state_dict()))
