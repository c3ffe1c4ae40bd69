"""Graph breaks: a module that cannot be traced whole runs as Python, its submodules as programs; numbers stay right."""

from __future__ import annotations

import copy
import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.cases import diagonal, quickly
from tests.compare import gradients
from tests.models import update
from tests.ranks import Ranks, on_threads
from tests.refusals import error_of
from tests.threads import Threads

WIDTH = 6


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Between(nn.Module):
    """A break between submodules; one of them is called twice, so two fragments share its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(), Pair()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        print(end="")
        return self.blocks[0](self.norm(self.blocks[1](x)))


class Own(nn.Module):
    """Breaks inside a module that has parameters of its own: one sharded, one scalar, one unused, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pair(x * self.frozen) @ self.weight.t()
        print(end="")
        return self.pair(y @ self.weight) * self.scale


class Experts(nn.Module):
    """Each rank's data decides which parameters are used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)])
        self.stacked = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = int(self.router(x).mean(0).argmax())
        if chosen == 0:
            x = x * 2
        return x @ self.weights[chosen] + x * self.stacked[chosen]


class Chooses(nn.Module):
    """Counts what its data chooses, in an `if`: a size that no trace knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Pair(), Pair()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        rows = (x[:, 0] > 0).nonzero().flatten()
        if rows.numel():
            x = x.index_add(0, rows, x[rows] * self.scale)
        return self.second(x)


class Nested(nn.Module):
    """A break two levels down, in a loop, under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Own(), Own()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """The broken module reads a weight that a submodule has too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        print(end="")
        return self.head(y) + y @ self.weight


class Reads(nn.Module):
    """Plain Python that reads parameters of its submodules, with and without gradients, by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        weight = self.fc.weight
        assert list(weight.shape) == [weight.size(0), len(weight)] == [WIDTH, WIDTH]
        with torch.no_grad():
            norm = torch.linalg.vector_norm(weight.to(x.dtype)) + weight.data[0, 0].abs()
        y = F.linear(self.fc(x), weight, bias=self.fc.bias) / norm + x * weight.sum()
        y = y + torch.mul(input=self.frozen.weight.detach()[1], other=x)
        return torch.cat([self.frozen(y), y @ self.frozen.weight.T], 1)


class Scales(nn.Module):
    """Reads a module that it is given, as DoRA reads the layer that it adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        print(end="")
        norm = torch.linalg.vector_norm(other.weight, dim=1).detach()
        return x @ (other.weight * self.scale / norm).T


class Keeps(Reads):
    """Keeps a loss of what it reads, of its own parameter too, which is then trained beside the output or alone."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH))
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.loss = (self.fc.weight @ self.own * x.mean()).square().sum()
        return y


class Borrows(nn.Module):
    """A module is read by another one, at twice, under activation checkpointing too."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scales = nn.Linear(WIDTH, WIDTH), Scales()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.scales, x, self.base, use_reentrant=False)
        return self.base(y) + self.scales(x, self.base)


class Checkpoints(nn.Module):
    """A plain function is checkpointed that reads parameters of modules, and its module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.own = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")

        def scaled(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                norm = torch.linalg.vector_norm(self.fc.weight.to(x.dtype))
            y = F.linear(x, self.fc.weight, self.fc.bias).sin() * self.own / norm
            return y + self.frozen(x) @ self.frozen.weight.T * self.fc.weight.sum()

        y = checkpoint(scaled, x, use_reentrant=False)
        return self.fc(checkpoint(scaled, y, use_reentrant=False))


MODELS = {cls.__name__: cls for cls in (Between, Own, Experts, Chooses, Nested, Tied, Reads, Borrows, Checkpoints)}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, x: torch.Tensor, past: str = "", first: bool = False) -> torch.Tensor:
    """The model's, and that of its module at `past`, which is checkpointed past the model, before it or after."""
    calls = [lambda: model(x)]
    if past:
        calls.insert(0 if first else 1, lambda: checkpoint(model.get_submodule(past), x, use_reentrant=False))
    return torch.stack([call().square().mean() for call in calls]).sum()


