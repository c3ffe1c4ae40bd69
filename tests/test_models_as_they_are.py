"""Models as people write them, on several ranks: each trains as in one process on the joined batch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import ModelOutput

import zcompile
from tests.cases import diagonal, quickly
from tests.compare import full, parameters
from tests.models import ConvNet, make, update
from tests.models import batch as make_batch
from tests.ranks import on_ranks, on_threads
from tests.threads import Threads

STEPS = 3
Values = dict[str, torch.Tensor]

both = pytest.mark.parametrize("stage", [0, 3])
rarely = [pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)]
every = pytest.mark.parametrize("stage", [0, *rarely, 3])


def differing(ours: Values, theirs: Values, tolerance: float = 1e-6) -> list[str]:
    """Names of what differs by more than rounding; 0 asks for the same bits."""
    assert list(ours) == list(theirs)
    pairs = [(name, ours[name], theirs[name]) for name in ours]
    if not tolerance:
        return [name for name, a, b in pairs if not torch.equal(a, b)]
    return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=tolerance, atol=tolerance)]


# -- what a model may be made of --------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One parameter at both ends of the model, and one layer used by every block: units share them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"own": nn.Linear(6, 6), "shared": self.shared}) for _ in range(3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block["shared"](block["own"](x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, dims=1).flatten())


class Lora(nn.Module):
    """A frozen linear map and what is learnt beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora(7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Unused(nn.Module):
    """A parameter, a whole block and an alternative that no call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.token = nn.Parameter(torch.ones(5))
        self.other = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.tanh(self.layers[0](x))).square().mean()


class Tiny(nn.Module):
    """Scalars, and first dimensions smaller than the world or not divided by it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.1]))
        self.row, self.pair = nn.Parameter(torch.randn(1, 7)), nn.Parameter(torch.randn(2, 7))
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * (x + self.row) * self.pair.sum(0) + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: list[torch.Tensor]
    note: str = "as it was"
    nothing: torch.Tensor | None = None


@dataclasses.dataclass
class HFOutput(ModelOutput):
    loss: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None
    nothing: torch.Tensor | None = None


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tuple": lambda loss, hidden: (loss, tuple(hidden)),
    "dict": lambda loss, hidden: {"loss": loss, "hidden": hidden, "number": 3},
    "dataclass": lambda loss, hidden: Output(loss, hidden),
    "ModelOutput": lambda loss, hidden: HFOutput(loss=loss, hidden=tuple(hidden)),
}


class Speaking(nn.Module):
    """Returns its loss and hidden states in a container, and takes only keywords."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, *, x: torch.Tensor, power: int = 2, scale: torch.Tensor | None = None) -> Any:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x if scale is None else x * scale))
            hidden.append(x)
        return OUTPUTS[self.kind]((x**power).mean(), hidden)


def speaking_loss(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """A loss made outside of the model, of several of its outputs."""
    out = model(x=x, scale=torch.full((7,), 0.9))
    if isinstance(out, tuple):
        return out[0] + out[1][0].mean()
    if not isinstance(out, dict):
        assert type(out) is Output
        assert out.note == "as it was"
        assert out.nothing is None
        return out.loss + out.hidden[0].mean()
    assert isinstance(out, HFOutput) or out["number"] == 3
    return out["loss"] + out["hidden"][0].mean()


MADE: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "adapted": Adapted,
    "unused": Unused,
    "tiny": Tiny,
    **{kind: lambda kind=kind: Speaking(kind) for kind in OUTPUTS},
}


def made(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MADE[kind]()


def data(kind: str, rank: int, step: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if kind == "tied":
        return torch.randint(0, 13, (size, 5), generator=generator)
    return torch.randn(size, 7, generator=generator)


def loss_of(kind: str, model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return speaking_loss(model, x) if kind in OUTPUTS else model(x)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay: a step that does not skip a parameter without gradient shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def fit(kind: str, model: nn.Module, batches: Iterable[torch.Tensor]) -> tuple[Values, list[str]]:
    """Parameters after training, and names of those that had no gradient in the last step."""
    optimizer = sgd(model)
    for x in batches:
        optimizer.zero_grad()
        loss_of(kind, model, x).backward()
        optimizer.step()
    return parameters(model), [name for name, p in model.named_parameters() if p.grad is None]


def agree(rank: int, kind: str, stage: int) -> list[str]:
    world = dist.get_world_size()
    joined = [torch.cat([data(kind, other, step) for other in range(world)]) for step in range(STEPS)]
    want, want_none = fit(kind, made(kind), joined)
    compiled = zcompile.compile(made(kind, seed=rank), stage=stage, backend="eager")
    got, none = fit(kind, compiled, [data(kind, rank, step) for step in range(STEPS)])
    assert none == want_none
    return differing(got, want)


TRAINED = [*itertools.product(MADE, [0, 3], [2, 3])]


@quickly("kind, stage, world", TRAINED, TRAINED[::18], pairs=False)
def test_trains_as_in_one_process_on_the_joined_batch(threads: Threads, kind: str, stage: int, world: int) -> None:
    assert threads.run(world, agree, kind, stage) == [[]] * world


def payload(rank: int, stage: int, learnt: bool) -> int:
    """Bytes of one step in which the layers' own weights are frozen, or learnt."""
    model = made("adapted")
    for layer in model.layers:
        layer.base.requires_grad_(learnt)
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    compiled(data("adapted", rank, 0)).backward()
    before = compiled.traffic.payload  # the copies that stages 1 and 2 keep are gathered once
    compiled(data("adapted", rank, 1)).backward()
    return compiled.traffic.payload - before


