from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.models import MODELS
from tests.passes.programs import CHAIN, TRACED, joined
from zcompile import OptionError, Program, parse
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Input, Kind, Parameter
from zcompile.passes.common.boundary import Boundary, Crossing, End, Lending, PipelineStage
from zcompile.passes.pipelining.cut_stages import cut_stages, units_in_order, work_of_units
from zcompile.tools.tracing import trace

HEAD = CHAIN.partition("def ")[0]
FIRST = """
def forward(box):
    (
        a,                      # f32[4, 4]          parameter a.weight
        x,                      # f32[8, 4]
    ) = unbox(box)
    ya = aten.mm.default(x, a)  # f32[8, 4]  +128 B  a
    return [ya], [x]


def backward(box):
    (
        x,                                  # f32[8, 4]
        b_grad_input,                       # f32[8, 4]          tangent
    ) = unbox(box)
    xt = aten.t.default(x)                  # &f32[4, 8]         a
    del x
    ga = aten.mm.default(xt, b_grad_input)  # f32[4, 4]   +64 B  a
    del b_grad_input, xt
    return [], {'a.weight': ga}
"""
SECOND = """
def forward(box):
    (
        b,                          # f32[4, 4]          parameter b.weight
        a_out,                      # f32[8, 4]          a
    ) = unbox(box)
    yb = aten.mm.default(a_out, b)  # f32[8, 4]  +128 B  b
    return [yb], [a_out]


def backward(box):
    (
        b,                                   # f32[4, 4]           parameter b.weight
        a_out,                               # f32[8, 4]           a
        c_grad_input,                        # f32[8, 4]           tangent
    ) = unbox(box)
    bt = aten.t.default(b)                   # &f32[4, 4]          b
    da = aten.mm.default(c_grad_input, bt)   # f32[8, 4]   +128 B  b
    del bt
    yat = aten.t.default(a_out)              # &f32[4, 8]          b
    del a_out
    gb = aten.mm.default(yat, c_grad_input)  # f32[4, 4]   +64 B   b
    del c_grad_input, yat
    return [da], {'b.weight': gb}
"""
THIRD = """
def forward(box):
    (
        c,                          # f32[4, 4]          parameter c.weight
        b_out,                      # f32[8, 4]          b
    ) = unbox(box)
    yc = aten.mm.default(b_out, c)  # f32[8, 4]  +128 B  c
    return [yc], [b_out]


def backward(box):
    (
        c,                         # f32[4, 4]           parameter c.weight
        b_out,                     # f32[8, 4]           b
        dy,                        # f32[8, 4]           tangent
    ) = unbox(box)
    ct = aten.t.default(c)         # &f32[4, 4]          c
    db = aten.mm.default(dy, ct)   # f32[8, 4]   +128 B  c
    del ct
    ybt = aten.t.default(b_out)    # &f32[4, 8]          c
    del b_out
    gc = aten.mm.default(ybt, dy)  # f32[4, 4]   +64 B   c
    del dy, ybt
    return [db], {'c.weight': gc}
"""


def test_a_step_is_cut_where_units_begin() -> None:
    traced = parse(joined(HEAD, TRACED))
    before = traced.text(regions=True)
    stages = cut_stages(traced, starts=["b", "c"])
    assert [str(stage.program).strip("\n") for stage in stages] == [one.strip("\n") for one in (FIRST, SECOND, THIRD)]
    assert [[unit.name for unit in stage.program.layout.units] for stage in stages] == [["a"], ["b"], ["c"]]
    assert traced.text(regions=True) == before, "a pass works on a copy"


def test_what_goes_from_stage_to_stage_is_said_by_its_name() -> None:
    first, second, third = (stage.boundary for stage in cut_stages(parse(joined(HEAD, TRACED)), starts=["b", "c"]))
    assert first == Boundary((0,), (Crossing("da", 1),), (Crossing("ya", 1),), ())
    assert second == Boundary((Crossing("ya", 0),), (Crossing("db", 2),), (Crossing("yb", 2),), (Crossing("da", 0),))
    assert third == Boundary((Crossing("yb", 1),), (0,), (0,), (Crossing("db", 1),))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (["d"], "split: names 'd', which is not a unit .* choose from 'a', 'b', 'c'"),
        (["a"], "split: has 'a' begin a stage, and nothing is computed between"),
        (["c", "b"], "split: has 'b' begin a stage, .* in the order of the forward: a, b, c"),
    ],
)
def test_stages_begin_with_units_in_their_order(starts: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){message}"):
        cut_stages(parse(joined(HEAD, TRACED)), starts=starts)


