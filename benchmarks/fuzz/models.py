"""Small random models as data, and the modules that such data describe.

Every layer takes and gives [batch, length, width], so any of them may follow any other. Nothing is random but the
start: dropout keeps everything, so that two runs of a model can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11
"""Odd, so that no world divides the embedding."""
KEPT = 1e-9
"""A probability of dropout that draws numbers and drops nothing."""


@dataclass(frozen=True)
class Layer:
    """One layer: a name in LAYERS, and what that one makes of the rest."""

    kind: str
    number: int = 0
    frozen: bool = False
    inner: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A model. `outputs` is the form of what it gives, `inputs` what it takes."""

    width: int = 4
    layers: tuple[Layer, ...] = ()
    heads: tuple[int, ...] = (3,)
    inputs: str = "floats"
    outputs: str = "tensor"
    tied: bool = False
    double: bool = True


@dataclass
class Answer:
    """What a model gives that returns an object."""

    first: Tensor
    others: tuple[Tensor, ...]


class Model(nn.Module):
    """The model of a spec: perhaps an embedding, layers, and heads that each give an output."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, spec.width) if spec.inputs == "tokens" else None
        self.layers = nn.ModuleList()
        for layer in spec.layers:
            again = layer.kind == "again" and len(self.layers) > 0
            self.layers.append(self.layers[layer.number % len(self.layers)] if again else made(layer, spec.width))
        sizes = [VOCABULARY, *spec.heads[1:]] if spec.tied else spec.heads
        self.heads = nn.ModuleList(nn.Linear(spec.width, size) for size in sizes)
        if spec.tied and self.embedding is not None:
            cast(nn.Linear, self.heads[0]).weight = self.embedding.weight

    def forward(self, x: Any, heads: str | None = None) -> Any:
        """Outputs of all heads, or of those whose digits are asked for."""
        value = x["x"][0] if isinstance(x, dict) else x
        value = self.embedding(value) if self.embedding is not None else value
        for layer in self.layers:
            value = layer(value)
        given = [head(value) for number, head in enumerate(self.heads) if heads is None or str(number) in heads]
        return packed(self.spec.outputs, given)


def packed(form: str, given: list[Tensor]) -> Any:
    """The outputs in the form of a spec."""
    match form:
        case "tensor":
            return given[0] if len(given) == 1 else tuple(given)
        case "dict":
            return {f"head{number}": value for number, value in enumerate(given)}
        case "nested":
            return {"first": (given[0],), "others": [*given[1:], None, 1]}
        case "object":
            return Answer(given[0], tuple(given[1:]))
        case "aliased":
            return (*given, given[0], given[-1].transpose(0, 1))
    return tuple(given)


def heads_of(outputs: Any) -> list[Tensor]:
    """The tensors among what a model gives, in order; those that are there twice, twice."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Answer):
        return [outputs.first, *outputs.others]
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple | list) else ()
    return [tensor for value in values for tensor in heads_of(value)]


def make_model(spec: Spec, seed: int) -> Model:
    """The model with values of this seed."""
    torch.manual_seed(seed)
    return Model(spec).to(torch.float64 if spec.double else torch.float32)


def make_batch(spec: Spec, seed: str, rows: int, length: int) -> tuple[Any, list[Tensor]]:
    """An input of `rows` sequences of `length`, and a target for each head."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(40))
    dtype = torch.float64 if spec.double else torch.float32

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=dtype)

    targets = [numbers(rows, length, size) for size in ((VOCABULARY, *spec.heads[1:]) if spec.tied else spec.heads)]
    match spec.inputs:
        case "tokens":
            return torch.randint(VOCABULARY, (rows, length), generator=generator), targets
        case "strided":
            return numbers(length, spec.width, rows).permute(2, 0, 1), targets
        case "dict":
            return {"x": [numbers(rows, length, spec.width)], "y": 1}, targets
        case "differentiable":
            return numbers(rows, length, spec.width).requires_grad_(), targets
    return numbers(rows, length, spec.width), targets


# -- layers ---------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Layers, and what `call(modules, x)` does with them; `modules` are an attribute of their own."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], modules: nn.Module) -> None:
        super().__init__()
        self.call, self.inner = call, modules

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


class WithParameters(nn.Module):
    """Parameters of these shapes, and what `call(self, x)` does with them."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        for name, shape in zip("abc", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Statistics(nn.Module):
    """Buffers that the forward writes: in place, or by putting another tensor there."""

    count: Tensor
    mean: Tensor

    def __init__(self, width: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1)).to(self.mean.dtype)
        if self.in_place:
            self.count += 1
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + mean * 0.1
        return x - self.mean.detach().clone()


