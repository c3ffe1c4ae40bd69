"""`zcompile.train_step`: bit for bit the loop, in every stage; gradients are gone unit by unit; what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import zcompile
from tests.cases import diagonal, quickly
from tests.models import batch, fit, make
from tests.threads import Threads
from zcompile import OptionError
from zcompile.cost.memory import peak_bytes
from zcompile.runtime.gradients.updates import Updater

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as people make them for weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def against_the_loop(rank: int, kind: str, optimizer: str, stage: int, **options: Any) -> list[str]:
    """What differs after four steps with a schedule of the learning rate and a write between two steps."""
    model = make(kind)
    other = copy.deepcopy(model)
    ours = OPTIMIZERS[optimizer](grouped(model))
    step = zcompile.train_step(model, None, ours, stage=stage, backend="eager", **options)
    compiled = zcompile.compile(other, stage=stage, backend="eager", **options)
    theirs = OPTIMIZERS[optimizer](grouped(compiled))
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5) for one in (ours, theirs)]
    differing = []
    for number in range(4):
        args = batch(kind, rank, number)
        loss = step(*args)
        expected = compiled(*args)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        for schedule in schedules:
            schedule.step()
        if number == 1:
            for one in (step.model, compiled):
                with torch.no_grad():
                    for param in one.parameters():
                        param.data.mul_(0.9)
        differing += [] if torch.equal(loss, expected) else [f"loss {number}"]
    got, want = (one.full_state_dict(rank0_only=False) for one in (step.model, compiled))
    differing += [name for name in want if not torch.equal(got[name], want[name])]
    differing += [name for name, param in step.model.named_parameters() if param.grad is not None]
    return differing


@quickly("stage", range(4), [3])
def test_a_step_is_the_loop(threads: Threads, stage: int) -> None:
    assert threads.run(2, against_the_loop, "gpt", "adamw", stage) == [[], []]


def with_all_optimizers(rank: int) -> list[str]:
    return [name for kind in OPTIMIZERS for name in against_the_loop(rank, "mlp", kind, 3)]


@pytest.mark.slow
def test_a_step_is_the_loop_with_any_optimizer(threads: Threads) -> None:
    assert threads.run(2, with_all_optimizers) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16, "checkpoint": "unit"},
        pytest.param({"prefetch": 0}, marks=pytest.mark.slow),
        pytest.param({"memory_limit": "40 MiB"}, marks=pytest.mark.slow),
        pytest.param({"passes": {"gather_ahead": None}}, marks=pytest.mark.slow),
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_step_is_the_loop_with_any_option(threads: Threads, options: dict[str, Any]) -> None:
    assert threads.run(2, with_options, options) == [[], []]


def with_options(rank: int, options: dict[str, Any]) -> list[str]:
    return against_the_loop(rank, "gpt", "adamw", 3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_is_the_loop_where_no_size_divides(threads: Threads, stage: int) -> None:
    assert threads.run(3, against_the_loop, "mlp", "adamw", stage) == [[], [], []]


@pytest.mark.slow
def test_alone_too() -> None:
    assert against_the_loop(0, "mlp", "adamw", 3) == []


class Tied(nn.Module):
    """Tied weights, a frozen layer, a parameter that nobody reads, one that no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.tokens = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.left_out = nn.Parameter(torch.ones(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.tokens(tokens))
        for layer in self.layers:
            x = torch.relu(layer(x)) + self.left_out
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
    return weight * torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def outside_the_model(rank: int, stage: int, clip: float | None) -> list[str]:
    """Two optimizers, a loss function of the user's own, batches of several sizes, and calls between the steps."""
    torch.manual_seed(0)
    models = [Tied() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = [zcompile.compile(model, stage=stage, backend="eager") for model in models]
    optimizers = [
        [
            torch.optim.AdamW([*model.layers.parameters(), model.unread], lr=0.1),
            torch.optim.SGD(model.tokens.parameters(), lr=0.1, momentum=0.9),
        ]
        for model in compiled
    ]
    step = zcompile.train_step(compiled[0], loss_of, optimizers[0], clip_grad_norm=clip)
    differing = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens = torch.randint(0, 10, (2 + (number % 3) * (rank + 1), 7), generator=generator)
        expected = loss_of(compiled[1], tokens, weight=2.0)
        expected.backward()
        if clip:
            nn.utils.clip_grad_norm_(compiled[1].parameters(), clip)
        for optimizer in optimizers[1]:
            optimizer.step()
        compiled[1].zero_grad()
        differing += [] if torch.equal(step(tokens, weight=2.0), expected) else [f"loss {number}"]
        with torch.no_grad():
            same = torch.equal(compiled[0](tokens), compiled[1](tokens))
        differing += [] if same else [f"evaluation {number}"]
    got, want = (one.full_state_dict(rank0_only=False) for one in compiled)
    return [*differing, *(name for name in want if not torch.equal(got[name], want[name]))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "clip"),
    [(1, None), *(pytest.param(*rare, marks=pytest.mark.slow) for rare in [(1, 0.05), (3, None), (3, 0.05)])],
)
def test_a_model_as_models_are(threads: Threads, stage: int, clip: float | None) -> None:
    assert threads.run(2, outside_the_model, stage, clip) == [[], []]


def norms(rank: int, stage: int) -> list[str]:
    """What a log says of the norm in a train step and in the loop."""
    model, other = make("mlp"), make("mlp")
    step = zcompile.train_step(
        model, None, torch.optim.AdamW(model.parameters()), stage=stage, backend="eager", clip_grad_norm=1.0
    )
    compiled = zcompile.compile(other, stage=stage, backend="eager")
    step(*batch("mlp", rank, 0))
    compiled(*batch("mlp", rank, 0)).backward()
    norm = nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
    assert type(step.grad_norm) is torch.Tensor
    return [f"{step.grad_norm:.6f}", f"{norm.item():.6f}", f"{float(norm):.6f}"]


@diagonal("world, stage", [1, 2], [0, 3])
def test_the_norm_can_be_printed(threads: Threads, world: int, stage: int) -> None:
    found = {text for texts in threads.run(world, norms, stage) for text in texts}
    assert len(found) == 1


def gradients_alive(rank: int) -> tuple[int, int]:
    """The most bytes of gradients that are alive while the optimizer steps a unit, and those of the largest unit."""
    model = make("gpt")
    step = zcompile.train_step(model, None, torch.optim.AdamW(model.parameters()), backend="eager")
    seen: list[tuple[StorageWeakRef, int]] = []
    most = [0]

    def see(parameter: torch.Tensor) -> None:
        storage = parameter.grad._local_tensor.untyped_storage()  # type: ignore[union-attr]
        if storage._cdata not in {reference.cdata for reference, _ in seen if not reference.expired()}:
            seen.append((StorageWeakRef(storage), storage.nbytes()))
        most[0] = max(most[0], sum(nbytes for reference, nbytes in seen if not reference.expired()))

    for parameter in step.model.parameters():
        parameter.register_post_accumulate_grad_hook(see)
    step(*batch("gpt", rank, 0))
    assert len(seen) > 4, "hooks have run"
    return most[0], max(sum(p.shard_numel * 4 for p in unit.params) for unit in step.model.layout.units)


@pytest.mark.slow
def test_gradients_of_one_unit_are_alive_at_once(threads: Threads) -> None:
    for most, largest in threads.run(2, gradients_alive):
        assert most <= largest


def within(rank: int, prefetch: int | str, limit: int | None, kind: str = "gpt") -> tuple[list[float], int, int]:
    """Losses of three steps, the bytes that one takes, and how many units it keeps full over the turn."""
    torch.manual_seed(0)
    model = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, None, optimizer, stage=3, prefetch=prefetch, memory_limit=limit, backend="eager")
    losses = [float(step(*batch(kind, rank, number))) for number in range(3)]
    return (
        losses,
        peak_bytes(step.model._engine.runtime.steps[-1].program),
        len(step.model._engine.schedule.kept),
    )


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_keeps_full_what_fits_beside_its_updates(threads: Threads, prefetch: int | str) -> None:
    (wanted, _, none), _ = threads.run(2, within, prefetch, None)
    (losses, first, all_), (_, second, _) = threads.run(2, within, prefetch, 2**30)
    assert losses == wanted
    most = max(first, second)  # what the program that runs takes is what was counted for it
    (losses, _, kept), _ = threads.run(2, within, prefetch, most)
    (_, less, fewer), _ = threads.run(2, within, prefetch, most - 1)
    assert losses == wanted
    assert none == 0 < all_ == kept > fewer
    assert less < most


