"""`torch.compile(model, backend=zcompile.backend(...))`: the same training from two changed lines."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zcompile
from tests import zoo
from tests.cases import quickly
from tests.compare import full
from tests.models import batch, make, update
from tests.ranks import Ranks, on_ranks
from tests.refusals import error_of
from zcompile import torch_backend
from zcompile.schedule.options import names_of
from zcompile.torch_backend import compiler
from zcompile.torch_internals.dynamo import BackendCompilerFailed, modules_given_to

Values = dict[str, torch.Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW would blow a gradient that is zero but for rounding up to a full step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def script(model: nn.Module, optimizer: torch.optim.Optimizer, called: nn.Module, kind: str, rank: int) -> Values:
    """A training script that knows nothing of zcompile: clipping, schedule, accumulation, zero_grad by the model."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        for micro in range(2):
            called(*batch(kind, rank, 10 * step + micro)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        (model if step % 2 else optimizer).zero_grad()
    shown = dict(model.named_parameters())
    return {name: full(value).clone() for name, value in model.state_dict().items() if name in shown}


def compiled_script(rank: int, kind: str, stage: int, backend: str, named: bool) -> list[str]:
    warnings.simplefilter("ignore")
    reference = make(kind)
    model = copy.deepcopy(reference) if rank == 0 else make(kind, seed=7)
    options: dict[str, Any] = {"stage": stage, "backend": backend}
    called = (
        torch.compile(model, backend="zcompile", options=options)
        if named
        else torch.compile(model, backend=zcompile.backend(**options))
    )
    got = script(model, sgd(model), called, kind, rank)
    want = script(reference, sgd(reference), DistributedDataParallel(reference), kind, rank)  # fmt: skip
    assert list(got) == list(want)
    return [name for name in want if not torch.allclose(got[name], want[name], rtol=1e-4, atol=1e-5)]


SCRIPTS = [("gpt", 0), ("gpt", 3), ("mlp", 0), ("mlp", 1), ("mlp", 2), ("mlp", 3), ("conv", 3)]


@quickly("kind, stage", SCRIPTS, [("mlp", 0)], slow=[("gpt", 3), ("conv", 3)])
def test_a_script_trains_as_under_ddp(ranks: Ranks, kind: str, stage: int) -> None:
    assert ranks.run(2, compiled_script, kind, stage, "eager", False) == [[], []]


@quickly("backend", ["eager", "inductor"], [], slow=["eager"])
def test_by_name(ranks: Ranks, backend: str) -> None:
    assert ranks.run(2, compiled_script, "mlp", 3, backend, True) == [[], []]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(6, 6) / 3), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(x) @ self.weight)


class Looped(nn.Module):
    """A graph break in a loop: Dynamo compiles one block and runs it for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            print(end="")
        return x.square().mean()


@pytest.mark.slow
@quickly("stage", [0, 3], [3])
@on_ranks(2)
def test_equal_blocks_that_share_a_graph_keep_parameters_of_their_own(rank: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    reference = Looped()
    model = copy.deepcopy(reference)
    called = torch.compile(model, backend=zcompile.backend(stage=stage, backend="eager"))
    differing = []
    for step in range(2):
        inputs = [torch.randn(3 + step, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        called(inputs[rank]).backward()
        torch.stack([reference(x) for x in inputs]).mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            if not torch.allclose(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6):
                differing.append(f"step {step} {name}")
    return differing


class Piecewise(nn.Module):
    """Each layer in a graph of its own: the later ones come when the first has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        print(end="")
        x = torch.tanh(self.layers[1](x))
        print(end="")
        return self.layers[2](x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_graphs_that_come_while_the_model_runs(rank: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    reference = Piecewise()
    model = copy.deepcopy(reference)
    called = torch.compile(model, backend=zcompile.backend(stage=stage, backend="eager"))
    trained, wanted = sgd(model), sgd(reference)
    for step in range(3):
        inputs = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        called(inputs[rank]).backward()
        torch.stack([reference(x) for x in inputs]).mean().backward()
        update(trained, wanted)
    state = model.state_dict()
    pairs = {name: (full(state[name]), param) for name, param in reference.named_parameters()}
    return [name for name, (ours, theirs) in pairs.items() if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)]


@on_ranks(2)
def test_clipping_gradients_that_are_sharded_in_part_says_why_it_cannot(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    called = torch.compile(model[0], backend=zcompile.backend(stage=3, backend="eager"))
    model[1](called(torch.ones(2, 4))).sum().backward()
    message = error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), zcompile.ParameterError)
    assert message.startswith("gradients: are sharded in part")


