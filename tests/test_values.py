"""The proof of values: real programs compute what was traced after every pass, and one that does not is told where."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zcompile
from tests import zoo
from tests.cases import quickly
from tests.models import batch, make
from zcompile import OptionError, Pass, PipelineError, Program, ProgramError, Rule, facts
from zcompile.ir.layout import STAGES, Hybrid
from zcompile.ir.operation import Phase, data, op_of, set_data
from zcompile.ir.ops import Accumulate, Call, Compute, GatherInside, GatherOutside, Input, Reduce
from zcompile.ir.region import Region
from zcompile.ir.side_effects import is_random
from zcompile.model.units import Precision, axes_over, make_layout
from zcompile.passes.split_phases import split_phases
from zcompile.proof.terms import Terms, parted, term_text
from zcompile.schedule.default_pipeline import ACCUMULATE
from zcompile.schedule.pipeline import Verified
from zcompile.tools.tracing import trace

# -- terms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0, False), (0.0, -0.0), (None, 0), ("1", 1), (torch.float32, "torch.float32")],
)
def test_constants_that_python_takes_for_equal_are_two_terms(one: object, other: object) -> None:
    terms = Terms()
    assert terms.constant(one) != terms.constant(other)
    assert terms.constant(one) == terms.constant(one)
    assert terms.constant(float("nan")) == terms.constant(float("nan"))


def test_equal_terms_are_one_and_part_where_they_differ_first() -> None:
    terms = Terms()
    mm, t = torch.ops.aten.mm.default, torch.ops.aten.t.default
    x, w, v = (terms.make(("parameter", name, "torch.float32")) for name in "xwv")
    one = terms.make((mm, x, terms.make((t, w))))
    assert terms.make((mm, x, terms.make((t, w)))) == one
    other = terms.make((mm, x, terms.make((t, v))))
    place = parted(one, other, terms, 0)
    assert (place.found, place.wanted) == (w, v)
    assert term_text(one, terms, {}) == "mm(x, t(w))"


def test_a_deep_term_needs_no_deep_stack() -> None:
    terms = Terms()
    sin = torch.ops.aten.sin.default
    one, other = (terms.make(("parameter", name, "")) for name in "ab")
    for _ in range(20_000):
        one, other = terms.make((sin, one)), terms.make((sin, other))
    assert terms.keys[parted(one, other, terms, 0).found][1] == "a"
    assert len(terms.below([one])) == 20_001


# -- real programs ----------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Draws random numbers, in blocks that are computed again, by torch's own checkpoints if that is wanted."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        q = x.view(1, 1, *x.shape)
        x = F.scaled_dot_product_attention(q, q, q).view(x.shape)  # may draw, and does not
        return F.dropout(torch.sin(self.blocks[index](x)), 0.5) * torch.rand_like(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = (
                torch_checkpoint(self.block, x, index, use_reentrant=False)
                if self.checkpointed
                else self.block(x, index)
            )
        return x


class Branching(nn.Module):
    """Chooses within the graph, and within the choice; blocks differ in the inner one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, function in zip(self.blocks, (torch.sin, torch.tanh, torch.sin), strict=True):
            x = self.choice(block(x), function)
        return x

    def choice(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 1, lambda x: function(x), lambda x: function(x * 2), (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: x * 3, (x,))


class Shared(nn.Module):
    """A unit that is read twice, weights that are tied, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.relu(self.inner(self.tokens(tokens))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


OWN: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "dropout": lambda: (Dropped(), (torch.randn(5, 8),)),
    "torch_checkpoint": lambda: (Dropped(checkpointed=True), (torch.randn(5, 8),)),
    "shared": lambda: (Shared(), (torch.randint(0, 11, (3, 4)),)),
    **{kind: (lambda kind=kind: (make(kind), batch(kind, 0, 0))) for kind in ("gpt", "mlp", "conv")},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"prefetch": 0},
    "far ahead": {"prefetch": 3, "small": 0},
    "as eager": {"partition": "default"},
    "by unit": {"checkpoint": "unit"},
    "budget": {"checkpoint": 0.95},
    "train step": {"updates": True, "arenas": True},
    "away": {"offload_activations": "cpu", "updates": True, "prefetch": 1},
    "pieces": {"bucket": 512, "small": 256},
    "limit": {"memory_limit": "1 GiB"},
}


UNCHECKED = [name for name, asked in SETTINGS.items() if "checkpoint" not in asked]


@functools.cache
def traced(kind: str, dtype: torch.dtype | None = None) -> tuple[nn.Module, Program]:
    """A model, and what is traced of it."""
    torch.manual_seed(0)
    if kind in OWN:
        model, args = OWN[kind]()
        return model, trace(model, args, dtype=dtype)
    model = zoo.make(kind)
    return model, trace(model, (), zoo.batch(kind, 0, 0), dtype=dtype)


def laid_out(kind: str, stage: int, world: int, dtype: torch.dtype | None = None) -> Program:
    model, program = traced(kind, dtype)
    layout = make_layout(model, STAGES[stage], axes_over(model, world), None, Precision(dtype))
    return replace(program, layout=layout)


def after_all(kind: str, stage: int, setting: str, world: int = 2, dtype: torch.dtype | None = None) -> Verified:
    return zcompile.pipeline(stage=stage, **SETTINGS[setting]).verified(laid_out(kind, stage, world, dtype))


KINDS = [*OWN, "llama", "t5", "vit", "bert"]


@quickly(
    "kind, dtype, stages",
    [(kind, dtype, stages) for kind in KINDS for dtype in (None, torch.bfloat16) for stages in ((0, 3), (1, 2))],
    [("shared", None, (1, 2))],
    pairs=False,
)
def test_real_programs_compute_what_was_traced_after_every_pass(
    kind: str, dtype: torch.dtype | None, stages: tuple[int, ...]
) -> None:
    proven = 0
    for stage in stages:
        for setting in SETTINGS:
            try:
                proven += len(after_all(kind, stage, setting, 2 + stage % 2, dtype).program.regions) > 0
            except OptionError:
                continue  # a budget that cannot be met, or a checkpoint without effect
    assert proven > 10


@quickly(
    "hybrid, stage, setting",
    [(hybrid, stage, setting) for hybrid in (Hybrid.HFSDP, Hybrid.HPZ) for stage in (2, 3) for setting in UNCHECKED],
    [(Hybrid.HFSDP, 3, "train step"), (Hybrid.HPZ, 2, "train step"), (Hybrid.HPZ, 3, "alone")],
)
def test_programs_with_secondary_shards_compute_what_was_traced(hybrid: Hybrid, stage: int, setting: str) -> None:
    assert divided_twice(hybrid, stage, setting).program.nodes(GatherInside)


def divided_twice(hybrid: Hybrid, stage: int = 3, setting: str = "plain") -> Verified:
    """A finished program of which both of two axes divide the parameters."""
    model, program = traced("mlp")
    layout = make_layout(model, STAGES[stage], axes_over(model, 4, 2), hybrid=hybrid)
    return zcompile.pipeline(stage=stage, **SETTINGS[setting]).verified(replace(program, layout=layout))


@pytest.mark.slow
def test_choices_within_choices_are_told_apart() -> None:
    torch.manual_seed(0)
    plain, x = Branching(), torch.randn(2, 4)
    compiled = zcompile.compile(copy.deepcopy(plain), backend="eager", units=["blocks.*"])
    assert torch.equal(compiled(x), plain(x))


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_held_back_are_those_that_were_traced(stage: int) -> None:
    held = after_all("gpt", stage, "plain").holding_back().after([ACCUMULATE]).program
    assert held.nodes(Accumulate)
    (first, *_) = held.nodes(Accumulate)
    shards, gradients = first.args
    first.args = (shards, [None, *gradients[1:]])
    with pytest.raises(ProgramError, match=r"the gradient of .* is missing; want"):
        after_all("gpt", stage, "plain").holding_back().after([changed(lambda program: held)])


# -- programs that compute something else -----------------------------------------------------------------------------


def changed(change: Callable[[Program], Any], **about: Any) -> Pass:
    """A pass that does `change` to a copy, or gives what that gives."""

    def run(program: Program) -> Program:
        copied = program.copy()
        result = change(copied)
        return result if isinstance(result, Program) else copied

    return Pass("mistake", run, **about)


def refusal(change: Callable[[Program], Any], kind: str = "gpt", stage: int = 3, setting: str = "plain") -> str:
    """What is said of a finished program after `change`."""
    begun = after_all(kind, stage, setting)
    with pytest.raises(ProgramError) as caught:
        begun.after([changed(change)])
    assert caught.value.subject.startswith("after mistake: ")
    return str(caught.value)


def calls_alike(program: Program, phase: Phase) -> tuple[fx.Node, fx.Node]:
    """Two calls of one region."""
    calls = program.nodes(Call, phase=phase)
    return next((a, b) for a in calls for b in calls if a is not b and op_of(a, Call).region == op_of(b, Call).region)


def swap_arguments(program: Program) -> None:
    """Gives the last two of what a region takes of one type in each other's place."""
    for call in reversed(program.nodes(Call)):
        given = [node for node in call.all_input_nodes if data(node).type is not None]
        pairs = [(a, b) for a in given for b in given if a is not b and data(a).type == data(b).type]
        if pairs:
            one, other = pairs[0]
            exchange = {one: other, other: one}
            call.args = tuple(exchange.get(arg, arg) for arg in call.args)  # type: ignore[arg-type]
            return


def read_saved_of_another(program: Program) -> None:
    one, other = calls_alike(program, Phase.BACKWARD)
    saved = [arg for arg in one.all_input_nodes if data(arg).phase is Phase.FORWARD and data(arg).type is not None]
    theirs = [arg for arg in other.all_input_nodes if data(arg).phase is Phase.FORWARD and data(arg).type is not None]
    pair = next((a, b) for a, b in zip(saved, theirs, strict=True) if a is not b and data(a).type == data(b).type)
    one.replace_input_with(*pair)


def swap_gradients(program: Program) -> None:
    """Gives a reduction two gradients of one shape in each other's place."""
    for node in program.nodes(Reduce):
        gradients = list(node.args[1])  # type: ignore[arg-type]
        for i, one in enumerate(gradients):
            for j, other in enumerate(gradients[:i]):
                if one is not None and other is not None and data(one).type == data(other).type:
                    gradients[i], gradients[j] = other, one
                    node.args = (node.args[0], gradients)
                    return


def drop_gradient(program: Program) -> Program:
    """Reduces one gradient less, and says that its parameter is unused."""
    node = next(n for n in program.nodes(Reduce) if len(op_of(n, Reduce).params) > 1)
    op, (shards, gradients) = op_of(node, Reduce), node.args
    gone = op.params[0]
    left = [g if p.name != gone else None for p, g in zip(program.layout.unit(op.unit).params, gradients, strict=True)]  # type: ignore[arg-type]
    node.args = (shards, left)
    program.respell(node, replace(op, params=op.params[1:]))
    for wait in list(node.users):
        program.respell(wait, replace(data(wait).op, params=op.params[1:]))  # type: ignore[type-var]
    return replace(program, unused=frozenset({gone}))


def edit_region(edit: Callable[[fx.Graph, Region], Any]) -> Callable[[Program], Program]:
    """Does `edit` to the graph of a copy of the first region, and to those behind until it gives something."""

    def run(program: Program) -> Program:
        for name, region in program.regions.items():
            graph = fx.Graph()
            result: Any = graph.graph_copy(region.graph, {}, return_output_node=True)
            graph.output(result[0]).meta = dict(result[1].meta)
            new = replace(region, graph=graph)
            if (found := edit(graph, new)) is not None:
                new = found if isinstance(found, Region) else new
                return replace(program, regions={**program.regions, name: new})
        raise AssertionError("no region can be edited so")

    return run


def write_by_itself(value: torch.Tensor) -> torch.Tensor:
    return value.mul_(2)


EFFECTS: dict[str, tuple[Any, Callable[[fx.Node], tuple[Any, ...]], str]] = {
    "a write by an operator": (operator.imul, lambda value: (value, 2.0), "not an operation of a traced graph"),
    "a write to an item": (operator.setitem, lambda value: (value, 0, 3.0), "not an operation of a traced graph"),
    "a method": ("mul_", lambda value: (value, 2.0), "a call_method, which its text has not"),
    "a seed": (torch.manual_seed, lambda value: (7,), "not an operation of a traced graph"),
    "a draw that is not numbered": (torch.rand, lambda value: (3,), "not an operation of a traced graph"),
    "a function": (write_by_itself, lambda value: (value,), "not an operation of a traced graph"),
    "statistics that are written": (
        torch.ops.aten.native_batch_norm.default,
        lambda value: (value, None, None, value, value, True, 1.0, 1e-5),
        "was not traced, and it is not known all that it does",
    ),
}


@quickly("name", list(EFFECTS), list(EFFECTS)[::3])
def test_what_does_more_than_give_a_value_is_refused_also_where_nobody_reads_it(name: str) -> None:
    target, args, words = EFFECTS[name]

    def insert(graph: fx.Graph, _: Region) -> bool:
        value = next(n for n in graph.nodes if n.op == "call_function" and data(n).type is not None)
        with graph.inserting_after(value):
            call = graph.call_method if isinstance(target, str) else graph.call_function
            set_data(call(target, args(value)), replace(data(value), op=Compute()))
        return True

    assert words in refusal(edit_region(insert))


@pytest.mark.slow
def test_a_graph_within_a_region_is_read_as_it_is_now() -> None:
    def edit(program: Program) -> Program:
        regions = {name: replace(r, modules=copy.deepcopy(dict(r.modules))) for name, r in program.regions.items()}
        modules = (module for region in regions.values() for module in region.modules.values())
        inner = (one for module in modules for one in module.modules() if isinstance(one, fx.GraphModule))
        products = [n for one in inner for n in one.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
        assert products, "something branches"
        for node in products:
            node.target = torch.ops.aten.add.Tensor  # without a recompile
        return replace(program, regions=regions)

    traced = trace(Branching(), (torch.ones(2, 4),))
    layout = make_layout(Branching(), STAGES[3], axes_over(Branching(), 2))
    finished = zcompile.pipeline(stage=3).verified(replace(traced, layout=layout))
    with pytest.raises(ProgramError, match="values as they were traced"):
        finished.after([changed(edit)])


def test_what_two_axes_divide_is_what_was_asked_for() -> None:
    def claim(program: Program) -> Program:
        for node in program.nodes(GatherOutside):
            program.respell(node, replace(op_of(node, GatherOutside), keep=False))
        return replace(program, layout=replace(program.layout, hybrid=Hybrid.HPZ))

    with pytest.raises(ProgramError, match="the hybrid of the layout: hpz; the traced step has hfsdp"):
        divided_twice(Hybrid.HFSDP).after([changed(claim)])


@pytest.mark.parametrize(
    ("other", "words"),
    [("blocks_0_out", "two lines are called"), ("region_0", "cannot name a value"), ("print(1); x", "cannot name")],
)
def test_names_mean_one_thing(other: str, words: str) -> None:
    def rename(program: Program) -> None:
        program.node("blocks_1_out").name = other

    assert words in refusal(rename)


def exchange_operands(graph: fx.Graph, region: Region) -> bool | None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.gelu_backward.default:
            node.args = (node.args[1], node.args[0])
            return True
    return None


def write_to_view_of_parameter(graph: fx.Graph, region: Region) -> bool:
    """In place, and when all has been computed: later readings of the parameter, in the next step too, see it."""
    place = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_before(graph.output_node()):
        view = graph.call_function(torch.ops.aten.detach.default, (place,))
        for node in (view, graph.call_function(torch.ops.aten.mul_.Tensor, (view, 2.0))):
            set_data(node, replace(data(place), op=Compute(), view=True))
    return True


def change_constant(graph: fx.Graph, region: Region) -> bool | None:
    for node in graph.nodes:
        for index, value in enumerate(node.args if node.op == "call_function" else ()):
            if type(value) is float:
                node.update_arg(index, value + 1)
                return True
    return None


def return_another(graph: fx.Graph, region: Region) -> bool | None:
    (results,) = graph.output_node().args
    if not isinstance(results, (tuple, list)):
        return None
    for i, one in enumerate(results):
        for j, other in enumerate(results[:i]):
            if data(one).type == data(other).type:
                changed_results = list(results)
                changed_results[i], changed_results[j] = other, one
                graph.output_node().args = (tuple(changed_results),)
                return True
    return None


def take_another_parameter(graph: fx.Graph, region: Region) -> Region | None:
    items = [(n, take) for n, take in enumerate(region.takes) if take[1] is not None]
    placeholders = graph.find_nodes(op="placeholder")
    for n, one in items:
        for m, other in items:
            if n < m and data(placeholders[n]).type == data(placeholders[m]).type:
                takes = list(region.takes)
                takes[n], takes[m] = other, one
                return replace(region, takes=tuple(takes))
    return None


def claim_frozen(program: Program) -> Program:
    trainable = dict.fromkeys((param.name for param in program.layout.params), True)
    return replace(program, layout=program.layout.with_trainable({**trainable, next(iter(trainable)): False}))


def return_another_result(program: Program) -> None:
    (loss,) = program.results.outputs
    other = next(node for node in program.nodes(Input) if data(node).type is not None)
    program.graph.output_node().replace_input_with(loss, other)


MISTAKES: dict[str, tuple[Callable[[Program], Any], str]] = {
    "arguments": (swap_arguments, r"in place of"),
    "saved": (read_saved_of_another, r"the gradient of .* is not what was traced: .* in place of .* \(traced in"),
    "gradients": (swap_gradients, r"the gradient of .* is not what was traced"),
    "dropped": (drop_gradient, r"is said to be unused; it is not"),
    "operands": (edit_region(exchange_operands), r"computes gelu_backward\("),
    "constant": (edit_region(change_constant), r"is not what was traced"),
    "written": (edit_region(write_to_view_of_parameter), r"what is written in place is after\(mul_\(.*; want none"),
    "results": (edit_region(return_another), r"is not what was traced"),
    "parameters": (edit_region(take_another_parameter), r"with \S+ in place of \S+ \(traced in"),
    "frozen": (claim_frozen, r"the parameters of .* are not those that"),
    "output": (return_another_result, r"result \S+ is not what was traced: .* want div\(sum\(where"),
}


@quickly("mistake", list(MISTAKES), list(MISTAKES)[::2])
def test_a_program_that_computes_something_else_is_refused(mistake: str) -> None:
    change, said = MISTAKES[mistake]
    message = refusal(change)
    assert re.search(said, message), message
    assert "-->" in message or mistake in ("dropped", "frozen"), message


def test_the_line_and_the_layer_are_told() -> None:
    def swap(program: Program) -> None:
        """The second block gets what the embedding gives."""
        first, second, *_ = [n for n in program.nodes(Call, phase=Phase.FORWARD) if data(n).source.startswith("blocks")]
        (given,) = [arg for arg in second.all_input_nodes if data(arg).type is not None and arg in first.users]
        second.replace_input_with(given, next(a for a in first.all_input_nodes if data(a).type == data(given).type))

    message = refusal(swap)
    assert "loss is not what was traced: region_1 of blocks.1 computes add(" in message
    assert re.search(r"with add\(embedding.* in place of add\(.*\(traced in blocks\.1", message), message


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_is_reduced_in_the_dtype_that_is_declared(stage: int) -> None:
    begun = after_all("gpt", stage, "plain", dtype=torch.bfloat16)
    program = begun.program.copy()
    node = program.nodes(Reduce)[0]
    program.respell(node, replace(op_of(node, Reduce), dtype=torch.bfloat16))
    said = r"computes mean\(dp, \w+, torch\.bfloat16, .*want mean\(dp, \w+, torch\.float32"
    with pytest.raises(ProgramError, match=said):
        zcompile.verify(program, [begun.values.fact], "here")
    with pytest.raises(
        ProgramError, match=r"says that it casts gradients of head to torch\.bfloat16; want torch\.float32"
    ):
        zcompile.verify(program, [facts.REDUCED_ONCE], "here")


def test_random_draws_are_numbered() -> None:
    def one_more(program: Program) -> Program:
        def draw(graph: fx.Graph, region: Region) -> bool | None:
            node = next((n for n in graph.nodes if n.target is torch.ops.aten.native_dropout.default), None)
            if node is None:
                return None
            with graph.inserting_before(node):
                graph.node_copy(node)
            return True

        return edit_region(draw)(program)

    assert "in place of draw" in refusal(one_more, "dropout")


def test_a_draw_that_is_repeated_in_the_backward_is_not_drawn_again() -> None:
    """torch's default partitioner leaves dead copies there, which FX never takes for dead."""
    program = split_phases(laid_out("dropout", 3, 2), partition="default")
    assert not [node for node in program.body(Phase.BACKWARD) if is_random(node)]
    assert len([node for node in program.body(Phase.FORWARD) if is_random(node)]) == 6


# -- what passes say beside a program, and what they mean to change ---------------------------------------------------


def test_a_pass_does_not_edit_the_region_that_it_is_given() -> None:
    def edit(program: Program) -> Program:
        for region in program.regions.values():
            for node in region.graph.nodes:
                if node.target is torch.ops.aten.gelu.default:
                    node.target = torch.ops.aten.relu.default
        return program.copy()

    with pytest.raises(PipelineError, match="changes the program that it is given"):
        after_all("gpt", 3, "plain").after([changed(edit)])


def scaled(program: Program) -> Program:
    """Multiplies what the first region returns by one."""

    def scale(graph: fx.Graph, region: Region) -> bool:
        (results,) = graph.output_node().args
        first = results[0] if isinstance(results, (tuple, list)) else results
        with graph.inserting_before(graph.output_node()):
            made = graph.call_function(torch.ops.aten.mul.Tensor, (first, 1.0))
        made.meta = dict(first.meta)
        set_data(made, replace(data(first), op=Compute()))
        graph.output_node().args = ((made, *results[1:]) if isinstance(results, (tuple, list)) else made,)
        return True

    return edit_region(scale)(program)


ONE = Rule("products with one", "aten.mul.Tensor(x, 1.0)", "x")


def test_what_a_pass_means_to_change_it_declares_by_a_rule() -> None:
    begun = after_all("gpt", 3, "plain")
    with pytest.raises(ProgramError, match="is not what was traced"):
        begun.after([changed(scaled)])
    scaling = begun.after([changed(scaled, rules=(ONE,))])
    assert scaling.program.notes[-1] == (
        "mistake changes values, by the rule products with one: aten.mul.Tensor(x, 1.0) counts as x"
    )
    later = scaling.after([Pass("copy", Program.copy)])
    assert later.values.fact.name == "values as they were traced modulo products with one"
    with pytest.raises(ProgramError, match=r"modulo products with one: .* is not what was traced"):
        later.after([Pass("other", edit_region(exchange_operands))])


def test_explain_lists_rules() -> None:
    compiled = zcompile.compile(
        make("gpt"), backend="eager", passes={"scale": Pass("scale", scaled, (facts.REGIONS_OUTLINED,), rules=(ONE,))}
    )
    compiled(*batch("gpt", 0, 0))
    assert (
        "scale changes values, by the rule products with one: aten.mul.Tensor(x, 1.0) counts as x" in compiled.explain()
    )


@pytest.mark.parametrize(
    ("pattern", "replacement", "problem"),
    [
        ("x", "x", "'x' is not a call"),
        ("aten.mul.Tensor(x, 1.0)", "y", "the pattern has no 'y'"),
        ("aten.mul.Tensor(x, 1.0)", "aten.mul.Tensor(1.0, x)", "is no shorter"),
        ("aten.mull.Tensor(x, 1.0)", "x", "aten.mull.Tensor is not an operation"),
        ("aten.mul.Tensor(x, ", "x", "cannot be read"),
        ("os.system('true')", "1", "os.system is not an operation"),
        ("aten.mul.Tensor(x, torch.nothing)", "x", "torch.nothing is unknown"),
    ],
)
def test_rules_that_say_nothing_are_refused(pattern: str, replacement: str, problem: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(problem)):
        Rule("mine", pattern, replacement)


def test_a_rule_holds_wherever_its_pattern_is_and_of_equal_parts_alone() -> None:
    terms = Terms((ONE, Rule("no difference", "aten.sub.Tensor(x, x)", "0.0")))
    mul, sub, sin = torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.sin.default
    x, y = (terms.make(("parameter", name, "")) for name in "xy")
    assert terms.make((mul, terms.make((mul, x, terms.constant(1.0))), terms.constant(1.0))) == x
    assert terms.make((mul, x, terms.constant(1))) != x
    assert terms.make((sub, terms.make((sin, x)), terms.make((sin, x)))) == terms.constant(0.0)
    assert terms.make((sub, x, y)) != terms.constant(0.0)