@pytest.mark.slow
def test_a_limit_is_compared_with_what_a_step_takes_that_frees_its_gradients(threads: Threads) -> None:
    """The loop's backward, which keeps them all, takes more."""
    (_, first, _), (_, second, _) = threads.run(2, within, 0, None, "mlp")
    for _, most, _ in threads.run(2, within, 0, max(first, second), "mlp"):
        assert most <= max(first, second)


@pytest.mark.slow
def test_a_step_within_a_limit_may_choose_its_prefetch(threads: Threads) -> None:
    (wanted, _, _), _ = threads.run(2, within, "auto", None)
    (losses, most, _), _ = threads.run(2, within, "auto", 700_000)
    assert losses == wanted
    assert most <= 700_000


def refused(rank: int, limit: int) -> str:
    with pytest.raises(OptionError) as caught:
        within(rank, 2, limit)
    return str(caught.value)


@pytest.mark.slow
def test_a_step_that_takes_more_than_its_limit_is_refused(threads: Threads) -> None:
    for message in threads.run(2, refused, 100_000):
        assert message.startswith("memory_limit: 97.66 KiB is less than the ")


def gathers(rank: int, changed: bool) -> list[int]:
    """Messages of the forward of each of three steps: the first gathers all, the others what is not there yet."""
    model = make("gpt")
    step = zcompile.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    found = []
    for number in range(3):
        step(*batch("gpt", rank, number))
        if changed and rank == 1:  # one rank alone writes, past autograd's counters
            next(iter(step.model.parameters())).data._local_tensor.mul_(2)
        timeline = step.model.timeline
        found.append(sum(m.operation == "all_gather" for m in timeline.messages or ()))
    return found