class Ticking(nn.Module):
    """Python that counts its calls and takes another way every other time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.calls = 0
        self.odd, self.even = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return cast(Tensor, (self.odd if self.calls % 2 else self.even)(x))


class Numbers(nn.Module):
    """Numbers of plain Python that change with each call: floats, integers, and what is in containers."""

    def __init__(self, width: int, kind: str, number: int) -> None:
        super().__init__()
        self.linear, self.kind, self.number = nn.Linear(width, width), kind, number
        self.tau, self.calls, self.mode = 1.0, 0, "odd"
        self.counts, self.scale = {"calls": 0}, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        factor = {"annealed": self.annealed, "counting": self.counting, "cycling": self.cycling}[self.kind]()
        return cast(Tensor, self.linear(x)) * factor

    def annealed(self) -> float:
        match self.number % 3:
            case 0:
                self.tau *= 0.9
            case 1:
                self.tau = max(self.tau - 0.1, 0.3)
            case _:
                self.scale[0] *= 0.8
        return self.tau * self.scale[0]

    def counting(self) -> float:
        self.calls += 1
        return [min(1.0, self.calls / 4), 0.5 if self.calls < 3 else 1.0, self.calls][self.number % 3]

    def cycling(self) -> float:
        self.mode = {"odd": "even", "even": "odd"}[self.mode]
        self.counts["calls"] += 1
        return 1.0 if self.mode == "odd" else 1.5


class Scaled(torch.autograd.Function):
    """A gradient of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def _in_place(linear: Any, x: Tensor) -> Tensor:
    value: Tensor = linear(x)
    value.add_(0.5).mul_(1.5)
    value[..., 0] *= 2
    value.select(-1, 1).add_(1)
    return value


def _without_gradient(linear: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        added: Tensor = linear(x)
    return x + added


def _routed(experts: Any, x: Tensor) -> Tensor:
    """Rows go to the expert that they choose: one that none chose is not called, on each rank another."""
    flat = x.flatten(0, 1)
    chosen = (flat[:, 0] > 0).long()
    out = torch.zeros_like(flat)
    for number, expert in enumerate(experts):
        rows = (chosen == number).nonzero().flatten()
        if rows.numel():
            out = out.index_add(0, rows, expert(flat[rows]))
    return out.view_as(x)


def _mixture(experts: Any, x: Tensor) -> Tensor:
    weights = x[..., : len(experts)].softmax(-1)
    return cast(Tensor, sum(expert(x) * weights[..., n, None] for n, expert in enumerate(experts)))


def _while_training(linear: Any, x: Tensor) -> Tensor:
    return cast(Tensor, linear(x)) if linear.training else x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(x: Tensor) -> Tensor:
    return torch.tanh(x)


def _broken(linear: Any, x: Tensor) -> Tensor:
    return cast(Tensor, _untraced(linear(x)))


def _branching(linear: Any, x: Tensor) -> Tensor:
    return cast(Tensor, linear(x)) if x.detach().abs().sum() < 1e9 else x


def _item(linear: Any, x: Tensor) -> Tensor:
    return cast(Tensor, linear(x)) * (1.0 if x.detach().sum().item() < 1e9 else 2.0)


def _printing(linear: Any, x: Tensor) -> Tensor:
    print("a value of shape", tuple(x.shape))
    return cast(Tensor, linear(x))


def _array(linear: Any, x: Tensor) -> Tensor:
    assert x.detach().float().numpy().shape == tuple(x.shape)
    return cast(Tensor, linear(x))


def _tied(modules: Any, x: Tensor) -> Tensor:
    return cast(Tensor, torch.tanh(modules[0](x)) + modules[1](x))


def _tied_pair(width: int, n: int) -> nn.Module:
    pair = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width, bias=n % 2 == 0)])
    cast(nn.Linear, pair[1]).weight = cast(nn.Linear, pair[0]).weight
    return Wrapped(_tied, pair)


def _hooked(width: int) -> nn.Module:
    linear = nn.Linear(width, width)
    linear.register_forward_hook(lambda module, args, out: out * 2)
    linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return linear


def _over_length(module: nn.Module) -> nn.Module:
    """A module that takes [batch, width, length]."""
    return Wrapped(lambda inner, x: inner(x.transpose(1, 2)).transpose(1, 2), module)