@pytest.mark.slow
@every
def test_frozen_parameters_are_gathered_but_not_reduced(threads: Threads, stage: int) -> None:
    """A gradient is sent once by a scatter, whose rows are padded, and counts twice in an all_reduce."""
    saved = threads.run(2, payload, stage, True)[0] - threads.run(2, payload, stage, False)[0]
    rows, times = (8, 1) if stage else (7, 2)
    assert saved == times * 3 * (rows * 7 + rows) * 4


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@diagonal("stage, world", [0, 3], [3, 2], pairs=False)
@on_threads()
def test_buffers_begin_as_rank_0s_and_follow_the_ranks_own_data(rank: int, stage: int, world: int) -> list[str]:
    """Rank 0's buffers at the start, then statistics of the rank's own data, as one device computes them."""
    model = make("conv", seed=rank)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.fill_(rank + 1)
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    reference = make("conv")
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.fill_(1)
    names = dict(reference.named_buffers())
    found = differing(dict(compiled.named_buffers()), names, 0)
    for step in range(STEPS):
        compiled(*make_batch("conv", rank, step)).backward()
        reference(*make_batch("conv", rank, step))
    return found + differing(dict(compiled.named_buffers()), dict(reference.named_buffers()), 0)


def twin(compiled: nn.Module) -> nn.Module:
    """A plain model with the values of `compiled`, in evaluation."""
    model = ConvNet()
    model.load_state_dict({name: full(value) for name, value in compiled.state_dict().items()})
    return model.eval()


@pytest.mark.slow
@quickly("stage", [0, 3], [3])
@on_threads(2)
def test_evaluation_between_steps_leaves_training_alone(rank: int, stage: int) -> None:
    """Training with evaluation between steps is training; evaluation uses the statistics of this rank."""
    worst, ends = 0.0, []
    for looking in (False, True):
        compiled = zcompile.compile(make("conv"), stage=stage, backend="eager")
        optimizer = sgd(compiled)
        for step in range(STEPS):
            if looking:
                compiled.eval()
                for context in (torch.no_grad, torch.inference_mode):
                    with context():
                        ours = compiled(*make_batch("conv", rank, 7, size=2 + step))
                    theirs = twin(compiled)(*make_batch("conv", rank, 7, size=2 + step))
                    worst = max(worst, float(abs(ours - theirs)))
                    assert not ours.requires_grad
                compiled.train()
            compiled(*make_batch("conv", rank, step)).backward()
            update(optimizer)
        ends.append(parameters(compiled) | dict(compiled.named_buffers()))
    assert differing(*ends, 0) == []
    assert worst < 1e-6


# -- calls ------------------------------------------------------------------------------------------------------------


