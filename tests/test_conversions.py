"""`compiled.to(dtype)` before anything is compiled or trained: as converting the model before zcompile.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zcompile
from tests.cases import diagonal, quickly
from tests.models import batch, make, update
from tests.ranks import on_threads
from tests.threads import Threads

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "double": lambda model: model.to(torch.float64),
    "there and back": lambda model: model.double().float(),
    "to a dtype of parts": lambda model: model.to(torch.bfloat16).to(torch.float64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "owners": {"whole": ["layers.0.weight", "layers.1.weight"]},
    "mixed": {"dtype": torch.bfloat16},
    "ignored": {"ignore": ["layers.0.weight"]},
    "hybrid": {"shard": "hpz", "outer_gather_dtype": torch.bfloat16},
}


def like(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def trained(
    rank: int, convert: Callable[[nn.Module], nn.Module], *, first: bool, stage: int, options: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and the state behind some steps of a model that is converted `first`, or once it is compiled."""
    model = make("mlp", rank)
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("count", torch.ones(3, dtype=torch.int32))
    model.layers[0].bias.requires_grad_(False)
    if first:
        convert(model)
    if "shard" in options:
        options = {**options, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    compiled = zcompile.compile(model, stage=stage, backend="eager", **options)
    compiled.layers[1].bias.marked = True
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)  # built before, as of a plain model
    parameters = list(compiled.parameters())
    if not first:
        assert convert(compiled) is compiled
    assert all(p is q for p, q in zip(compiled.parameters(), parameters, strict=True))
    assert compiled.layers[1].bias.marked
    dtype, losses = next(compiled.parameters()).dtype, []
    for step in range(3):
        loss = compiled(*(value.to(dtype) for value in batch("mlp", rank, step)))
        loss.backward()
        assert all(p.grad is None or p.grad.dtype is dtype for p in parameters)
        update(optimizer)
        losses.append(loss.detach())
    return losses, {name: like(value) for name, value in compiled.state_dict().items()}


def both(rank: int, kind: str, stage: int, way: str) -> list[str]:
    given = {"stage": stage, "options": OPTIONS[way]}
    losses, state = trained(rank, CONVERSIONS[kind], first=False, **given)
    wanted, expected = trained(rank, CONVERSIONS[kind], first=True, **given)
    assert list(state) == list(expected)
    found = [n for n, v in expected.items() if state[n].dtype is not v.dtype or not torch.equal(state[n], v)]
    return found + ["a loss" for one, other in zip(losses, wanted, strict=True) if not torch.equal(one, other)]


@pytest.mark.slow
@quickly("kind, stage", [(kind, stage) for kind in CONVERSIONS for stage in range(4)], [("bfloat16", 3)], pairs=False)
def test_a_compiled_model_is_converted_as_the_model_would_be(threads: Threads, kind: str, stage: int) -> None:
    assert threads.run(2, both, kind, stage, "plain") == [[]] * 2


@pytest.mark.slow
@diagonal("way, kind", [way for way in OPTIONS if way != "plain"], ["double", "bfloat16"], pairs=False)
def test_options_go_by_the_dtypes_that_it_is_converted_to(threads: Threads, way: str, kind: str) -> None:
    world = 4 if way == "hybrid" else 3
    assert threads.run(world, both, kind, 3, way) == [[]] * world


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


X = torch.arange(12.0).reshape(3, 4) / 12


@pytest.mark.parametrize("stage", [0, 3])
def test_what_requires_gradients_may_change_between_steps(stage: int) -> None:
    compiled, model = zcompile.compile(plain(), stage=stage, backend="eager"), plain()
    for frozen in (True, False, True):
        for either in (compiled, model):
            either[0].requires_grad_(not frozen)
            either.zero_grad()
            either(X).sum().backward()
        for name, param in model.named_parameters():
            grad = compiled.get_parameter(name).grad
            assert (grad is None) == (param.grad is None)
            assert param.grad is None or torch.equal(like(grad), param.grad)


def stepped(compiled: Any) -> None:
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for param in compiled.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (lambda compiled: compiled(X), "programs have been compiled"),
        (stepped, "an optimizer holds state"),
        (lambda compiled: compiled[0].weight.register_post_accumulate_grad_hook(print), "0.weight: has hooks"),
    ],
)
def test_a_model_that_is_in_use_is_not_converted(before: Callable[[Any], Any], said: str) -> None:
    compiled = zcompile.compile(plain(), backend="eager")
    before(compiled)
    state = {name: like(value) for name, value in compiled.state_dict().items()}
    with pytest.raises(zcompile.ParameterError, match=said):
        compiled.bfloat16()
    for name, value in compiled.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(like(value), state[name])