def _multihead(inner: Any, x: Tensor) -> Tensor:
    return cast(Tensor, inner(x, x, x, need_weights=False)[0])


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _with_unused(width: int) -> nn.Module:
    module = WithParameters(lambda m, x: x + m.a, (width,), (3, width), ())
    return nn.Sequential(module, nn.Linear(width, width))


def _listed(width: int) -> nn.Module:
    module = Wrapped(lambda m, x: x * m[0] + m[1], nn.ParameterList([torch.ones(width), torch.zeros(())]))
    return nn.Sequential(module, nn.Linear(width, width))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda w, n: nn.Linear(w, w, bias=n % 2 == 0),
    "mlp": lambda w, n: _mlp(w, w + n),
    "bilinear": lambda w, n: Wrapped(lambda m, x: m(x, x.tanh()), nn.Bilinear(w, w, w)),
    "weight_norm": lambda w, n: cast(nn.Module, weight_norm(nn.Linear(w, w))),
    "hooked": lambda w, n: _hooked(w),
    "tied_pair": _tied_pair,
    "layer_norm": lambda w, n: nn.LayerNorm(w, elementwise_affine=n % 3 > 0),
    "rms_norm": lambda w, n: nn.RMSNorm(w),
    "batch_norm": lambda w, n: _over_length(nn.BatchNorm1d(w)),
    "batch_norm_at_rest": lambda w, n: _over_length(nn.BatchNorm1d(w).eval()),
    "group_norm": lambda w, n: _over_length(nn.GroupNorm(2, w)),
    "conv": lambda w, n: _over_length(nn.Conv1d(w, w, 3, padding=1)),
    "conv2d": lambda w, n: Wrapped(lambda m, x: m(x[:, None])[:, 0], nn.Conv2d(1, 1 + n % 3, 3, padding=1)),
    "attention": lambda w, n: Attention(w),
    "multihead": lambda w, n: Wrapped(_multihead, nn.MultiheadAttention(w, 2, batch_first=True)),
    "encoder": lambda w, n: nn.TransformerEncoderLayer(w, 2, 2 * w, dropout=KEPT if n % 2 else 0.0, batch_first=True),
    "lstm": lambda w, n: Wrapped(lambda m, x: m(x)[0], nn.LSTM(w, w, batch_first=True)),
    "dropout": lambda w, n: nn.Dropout(KEPT if n % 2 else 0.0),
    "scalar": lambda w, n: WithParameters(lambda m, x: x * m.a, ()),
    "odd": lambda w, n: WithParameters(lambda m, x: x * m.a.sum() + m.b[-1], (1 + n,), (n % 3 + 1,)),
    "low_rank": lambda w, n: WithParameters(lambda m, x: x @ m.a.t() @ m.a, (1 + n % 3, w)),
    "table": lambda w, n: WithParameters(lambda m, x: x + m.a[: x.shape[1]], (8, w)),
    "positions": lambda w, n: WithParameters(lambda m, x: (x * m.a[: x.shape[1]]).tanh(), (8, w)),
    "expanded": lambda w, n: WithParameters(lambda m, x: x * m.a[n % 3].expand_as(x), (3, w)),
    "penalty": lambda w, n: WithParameters(lambda m, x: x + m.a.square().sum() * 0.1, (n + 1, 3)),
    "listed": lambda w, n: _listed(w),
    "unused": lambda w, n: _with_unused(w),
    "detached": lambda w, n: Wrapped(lambda m, x: x + m(x).detach(), nn.Linear(w, w)),
    "without_gradient": lambda w, n: Wrapped(_without_gradient, nn.Linear(w, w)),
    "statistics": lambda w, n: Statistics(w, in_place=n % 2 == 0),
    "in_place": lambda w, n: Wrapped(_in_place, nn.Linear(w, w)),
    "relu_in_place": lambda w, n: nn.Sequential(nn.Linear(w, w), nn.LeakyReLU(0.1, inplace=True)),
    "halves": lambda w, n: Wrapped(lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1), nn.Identity()),
    "turned": lambda w, n: Wrapped(lambda m, x: m(x.flip(1)).transpose(0, 1).transpose(0, 1), nn.Linear(w, w)),
    "function": lambda w, n: Wrapped(lambda m, x: Scaled.apply(m(x)), nn.Linear(w, w)),
    "twice": lambda w, n: Wrapped(lambda m, x: m(torch.tanh(m(x))), nn.Linear(w, w)),
    "mixture": lambda w, n: Wrapped(_mixture, nn.ModuleList(nn.Linear(w, w) for _ in range(2 + n % 2))),
    "while_training": lambda w, n: Wrapped(_while_training, nn.Linear(w, w)),
    "annealed": lambda w, n: Numbers(w, "annealed", n),
    "counting": lambda w, n: Numbers(w, "counting", n),
    "cycling": lambda w, n: Numbers(w, "cycling", n),
    "ticking": lambda w, n: Ticking(w),
    "graph_break": lambda w, n: Wrapped(_broken, nn.Linear(w, w)),
    "branching": lambda w, n: Wrapped(_branching, nn.Linear(w, w)),
    "item": lambda w, n: Wrapped(_item, nn.Linear(w, w)),
    "printing": lambda w, n: Wrapped(_printing, nn.Linear(w, w)),
    "array": lambda w, n: Wrapped(_array, nn.Linear(w, w)),
    "routed": lambda w, n: Wrapped(_routed, nn.ModuleList(nn.Linear(w, w) for _ in range(2))),
}
BREAKING = ("graph_break", "branching", "item", "printing", "array", "routed", "lstm", "ticking")
"""Layers that Dynamo cannot, or may not, trace into one graph."""
IN_PYTHON = ("annealed", "counting", "cycling", "ticking")
"""Layers of which a call changes what no state has."""
REMEMBERING = ("statistics", "batch_norm", "batch_norm_at_rest", *IN_PYTHON)
"""Layers that a call changes: a checkpoint's second one changes them again, but not where it is traced."""
CONTAINERS: dict[str, Callable[[nn.ModuleList], nn.Module]] = {
    "sequence": lambda inner: nn.Sequential(*inner),
    "residual": lambda inner: Wrapped(lambda m, x: x + m(x), nn.Sequential(*inner)),
    "dictionary": lambda inner: Wrapped(_by_name, nn.ModuleDict({f"part {n}": m for n, m in enumerate(inner)})),
    "checkpointed": lambda inner: Wrapped(_checkpointed, nn.Sequential(*inner)),
}