@pytest.mark.slow
def test_the_first_gathers_of_a_step_start_in_the_one_before(threads: Threads) -> None:
    found = threads.run(2, gathers, False)
    assert found[0] == found[1]
    _, second, third = found[0]
    assert second == third
    stale = threads.run(2, gathers, True)[0]
    assert stale[1] > second, "a copy that anybody has changed is gathered again, on all ranks"


@pytest.mark.slow
def test_inductor_gives_what_its_loop_gives() -> None:
    model, other = make("mlp"), make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, None, optimizer)
    compiled = zcompile.compile(other)
    loop = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    for number in range(3):
        loss = compiled(*batch("mlp", 0, number))
        loss.backward()
        loop.step()
        loop.zero_grad()
        assert torch.equal(step(*batch("mlp", 0, number)), loss)


class Uneven(nn.Module):
    """Parameters that are small beside the activations of large batches, and large beside those of small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def unequal(rank: int) -> list[str]:
    """Ranks with batches of very different sizes, which change: what they communicate, and the losses of rank 0."""
    torch.manual_seed(0)
    step = zcompile.train_step(model := Uneven(), None, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    for number in range(4):
        step(torch.arange(2 if (rank + number) % 2 else 600, dtype=torch.int64).view(-1, 2) % 512)
    return sorted({one.digest() for one in step.model._engine.runtime.steps[0:] for one in [one.program]})


@pytest.mark.slow
def test_what_is_gathered_ahead_does_not_depend_on_the_batch(threads: Threads) -> None:
    first, second = threads.run(2, unequal)
    assert first == second
    assert len(first) == 1


def sent(rank: int, fused: bool) -> int:
    """Bytes of the third step of a model with a frozen first unit."""
    model = make("gpt")
    model.tokens.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, None, optimizer, stage=1, backend="eager", clip_grad_norm=None if fused else 1.0)
    for number in range(3):
        before = step.model.traffic.payload
        step(*batch("gpt", rank, number))
    return step.model.traffic.payload - before


@pytest.mark.slow
def test_what_is_frozen_and_kept_is_not_gathered_again(threads: Threads) -> None:
    assert threads.run(2, sent, True) == threads.run(2, sent, False)


class Decays(torch.optim.SGD):
    """Decays every parameter that it holds, with or without a gradient."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.9)
        return super().step(closure)