class Frontend(nn.Module):
    """Its input needs a gradient and two of its results have one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.layers[0](x))
        return self.layers[2](torch.tanh(self.layers[1](hidden))).square().mean(), hidden


@both
@on_ranks(2)
def test_gradients_come_and_go_through_several_results_and_inputs(rank: int, stage: int) -> list[str]:
    """A compiled model in the middle of plain ones: gradients go in at both results and out at the input."""
    torch.manual_seed(0)
    model = Frontend()
    reference = copy.deepcopy(model)
    compiled = zcompile.compile(model, stage=stage, backend="eager")
    first, x = nn.Linear(7, 7), torch.randn(4, 7)  # on all ranks the same, so that the mean is the gradient
    found = []
    for either in (compiled, reference):
        first.zero_grad()
        loss, hidden = either(first(x))
        (loss * 3 + hidden.exp().mean()).backward()
        grads = {name: full(p.grad) for name, p in either.named_parameters()}
        found.append(grads | {"first": first.weight.grad.clone()})
    return differing(*found)


@pytest.mark.slow
@diagonal("stage, reverse", [0, 3], [False, True])
@on_threads(3)
def test_two_forwards_before_a_backward(rank: int, stage: int, reverse: bool) -> list[str]:
    """Two graphs in flight, as a contrastive loss has them: parameters are gathered for each again."""
    world = dist.get_world_size()
    model = made("tiny")
    compiled = zcompile.compile(made("tiny"), stage=stage, backend="eager")
    for other in range(world):
        for step in range(2):
            (model(data("tiny", other, step)) / world).backward()
    losses = [compiled(data("tiny", rank, step)) for step in range(2)]
    for loss in reversed(losses) if reverse else losses:
        loss.backward()
    return differing(*({n: full(p.grad) for n, p in m.named_parameters()} for m in (compiled, model)))


@both
@on_ranks(2)
def test_one_loss_of_two_calls(rank: int, stage: int) -> list[str]:
    model, world = made("tiny"), dist.get_world_size()
    compiled = zcompile.compile(made("tiny"), stage=stage, backend="eager")
    for other in range(world):
        ((model(data("tiny", other, 0)) * model(data("tiny", other, 1))) / world).backward()
    (compiled(data("tiny", rank, 0)) * compiled(data("tiny", rank, 1))).backward()
    return differing(*({n: full(p.grad) for n, p in m.named_parameters()} for m in (compiled, model)))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5, self.training)
        return x.square().mean()


@both
@on_ranks(2)
def test_dropout_draws_the_masks_of_eager_pytorch(rank: int, stage: int) -> list[str]:
    """Masks are drawn as in eager PyTorch, from the rank's own seed."""
    found = []
    for prepare in (DistributedDataParallel, lambda model: zcompile.compile(model, stage=stage, backend="eager")):
        torch.manual_seed(0)
        model = prepare(Dropping())
        optimizer = sgd(model)
        torch.manual_seed(10 + rank)
        for step in range(STEPS):
            model(data("tiny", rank, step)).backward()
            update(optimizer)
        found.append({name.removeprefix("module."): value for name, value in parameters(model).items()})
    return differing(*found, 0)


@pytest.mark.slow
@quickly("stage", [0, 3], [3], slow=())
@on_threads(2)
def test_many_shapes_need_few_programs(rank: int, stage: int) -> None:
    """A pair for the first shape, one for sizes that vary, and one for each dimension found to vary later."""
    compiled = zcompile.compile(make("gpt"), stage=stage, backend="eager")
    for step in range(12):
        tokens, targets = make_batch("gpt", rank, step, size=2 + (step * 5 + rank) % 7)
        length = 3 + (step * 7 + 2 * rank) % 13
        compiled(tokens[:, :length], targets[:, :length]).backward()
    assert len(compiled.programs) <= 6


# -- exceptions -------------------------------------------------------------------------------------------------------


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError("in the backward")


FAULTS = ("forward", "loss function", "backward", "accumulation", "input")


def fail(kind: str, compiled: nn.Module, x: torch.Tensor) -> None:
    """One step of training that ends with an exception somewhere."""
    if kind == "forward":
        compiled(x[:, :5])  # of the wrong shape
    if kind == "loss function":
        compiled(x).backward(torch.ones(3))
    if kind == "backward":
        Faulty.apply(compiled(x)).backward()
    if kind == "input":
        compiled(Faulty.apply(x.requires_grad_())).backward()
    if kind == "accumulation":
        hook = next(compiled.parameters()).register_post_accumulate_grad_hook(raising)
        try:
            compiled(x).backward()
        finally:
            hook.remove()


def raising(param: torch.Tensor) -> None:
    raise FloatingPointError(f"in a hook of {param.shape}")