def _by_name(modules: Any, x: Tensor) -> Tensor:
    for name in sorted(modules):
        x = modules[name](x)
    return x


def _checkpointed(module: Any, x: Tensor) -> Tensor:
    return cast(Tensor, checkpoint(module, x, use_reentrant=False))


def made(layer: Layer, width: int) -> nn.Module:
    """The module of a layer."""
    if layer.kind in CONTAINERS:
        module = CONTAINERS[layer.kind](nn.ModuleList(made(inner, width) for inner in layer.inner))
    else:
        module = LAYERS[layer.kind if layer.kind != "again" else "linear"](width, layer.number)
    return module.requires_grad_(not layer.frozen)


# -- chance ---------------------------------------------------------------------------------------------------------


def draw_spec(chance: random.Random, *, breaks: float = 0.25) -> Spec:
    """A random model; a share of `breaks` of them have layers that break the graph."""
    kinds = list(LAYERS) if chance.random() < breaks else [kind for kind in LAYERS if kind not in BREAKING]
    inputs = chance.choice(["tokens", "tokens", "floats", "strided", "dict", "differentiable"])
    return Spec(
        width=chance.choice([4, 6, 8, 10]),
        layers=tuple(_draw_layer(chance, kinds, 2) for _ in range(chance.randint(1, 4))),
        heads=tuple(chance.randint(1, 7) for _ in range(chance.choice([1, 1, 2, 2, 3]))),
        inputs=inputs,
        outputs=chance.choice(["tensor", "tuple", "dict", "nested", "object", "aliased"]),
        tied=inputs == "tokens" and chance.random() < 0.4,
        double=chance.random() < 0.6,
    )


def _draw_layer(chance: random.Random, kinds: Sequence[str], depth: int) -> Layer:
    number, frozen = chance.randint(0, 6), chance.random() < 0.1
    if depth and chance.random() < 0.3:
        container = chance.choice(list(CONTAINERS))
        among = [kind for kind in kinds if container != "checkpointed" or kind not in REMEMBERING]
        inner = tuple(_draw_layer(chance, among, depth - 1) for _ in range(chance.randint(1, 3)))
        return Layer(container, number, frozen, inner)
    if depth == 2 and chance.random() < 0.08:
        return Layer("again", number)
    return Layer(chance.choice(list(kinds)), number, frozen)
