"""Optimizers that DTensor has no rule for: stepped right on shards, or refused by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import zcompile
from tests.cases import diagonal
from tests.models import update
from tests.ranks import on_ranks
from tests.refusals import error_of


class Coded(torch.Tensor):
    """A tensor subclass that optimizers of few bits keep their state in; here it only scales."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype, device=codes.device)
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Coded(args[0].codes)
        args = [arg.codes / 4 if isinstance(arg, Coded) else arg for arg in args]
        return func(*args, **(kwargs or {}))


class FewBits(torch.optim.Optimizer):
    """As torchao's: knows DTensors and plain tensors, and no class derived from them; its state is a subclass."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if type(param) not in (nn.Parameter, DTensor):
                    raise TypeError(f"{type(param).__name__} is neither DTensor nor a parameter")
                if param.grad is not None:
                    state = self.state[param]
                    moment = 0.9 * (state["moment"] + 0.0 if state else torch.zeros_like(param)) + param.grad
                    state["moment"] = Coded(4 * moment)
                    param.sub_(group["lr"] * moment)
        return loss


class Remembers(torch.optim.Optimizer):
    """Keeps its moments in a dictionary of its own, and knows no DTensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.moments: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, DTensor):
                    raise TypeError("a DTensor")
                self.moments[param] = 0.9 * self.moments.get(param, torch.zeros_like(param)) + param.grad
                param.data = param.data - group["lr"] * self.moments[param]
        return loss


class Normed(torch.optim.SGD):
    """Scales each parameter's gradient by a norm that it reads off what is there: wrong on a part of it."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    local = param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad
                    param.grad.div_(local.norm() + 1.0)
        return super().step(closure)


class Adapting(torch.optim.SGD):
    """Sets its rate by all gradients, as Prodigy: DTensor adds up sums of which each rank has its part."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["scale"] = float(sum(param.grad.abs().sum() for param in group["params"]))
            for param in group["params"]:
                param.grad.mul_(1 / (1 + group["scale"]))
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Remembers a sum of all gradients that it has not used yet; cannot step DTensors."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if any(isinstance(param, DTensor) for param in group["params"]):
                raise TypeError("a DTensor")
            group["seen"] = float(sum(param.grad.abs().sum() for param in group["params"]))
        return super().step(closure)


class Asking(torch.optim.SGD):
    """Wants more than gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(param.curvature)
        return super().step(closure)


class Nested(torch.optim.Optimizer):
    """Keeps its moments in a dictionary within its state, as heavyball's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, DTensor):
                    raise TypeError("a DTensor")
                moments = self.state[param].setdefault("moments", {"first": torch.zeros_like(param)})
                moments["first"].lerp_(param.grad, 0.5)
                param.sub_(moments["first"], alpha=group["lr"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.05),
    "Rprop foreach": lambda params: torch.optim.Rprop(params, lr=0.05, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "Adagrad fused": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
    "few bits": lambda params: FewBits(params, lr=0.05),
    "remembers": lambda params: Remembers(params, lr=0.05),
}


def train(compiled: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[int], list[torch.Tensor]]) -> None:
    for step in range(4):
        optimizer.zero_grad()

        def closure(step: int = step) -> torch.Tensor:
            losses = [compiled(x).square().mean() for x in batches(step)]
            torch.stack(losses).mean().backward()
            return losses[0].detach()

        if step % 2:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()


@diagonal("kind, stage", KINDS, [1, 3])
@on_ranks(2)
def test_what_treats_elements_alone_steps_shards_as_it_steps_the_whole(rank: int, kind: str, stage: int) -> None:
    reference = model()
    train(reference, plain := KINDS[kind](reference.parameters()), lambda step: [batch(r, step) for r in range(2)])
    compiled = zcompile.compile(model(), stage=stage, backend="eager")
    optimizer, seen = KINDS[kind](compiled.parameters()), []
    optimizer.register_step_pre_hook(lambda made, *_: seen.append(made is optimizer))
    optimizer.register_step_post_hook(lambda made, *_: seen.append(made is optimizer))
    train(compiled, optimizer, lambda step: [batch(rank, step)])
    assert seen == [True] * 8, "hooks see the user's own optimizer"
    for ours, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=1e-6)  # type: ignore[operator]
        for key, value in plain.state[theirs].items():
            mine = optimizer.state[ours][key]
            if isinstance(value, torch.Tensor) and value.shape == theirs.shape:
                assert isinstance(mine, DTensor), key
                assert mine.shape == value.shape
            if isinstance(value, torch.Tensor) and not isinstance(value, Coded):
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                torch.testing.assert_close(mine, value, rtol=0, atol=1e-5)
    assert optimizer.param_groups[0].get("steps") == plain.param_groups[0].get("steps")