def compiled(kind: str = "mlp", **options: Any) -> tuple[nn.Module, nn.Module]:
    model = make(kind)
    return model, torch.compile(model, backend=zcompile.backend(backend="eager", **options))


def test_state_goes_out_and_in() -> None:
    model, called = compiled()
    before = {name: value.clone() for name, value in make("mlp").state_dict().items()}
    called(*batch("mlp", 0, 0)).backward()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) and torch.equal(full(value), before[name]) for name, value in state.items())
    other = make("mlp", seed=3).state_dict()
    model.load_state_dict(other)
    assert all(torch.equal(full(value), other[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(called(*batch("mlp", 0, 0)), make("mlp", seed=3)(*batch("mlp", 0, 0)))


@pytest.mark.slow
def test_full_memory_is_given_up_and_optimizer_state_is_sharded() -> None:
    model, called = compiled("gpt")
    optimizer = torch.optim.AdamW(model.parameters())
    called(*batch("gpt", 0, 0)).backward()
    optimizer.step()
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in model.parameters()}
    assert sum(storages.values()) <= max(4 * param.numel() for param in model.parameters())
    assert all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())


@pytest.mark.slow
def test_low_precision() -> None:
    model, called = compiled("gpt", dtype=torch.bfloat16)
    called(*batch("gpt", 0, 0)).backward()
    reference = make("gpt")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = reference(*batch("gpt", 0, 0))
    loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        assert (full(ours.grad) - theirs.grad).norm() < 0.03 * theirs.grad.norm() + 1e-6


def test_dynamic_shapes_and_inference() -> None:
    called = compiled()[1]
    reference = make("mlp")
    with torch.no_grad():
        for size in (2, 3, 5, 7):
            x, y = batch("mlp", 0, 0, size)
            torch.testing.assert_close(called(x, y), reference(x, y))


class Reads(nn.Module):
    """What `read` does of a parameter is run as plain Python, between graphs."""

    def __init__(self, read: Callable[[nn.Parameter], Any] = torch.sum) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor, outside: bool = True) -> torch.Tensor:
        y = self.linear(x)
        return y.sum() + self.outside() if outside else y.sum()

    @torch.compiler.disable
    def outside(self) -> Any:
        return self.read(self.linear.weight)


def normalized_again(weight: torch.Tensor) -> torch.Tensor:
    x = torch.randn(2, 16, requires_grad=True)
    normalized = partial(nn.functional.group_norm, num_groups=2, weight=weight.flatten())
    return checkpoint(normalized, x, use_reentrant=False).sum()


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": torch.sum,
    "operator": lambda weight: (weight + 1).sum(),
    "comparison": lambda weight: int((weight > 0).sum()),
    "number": lambda weight: weight[0, 0].item(),
    "iteration": lambda weight: sum(row.sum() for row in weight),
    "list": lambda weight: torch.stack([weight, weight]).sum(),
    "data": lambda weight: weight.data.sum(),
    "transposed": lambda weight: weight.T.sum(),
    "operation": lambda weight: torch.ops.aten.sum.default(weight),
    "in place": lambda weight: torch.zeros(4, 4).add_(weight).sum(),
    "out": lambda weight: torch.sum(torch.zeros(1), 0, out=weight),
    "numpy": lambda weight: float(numpy.asarray(weight).sum()),
    "list of numbers": lambda weight: sum(map(sum, weight.tolist())),
    "text": lambda weight: float(f"{weight[0, 0]:.3f}"),
    "checkpoint": normalized_again,
    "pickle": lambda weight: len(pickle.dumps(weight)),
    "dlpack": lambda weight: torch.from_dlpack(weight).sum(),
    "foreach": lambda weight: torch._foreach_norm([weight])[0],
}


