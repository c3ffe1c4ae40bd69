"""divide_sequence: the text of a small program, and real ones computed by all ranks at once in this process."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zcompile
from examples.gpt import GPT, GPTConfig
from tests.cases import quickly
from tests.passes.programs import check, head_of
from zcompile import OptionError, Program, ProgramError, computes, verify
from zcompile.cost.hardware import CPU, Hardware
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Communication, Input, Kind, Parameter, Release
from zcompile.model.units import make_layout
from zcompile.passes.divide_sequence import divide_sequence
from zcompile.proof.dumps import prove_dump
from zcompile.report.dumps import write_dump
from zcompile.schedule.pipeline import Journal
from zcompile.tools.llama import Llama, LlamaShape
from zcompile.tools.tracing import trace
from zcompile.torch_internals.ring_attention import kernel_of

WORDS, WIDTH, HEADS, LENGTH, BATCH = 32, 16, 4, 8, 3
HEAD = head_of("a").replace('"shard 2"', '"shard 2", "sp": "sequence 2"')
HOW = ("ulysses", "ring")
WHOLE = """
def forward(box):
    (
        a,                                # f32[4, 4]             parameter a.weight
        x,                                # f32[3, 8, 4]
    ) = unbox(box)
    rows = aten.view.default(x, [24, 4])  # &f32[24, 4]
    y = aten.mm.default(rows, a)          # f32[24, 4]    +384 B  a
    del rows
    squares = aten.mul.Tensor(y, y)       # f32[24, 4]    +384 B  a
    loss = aten.sum.default(squares)      # f32[]         +4 B
    del squares                           #               -384 B
    return [loss], [x, y]


def backward(box):
    (
        x,                                  # f32[3, 8, 4]
        y,                                  # f32[24, 4]            a
        dloss,                              # f32[]                 tangent
    ) = unbox(box)
    scaled = aten.mul.Tensor(y, dloss)      # f32[24, 4]    +384 B  a
    del y, dloss                            #               -384 B
    rows_1 = aten.view.default(x, [24, 4])  # &f32[24, 4]
    del x
    columns = aten.t.default(rows_1)        # &f32[4, 24]
    del rows_1
    da = aten.mm.default(columns, scaled)   # f32[4, 4]     +64 B   a
    del scaled, columns                     #               -384 B
    return [None], {'a.weight': da}
"""


DIVIDED = """
def forward(box):
    (
        a,                                                     # f32[4, 4]             parameter a.weight
        x,                                                     # f32[3, 8, 4]
    ) = unbox(box)
    rows = aten.view.default(x, [24, 4])                       # &f32[24, 4]
    rows_part = ops.zcompile.shard.default(rows, 0, 3, 2, [0, 1], 'sp')  # f32[12, 4]  +192 B  a
    del rows
    y = aten.mm.default(rows_part, a)                          # f32[12, 4]    +192 B  a
    del rows_part                                              #               -192 B
    squares = aten.mul.Tensor(y, y)                            # f32[12, 4]    +192 B  a
    loss = aten.sum.default(squares)                           # f32[]         +4 B
    del squares                                                #               -192 B
    loss_sum = ops.zcompile.all_reduce.default(loss, 2, 'sp')  # f32[]         +4 B
    del loss                                                   #               -4 B
    return [loss_sum], [x, y]


def backward(box):
    (
        x,                                      # f32[3, 8, 4]
        y,                                      # f32[12, 4]            a
        dloss,                                  # f32[]                 tangent
    ) = unbox(box)
    scaled = aten.mul.Tensor(y, dloss)          # f32[12, 4]    +192 B  a
    del y, dloss                                #               -192 B
    rows_1 = aten.view.default(x, [24, 4])      # &f32[24, 4]
    del x
    columns = aten.t.default(rows_1)            # &f32[4, 24]
    del rows_1
    columns_part = ops.zcompile.shard.default(columns, 1, 3, 2, [0, 1], 'sp')  # f32[4, 12]  +192 B  a
    del columns
    da = aten.mm.default(columns_part, scaled)  # f32[4, 4]     +64 B   a
    del scaled, columns_part                    #               -384 B
    da_scaled = aten.mul.Tensor(da, 2)          # f32[4, 4]     +64 B   a
    del da                                      #               -64 B
    return [None], {'a.weight': da_scaled}