def train(rank: int, kind: str, world: int, stage: int, backend: str, past: str = "", first: bool = False) -> list[str]:
    """Three steps beside single-process training on all ranks' batches; names of what differs."""
    warnings.simplefilter("ignore")
    reference = make(kind)
    compiled = zcompile.compile(copy.deepcopy(reference), stage=stage, backend=backend)
    ours = torch.optim.SGD(compiled.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
    differing = []
    for step in range(3):
        loss_of(compiled, batch(rank, step), past, first).backward()
        torch.stack([loss_of(reference, batch(r, step), past, first) for r in range(world)]).mean().backward()
        got, want = gradients(compiled), gradients(reference)
        assert got.keys() == want.keys()
        for name in want:
            a, b = got[name], want[name]
            if (a is None) != (b is None):
                differing.append(f"step {step} {name}: {a} for {b}")
            elif a is not None and b is not None and (a - b).abs().max() > 2e-6 * b.abs().max():
                differing.append(f"step {step} {name}: {(a - b).abs().max() / b.abs().max()}")
        update(ours, theirs)
    assert compiled.explain().count("graph break at") >= 1
    return differing


BROKEN = list(itertools.product(MODELS, range(4), (2, 3)))


QUICK = [(kind, 3, 2 + index % 2) for index, kind in enumerate(MODELS) if index % 6 == 0]


@quickly("kind, stage, world", BROKEN, QUICK)
def test_broken_models_train_as_on_one_device(threads: Threads, kind: str, stage: int, world: int) -> None:
    assert threads.run(world, train, kind, world, stage, "eager") == [[]] * world


@pytest.mark.slow
@diagonal("order, stage", ["model first", "module first"], [0, 3], pairs=False)
def test_a_module_is_checkpointed_within_a_broken_model_and_past_it(threads: Threads, stage: int, order: str) -> None:
    assert threads.run(2, train, "Nested", 2, stage, "eager", "layers.0", order == "module first") == [[]] * 2


@diagonal("alone, stage", [True, False], [0, 3])
@on_threads(2)
def test_a_loss_that_the_model_keeps_is_trained(rank: int, stage: int, alone: bool) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    reference = Keeps()
    given = copy.deepcopy(reference)
    compiled = zcompile.compile(given, stage=stage, backend="eager")

    def loss_of(model: nn.Module, kept: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x).square().mean()
        return kept.loss if alone else out + kept.loss

    loss_of(compiled, given, batch(rank, 0)).backward()
    torch.stack([loss_of(reference, reference, batch(r, 0)) for r in range(2)]).mean().backward()
    got, want = gradients(compiled), gradients(reference)
    return [
        name
        for name, a in got.items()
        if (a is None) != (want[name] is None) or (a is not None and not torch.allclose(a, want[name], rtol=1e-5))
    ]


class Differentiates(nn.Module):
    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.fc, self.before = nn.Linear(WIDTH, WIDTH), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        if self.before:
            self.fc.weight.sum()
        return torch.func.grad(lambda value: (value @ self.fc.weight).square().sum())(x)


def test_a_parameter_is_not_gathered_within_a_transform() -> None:
    x, plain = batch(0, 0), Differentiates(before=True)
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager")
    for model in (plain, compiled):
        model(x).square().sum().backward()
    assert torch.allclose(full(compiled.fc.weight.grad), full(plain.fc.weight.grad))
    compiled = zcompile.compile(Differentiates(before=False), backend="eager")
    with pytest.raises(zcompile.ParameterError, match=r"fc\.weight: is first read within a transform of torch\.func"):
        compiled(x)


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Asks(nn.Module):
    """Asks for the dtype of what it reads, and lets another thread look at shards meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.seen = nn.Linear(WIDTH, WIDTH), list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        weight = self.fc.weight
        self.seen += [weight.dtype, (weight * 1).dtype]
        other = threading.Thread(target=lambda: self.seen.append(type(weight.detach())))
        other.start()
        other.join()
        return self.fc(x)


def test_what_code_asks_about_is_what_it_reads_and_other_threads_see_shards() -> None:
    model = Asks()
    compiled = zcompile.compile(model, backend="eager", dtype=torch.bfloat16)
    compiled(batch(0, 0))
    assert model.seen[:2] == [torch.bfloat16] * 2
    assert issubclass(model.seen[2], DTensor)
    assert compiled.fc.weight.dtype is torch.float32


class ReadsOnOneRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.rank = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.fc(x @ self.fc.weight if self.rank else x)


def read_on_one_rank(rank: int) -> str:
    warnings.simplefilter("ignore")
    model = ReadsOnOneRank()
    model.rank = rank
    compiled = zcompile.compile(model, backend="eager")
    return error_of(lambda: compiled(batch(rank, 0)).sum().backward())


def test_ranks_that_read_other_parameters_are_refused(ranks: Ranks) -> None:
    said = ranks.run(2, read_on_one_rank)
    assert all("rank" in text for text in said), said


@pytest.mark.slow
def test_inductor_compiles_fragments(threads: Threads) -> None:
    assert threads.run(2, train, "Between", 2, 3, "inductor") == [[]] * 2


def broken(kind: str, **options: Any) -> zcompile.CompiledModule:
    return zcompile.compile(make(kind), backend="eager", **options)


@pytest.mark.slow
def test_each_fragment_is_a_program_of_its_own_and_explain_says_why() -> None:
    compiled = broken("Between")
    with pytest.warns(
        UserWarning, match=r"graph break at .*test_fragments\.py:\d+: print(?s:.*)run as plain Python.*Between"
    ):
        compiled(batch(0, 0)).sum().backward()
    assert len(compiled.programs) == 8, "the norm, and the blocks, of which one takes two kinds of input"
    assert {unit.name for program in compiled.programs for unit in program.layout.units} == {
        "blocks.0", "blocks.1", "norm",
    }  # fmt: skip
    page = compiled.explain()
    assert f"graph break at {__file__}:" in page
    assert 'print(end="")' in page


@pytest.mark.slow
def test_a_split_model_keeps_its_shards_between_calls() -> None:
    compiled = broken("Own")
    with pytest.warns(UserWarning, match="run as plain Python"):
        compiled(batch(0, 0)).sum().backward()
    assert all(isinstance(param, DTensor) for param in compiled.parameters())
    with torch.inference_mode():
        assert compiled(batch(0, 1)).shape == (4, WIDTH)


@pytest.mark.filterwarnings("ignore")
def test_the_backward_of_a_split_model_is_checked_too() -> None:
    compiled = broken("Own")
    loss = compiled(batch(0, 0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    again = compiled(batch(0, 0)).sum()
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    with pytest.raises(zcompile.BackwardError, match="parameters changed"):
        again.backward()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        self.weight.data.mul_(2)
        return x * self.weight


class WritesBelow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        with torch.no_grad():
            self.below.weight *= 2
        return self.below(x)


class AssignsBelow(WritesBelow):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        self.below.weight.data = self.below.weight.data * 2
        return self.below(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Writes, zcompile.CaptureError, r"^weight: the model's forward writes to this parameter"),
        (WritesBelow, zcompile.CaptureError, r"^below\.weight: the model's forward writes to this parameter"),
        (
            AssignsBelow,
            zcompile.CaptureError,
            r"^below\.weight: the model's forward writes to .* the code of AssignsBelow",
        ),
    ],
)
def test_what_plain_python_must_not_do(model: type[nn.Module], error: type[Exception], message: str) -> None:
    compiled = zcompile.compile(model(), backend="eager")
    for _ in range(2):
        with pytest.raises(error, match=message):
            compiled(batch(0, 0))
    assert all(isinstance(param, DTensor) for param in compiled.parameters())