@pytest.mark.parametrize("grad", [True, False])
def test_a_parameter_read_between_graphs_is_refused(grad: bool) -> None:
    for name, read in READS.items():
        torch.compiler.reset()  # else recompile_limit is reached
        model = Reads(read)
        called = torch.compile(model, backend=zcompile.backend(backend="eager"))
        message = r"linear\.weight: was read outside of compiled graphs"
        with torch.set_grad_enabled(grad), pytest.raises(zcompile.ParameterError, match=message):
            pytest.fail(f"{name}: {called(torch.randn(2, 4))}")


def test_what_reads_no_values_of_a_parameter_between_graphs_is_not_refused() -> None:
    def read(weight: nn.Parameter) -> int:
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        assert weight in {weight}
        assert repr(weight) == "GraphParameter('linear.weight', [4, 4])"
        assert torch.equal(torch.zeros_like(weight), weight.new_zeros(4, 4))
        assert type(torch.ones_like(weight)) is torch.Tensor
        return weight.dim() + weight.numel() + len(weight) + weight.shape[0] + weight.dtype.itemsize

    model = Reads(read)
    plain, called = copy.deepcopy(model), torch.compile(model, backend=zcompile.backend(backend="eager"))
    plain.read = lambda weight: 2 + 16 + 4 + 4 + 4
    x = torch.randn(2, 4)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(called(x), plain(x))
        called(x).backward()
    plain(x).backward()
    torch.testing.assert_close(full(model.linear.weight.grad), 2 * plain.linear.weight.grad)


def test_parameters_that_have_no_memory_are_traced_as_plain_ones() -> None:
    """Once they are of a class of ours; one graph, and one compilation, for what is the same."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True))

    def attended(x: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(model[1], model[0](x), use_reentrant=False)
        return model[2](inside, inside, inside)[0] + model[0].bias * model[0].weight.T.sum()

    plain = copy.deepcopy(model)
    backend = zcompile.backend(backend="eager")
    x = torch.randn(2, 3, 4)
    called = torch.compile(attended, backend=backend, fullgraph=True)
    called(x).sum().backward()
    model.requires_grad_(False).requires_grad_(True)
    model.eval()  # so that it is compiled once more
    called(x).sum().backward()
    assert len({program.text() for program in backend.programs}) == 2
    gradients = {name: full(param.grad) for name, param in model.named_parameters()}
    model = plain.eval()
    attended(x).sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(gradients[name], 2 * param.grad)


def test_a_model_is_converted_to_what_it_is_and_to_nothing_else() -> None:
    model = nn.Linear(4, 4)
    called = torch.compile(model, backend=zcompile.backend(backend="eager"))
    called(torch.ones(1, 4)).sum().backward()
    gradient = model.weight.grad
    assert model.to("cpu", torch.float32).cpu().float() is model
    assert model.weight.grad is gradient
    for convert in (nn.Module.half, nn.Module.double, lambda one: one.to("meta"), lambda one: one.weight.to(copy=True)):
        with pytest.raises(zcompile.ParameterError, match="weight: cannot be converted, copied or moved"):
            convert(model)
    called(torch.ones(1, 4)).sum().backward()
    assert torch.equal(full(model.weight.grad), torch.full((4, 4), 2.0))


def test_a_parameter_stays_one_of_its_class() -> None:
    class Scale(nn.Parameter):
        pass

    model = nn.Linear(4, 4, bias=False)
    model.weight = Scale(model.weight.detach())
    torch.compile(model, backend=zcompile.backend(backend="eager"))(torch.ones(1, 4)).sum().backward()
    assert isinstance(model.weight, Scale)
    assert isinstance(model.weight.grad, DTensor)


class Twice(nn.Module):
    """Three graphs: one of each layer, and one of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        print(end="")
        x = self.second(x)
        print(end="")
        return self.second(self.first(x))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Twice(), Twice()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(("stage", "apart"), [(0, False), (3, False), (3, True)])