def before_step(optimizer: Any, *_: object) -> None:
    """A warm-up, and gradients put in place of others."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        for param in group["params"]:
            param.grad = None if param.grad is None else param.grad.sign()  # None before a closure


def after_step(optimizer: Any, *_: object) -> None:
    """A decay, a count, and moments that are forgotten."""
    optimizer.count += 1
    for group in optimizer.param_groups:
        group["lr"] *= 1.5
        for param in group["params"]:
            optimizer.state[param]["exp_avg"].zero_()


def test_what_an_optimizers_own_hooks_change_is_in_its_step_and_stays() -> None:
    def stepped(trained: nn.Module) -> torch.optim.Optimizer:
        optimizer: Any = torch.optim.AdamW(trained.parameters(), lr=0.1)
        optimizer.count = 0
        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)
        train(trained, optimizer, lambda step: [batch(0, step)])
        return optimizer  # type: ignore[no-any-return]

    plain = stepped(reference := model())
    ours = stepped(compiled := zcompile.compile(model(), stage=3, backend="eager"))
    for mine, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)  # type: ignore[operator]
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert vars(ours)["count"] == vars(plain)["count"] == 4


def test_one_optimizer_steps_the_shards_of_two_models_once() -> None:
    def stepped(models: list[nn.Module]) -> None:
        params = [param for one in models for param in one.parameters()]
        optimizer = FewBits(params, lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            sum(one(batch(0, step)).square().mean() for one in models).backward()  # type: ignore[union-attr]
            optimizer.step()
        assert optimizer.param_groups[0]["steps"] == 3

    stepped(references := [model(), model()])
    stepped(compiled := [zcompile.compile(model(), stage=3, backend="eager") for _ in range(2)])
    for one, reference in zip(compiled, references, strict=True):
        for mine, theirs in zip(one.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)  # type: ignore[operator]


def test_a_step_that_fails_leaves_the_next_as_it_is() -> None:
    compiled = zcompile.compile(model(), stage=3, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    (weight, *_), values = compiled.parameters(), []
    optimizer.register_step_post_hook(lambda *_: values.append(weight.full_tensor()))  # type: ignore[operator]

    def fails() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    compiled(batch(0, 0)).square().mean().backward()
    expected = weight.full_tensor() - 0.1 * weight.grad.full_tensor()  # type: ignore[operator, union-attr]
    optimizer.step()
    torch.testing.assert_close(values, [expected])
    assert not vars(optimizer)["_optimizer_step_pre_hooks"]


@on_ranks(2)
def test_gradients_with_other_placements_than_their_parameters_are_stepped_as_on_dtensors(rank: int) -> None:
    """Gradients with zero mean over rows, which DTensor gives other placements; then those of no_sync and a closure."""
    reference, compiled = model(), zcompile.compile(model(), stage=3, backend="eager")
    for trained, ranks_ in ((reference, range(2)), (compiled, [rank])):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)

        def loss(step: int, trained: nn.Module = trained, ranks_: Any = ranks_) -> torch.Tensor:
            return torch.stack([trained(batch(r, step)).square().mean() for r in ranks_]).mean()

        loss(0).backward()
        for param in trained.parameters():
            param.grad = param.grad - param.grad.mean(0, keepdim=True)  # type: ignore[union-attr]
            if isinstance(param.grad, DTensor) and param.ndim == 2:
                param.grad = param.grad.redistribute(placements=[Shard(1)])
        update(optimizer)
        with compiled.no_sync():
            loss(1).backward()
        optimizer.step(lambda: (held := loss(2)).backward() or held.item())  # type: ignore[func-returns-value]
    for mine, theirs in zip(compiled.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=0, atol=1e-6)  # type: ignore[operator]


def test_a_gradient_that_is_no_dtensor_is_refused() -> None:
    compiled = zcompile.compile(model(), stage=3, backend="eager")
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled(batch(0, 0)).square().mean().backward()
    compiled.get_parameter("2.bias").grad = torch.ones(5)
    with pytest.raises(zcompile.ParameterError, match=r"2\.bias: is a DTensor, and its `\.grad` was set to a plain"):
        optimizer.step()


class Product(torch.autograd.Function):
    """Is given a parameter as it is: what it returns as its gradient, autograd puts into `.grad`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(ctx.saved_tensors[0]), grad.T @ ctx.saved_tensors[0]


class Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.copies = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")  # breaks the graph
        return self.fc(x) + Product.apply(x, self.fc.weight.clone() if self.copies else self.fc.weight)


def by_code(stage: int) -> tuple[nn.Module, torch.Tensor]:
    compiled = zcompile.compile(nn.Linear(4, 4), stage=stage, backend="eager")
    compiled.weight.grad = torch.ones(4, 4)
    return compiled, compiled.weight


def by_function(stage: int) -> tuple[nn.Module, torch.Tensor]:
    compiled = zcompile.compile(Applies(), stage=stage, backend="eager")
    return compiled, compiled.fc.weight