class Insists(torch.optim.SGD):
    """Wants a gradient of every parameter that it holds."""

    def step(self, closure: Any = None) -> Any:
        assert all(param.grad is not None for group in self.param_groups for param in group["params"])
        return super().step(closure)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Decays, Insists])
def test_an_optimizer_steps_once_for_each_parameter(kind: type[torch.optim.Optimizer]) -> None:
    model, other = make("mlp"), make("mlp")
    step = zcompile.train_step(model, None, kind(model.parameters(), lr=0.1), backend="eager")  # type: ignore[call-arg]
    compiled = zcompile.compile(other, backend="eager")
    loop = kind(compiled.parameters(), lr=0.1)  # type: ignore[call-arg]
    seen: list[torch.optim.Optimizer] = []
    for optimizer in (loop, step.optimizers[0]):
        optimizer.register_step_post_hook(lambda one, *_: seen.append(one))
    for number in range(3):
        compiled(*batch("mlp", 0, number)).backward()
        loop.step()
        loop.zero_grad()
        step(*batch("mlp", 0, number))
    # Once torch has wrapped SGD's own step too, it calls hooks twice for a class that is derived from it.
    assert seen.count(loop) == seen.count(step.optimizers[0]) > 0
    got, want = step.model.full_state_dict(), compiled.full_state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_an_argument_called_box_is_one_like_any_other() -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, box: torch.Tensor) -> torch.Tensor:
            x = box
            for layer in self.layers:
                x = layer(x) * box
            return x.sum()

    compiled = zcompile.compile(Boxed(), backend="eager")
    compiled(torch.ones(2, 3)).backward()


# -- what is refused --------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers without schedules do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] /= group["count"]
        return super().step(closure)


class Together(torch.optim.SGD):
    """Steps by the norm of all its gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_([p for p in group["params"] if p.grad is not None], 0.01)
        return super().step(closure)


class Busy(torch.optim.SGD):
    """Counts the steps in which its groups have had a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + any(param.grad is not None for param in group["params"])
        return super().step(closure)