"""


class Explicit(nn.Module):
    """Attention by products of matrices and a softmax, under a causal mask; a tied head and a bias by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        query, key, value = self.project(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(2)) * self.scale
        logits = x @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)


class Masked(nn.Module):
    """Attention under a mask of documents that are packed into one sequence, and a loss in which tokens weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.project = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        document = (tokens == 0).cumsum(1)
        mask = (document[:, :, None] == document[:, None, :])[:, None]
        x = self.tokens(tokens)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        losses = F.cross_entropy(self.head(mixed.transpose(1, 2).flatten(2)).transpose(1, 2), targets, reduction="none")
        return (losses * (targets > 4)).sum() / (targets > 4).sum()


class Remembering(nn.Module):
    """Attention to values of another number, of which gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.query = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory, self.head = nn.Parameter(torch.randn(1, 2, 12, WIDTH // 2)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        query = self.query(x := self.tokens(tokens)).unflatten(-1, (2, -1)).transpose(1, 2)
        memory = self.memory.expand(len(x), -1, -1, -1)
        x = x + F.scaled_dot_product_attention(query, memory, memory).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), weight=torch.linspace(0, 1, WORDS))


class Patches(nn.Module):
    """A model of images: their patches, computed by a convolution, are the tokens; one answer for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, WIDTH, (1, 2), (1, 2)), nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.norm, self.project, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        images = torch.stack([tokens, targets], -2).float()[:, None]
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x.mean(1)), targets[:, 0])


class Raised(nn.Module):
    """A sum over tokens to which a number is added once, and not by each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return (x.square().sum() + 1).log() + x[:, :, 0].sum() * 2 + targets.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(vocabulary=WORDS, context=16, layers=2, heads=HEADS, width=WIDTH)),
    "llama": lambda: Llama(LlamaShape(2, WIDTH, 24, HEADS, HEADS), WORDS),
    "grouped": lambda: Llama(LlamaShape(1, WIDTH, 24, HEADS, 2), WORDS),
    "explicit": Explicit,
    "raised": Raised,
    "masked": Masked,
    "patches": Patches,
    "remembering": Remembering,
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))  # type: ignore[return-value]


def traced(model: nn.Module, ranks: int, args: tuple[Tensor, ...] | None = None) -> Program:
    program = trace(model, args or batch(), fuses=False, chunks=True)
    axes = Axis("dp_sp", AxisKind.SHARD, 2 * ranks), Axis("sp", AxisKind.SEQUENCE, ranks)
    return replace(program, layout=make_layout(model, STAGES[3], axes))