@pytest.mark.slow
@quickly("stage, kind", [*itertools.product([0, 3], FAULTS)], [(3, kind) for kind in FAULTS], slow=())
@on_ranks(2)
def test_after_an_exception_on_all_ranks_training_goes_on(rank: int, stage: int, kind: str) -> list[str]:
    """Parameters after steps with an exception in between, and the memory of full parameters free again."""
    ends = []
    for faulty in (False, True):
        compiled = zcompile.compile(made("tiny"), stage=stage, backend="eager")
        optimizer = sgd(compiled)
        for step in range(STEPS):
            if faulty and step:
                with pytest.raises((RuntimeError, FloatingPointError, TypeError)):
                    fail(kind, compiled, data("tiny", rank, 9))
                optimizer.zero_grad()
            compiled(data("tiny", rank, step)).backward()
            update(optimizer)
        ends.append(parameters(compiled))
    return differing(*ends, 0)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_threads(2)
def test_autocast_computes_in_bfloat16_the_bits_of_ddp(rank: int, stage: int) -> None:
    """Compute in bfloat16 under torch.autocast, with parameters and their communication in fp32."""
    found = []
    for prepare in (DistributedDataParallel, lambda model: zcompile.compile(model, stage=stage, backend="eager")):
        model = prepare(make("gpt"))
        optimizer = sgd(model)
        for step in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*make_batch("gpt", rank, step))
            loss.backward()
            update(optimizer)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            dtype = model(make_batch("gpt", rank, 0)[0]).dtype
        found.append({name.removeprefix("module."): value for name, value in parameters(model).items()})
    assert differing(*found, 0) == []
    assert dtype == torch.bfloat16


# -- optimizers -------------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """As a user writes one: a loop over parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(momentum.mul(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """The usual rule: matrices decay, vectors and scalars do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd-nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adam-foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "adam-fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw-groups": lambda m: torch.optim.AdamW(by_dimension(m), lr=0.01),
    "adamw-groups-fused": lambda m: torch.optim.AdamW(by_dimension(m), lr=0.01, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "adagrad-foreach": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, foreach=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "rmsprop-foreach": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, foreach=True),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "lion": lambda m: Lion(m.parameters()),
}


def optimize(rank: int, model: nn.Module) -> Iterator[Values]:
    """Parameters after training with each optimizer, from the same start: one compilation serves all."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for make_optimizer in OPTIMIZERS.values():
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
        optimizer = make_optimizer(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10, cycle_momentum=False)
        for step in range(5):
            model(*make_batch("mlp", rank, step)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=bool(step % 2))
        optimizer.zero_grad()
        yield {name.removeprefix("module."): value for name, value in parameters(model).items()}


@pytest.mark.slow
@quickly("stage", range(4), [3], slow=[1])
@on_threads(2)
def test_any_optimizer_and_schedule_gives_the_bits_of_ddp(rank: int, stage: int) -> None:
    """The shards of 13 and 5 rows over two ranks are uneven, the last layer's row is on one rank, a scalar on both.

    A fused kernel rounds the last entries of a tensor otherwise than those it takes eight at a time.
    """
    ours = optimize(rank, zcompile.compile(make("mlp"), stage=stage, backend="eager"))
    theirs = optimize(rank, DistributedDataParallel(make("mlp")))
    found = {
        name: differing(a, b, 1e-6 if "fused" in name else 0)
        for name, a, b in zip(OPTIMIZERS, ours, theirs, strict=True)
    }
    assert {name: names for name, names in found.items() if names} == {}


def clipped(rank: int, kind: str, stage: int, norm: float) -> tuple[list[str], float]:
    world = dist.get_world_size()
    reference, compiled = make(kind), zcompile.compile(make(kind), stage=stage, backend="eager")
    ours, theirs, worst = sgd(compiled), sgd(reference), 0.0
    for step, foreach in enumerate((None, True, False)):
        joined = [torch.cat(parts) for parts in zip(*(make_batch(kind, r, step) for r in range(world)), strict=True)]
        reference(*joined).backward()
        compiled(*make_batch(kind, rank, step)).backward()
        found, wanted = (
            full(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm, foreach=foreach)).item()
            for model in (compiled, reference)
        )
        worst = max(worst, abs(found / wanted - 1))
        update(ours, theirs)
    return differing(parameters(compiled), parameters(reference)), worst


@pytest.mark.slow
@diagonal("stage, case", range(4), [("mlp", 3, 2.0), ("gpt", 2, float("inf")), ("mlp", 3, 1.0)], pairs=False)
def test_the_global_norm_is_clipped(threads: Threads, stage: int, case: tuple[str, int, float]) -> None:
    """Not the infinite norm where a rank's shard is empty, as of one row over two ranks: torch has none of nothing."""
    kind, world, norm = case
    for names, worst in threads.run(world, clipped, kind, stage, norm):
        assert names == []
        assert worst < 1e-6