class Measuring(torch.optim.SGD):
    """Steps the further, the larger the gradients of the step before were, of all its parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            norms = [float(param.grad.norm()) for param in group["params"] if param.grad is not None]
            group["size"], group["lr"] = sum(norms), 0.01 * (1 + group.get("size", 0.0))
        return super().step(closure)


class Attribute(torch.optim.SGD):
    """Counts its steps by itself."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class Proxy(torch.optim.SGD):
    """Shows the groups of another optimizer, as wrappers do."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner = groups


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (torch.optim.LBFGS, "LBFGS cannot step for some of its parameters alone: TypeError"),
        (Busy, "Busy steps some of its parameters alone differently from all at once"),
        (Measuring, "Measuring steps some of its parameters alone differently from all at once"),
        (Attribute, "changes its attribute 'count'"),
        (Proxy, "Proxy only wraps another optimizer"),
        (Together, "Together steps some of its parameters alone differently from all at once"),
    ],
)
def test_an_optimizer_that_steps_all_at_once_is_refused(kind: type[torch.optim.Optimizer], found: str) -> None:
    model = make("mlp")
    with pytest.raises(zcompile.OptimizerError, match=found):
        zcompile.train_step(model, None, kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    assert not any(isinstance(param, DTensor) for param in model.parameters()), "nothing was sharded"
    step = zcompile.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    step(*batch("mlp", 0, 0))


def test_an_optimizer_is_tried_where_its_parameters_have_memory() -> None:
    """The trial compares values, which parameters on meta do not have."""
    held = [nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.ones(2))]
    assert Updater([torch.optim.Adam(held)]).slots == [{"exp_avg": torch.float32, "exp_avg_sq": torch.float32}]


def test_an_optimizer_that_counts_in_its_groups_counts_steps_not_units() -> None:
    found = []
    for by_step in (False, True):
        model = make("mlp")
        optimizer = Counting(model.parameters(), lr=0.1)
        if by_step:
            step = zcompile.train_step(model, None, optimizer, backend="eager")
            for number in range(4):
                step(*batch("mlp", 0, number))
        else:
            fit(model, optimizer, [batch("mlp", 0, number) for number in range(4)])
        (group,) = optimizer.param_groups
        values = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        found.append((group["lr"], group["count"], [value.detach().clone() for value in values]))
    (lr, count, want), (got_lr, got_count, got) = found
    assert (got_lr, got_count) == (lr, count) == (0.1 / 24, 4)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_schedule_that_begins_with_nothing_hides_nothing() -> None:
    model = make("mlp")
    optimizer = Together(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: number / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    with pytest.raises(zcompile.OptimizerError, match="steps some of its parameters alone differently"):
        zcompile.train_step(model, None, optimizer)


def test_hooks_before_a_step_are_refused_and_float16_is() -> None:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zcompile.train_step(model, None, optimizer, backend="eager")
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(zcompile.OptimizerError, match="SGD has a hook before its step"):
        step(*batch("mlp", 0, 0))
    handle.remove()
    step(*batch("mlp", 0, 0))
    with pytest.raises(zcompile.OptionError, match="dtype: is float16"):
        zcompile.train_step(model := make("mlp"), None, sgd(model), dtype=torch.float16)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("norm", [0, -1.0, float("inf"), float("nan")])
def test_a_norm_that_clips_nothing_is_refused(norm: float) -> None:
    with pytest.raises(zcompile.OptionError, match=r"clip_grad_norm: .* is not a norm"):
        zcompile.train_step(model := make("mlp"), None, sgd(model), clip_grad_norm=norm)


def test_options_of_compile_are_refused_for_a_compiled_model() -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager")
    with pytest.raises(zcompile.OptionError, match=r"stage: belongs to zcompile\.compile"):
        zcompile.train_step(compiled, None, sgd(compiled), stage=2)


def test_an_optimizer_of_another_model_is_refused() -> None:
    for model in (make("mlp"), zcompile.compile(make("mlp"), backend="eager")):
        with pytest.raises(zcompile.OptimizerError, match="holds none of the model's parameters"):
            zcompile.train_step(model, None, sgd(make("mlp")))


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda model, x, y: model(x, y) + torch.zeros(3), r"loss_fn: returns \[3\]"),
        (lambda model, x, y: {"loss": model(x, y)}, "loss_fn: returns dict"),
        (lambda model, x, y: model(x, y).detach(), "loss_fn: gives a loss that depends on no parameter"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss_fn: Callable[..., Any], found: str) -> None:
    model = make("mlp")
    step = zcompile.train_step(model, loss_fn, sgd(model), backend="eager")
    before = step.model.full_state_dict()
    with pytest.raises(zcompile.OptionError, match=found):
        step(*batch("mlp", 0, 0))
    assert all(torch.equal(value, before[name]) for name, value in step.model.full_state_dict().items())


def test_a_graph_break_is_refused_where_it_is() -> None:
    def broken(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x, y)
        print(loss.item())
        return loss

    model = make("mlp")
    step = zcompile.train_step(model, broken, sgd(model), backend="eager")
    with pytest.raises(zcompile.CaptureError, match=r"test_train_step\.py:\d+: .*loss.item\(\).*: breaks the graph"):
        step(*batch("mlp", 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_before_and_no_sync_are_refused(stage: int) -> None:
    compiled = zcompile.compile(make("mlp"), backend="eager", stage=stage)
    step = zcompile.train_step(compiled, None, sgd(compiled))
    with compiled.no_sync(), pytest.raises(zcompile.OptionError, match="no_sync: delays the reduction"):
        step(*batch("mlp", 0, 0))
    compiled(*batch("mlp", 0, 0)).backward()
    with pytest.raises(zcompile.ParameterError, match="has a gradient already"):
        step(*batch("mlp", 0, 0))
    compiled.zero_grad()
    step(*batch("mlp", 0, 0))


def test_updates_without_an_optimizer_are_refused() -> None:
    passes = zcompile.pipeline(stage=3, partition="default", updates=True)
    compiled = zcompile.compile(make("mlp"), passes=passes, backend="eager")
    with pytest.raises(zcompile.PipelineError, match="insert_updates: updates parameters, and no optimizer is known"):
        compiled(*batch("mlp", 0, 0))
