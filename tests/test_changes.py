"""What users change in a compiled model, attributes and hooks, has the effect that it has on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

import zcompile
from tests.cases import diagonal
from tests.models import update
from tests.ranks import on_ranks
from zcompile import ParameterError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.act: nn.Module = nn.Tanh()
        self.scale: float = 1.0
        self.negate = False
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.act(x) * self.scale * self.mask
        return -x if self.negate else x


def both(stage: int = 3) -> tuple[Model, zcompile.CompiledModule]:
    """A plain model and a compiled one of the same values, which has trained already."""
    torch.manual_seed(0)
    plain = Model()
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager", stage=stage)
    equal(plain, compiled)
    return plain, compiled


def equal(plain: nn.Module, compiled: zcompile.CompiledModule) -> None:
    """Results and gradients of both are the same."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = [model(x) for model in (plain, compiled)]
    assert torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    grads = {name: param.grad for name, param in compiled.named_parameters()}
    for name, param in plain.named_parameters():
        got = grads[name]
        assert got is not None
        assert param.grad is not None
        assert torch.equal(param.grad, got.full_tensor() if hasattr(got, "full_tensor") else got), name
    plain.zero_grad()
    compiled.zero_grad()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", (2.0, 3.5, 1.0)),
        ("scale", (2, 3)),
        ("negate", (True, False)),
        ("mask", (torch.tensor([1.0, 0, 2, 3]), torch.rand(3, 4))),
        ("act", (nn.ReLU(), nn.Sigmoid())),
        ("training", (False, True)),
    ],
)
def test_an_attribute_that_is_set_is_the_models(name: str, values: tuple[Any, ...]) -> None:
    plain, compiled = both()
    for value in values:
        setattr(plain, name, value)
        setattr(compiled, name, value)
        assert getattr(compiled._model, name) is value
        equal(plain, compiled)


@pytest.mark.slow
def test_an_attribute_of_a_submodule_counts_and_one_may_be_deleted() -> None:
    plain, compiled = both()
    for model in (plain, compiled):
        model.blocks[1].scale = 2.5  # type: ignore[union-attr]
        model.note = "mine"
    equal(plain, compiled)
    del compiled.note
    assert not hasattr(compiled._model, "note")
    assert not hasattr(compiled, "note")
    del compiled.mask
    with pytest.warns(UserWarning, match="graph break"), pytest.raises(AttributeError, match="mask"):
        compiled(torch.ones(3, 4))


def test_methods_and_results_of_the_compiled_module_stay_its_own() -> None:
    _, compiled = both()
    with pytest.raises(AttributeError):
        compiled.layout = None
    compiled.eval()
    assert not compiled.training
    assert not compiled._model.training
    assert not compiled.blocks[0].training


class Profiled(nn.Linear):
    """Has an attribute of a name that compiled modules have, too."""

    profile = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.profile


def test_an_attribute_that_is_something_else_here_is_refused() -> None:
    model = Profiled(4, 4)
    compiled = zcompile.compile(model, backend="eager")
    before = compiled(torch.ones(3, 4))
    with pytest.raises(ParameterError, match="has an attribute 'profile', which is something else on the compiled"):
        compiled.profile = 4.0
    model.profile = 4.0
    torch.testing.assert_close(compiled(torch.ones(3, 4)), 2 * before)


@pytest.mark.parametrize("value", [nn.Linear(4, 4), nn.Parameter(torch.ones(4))])
def test_parameters_that_are_set_are_refused_by_name(value: object) -> None:
    plain, compiled = both()
    with pytest.raises(ParameterError, match=r"^head(\.weight)?: was put into the model after zcompile.compile"):
        compiled.head = value
    assert not hasattr(compiled, "head")
    equal(plain, compiled)


def replace_linear(model: Any) -> None:
    model.blocks[1].linear = nn.Linear(4, 4)


def append_block(model: Any) -> None:
    model.blocks.append(Block())


def add_parameter(model: Any) -> None:
    model.blocks[1].extra = nn.Parameter(torch.ones(4))


def parametrize(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.blocks[1].linear)


@pytest.mark.parametrize("change", [replace_linear, append_block, add_parameter, parametrize])
def test_parameters_put_into_a_submodule_are_refused_by_name_at_every_call(change: Callable[[Any], None]) -> None:
    _, compiled = both()
    change(compiled)
    for _ in range(2):
        with pytest.raises(ParameterError, match=r"^blocks\.\d\.[\w.]+: was (put into|replaced or removed)"):
            compiled(torch.ones(3, 4))


def test_a_parameter_that_is_taken_away_is_an_error_and_not_a_crash() -> None:
    _, compiled = both()
    del compiled.blocks[1].linear.weight
    with pytest.raises(ParameterError, match=r"^blocks\.1\.linear\.weight: was replaced or removed"):
        compiled(torch.ones(3, 4))


@pytest.mark.slow
def test_modules_that_change_places_do() -> None:
    plain, compiled = both()
    for model in (plain, compiled):
        blocks: Any = model.blocks
        blocks[0], blocks[2] = blocks[2], blocks[0]
    x = torch.ones(3, 4)
    assert torch.equal(plain(x), compiled(x))