# -- real steps: all stages together compute what the whole computes ----------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Skips(nn.Module):
    """Values that cross several cuts, a mask, a parameter that the first and the last block read, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.down = nn.ModuleList(Residual(8) for _ in range(3))
        self.up = nn.ModuleList(Residual(8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (torch.arange(x.shape[1])[:, None] > 1).float()
        h, kept = x * self.scale, []
        for block in self.down:
            h = block(h) * mask
            kept.append(h)
        for block in self.up:
            h = block(h + kept.pop()) * mask + h.mean()
        return ((h - y) ** 2).mean() + (self.scale**2).sum(), h.detach().sum()


class Whole(nn.Module):
    """A parameter that the first block reads twice and the last once; whole numbers, whose sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(4.0))
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        for block in self.blocks:
            nn.init.eye_(block.weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.blocks[1](self.blocks[0](x * self.scale + self.scale))
        return (h * self.scale).sum(), y.sum()


def case(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "skips":
        return Skips(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    if name == "whole":
        return Whole(), (torch.arange(8.0).view(2, 4), torch.ones(2))
    tokens = torch.randint(0, 64, (2, 16))
    return MODELS[name](), (tokens, tokens.roll(1))


class Evaluated:
    """The values of one program, computed by PyTorch phase by phase."""

    def __init__(self, program: Program, model: nn.Module, inputs: list[Any]) -> None:
        self.program, self.values = program, dict[fx.Node, Any]()
        parameters = dict(model.named_parameters())
        for node in program.graph.find_nodes(op="placeholder"):
            op = data(node).op
            if isinstance(op, Parameter):
                self.values[node] = parameters[op.name].detach()
            elif isinstance(op, Input) and op.kind is not Kind.TANGENT:
                self.values[node] = inputs[op.index] if op.kind is Kind.DATA else program.constants[node.name]

    def run(self, phase: Phase, tangents: Mapping[int, Any]) -> None:
        for node in self.program.nodes(Input):
            if op_of(node, Input).kind is Kind.TANGENT and phase is Phase.BACKWARD:
                self.values[node] = tangents[op_of(node, Input).index]
        for node in self.program.body(phase):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def numbered(program: Program) -> list[fx.Node]:
    return [node for node in program.nodes(Input) if op_of(node, Input).kind is Kind.DATA]


def renumbered(traced: Program) -> dict[int, int]:
    """By the index of an input of a traced step its number among them."""
    return {op_of(node, Input).index: number for number, node in enumerate(numbered(traced))}


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        pytest.param("gpt", ["blocks.1"], marks=pytest.mark.slow),
        pytest.param("gpt", ["blocks.0", "blocks.2", "head"], marks=pytest.mark.slow),
        ("tied", ["blocks.1"]),
        pytest.param("skips", ["down.1", "down.2", "up.0", "up.2"], marks=pytest.mark.slow),
        ("skips", ["up.1"]),
        ("whole", ["blocks.1"]),
    ],
)
def test_the_stages_together_give_what_the_step_gives(name: str, starts: list[str]) -> None:
    model, batch = case(name)
    traced = trace(model, batch)
    given = dict(zip([node.name for node in numbered(traced)], batch, strict=True))
    inputs = [given[node.name] for node in numbered(traced)]
    whole = Evaluated(traced, model, dict(zip(renumbered(traced), inputs, strict=True)))  # type: ignore[arg-type]
    for phase in traced.phases:
        whole.run(phase, {0: torch.ones(())})
    stages = cut_stages(traced, starts=starts)
    sent: dict[str, Any] = {}

    def value(end: End, own: Mapping[int, Any]) -> Any:
        return own[end] if isinstance(end, int) else sent[end.value]

    parts: list[tuple[PipelineStage, Evaluated]] = []
    results: dict[int, Any] = {}
    for stage in stages:
        part = Evaluated(stage.program, model, [value(end, dict(enumerate(inputs))) for end in stage.boundary.inputs])
        part.run(Phase.FORWARD, {})
        parts.append((stage, part))
        if stage.lent is not None:
            lent = Evaluated(stage.lent, model, [])
            lent.run(Phase.FORWARD, {})
            names = dict.fromkeys(lending.value for lending in stage.boundary.lends)
            sent |= dict(zip(names, map(lent.values.get, stage.lent.results.outputs), strict=True))
        for end, node in zip(stage.boundary.outputs, stage.program.results.outputs, strict=True):
            if isinstance(end, Crossing):
                assert end.stage > stage.number
                sent[end.value] = part.values[node]
            else:
                results[end] = part.values[node]
    gradients: dict[str, list[Any]] = {}
    for stage, part in reversed(parts):
        tangents = [value(end, {0: torch.ones(())}) for end in stage.boundary.tangents]
        part.run(Phase.BACKWARD, dict(enumerate(tangents)))
        for end, node in zip(stage.boundary.gradients, stage.program.results.input_gradients, strict=True):
            assert not isinstance(end, int)
            assert end.stage < stage.number
            if isinstance(end, Lending):
                gradients.setdefault(end.param, []).append(part.values[node])
            else:
                sent[end.value] = part.values[node]
        for name_, node in stage.program.results.gradients.items():
            gradients.setdefault(name_, []).append(part.values[node])
    assert all(torch.equal(results[i], whole.values[node]) for i, node in enumerate(traced.results.outputs))
    assert gradients.keys() == traced.results.gradients.keys()
    for name_, node in traced.results.gradients.items():
        first, *others = gradients[name_]
        assert torch.equal(sum(others, first), whole.values[node]), name_
        assert bool(others) is (name_ in stages[-1].boundary.summands)
    sums = [node for stage in stages for node in stage.program.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert not any(data(node).view for node in sums), "those that a cut adds take memory of their own, too"


def test_a_gradient_of_a_tied_parameter_is_not_sent_for_each_micro_batch() -> None:
    model, batch = case("tied")
    first, last = cut_stages(trace(model, batch), starts=["blocks.1"])
    assert len(first.boundary.tangents) == last.boundary.sent_back == 1
    assert first.boundary.lends == first.boundary.collects == (Lending("tokens.weight", "tokens_weight", 1),)
    assert last.boundary.gradients[1:] == (Lending("tokens.weight", "tokens_weight", 0),)
    assert "tokens.weight" not in {param.name for param in last.program.layout.params}


def test_a_tied_head_counts_where_it_stands() -> None:
    model, batch = case("tied")
    found = work_of_units(trace(model, batch), lambda node: float("mm" in node.name))
    assert found["tokens"] == 0
    assert found["norm"] == 3


def test_masks_and_positions_are_computed_where_they_are_needed() -> None:
    model, batch = case("gpt")
    traced = trace(model, batch)
    assert units_in_order(traced) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]
    for stage in cut_stages(traced, starts=["blocks.1", "head"])[1:]:
        received = [end for end in stage.boundary.inputs if isinstance(end, Crossing)]
        assert len(received) == 1, "the activation alone"