class AllRanks:
    """Computes a program as all ranks of a group do, each line by every rank before the next."""

    def __init__(self, program: Program, ranks: int, given: Callable[[fx.Node], Any]) -> None:
        self.ranks, self.values = ranks, dict[fx.Node, list[Any]]()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = [given(node)] * ranks
            elif node.op == "call_function":
                self.values[node] = self.computed(node)

    def computed(self, node: fx.Node) -> list[Any]:
        name, ranks = str(node.target), range(self.ranks)
        if not name.startswith("zcompile"):
            each = [fx.map_arg((node.args, node.kwargs), lambda arg: self.values[arg][rank]) for rank in ranks]  # noqa: B023
            return [node.target(*args, **kwargs) for args, kwargs in each]  # type: ignore[operator]
        if "ring" in name:
            return self.ring(node)
        source, dim, *rest = node.args
        parts = self.values[source]  # type: ignore[index]
        match name.split(".")[1]:
            case "shard":
                apart = [part.unflatten(dim, (rest[0], -1)) for part in parts]
                at = self.rows(apart[0].shape[dim + 1], node.kwargs)  # type: ignore[operator]
                found = [one.index_select(dim + 1, at[rank]).flatten(dim, dim + 1) for rank, one in enumerate(apart)]  # type: ignore[operator]
            case "all_gather":
                apart = [part.unflatten(dim, (rest[0], -1)) for part in parts]
                joined = torch.cat(apart, dim + 1)  # type: ignore[operator]
                back = torch.cat(self.rows(joined.shape[dim + 1], node.kwargs)).argsort()  # type: ignore[operator]
                found = [joined.index_select(dim + 1, back).flatten(dim, dim + 1)] * self.ranks  # type: ignore[operator]
            case "all_to_all":
                found = [*torch.cat(parts, dim).chunk(self.ranks, rest[0])]  # type: ignore[arg-type]
            case "all_reduce":
                found = [sum(parts[1:], parts[0])] * self.ranks
        return [like(node.meta["val"], one) for one in found]

    def rows(self, length: int, kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The numbers of the rows of each rank; in a ring, they are in zig-zag order."""
        if kwargs is not None and not kwargs.get("zigzag"):
            return [*torch.arange(length).chunk(self.ranks)]
        chunks = torch.arange(length).chunk(2 * self.ranks)
        return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(self.ranks)]

    def ring(self, node: fx.Node) -> list[Any]:
        """What the kernel gives of the whole, in parts."""
        name = str(node.target).split(".")[1].removeprefix("ring")
        places, count = (range(6), 8) if "backward" in name else (range(3), 5)

        def whole(place: int, arg: Any) -> Any:
            if not isinstance(arg, fx.Node):
                return arg
            parts = self.values[arg]
            if place not in places:
                return parts[0]
            joined = torch.cat(parts, 2)
            return joined.index_select(2, torch.cat(self.rows(joined.shape[2])).argsort())

        given = [whole(place, arg) for place, arg in enumerate(node.args[:count])]
        named = {key: whole(-1, arg) for key, arg in node.kwargs.items() if key not in ("size", "group")}
        results = getattr(torch.ops.aten, name).default(*given, **named)
        parts = [[one.index_select(2, at) for at in self.rows(one.shape[2])] for one in results]
        return [tuple(map(like, node.meta["val"], own)) for own in zip(*parts, strict=True)]


def like(fake: Tensor, value: Tensor) -> Tensor:
    """The value, in memory as graphs expect it."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value)


def test_rows_are_divided_and_sums_added_up() -> None:
    check(divide_sequence, HEAD, WHOLE, DIVIDED)


def computed(program: Program, model: nn.Module, ranks: int) -> tuple[list[Any], dict[str, list[Tensor]]]:
    """The losses and the gradients of all ranks."""
    parameters, tensors = dict(model.named_parameters()), dict(zip(("tokens", "targets"), batch(), strict=True))

    def given(node: fx.Node) -> Any:
        op = data(node).op
        if isinstance(op, Parameter):
            return parameters[op.name].detach()
        assert isinstance(op, Input)
        if op.kind is Kind.CONSTANT:
            return program.constants[node.name]
        return torch.ones(()) if op.kind is Kind.TANGENT else tensors[node.name]

    values, results = AllRanks(program, ranks, given).values, program.results
    return values[results.outputs[0]], {name: values[gradient] for name, gradient in results.gradients.items()}


def test_gradients_are_reduced_when_those_of_all_tokens_are() -> None:
    program = traced(MODELS["llama"](), 2)
    whole, *divided = (zcompile.pipeline(stage=3, prefetch=1, sequence=how).run(program) for how in (None, *HOW))  # type: ignore[arg-type]
    for made in divided:
        assert lines(made) == lines(whole)


def lines(program: Program) -> list[str]:
    """The calls, communications and releases of a program."""
    return [node.name for node in program.graph.nodes if isinstance(data(node).op, (Call, Communication, Release))]


@quickly(
    "name, ranks, how",
    [*itertools.product(MODELS, [2], HOW), ("gpt", 4, "ring"), ("explicit", 4, "ulysses"), ("masked", 4, "ring")],
    [("grouped", 2, "ring"), ("explicit", 4, "ulysses"), ("raised", 2, "ulysses")],
)
def test_all_ranks_compute_what_one_computes(name: str, ranks: int, how: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    program = traced(model, ranks)
    divided = divide_sequence(program, how)
    verify(divided, (computes(program),), "here")
    losses, gradients = computed(divided, model, ranks)
    wanted = model(*batch())
    wanted.backward()
    for loss in losses:
        torch.testing.assert_close(loss, wanted)
    for param, each in gradients.items():
        mean = sum(each) / ranks
        torch.testing.assert_close(mean, model.get_parameter(param).grad, msg=lambda m, n=param: f"{n}: {m}")
    most = max(node.meta["val"].numel() for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    mine = [node.meta["val"].numel() for node in divided.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert max(mine) < most or name in (
        "explicit",
        "raised",
        "remembering",
    )  # whose keys and values each rank has, and their gradients


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with one line changed that divides a value, or another value in its place."""

    def changed(what: str, number: int, change: Callable[[list[fx.Node], fx.Node], None]) -> tuple[str, Program]:
        copied = program.copy()
        nodes = list(copied.graph.nodes)
        change(nodes, nodes[number])
        return f"{what} {nodes[number].name}", copied

    for number, node in enumerate(program.graph.nodes):
        name = str(node.target)
        if "ring" in name:
            tensors = [at for at, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
            for at, other in itertools.permutations(tensors, 2):
                yield changed("mixed up", number, lambda _, n, a=at, o=other: n.update_arg(a, n.args[o]))
            if node.args[-1] is True:
                yield changed("seeing all", number, lambda _, n: n.update_arg(len(n.args) - 1, False))
            yield changed("within ranks", number, lambda _, n: setattr(n, "target", kernel_of(n.target)))
        elif name.startswith("zcompile"):
            yield changed("without", number, lambda _, n: n.replace_all_uses_with(n.args[0]))
            for at, value in ((1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)):
                if "all_reduce" not in name and node.args[at] != value:
                    yield changed(f"{at}={value} of", number, lambda _, n, a=at, v=value: n.update_arg(a, v))
            for other, like in enumerate(itertools.islice(program.graph.nodes, number)):
                if str(like.target) == name and like.meta["val"].shape == node.meta["val"].shape:
                    yield changed(
                        f"{like.name} for", number, lambda nodes, n, o=other: n.replace_all_uses_with(nodes[o])
                    )
        elif node.target is torch.ops.aten.mul.Tensor and node.args[1] == 2:
            yield changed("unscaled", number, lambda _, n: n.replace_all_uses_with(n.args[0]))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_no_mutant_is_accepted_that_computes_something_else(name: str, how: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    program = traced(model, 2)
    wanted = computed(divide_sequence(program, how), model, 2)
    refused = 0
    every = list(mutants(divide_sequence(program, how)))
    for what, mutant in every:
        try:
            verify(mutant, (computes(program),), "here")
        except ProgramError:
            refused += 1
            continue
        try:
            found = computed(mutant, model, 2)
        except RuntimeError as error:
            raise AssertionError(f"{what} is accepted, and fails") from error
        torch.testing.assert_close(found, wanted, msg=lambda m, w=what: f"{w}: {m}")
    assert refused > 0.6 * len(every) > 10


@pytest.mark.parametrize(("old", "new"), [(2, 4), ("sp", "dp_sp")])
@pytest.mark.parametrize("divide", [divide_sequence, *(zcompile.pipeline(stage=3, sequence=how).run for how in HOW)])
def test_values_divided_over_other_ranks_are_refused(
    divide: Callable[[Program], Program], old: int | str, new: int | str
) -> None:
    program = traced(MODELS["gpt"](), 2)
    divided, refused = divide(program), 0
    for graph in (divided.graph, *(region.graph for region in divided.regions.values())):
        for node in graph.nodes:
            if str(node.target).startswith("zcompile"):
                args, kwargs = node.args, node.kwargs
                if "ring" in str(node.target):
                    node.update_kwarg("size" if old == 2 else "group", new)
                else:
                    node.update_arg(max(at for at, arg in enumerate(node.args) if arg == old), new)
                with pytest.raises(ProgramError):
                    verify(divided, (computes(program),), "here")
                node.args, node.kwargs = args, kwargs
                refused += 1
    verify(divided, (computes(program),), "here")
    assert refused >= 10


def test_a_mask_of_three_dimensions_is_refused() -> None:
    """Whose heads are along another dimension than those of the other values."""
    program = traced(MODELS["masked"](), 2)
    divided = divide_sequence(program)
    attention = next(node for node in divided.graph.nodes if "attention" in str(node.target))
    mask = attention.kwargs["attn_mask"]
    with divided.graph.inserting_before(attention):
        heads = divided.graph.call_function(torch.ops.aten.squeeze.dim, (mask, 1))
    heads.meta = mask.meta | {"val": mask.meta["val"].squeeze(1)}
    attention.update_kwarg("attn_mask", heads)
    with pytest.raises(ProgramError, match="takes squeeze_dim, a mask of three dimensions"):
        verify(divided, (computes(program),), "here")


class Crossed(nn.Module):
    """Attention of all tokens to the first half of them, or to some that are given."""

    def __init__(self, tokens: int, *, causal: bool) -> None:
        super().__init__()
        self.key, self.embedding, self.causal = nn.Parameter(torch.randn(1, 2, tokens, 4)), nn.Embedding(8, 8), causal

    def forward(self, tokens: Tensor) -> Tensor:
        query, key = (
            self.embedding(tokens).unflatten(-1, (2, 4)).transpose(1, 2),
            self.key.expand(len(tokens), -1, -1, -1),
        )
        return F.scaled_dot_product_attention(query, key, key, is_causal=self.causal).square().sum()


@pytest.mark.parametrize(
    ("tokens", "causal", "problem"), [(6, False, "6 tokens, which 2 ranks"), (4, True, "fewer queries")]
)
def test_what_cannot_go_round_is_refused(tokens: int, causal: bool, problem: str) -> None:
    program = traced(Crossed(tokens, causal=causal), 2, (torch.ones(2, 8, dtype=torch.int64),))
    with pytest.raises(OptionError, match=f"(?s)sequence: cannot divide _scaled.*test_divide.*{problem}"):
        divide_sequence(program, "ring")


def test_a_ring_wants_chunks_for_all_ranks_twice() -> None:
    program = traced(MODELS["gpt"](), 2, tuple(part[:, :6].contiguous() for part in batch()))
    with pytest.raises(OptionError, match=r"(?s)no input is .batch, tokens.*a multiple of 4"):
        divide_sequence(program, "ring")


@pytest.mark.parametrize(
    ("name", "ranks", "hardware", "how"),
    [
        ("grouped", 4, None, "in a ring"),  # as four ranks do not divide two heads
        ("gpt", 4, Hardware.of(flops=1e3, memory_bandwidth=1e9, latency=1e-9, bandwidth=1e3), "in a ring"),
        ("gpt", 4, Hardware.of(flops=1e15, memory_bandwidth=1e15, latency=1e-9, bandwidth=1e3), "by heads"),
    ],
)
def test_what_takes_less_time_is_chosen(name: str, ranks: int, hardware: Hardware | None, how: str) -> None:
    assert how in divide_sequence(traced(MODELS[name](), ranks), "auto", hardware).notes[-1]


def test_what_can_be_divided_in_no_way_is_refused() -> None:
    program = traced(MODELS["grouped"](), 4, tuple(part[:, :4].contiguous() for part in batch()))
    with pytest.raises(OptionError, match=r"no input is .batch, tokens."):
        divide_sequence(program, "auto")


@pytest.mark.parametrize(
    ("model", "args", "problem"),
    [
        (lambda: Llama(LlamaShape(1, 18, 24, 3, 3), WORDS), batch(), "3 heads, which 2 ranks do not divide"),
        (MODELS["gpt"], tuple(part[:, :7].contiguous() for part in batch()), "no input is .batch, tokens."),
        (MODELS["grouped"], batch(), "2 heads, which 4 ranks do not divide"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (torch.ones(2, 8, 4),), "draws random numbers"),
        (lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 4)), (torch.ones(2, 8, 4),), "draws random numbers"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: Callable[[], nn.Module], args: tuple[Tensor, ...], problem: str
) -> None:
    with pytest.raises(OptionError, match=f"(?s)sequence: .*{problem}"):
        divide_sequence(traced(model(), 4 if "4 ranks" in problem else 2, args))


def test_without_an_axis_of_sequences_nothing_is_divided() -> None:
    program = traced(MODELS["gpt"](), 2)
    with pytest.raises(OptionError, match="the mesh has no axis for them"):
        divide_sequence(replace(program, layout=replace(program.layout, axes=program.layout.axes[:1])))


def dumped(program: Program, folder: Path, how: Any = "ulysses") -> Path:
    journal = Journal()
    zcompile.pipeline(stage=3, prefetch=1, sequence=how).run(program, journal)
    write_dump(folder, [journal], "", CPU)
    return folder


@quickly("name, how", [*itertools.product(MODELS, HOW)], [("grouped", "ulysses"), ("gpt", "ring")])
def test_a_divided_program_is_proven_from_its_text(name: str, how: str, tmp_path: Path) -> None:
    (verdict,) = prove_dump(dumped(traced(MODELS[name](), 2), tmp_path, how))
    assert verdict.error is None, verdict.error


CHANGES = {
    "ulysses": [
        (r"all_to_all\.default\((\w+), 2, 1,", r"all_to_all.default(\1, 2, 3,"),
        (r"all_to_all\.default\((\w+), 1, 2,", r"all_to_all.default(\1, 2, 1,"),
        (r"shard\.default\((\w+), 1, 1,", r"shard.default(\1, 0, 1,"),
        (r"(\w+) = ops\.zcompile\.all_reduce\.default\((\w+), 2, 'sp'\)", r"\1 = aten.neg.default(\2)"),
        (r"aten\.mul\.Tensor\((\w+), 2\)", r"aten.mul.Tensor(\1, 3)"),
        (r"aten\.mul\.Tensor\((\w+), 2\)", r"aten.clone.default(\1)"),
        (r"(ops\.zcompile\.\w+\.default\(.*)'sp'\)", r"\1'dp')"),
        (r"(ops\.zcompile\.\w+\.default\(.*) 2,( \[.*\],)? 'sp'\)", r"\1 4,\2 'sp')"),
        (r"ops\.zcompile\.wait_all_to_all\.default\((\w+), .*'sp'\)", r"aten.alias.default(\1)"),
        (r"(\n    )(\w+ = ops\.zcompile\.wait_all_to_all\.default\()(\w+)", r"\1zz = aten.clone.default(\3)\1\2zz"),
        (r"(wait_all_to_all\.default\()(\w+)(.*\n.*wait_all_to_all\.default\()(\w+)", r"\1\4\3\2"),
        (r"(all_to_all\.default\(\w+, \d, \d, 2, \[)(\d), (\d), ", r"\1\3, \2, "),
    ],
    "ring": [
        (r", zigzag=True\)", ", zigzag=False)"),
        (r", zigzag=True\)", ")"),
        (r", zigzag=True\)", ", zigzag=0)"),
        (r", zigzag=True\)", ", zigzag=not True)"),
        (r"ops\.zcompile\.ring(_scaled_\S+\(.*), size=2, group='sp'\)", r"aten.\1)"),
        (r"(ring_scaled_\S+\(.*), True, size", r"\1, False, size"),
        (r"(ring_scaled_\S+\(.*)size=2", r"\1size=4"),
        (r"(ring_scaled_\S+\(.*)group='sp'", r"\1group='dp'"),
        (r"(ring_scaled_\w+\.default\()(\w+), (\w+)", r"\1\3, \2"),
        (r"(ring_scaled_\w+\.default\(\w+, )(\w+), (\w+)", r"\1\3, \2"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "number"), [(how, number) for how in HOW for number in range(len(CHANGES[how]))])
def test_a_text_that_divides_otherwise_is_not_proven(how: str, number: int, tmp_path: Path) -> None:
    folder, (old, new) = dumped(traced(MODELS["gpt"](), 2), tmp_path, how), CHANGES[how][number]
    changed = 0
    for file in (folder / "program_0" / "regions").glob("*.py"):
        text = file.read_text()
        for found in re.finditer(old, text):
            file.write_text(text[: found.start()] + found.expand(new) + text[found.end() :])
            (verdict,) = prove_dump(folder)
            assert verdict.proof is None, found[0]
            changed += 1
        file.write_text(text)
    assert changed
    (verdict,) = prove_dump(folder)
    assert verdict.proof is not None