def test_an_optimizer_with_state_keeps_a_model_from_being_converted() -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    update(optimizer)
    compiled = zcompile.compile(model, optimizer=optimizer, backend="eager")
    with pytest.raises(zcompile.ParameterError, match="an optimizer holds state"):
        compiled.half()
    with compiled.unsharded(), pytest.raises(zcompile.StateError, match=r"within unsharded\(\)"):
        compiled.half()


def test_shards_elsewhere_are_not_converted(tmp_path: Any) -> None:
    compiled = zcompile.compile(plain(), backend="eager", offload_parameters=f"disk:{tmp_path}")
    with pytest.raises(zcompile.ParameterError, match="offload_parameters= has made room"):
        compiled.double()


def test_a_converted_model_moves_nowhere() -> None:
    compiled = zcompile.compile(plain(), backend="eager")
    with pytest.raises(zcompile.ParameterError, match="a sharded model cannot be moved"):
        compiled.to("meta", torch.bfloat16)
    assert compiled[0].weight.dtype is torch.float32


@diagonal("kind, stage", CONVERSIONS, [0, 3])
def test_the_given_model_is_converted_as_the_compiled_one_is(kind: str, stage: int) -> None:
    given, expected = plain(), CONVERSIONS[kind](plain())
    compiled = zcompile.compile(given, stage=stage, backend="eager")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (compiled, expected)]
    assert CONVERSIONS[kind](nn.ModuleDict({"wrapped": given}))["wrapped"] is given
    for _ in range(2):
        for model, optimizer in zip((compiled, expected), optimizers, strict=True):
            model(X.to(expected[0].weight.dtype)).sum().backward()
            update(optimizer)
    for name, value in expected.state_dict().items():
        assert torch.equal(like(compiled.state_dict()[name]), value), name


@pytest.mark.parametrize("stage", [0, 3])
def test_a_given_model_that_is_in_use_is_not_converted_or_moved(stage: int) -> None:
    given = plain()
    compiled = zcompile.compile(given, stage=stage, backend="eager")
    with pytest.raises(zcompile.ParameterError, match="0: is a module of a sharded model"):
        given[0].half()
    with pytest.raises(zcompile.ParameterError, match="a sharded model cannot be moved"):
        given.to("meta")
    compiled(X).sum().backward()
    with pytest.raises(zcompile.ParameterError, match="programs have been compiled"):
        given.half()
    for same in (given, given[0]):
        assert same.to("cpu", torch.float32).float() is same
    parameter, before = given[0].weight, like(given[0].weight)
    torch.optim.SGD(given.parameters(), lr=0.1).step()
    assert given[0].weight is parameter
    assert not torch.equal(like(parameter), before)
    with compiled.unsharded():
        assert given[0].half()(X.half()).dtype is torch.float16  # full parameters, for as long as they are there
    assert compiled(X).dtype is torch.float32


# -- models without parameters ----------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """No parameter, and with `buffers` one buffer."""

    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        if buffers:
            self.register_buffer("factor", torch.full((4,), 2.0))
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * getattr(self, "factor", 3)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "frozen": lambda: plain().requires_grad_(False),
    "buffers": lambda: Fixed(buffers=True),
    "nothing": lambda: Fixed(buffers=False),
}


@diagonal("kind, stage", KINDS, [0, 1, 2, 3], pairs=False)
@on_threads(2)
def test_models_without_anything_to_train_run(rank: int, kind: str, stage: int, tmp_path: Any) -> list[str]:
    folder = str(tmp_path / "saved")
    model = KINDS[kind]()
    compiled, found = zcompile.compile(KINDS[kind](), stage=stage, backend="eager"), []
    for step in range(2):
        x = (X + rank + step).requires_grad_()
        theirs = (X + rank + step).requires_grad_()
        for given, either in ((x, compiled), (theirs, model)):
            either(given).square().sum().backward()
        if not torch.equal(x.grad, theirs.grad):
            found.append("a gradient")
        with torch.no_grad():
            if not torch.equal(compiled(x), model(x)):
                found.append("a result")
    with compiled.unsharded():
        compiled(X)
    compiled.full_state_dict()
    compiled.save_checkpoint(folder)
    compiled.load_checkpoint(folder)
    assert compiled.explain()
    assert list(compiled.state_dict()) == list(model.state_dict())
    return found
