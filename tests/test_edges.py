"""Where a training loop leaves the beaten path: what plain PyTorch does, or a typed error; never another number."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import diagonal
from tests.compare import gradients
from tests.models import batch, make
from tests.ranks import on_ranks, on_threads
from tests.refusals import error_of

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.ones(2, 4)
Gradients = dict[str, torch.Tensor | None]


def assert_as_plain(model: nn.Module, use: Callable[[nn.Module], Any], **options: Any) -> None:
    """`use` leaves the same gradients on the compiled model as on the plain one."""
    compiled = zcompile.compile(copy.deepcopy(model), backend="eager", **options)
    use(model)
    use(compiled)
    got, want = gradients(compiled), gradients(model)
    for name, grad in want.items():
        assert (got[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(got[name], grad, msg=name)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Own(nn.Module):
    """Breaks the graph, has a parameter of its own, and calls a submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.linear = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.linear(x) @ self.weight


# -- gradients that were not asked for, or asked for in another way ----------------------------------------------------


def grad_of_the_input(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    loss = model(x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def backward_into_the_input(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    model(x).sum().backward(inputs=[x])


def retained_after_a_plain_one(model: nn.Module) -> None:
    model(X).sum().backward()
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@diagonal("use, made", [grad_of_the_input, backward_into_the_input, retained_after_a_plain_one], [net, Own])
def test_ways_to_ask_for_gradients(made: Callable[[], nn.Module], use: Callable[[nn.Module], None]) -> None:
    assert_as_plain(made(), use)


ASKED: dict[str, Callable[[torch.Tensor, list[nn.Parameter]], Any]] = {
    "all": lambda loss, params: torch.autograd.grad(loss, params),
    "unused allowed": lambda loss, params: torch.autograd.grad(loss, params, allow_unused=True),
    "zeros allowed": lambda loss, params: torch.autograd.grad(loss, params[-1:], materialize_grads=True),
    "one of them": lambda loss, params: torch.autograd.grad(loss, params[1], allow_unused=True),
}
ALONE = {"in .grad": lambda loss, params: loss.backward(inputs=params[:1])}


@diagonal("made, stage, asked", [net, Own], [0, 1, 3], ASKED)
def test_gradients_of_parameters_alone_are_refused(made: Callable[[], nn.Module], stage: int, asked: str) -> None:
    compiled = zcompile.compile(made(), stage=stage, backend="eager")
    with pytest.raises(zcompile.BackwardError, match=r"(weight|bias): torch\.autograd\.grad.* goes only to \.grad"):
        ASKED[asked](compiled(X).sum(), list(compiled.parameters())[1:])


@pytest.mark.parametrize("asked", ASKED | ALONE)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_alone_are_refused_of_what_torch_compile_shards(stage: int, asked: str) -> None:
    compiled = torch.compile(net(), backend=zcompile.backend(stage=stage, backend="eager"))
    loss = compiled(X).sum()
    with pytest.raises(zcompile.BackwardError, match=r"goes only to \.grad"):
        (ASKED | ALONE)[asked](loss, list(compiled.parameters()))


def test_gradients_into_some_parameters_alone_are_refused() -> None:
    compiled = zcompile.compile(net(), stage=0, backend="eager")
    with pytest.raises(zcompile.BackwardError, match=r"goes only to \.grad"):
        compiled(X).sum().backward(inputs=list(compiled.parameters())[1:2])


def test_a_gradient_that_comes_past_the_model_is_given() -> None:
    compiled = zcompile.compile(net(), backend="eager")
    first, second = list(compiled.parameters())[:2]
    compiled(X).sum().backward()
    found, none = torch.autograd.grad(first.full_tensor().square().sum(), [first, second], allow_unused=True)
    torch.testing.assert_close(found.full_tensor(), 2 * first.detach().full_tensor())
    assert none is None
    with pytest.raises(zcompile.BackwardError, match=r"goes only to \.grad"):
        torch.autograd.grad(compiled(X).sum() + first.full_tensor().sum(), first)


class Force(nn.Module):
    """A forward that differentiates: an interatomic force field."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x).sum()
        (force,) = torch.autograd.grad(energy, x, retain_graph=True)
        return energy + 0 * force.sum()


def test_a_forward_that_differentiates() -> None:
    assert_as_plain(Force(), lambda model: model(X))
    assert_as_plain(Force(), lambda model: model(X).backward())


def test_gradients_of_gradients_are_refused() -> None:
    compiled = zcompile.compile(net(), backend="eager")
    with pytest.raises(zcompile.BackwardError, match="no gradients of gradients"):
        compiled(X).sum().backward(create_graph=True)


# -- models whose graph breaks -----------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = Own(), nn.Linear(4, 1), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_broken_module_under_a_checkpoint(reentrant: bool) -> None:
    assert_as_plain(Outer(reentrant), lambda model: model(X.clone().requires_grad_()).sum().backward())


@pytest.mark.slow
def test_a_submodule_of_a_broken_model_called_by_itself() -> None:
    def use(model: nn.Module) -> None:
        model(X.clone().requires_grad_()).sum().backward()
        model.inner(X).sum().backward()

    assert_as_plain(Outer(False), use)


def behind(node: Any, seen: set[Any]) -> set[Any]:
    if node is not None and node not in seen:
        seen.add(node)
        for following, _ in node.next_functions:
            behind(following, seen)
    return seen


def has_memory(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= needed


def frozen_at_the_bottom() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "by", [zcompile.compile, lambda model, **k: torch.compile(model, backend=zcompile.backend(**k))]
)
@pytest.mark.parametrize("made", [frozen_at_the_bottom, Own])
def test_what_lies_behind_a_result_can_be_read(stage: int, by: Any, made: Callable[[], nn.Module]) -> None:
    compiled = by(made(), stage=stage, backend="eager")
    for _ in range(2):
        result = compiled(X.clone().requires_grad_())
        nodes = behind(result.grad_fn, set())
        held = [node.variable for node in nodes if hasattr(node, "variable")]
        held += [tensor for node in nodes for tensor in getattr(node, "saved_tensors", ())]
        held += [getattr(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_")]
        assert all(has_memory(one) for one in held if isinstance(one, torch.Tensor))
        result.sum().backward()


@dataclass(slots=True)
class Slotted:
    loss: torch.Tensor


class Hides(Own):
    def forward(self, x: torch.Tensor) -> Slotted:
        return Slotted(super().forward(x).sum())


def test_a_result_with_slots() -> None:
    assert_as_plain(Hides(), lambda model: model(X).loss.backward())


class Returns(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return self.weight


def test_a_broken_model_that_returns_its_parameter() -> None:
    compiled = zcompile.compile(Returns(), backend="eager")
    with pytest.raises(zcompile.CaptureError, match=r"^weight: the model returns this parameter"):
        compiled(X)


class Recursive(Own):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


def test_a_module_that_calls_itself() -> None:
    assert_as_plain(Recursive(), lambda model: model(X).sum().backward())


@pytest.mark.slow
def test_the_backward_of_another_model_is_none_of_its_business() -> None:
    generator, critic = (zcompile.compile(made, backend="eager") for made in (nn.Linear(4, 4), Own()))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    fake = generator(X)
    critic(fake).sum().backward(retain_graph=True)
    optimizer.step()
    fake.sum().backward()


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_closure_that_synchronises_and_one_that_does_not() -> None:
    compiled = zcompile.compile(net(), stage=1, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)

    def closure(hold: bool = False) -> torch.Tensor:
        with compiled.no_sync():
            compiled(X).sum().backward()
        if not hold:
            compiled(X).sum().backward()
        return torch.tensor(0.0)

    optimizer.step(closure)
    optimizer.zero_grad()
    with pytest.raises(zcompile.OptimizerError, match="held back by no_sync"):
        optimizer.step(lambda: closure(hold=True))


def test_a_gradient_from_before_compile_is_refused() -> None:
    model = net()
    model(X).sum().backward()
    with pytest.raises(zcompile.ModelError, match=r"0\.weight: has a gradient, which would be lost"):
        zcompile.compile(model, backend="eager")


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("change", ["zero_", "mul_"])
def test_gradients_changed_in_place_between_micro_batches(stage: int, change: str) -> None:
    def use(model: nn.Module) -> None:
        model(X).sum().backward()
        for _ in range(1) if not hasattr(model, "no_sync") else ():
            (2 * model(X)).sum().backward()
        if hasattr(model, "no_sync"):
            with model.no_sync():
                (2 * model(X)).sum().backward()
        for param in model.parameters():
            getattr(param.grad, change)(*([] if change == "zero_" else [3.0]))
        model(X).sum().backward()

    assert_as_plain(net(), use, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hooks_after_accumulation_run_once_with_the_gradient(stage: int) -> None:
    compiled = zcompile.compile(net(), stage=stage, backend="eager")
    seen: list[bool] = []
    for param in compiled.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    compiled(X).sum().backward()
    assert seen == [True] * 4


def test_copies_of_parameters_are_whole() -> None:
    compiled = zcompile.compile(net(), backend="eager")
    for param in compiled.parameters():
        copied = copy.deepcopy(param)
        assert torch.equal(copied.full_tensor(), param.full_tensor())
        assert copied.to_local().data_ptr() != param.to_local().data_ptr()
    assert "Sequential" in repr(compiled)
    repr(compiled._tree)


@pytest.mark.parametrize("made", [net, Own])
def test_a_model_that_nobody_holds_is_gone_and_its_loss_still_has_a_backward(made: Callable[[], nn.Module]) -> None:
    def call() -> tuple[torch.Tensor, list[nn.Parameter], weakref.ref[Any]]:
        compiled = zcompile.compile(made(), backend="eager")
        return compiled(X).sum(), list(compiled.parameters()), weakref.ref(compiled._engine)

    loss, params, engine = call()
    gc.collect()
    loss.backward()
    assert all(param.grad is not None for param in params)
    del loss
    gc.collect()
    assert engine() is None


# -- ranks that differ -------------------------------------------------------------------------------------------------


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x).sum()


@on_ranks(2)
def test_ranks_that_run_different_programs_are_told(rank: int) -> None:
    """Two programs that both ranks know, run crosswise: their collectives have equal sizes."""
    compiled = zcompile.compile(Chooses(), backend="eager")
    for which in (0, 1):
        compiled(X, which).backward()
    before = [param.grad.to_local().clone() for param in compiled.parameters()]
    message = error_of(lambda: compiled(X, rank).backward(), zcompile.AgreementError)
    after = [param.grad.to_local() for param in compiled.parameters()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert message.startswith("the ranks are out of step: rank 0: run ")
    assert "rank 1: run" in message


@pytest.mark.parametrize("stage", [0, 3])
@on_threads(2)
def test_ranks_with_different_new_programs_are_told_where_they_differ(rank: int, stage: int) -> None:
    """Stage 0 communicates in the backward alone, and compares programs there."""
    compiled = zcompile.compile(Chooses(), stage=stage, backend="eager", units=["experts.0", "experts.1"])
    message = error_of(lambda: compiled(X, rank).backward(), zcompile.AgreementError)
    assert message.startswith("the program's communications: message 1 over dp differs: rank 0: ")
    assert all(param.grad is None for param in compiled.parameters())


# -- through torch.compile ---------------------------------------------------------------------------------------------


def compiled_by_torch(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=zcompile.backend(backend="eager", **options))


def test_frozen_parameters_and_other_optimizers() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    called = compiled_by_torch(model)
    called(X).sum().backward()
    assert model[0].weight.grad is None
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=0.1).step()


def test_a_gradient_put_in_place_is_the_shards() -> None:
    model, plain = net(), net()
    called = compiled_by_torch(model)
    for one, params in ((called, model), (plain, plain)):
        optimizer = torch.optim.SGD(params.parameters(), lr=0.1)
        one(X).sum().backward()
        for param in params.parameters():
            param.grad = param.grad / 2
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_on_the_users_parameters(stage: int) -> None:
    model = net()
    seen: list[bool] = []
    called = compiled_by_torch(model, stage=stage)
    called(X)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    called(X).sum().backward()
    assert seen == [True] * 4
    model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(zcompile.ParameterError, match="register_hook, which would not run"):
        called(X)


def test_a_write_to_a_parameter_without_memory() -> None:
    model = net()
    called = compiled_by_torch(model)
    called(X)
    told = pytest.raises(zcompile.ParameterError, match=r"0\.weight: was written to, where it has no memory")
    with torch.no_grad(), told:
        model[0].weight.zero_()
    with told:
        model[0].weight.data = torch.zeros(1)


def test_a_step_whose_closure_calls_the_model_first() -> None:
    model, plain = net(), net()
    called = compiled_by_torch(model)
    for one, params in ((called, model), (plain, plain)):
        optimizer = torch.optim.SGD(params.parameters(), lr=0.1)

        def closure(one: Any = one, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = one(X).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])


def test_optimizer_state_loads_again(tmp_path: Any) -> None:
    model = net()
    called = compiled_by_torch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    called(X).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = torch.optim.AdamW(model.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    called(X).sum().backward()
    again.step()
    assert len(again.state) == 4


def test_a_model_without_memory_is_not_copied() -> None:
    model = make("mlp")
    compiled_by_torch(model)(*batch("mlp", 0, 0))
    with pytest.raises(zcompile.ParameterError, match="cannot be copied"):
        copy.deepcopy(model)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.norm, x, use_reentrant=False)).square().sum()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batch_normalization_within_a_checkpoint_reads_the_statistics_of_before(backend: str) -> None:
    torch.manual_seed(0)
    plain = Normalized()
    traced = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    compiled = zcompile.compile(copy.deepcopy(plain), backend=backend)
    for step in range(2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for model in (plain, traced, compiled):
            model(x).backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
    # Eager counts a batch twice, as it computes it twice.
    torch.testing.assert_close(compiled.norm.running_mean, traced._orig_mod.norm.running_mean)


class Bags(nn.Module):
    """Embeddings that ask for sparse gradients: modules and functions."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.bag = nn.Embedding(10, 8, sparse=sparse), nn.EmbeddingBag(10, 8, sparse=sparse)
        self.weight, self.sparse = nn.Parameter(torch.randn(10, 8)), sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called = nn.functional.embedding(x, self.weight, sparse=self.sparse)
        return (self.one(x).sum(1) + self.bag(x) * called.sum(1)).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sparse_gradients_are_made_dense_with_a_warning_that_names_them(stage: int, backend: str) -> None:
    tokens, reference = torch.arange(12).view(4, 3) % 7, Bags(sparse=False)
    reference(tokens).backward()
    compiled = zcompile.compile(Bags(sparse=True), stage=stage, backend=backend)
    with pytest.warns(UserWarning, match="sparse=True") as caught:
        compiled(tokens).backward()
    said = [str(one.message) for one in caught if "sparse=True" in str(one.message)]
    assert sorted(text.partition(":")[0] for text in said) == ["bag.weight", "one.weight", "weight"]
    for name, param in reference.named_parameters():
        found = dict(compiled.named_parameters())[name].grad
        torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, param.grad)


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.detach().cpu().numpy(),
        lambda p: p.data.numpy(),
        lambda p: p.detach().cpu().float().numpy(),
        lambda p: p.detach().to("cpu").tolist(),
        lambda p: p.tolist(),
        lambda p: np.asarray(p.detach()),
    ],
)
def test_what_reads_a_parameters_values_is_told_how(read: Callable[[torch.Tensor], object]) -> None:
    compiled = zcompile.compile(nn.Linear(4, 4), stage=3, backend="eager")
    with pytest.raises(zcompile.ParameterError, match=r"weight: (.|\n)*full_tensor\(\) on every rank, or its to_local"):
        read(compiled.get_parameter("weight"))