@on_ranks(2)
def test_several_graphs_by_name_under_one_optimizer(rank: int, stage: int, apart: bool) -> None:
    warnings.simplefilter("ignore")
    """One optimizer holds the parameters of all graphs, and of both backends where two modules are compiled `apart`.

    With other options: torch takes what is of one name and of equal options for one backend.
    """
    model, plain = (Apart() if apart else Twice() for _ in range(2))
    for number, module in enumerate([model.first, model.second] if apart else [model]):
        module.compile(backend="zcompile", options={"backend": "eager", "stage": stage - number})
    reference = DistributedDataParallel(plain)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        update(*optimizers)
    state = model.state_dict()
    found = [torch.allclose(full(state[name]), value, atol=1e-5) for name, value in plain.state_dict().items()]
    assert found
    assert all(found)


def test_what_a_module_within_another_has_for_a_backend_stays_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inside = torch.compile(model[0], backend="zcompile", options={"backend": "eager", "stage": 2})
    x = torch.ones(2, 4)
    inside(x)
    model.forward = lambda x: model[1](x)
    torch.compile(model, backend="zcompile", options={"backend": "eager", "stage": 3})(x)
    with torch.no_grad():  # compiled once more
        inside(x)
    assert model[0].weight.zcompile_backend().options.stage == 2
    assert model[1].weight.zcompile_backend().options.stage == 3


def test_a_graph_over_parameters_of_two_backends_is_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    for layer in (first, second):
        torch.compile(layer, backend=zcompile.backend(backend="eager"))(torch.ones(2, 4))
    called = torch.compile(lambda x: second(first(x)), backend=zcompile.backend(backend="eager"))
    with pytest.raises(BackendCompilerFailed, match=r"ModelError: weight: was sharded by another backend"):
        called(torch.ones(2, 4))