@pytest.mark.filterwarnings("ignore:zcompile. graph break")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("made", [by_code, by_function])
def test_no_average_is_added_to_a_gradient_that_is_no_dtensor(made: Callable[..., Any], stage: int) -> None:
    compiled, parameter = made(stage)
    with pytest.raises(zcompile.ParameterError, match=r"weight: is a DTensor, and its `\.grad` was set to a plain"):
        compiled(torch.ones(2, 4)).sum().backward()
    compiled.zero_grad()
    compiled.copies = True  # what the error says to do
    compiled(torch.ones(2, 4)).sum().backward()
    twice = 2.0 if made is by_function else 1.0
    torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((4, 4), 2 * twice))


@pytest.mark.slow
@on_ranks(2)
def test_a_train_step_steps_shards_alike(rank: int) -> None:
    reference = model()
    optimizer = torch.optim.Rprop(reference.parameters(), lr=0.05)
    for number in range(3):
        optimizer.zero_grad()
        (sum(reference(batch(r, number)).square().mean() for r in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    ours = model()
    step = zcompile.train_step(
        ours, lambda net, x: net(x).square().mean(), torch.optim.Rprop(ours.parameters(), lr=0.05), backend="eager"
    )
    for number in range(3):
        step(batch(rank, number))
    for mine, theirs in zip(step.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=0, atol=1e-6)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("Adafactor", "Adafactor steps sharded parameters differently"),
        ("LBFGS", "0.weight: LBFGS flattens it, and 2 ranks do not divide its 9 rows"),
        ("Normed", "Normed steps sharded parameters differently"),
        pytest.param(
            "Adapting",
            "Adapting steps sharded parameters differently",
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 adds its sums up right"),
        ),
        ("Counting", "Counting adapts itself to all elements"),
    ],
)
@on_ranks(2)
def test_what_needs_the_whole_is_refused_before_it_changes_anything(rank: int, kind: str, found: str) -> None:
    compiled = zcompile.compile(model(), stage=3, backend="eager")
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
        "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.05),
        "Normed": lambda params: Normed(params, lr=0.05),
        "Adapting": lambda params: Adapting(params, lr=0.05),
        "Counting": lambda params: Counting(params, lr=0.05),
    }
    optimizer = makers[kind](compiled.parameters())
    before = [param.full_tensor() for param in compiled.parameters()]  # type: ignore[operator]
    compiled(batch(rank, 0)).square().mean().backward()
    generator = torch.get_rng_state()
    step = (lambda: optimizer.step(lambda: 0.0)) if kind == "LBFGS" else optimizer.step
    text = error_of(step, zcompile.OptimizerError)
    assert found in text
    assert "stage=0" in text
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(compiled.parameters(), before, strict=True))  # type: ignore[operator]
    assert all(p.grad is not None for p in compiled.parameters())
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.slow
@on_ranks(2)
def test_muon_which_communicates_through_dtensor_steps_shards(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(8, 6, bias=False)
    compiled = zcompile.compile(copy.deepcopy(reference), stage=3, backend="eager")
    for trained, ranks_ in ((reference, range(2)), (compiled, [rank])):
        optimizer = torch.optim.Muon(trained.parameters(), lr=0.05)
        losses = [trained(torch.ones(2, 8) * (r + 1)).square().mean() for r in ranks_]
        torch.stack(losses).mean().backward()
        optimizer.step()
    torch.testing.assert_close(next(compiled.parameters()).full_tensor(), reference.weight, rtol=0, atol=2e-3)  # type: ignore[operator]


@on_ranks(2)
def test_what_cannot_be_tried_warns(rank: int) -> None:
    compiled = zcompile.compile(model(), stage=3, backend="eager")
    for param in compiled.parameters():
        param.curvature = 2.0  # type: ignore[attr-defined]
    optimizer = Asking(compiled.parameters(), lr=0.05)
    compiled(batch(rank, 0)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"Asking could not be tried on small tensors \(.*curvature.*whole="):
        optimizer.step()


@pytest.mark.slow
@on_ranks(2)
def test_state_that_nobody_knows_how_to_divide_is_not_saved(rank: int, tmp_path: Any) -> None:
    folder = str(tmp_path / "saved")
    for whole in (None, ["0.weight", "0.bias", "2.weight", "2.bias"]):
        compiled = zcompile.compile(model(), stage=3, whole=whole, backend="eager")
        optimizer = Nested(compiled.parameters(), lr=0.05)
        compiled(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        if whole is None:
            with pytest.raises(zcompile.StateError, match=r"0\.weight\.moments: is a dict that has a tensor of shape"):
                compiled.save_checkpoint(folder, optimizer)
        else:
            compiled.save_checkpoint(folder, optimizer)


def test_what_has_left_an_optimizer_is_not_kept_by_it() -> None:
    compiled = zcompile.compile(nn.Linear(4, 4), stage=3, backend="eager")
    other = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([{"params": compiled.parameters()}, {"params": [other]}], lr=0.1)
    for _ in range(2):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.param_groups[1:] = []
    gone = weakref.ref(other)
    del other
    assert gone() is None
