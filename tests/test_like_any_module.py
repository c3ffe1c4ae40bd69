"""A compiled model where people expect a module: conversions, containers, copies and files, compilers, counters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zcompile
from tests.cases import diagonal, quickly
from tests.ranks import on_ranks
from zcompile.torch_internals.dispatch import TorchDispatchMode
from zcompile.torch_internals.pytree import tree_map_only


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def made(**options: Any) -> Any:
    return zcompile.compile(plain(), backend="eager", **options)


X = torch.arange(12.0).reshape(3, 4) / 12


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to("cpu"),
        pytest.param(lambda m: m.to(torch.float32), marks=pytest.mark.slow),
        lambda m: m.to(torch.device("cpu"), torch.float32, non_blocking=True),
        pytest.param(lambda m: m.cpu(), marks=pytest.mark.slow),
        lambda m: m.float(),
        pytest.param(lambda m: m.to_empty(device="cpu"), marks=pytest.mark.slow),
    ],
)
def test_conversions_that_change_nothing_pass(convert: Callable[[Any], Any]) -> None:
    compiled = made()
    assert convert(compiled) is compiled
    assert torch.equal(compiled(X), plain()(X))


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta")])
def test_conversions_that_would_change_what_runs_are_refused(convert: Callable[[Any], Any]) -> None:
    compiled = made()
    compiled(X)
    with pytest.raises(zcompile.ParameterError, match=r"cannot be (moved|converted)"):
        convert(compiled)
    reference = plain()
    reference(X)
    assert torch.equal(compiled(X), reference(X))


@pytest.mark.slow
def test_it_is_of_the_models_class_and_a_container_as_the_model_is() -> None:
    compiled, model = made(), plain()
    assert isinstance(compiled, nn.Sequential)
    assert isinstance(compiled, zcompile.CompiledModule)
    assert len(compiled) == 4
    assert [type(one) for one in compiled] == [type(one) for one in model]
    assert torch.equal(compiled[:2](X), model[:2](X))
    assert torch.equal(compiled[3](torch.ones(8)), model[3](torch.ones(8)))
    single = zcompile.compile(nn.Linear(4, 2), backend="eager")
    assert bool(single)
    with pytest.raises(TypeError, match="has no len"):
        len(single)


@pytest.mark.slow
def test_a_module_that_is_replaced_is_noticed() -> None:
    compiled, model = made(), plain()
    compiled(X)
    for either in (compiled, model):
        either[2] = nn.Tanh()
    assert torch.equal(compiled(X), model(X))
    with pytest.raises(zcompile.ParameterError, match="was put into the model after"):
        compiled[2] = nn.Linear(8, 8)


@quickly("stage", range(4), [3])
@on_ranks(2)
def test_files_of_states_load_into_the_plain_model_or_are_not_written(rank: int, stage: int) -> None:
    compiled, found = made(stage=stage), []
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled(X).sum().backward()
    optimizer.step()
    for what in (compiled.state_dict(), {"model": copy.deepcopy(compiled.state_dict())}, optimizer.state_dict()):
        try:
            torch.save(what, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file)
            if "state" not in state:
                plain().load_state_dict(state.get("model", state))
            found.append("loads")
        except zcompile.StateError as error:
            found.append(str(error))
    shapes = tree_map_only(torch.Tensor, lambda value: tuple(value.shape), compiled.state_dict())
    assert shapes["0.weight"] == (8, 4)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not compiled.load_state_dict(compiled.state_dict(), assign=True).missing_keys
    for one in found:
        assert one == "loads" if stage == 0 else one.startswith("state_dict(): holds this rank's shards"), one


def test_values_are_loaded_with_assign_too() -> None:
    compiled, model = made(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    compiled.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(compiled(X), model(X))


def test_it_is_not_pickled() -> None:
    with pytest.raises(zcompile.ModelError, match="Sequential: is compiled, and cannot be pickled"):
        pickle.dumps(made())


@diagonal("how, warm", ["compile", "method", "around", "pieces"], [False, True])
def test_torch_compile_finds_it_compiled_already(how: str, warm: bool) -> None:
    model = plain()
    compiled: Any = zcompile.compile(model, backend="eager")
    ours, reference = nn.ModuleList([nn.Linear(4, 4)]), plain()
    first = ours[0]
    if warm:
        compiled(X)
        reference(X)
    match how:
        case "compile":
            call = torch.compile(compiled, backend="aot_eager")
            expected = reference(X)
        case "method":
            compiled.compile()
            call, expected = compiled, reference(X)
        case "around":
            call = torch.compile(lambda x: compiled(first(x)) * 2, backend="aot_eager")
            expected = reference(first(X)) * 2
        case _:
            call = torch.compile(lambda x: compiled[3](torch.relu(model[0](x))), backend="aot_eager")
            expected = reference[3](torch.relu(reference[0](X)))
    result = call(X)
    assert torch.equal(result, expected)
    result.sum().backward()
    expected.sum().backward()
    for name, parameter in compiled.named_parameters():
        theirs = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (theirs is None)
        if theirs is not None:
            assert torch.allclose(parameter.grad.full_tensor(), theirs, atol=1e-6)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
def test_dispatch_modes_see_what_is_computed(warm: bool) -> None:
    compiled, model, flops = made(), plain(), []
    for either in (compiled, model):
        if warm:
            either(X).sum().backward()
        with FlopCounterMode(display=False) as counter, Counting() as mode:
            either(X).sum().backward()
        flops.append(counter.get_total_flops())
        assert any("addmm" in name for name in mode.seen)
        assert not [one for one in ("mm", "addmm") if not any(one in name for name in mode.seen)]
    assert flops[0] == flops[1] > 0
    assert not compiled._tree.root.is_split  # counters' hooks for all modules break the graph while they count alone
    assert torch.equal(compiled(X), model(X))