@pytest.mark.slow
@on_ranks(2)
def test_a_gradient_that_no_graph_has_averaged_is_refused(rank: int) -> None:
    """The frame of the loop is skipped, and with it the reading of `scale`; blocks are compiled."""
    model = Looped()
    model.blocks.append(nn.Linear(6, 6))
    called = torch.compile(model, backend=zcompile.backend(backend="eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called(torch.randn(2, 6)).backward()
    message = error_of(optimizer.step, zcompile.OptimizerError)
    assert "is in no compiled graph, so its gradient is not averaged over the ranks" in message


class Recurrent(nn.Module):
    """Dynamo compiles nothing of an LSTM; of the head it does."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6)
        self.head = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(x)[0])
        return out


def through_module(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def by_method(model: nn.Module, backend: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


GIVEN = {given.__name__: given for given in (through_module, in_place, by_method)}


def step_error(optimizer: torch.optim.Optimizer) -> str:
    return error_of(optimizer.step, zcompile.OptimizerError)


def nothing_compiled(rank: int, given: str, stage: int) -> list[str]:
    model = nn.LSTM(4, 4)
    before = [param.detach().clone() for param in model.parameters()]
    backend = zcompile.backend(stage=stage, backend="eager")
    called, optimizer = GIVEN[given](model, backend), sgd(model)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    errors = [step_error(sgd(other))]
    called(torch.randn(2, 3, 4))[0].sum().backward()
    errors += [step_error(optimizer), step_error(optimizer)]
    unchanged = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return [*errors, str(unchanged)]


@pytest.mark.parametrize(
    ("given", "stage"), [("through_module", 3), ("through_module", 0), ("in_place", 3), ("by_method", 3)]
)
def test_a_module_of_which_nothing_is_compiled_is_refused_by_the_step(ranks: Ranks, given: str, stage: int) -> None:
    for other, first, second, unchanged in ranks.run(2, nothing_compiled, given, stage):
        assert other == "", "an optimizer over something else steps as before"
        assert first == second
        assert first.startswith(
            "weight_ih_l0: is in no compiled graph, so its gradient is not averaged over the ranks.\n  Fix: use"
        )
        assert "zcompile.compile" in first
        assert unchanged == "True"


@on_ranks(2)
def test_a_backend_that_is_given_by_name_and_never_called_refuses_the_step(rank: int) -> None:
    model = nn.LSTM(4, 4)
    called = torch.compile(model, backend="zcompile")
    called(torch.randn(2, 3, 4))[0].sum().backward()
    message = step_error(sgd(called))
    assert message.startswith("weight_ih_l0: is in no compiled graph")


def test_alone_a_module_of_which_nothing_is_compiled_trains_as_before(ranks: Ranks) -> None:
    ((other, first, second, unchanged),) = ranks.run(1, nothing_compiled, "through_module", 3)
    assert (other, first, second, unchanged) == ("", "", "", "False")


@pytest.mark.parametrize("named", [False, True])
@on_ranks(2)
def test_an_optimizer_over_what_was_left_out_of_graphs_alone_is_refused(rank: int, named: bool) -> None:
    model = Recurrent()
    options: Any = {"backend": "eager"}
    backend: Any = "zcompile" if named else zcompile.backend(**options)
    called = torch.compile(model, backend=backend, **({"options": options} if named else {}))
    head, lstm = sgd(model.head), sgd(model.lstm)
    called(torch.randn(2, 3, 4)).sum().backward()
    assert step_error(head) == ""
    assert step_error(lstm).startswith("lstm.weight_ih_l0: is in no compiled graph")


@on_ranks(2)
def test_compiled_modules_are_looked_for_once_an_optimizer(rank: int) -> None:
    other, count = nn.Linear(2, 2), 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return modules_given_to(*args)

    backend = zcompile.backend(backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "modules_given_to", counted)
        optimizer = sgd(other)
        counts = []
        for step in range(4):
            if step:  # without gradients there is nothing to ask
                other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            counts.append(count)
    del backend
    none, first, second, third = counts
    assert none == 0
    assert 0 < first == second == third


def test_looking_for_compiled_modules_does_not_disturb_other_threads() -> None:
    """Whoever holds all live objects holds the tuples that threads are building, which end with a SystemError then."""
    errors, over = list[BaseException](), threading.Event()

    def build() -> None:
        try:
            while not over.is_set():
                tuple(number for number in range(40))
        except SystemError as error:
            errors.append(error)

    threads, interval = [threading.Thread(target=build) for _ in range(2)], sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for _ in range(10):
            list(modules_given_to(()))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for thread in threads:
            thread.join()
    assert not errors


def test_a_second_and_a_stale_backward_are_refused() -> None:
    model, called = compiled()
    loss = called(*batch("mlp", 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    with pytest.raises((zcompile.BackwardError, RuntimeError), match=r"second time|freed"):
        loss.backward()
    stale = called(*batch("mlp", 0, 1))
    optimizer.step()
    with pytest.raises(zcompile.BackwardError, match="parameters changed"):
        stale.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 7}, "7 is not a ZeRO stage"),
        ({"backend": "eagre"}, "did you mean 'eager'"),
        ({"dtype": int}, "is not a dtype"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zcompile.OptionError, match=message):
        zcompile.backend(**options)


def test_an_unknown_option_by_name() -> None:
    called = torch.compile(make("mlp"), backend="zcompile", options={"stages": 3})
    with pytest.raises(Exception, match=r"options\['stages'\]: is not an option of.*\n.*did you mean 'stage'"):
        called(*batch("mlp", 0, 0))


def test_options_of_modules_by_name() -> None:
    known = names_of(zcompile.backend, zcompile.BackendOptions)
    for option in sorted(names_of(zcompile.compile, zcompile.CompileOptions) - known):
        with pytest.raises(
            zcompile.OptionError, match=rf"options\['{option}'\]: is an option of zcompile.compile only"
        ):
            compiler(torch.fx.symbolic_trace(torch.nn.Identity()), [], options={option: None})


@pytest.mark.slow
def test_explain_and_programs() -> None:
    made = zcompile.backend(backend="eager")
    with pytest.raises(zcompile.ModelError, match="has compiled nothing yet"):
        made.explain()
    model = make("gpt")
    torch.compile(model, backend=made)(*batch("gpt", 0, 0)).backward()
    assert "blocks.1" in made.explain()
    assert [program.name for program in made.programs] == ["forward", "backward"]
    assert set(made.shards()) == set(dict(model.named_parameters()))


@pytest.mark.slow
def test_parameters_are_traced_with_the_sizes_that_they_have() -> None:
    """Sizes that vary would be guarded on, and Dynamo could not say whose they are."""
    plain = zoo.make("resnet")
    made = zoo.make("resnet")
    backend = zcompile.backend(backend="eager")
    losses = [
        zoo.loss("resnet", model, zoo.batch("resnet", 0, 0)) for model in (plain, torch.compile(made, backend=backend))
    ]
    assert losses[0].item() == losses[1].item()


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalization_keeps_its_dtype_in_mixed_precision(training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train(training)
    plain = copy.deepcopy(model)
    backend = zcompile.backend(dtype=torch.bfloat16, backend="eager")
    x = torch.randn(6, 4)
    torch.compile(model, backend=backend)(x).float().square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        plain(x).float().square().sum().backward()
    assert backend.engine.runtime.layout.param("1.weight").compute_dtype is None
    for ours, theirs in zip(backend.shards().values(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.slow
@on_ranks(2)
def test_a_graph_without_parameters_is_explained_and_dumped(rank: int, tmp_path: Path) -> None:
    trained, plain = nn.Linear(4, 4), nn.Tanh()
    made = zcompile.backend(backend="eager")
    torch.compile(trained, backend=made)(torch.ones(2, 4)).sum().backward()
    torch.compile(plain, backend=made)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    made.dump(str(tmp_path))
    text = made.explain()
    assert "volume: each rank sends 0 B; this program has no parameters" in text


def test_steps_of_a_backend_are_profiled_for_its_dump(tmp_path: Path) -> None:
    model, made = nn.Linear(4, 4), zcompile.backend(backend="eager")
    compiled, optimizer = torch.compile(model, backend=made), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zcompile.ModelError, match="has compiled nothing yet"), made.profile():
        pass
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    without = made.dump(tmp_path / "before", all_ranks=True) / "rank_0" / "trace.json"
    with made.profile():
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    measured = made.dump(tmp_path / "after", all_ranks=True) / "rank_0" / "trace.json"
    assert len(measured.read_text()) > len(without.read_text()), "its steps stand beside the predicted ones"


def test_an_optimizer_over_more_than_the_model_steps_the_shards() -> None:
    backend = zcompile.backend(stage=3, backend="eager")
    model, extra = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    before = model.weight.detach().clone()
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(4, 3)).sum().backward()
    torch.optim.SGD([*model.parameters(), extra], lr=0.5).step()
    assert torch.allclose(full(backend.shards()["weight"]), before - 0.5 * 4)
    assert torch.equal(extra, torch.ones(2)), "it has no gradient"


class ByMode(nn.Module):
    """Compiled anew for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(4, 4), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * len(self.mode)


def test_what_torch_does_not_compile_any_more_is_refused() -> None:
    model, x = ByMode(), torch.ones(2, 4)
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=zcompile.backend(backend="eager"))
    for number in range(8):
        plain.mode = model.mode = f"{number}"
        with torch.no_grad():
            assert torch.equal(compiled(x), plain(x))
    model.mode = "more"
    with torch.no_grad(), pytest.raises(zcompile.ParameterError, match=r"linear\..*outside(.|\n)*recompile_limit"):
        assert torch.equal(compiled(x), plain(x)), "torch's recompile_limit is 8, and here it is not reached"