# -- hooks ------------------------------------------------------------------------------------------------------------

Log = list[Any]
Register = Callable[[Any, Log], RemovableHandle]


def before_block(model: Any, log: Log) -> RemovableHandle:
    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] * 2,)

    handle: RemovableHandle = model.blocks[1].register_forward_pre_hook(hook)
    return handle


def behind_linear(model: Any, log: Log) -> RemovableHandle:
    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        log.append(result.detach().clone())
        return result * 3

    handle: RemovableHandle = model.blocks[1].linear.register_forward_hook(hook)
    return handle


def behind_model(model: Any, log: Log) -> RemovableHandle:
    handle: RemovableHandle = model.register_forward_hook(lambda module, args, result: result * 3)
    return handle


def of_backward(model: Any, log: Log) -> RemovableHandle:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        log.append(outputs[0].detach().clone())
        return (inputs[0] * 2,)

    handle: RemovableHandle = model.blocks[1].register_full_backward_hook(hook)
    return handle


def before_backward(model: Any, log: Log) -> RemovableHandle:
    def hook(module: nn.Module, outputs: Any) -> Any:
        log.append(outputs[0].detach().clone())
        return (outputs[0] * 2,)

    handle: RemovableHandle = model.blocks[1].register_full_backward_pre_hook(hook)
    return handle


def behind_every_module(model: Any, log: Log) -> RemovableHandle:
    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor | None:
        return result * 2 if isinstance(module, nn.Linear) else None

    return modules.register_module_forward_hook(hook)


HOOKS = [before_block, behind_linear, behind_model, of_backward, before_backward, behind_every_module]


@pytest.mark.filterwarnings("ignore:zcompile. graph break")
@diagonal("register, early", HOOKS, [False, True], pairs=False)
def test_hooks_run_until_they_are_removed(register: Register, early: bool) -> None:
    torch.manual_seed(0)
    plain = Model()
    logs: tuple[Log, Log] = ([], [])
    if early:
        compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    else:
        plain, compiled = both()
    handles = [register(model, log) for model, log in zip((plain, compiled._model), logs, strict=True)]
    try:
        equal(plain, compiled)
        equal(plain, compiled)
    finally:
        for handle in handles:
            handle.remove()
    equal(plain, compiled)
    assert len(logs[0]) == len(logs[1])
    for want, got in zip(*logs, strict=True):
        assert torch.equal(want, got)


@pytest.mark.slow
def test_a_hook_in_the_place_of_another_one_runs() -> None:
    plain, compiled = both()
    for factor in (2, 3, 2):

        def hook(module: nn.Module, args: Any, result: torch.Tensor, factor: int = factor) -> torch.Tensor:
            return result * factor

        handles = [model.blocks[0].register_forward_hook(hook) for model in (plain, compiled)]  # type: ignore[union-attr]
        equal(plain, compiled)
        for handle in handles:
            handle.remove()


@pytest.mark.slow
def test_a_function_that_is_registered_again_is_not_traced_again() -> None:
    _, compiled = both()
    seen = []
    for _ in range(12):
        handle = compiled.blocks[0].register_forward_hook(_tripled)
        compiled(torch.ones(3, 4))
        handle.remove()
        compiled(torch.ones(3, 4))
        seen.append(len(compiled.programs))
    assert seen[0] == seen[-1]


def _tripled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 3


@pytest.mark.slow
def test_hooks_of_the_compiled_module_itself_run() -> None:
    _, compiled = both()
    log: Log = []
    compiled.register_forward_pre_hook(lambda module, args: log.append("before"))
    compiled.register_forward_hook(lambda module, args, result: log.append("behind"))
    compiled.register_full_backward_hook(lambda module, inputs, outputs: log.append("backward"))
    compiled(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert log == ["before", "behind", "backward"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_late_hooks_and_attributes_count_on_several_ranks(rank: int, stage: int) -> None:
    """Gradients under a hook that was registered after a first step, less those of plain training."""
    plain, compiled = both(stage)
    for model in (plain, compiled):
        model.blocks[1].linear.register_forward_hook(_tripled)  # type: ignore[union-attr]
        model.scale = 2.0
        model(torch.ones(3, 4)).square().sum().backward()
    grads = {name: param.grad for name, param in compiled.named_parameters()}
    found = []
    for name, param in plain.named_parameters():
        got: Any = grads[name]
        got = got.full_tensor() if stage else got
        found.append(float((got - param.grad).abs().max()))
    assert max(found) < 1e-5


@pytest.mark.slow
def test_a_train_step_sees_late_hooks_and_attributes() -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    steps = zcompile.train_step(model, _loss, torch.optim.SGD(model.parameters(), 0.1), backend="eager")
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    x = torch.ones(3, 4)
    for step in range(3):
        if step:
            for one in (plain, steps.model):
                one.scale = 1.0 + step
                one.blocks[0].register_forward_hook(_tripled)  # type: ignore[union-attr]
        loss = _loss(plain, x)
        loss.backward()
        update(optimizer)
        assert torch.equal(steps(x), loss.detach())


def _loss(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()
