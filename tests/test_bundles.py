"""Bundles: several values that one line leaves for one other are printed as one, and are read again as they were."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zcompile
from tests.models import batch, make
from zcompile.facts import verify
from zcompile.ir.axis import axes_of
from zcompile.ir.bundles import Bundle, bundles_of, grouped
from zcompile.ir.layout import STAGES
from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Item, Reduce
from zcompile.ir.program import Program
from zcompile.ir.spelling import common_module
from zcompile.model.units import make_layout
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import ALWAYS
from zcompile.tools.tracing import trace

HEAD = """
axes = {"dp": "shard 2"}
stage = 3
units = {
    "a": [
        "a.weight f32[4, 4]",
        "a.bias f32[4]",
    ],
}
packed = {
}


def region_0(box):
    (
        weight,                          # f32[4, 4]           argument 0 item 0
        bias,                            # f32[4]              argument 0 item 1
        x,                               # f32[8, 4]           argument 1
    ) = unbox(box)
    y = aten.addmm.default(bias, x, weight)  # f32[8, 4]  +128 B
    s = aten.sin.default(y)              # f32[8, 4]   +128 B
    c = aten.cos.default(y)              # f32[8, 4]   +128 B
    part = aten.slice.Tensor(c, 0, 0, 4)  # &f32[4, 4]
    return [s, y, c, part]


def region_1(box):
    (
        weight,                          # f32[4, 4]           argument 0 item 0
        dy,                              # f32[8, 4]           argument 1
        y,                               # f32[8, 4]           argument 2
        c,                               # f32[8, 4]           argument 3
        part,                            # f32[4, 4]           argument 4
    ) = unbox(box)
    dz = aten.mul.Tensor(dy, c)          # f32[8, 4]   +128 B
    dx = aten.mm.default(dz, weight)     # f32[8, 4]   +128 B
    dw = aten.mm.default(part, weight)   # f32[4, 4]   +64 B
    db = aten.sum.dim_IntList(y, [0])    # f32[4]      +16 B
    return [dx, dw, db]


"""
FORWARD = """
def forward(box):
    (
        a,                                     #                                 2 parameters  unit a
        x,                                     # f32[8, 4]
    ) = unbox(box)
    a_gather = all_gather(a)                   #                                 +80 B         a
    a_full = wait(a_gather)                    #                                               a
    a_out, *a_saved = region_0(a_full, x)      # f32[8, 4], 3 values             +384 B        a
    del x
    return [a_out], [a_full, a_saved]
"""
BACKWARD = """
def backward(box):
    (
        a,                                                 #                         2 parameters  unit a
        a_full,                                            #                                       full unit a
        a_saved,                                           # 3 values                256 B         a
        dy,                                                # f32[8, 4]                             tangent
    ) = unbox(box)
    a_grad_input, *a_full_grads = region_1(a_full, dy, *a_saved)  # f32[8, 4], 2 values  +208 B        a
    del a_saved, dy                                        #                         -256 B
    release(a_full)                                        #                         -80 B         a
    a_reduce = reduce_scatter(a, a_full_grads)             #                         +40 B         a
    a_grads = wait(a_reduce)                               #                         -80 B         a
    return [a_grad_input], [a_grads]
"""


def program(forward: str = FORWARD, backward: str = BACKWARD) -> Program:
    return zcompile.parse(f"{HEAD}{forward}\n{backward}")


def names(found: Program) -> dict[str, list[str]]:
    bundles = dict.fromkeys(bundles_of(found).values())
    return {bundle.name: [member.name for member in bundle.members] for bundle in bundles}


def test_several_values_for_one_line_are_one_in_the_text_and_each_by_itself_in_the_graph() -> None:
    found = program()
    assert names(found) == {
        "a_saved": ["a_saved_1", "a_saved_2", "a_saved_3"],
        "a_full_grads": ["a_full_grads_1", "a_full_grads_2"],
    }
    items = {node.name: data(node) for node in found.nodes(Item)}
    assert str(items["a_saved_1"].type) == "f32[8, 4]"
    assert items["a_saved_3"].view, "it shows the memory of another one, as the text of the region says"
    assert [node.args[1] for node in found.nodes(Reduce)] == [
        [found.node("a_full_grads_1"), found.node("a_full_grads_2")]
    ]
    assert sum(found.memory(node) for node in found.nodes(Call)) == 384 + 208
    text = found.text(regions=True)
    assert zcompile.parse(text).text(regions=True) == text
    verify(found, ALWAYS, "")


def test_what_several_values_are_is_counted_at_the_margin() -> None:
    text = program().text()
    assert "a_out, *a_saved = region_0(a_full, x)" in text
    assert "# f32[8, 4], 3 values" in text
    assert any(line.split() == ["a_saved,", "#", "3", "values", "256", "B", "a"] for line in text.splitlines())
    assert "del a_full_grads" not in text, "the reduction empties the list"


def test_a_value_with_another_reader_is_printed_by_its_own_name_and_the_rest_stays_together() -> None:
    forward = FORWARD.replace("a_out, *a_saved", "a_out, y, *a_saved").replace(
        "f32[8, 4], 3", "f32[8, 4], f32[8, 4], 2"
    )
    forward = forward.replace("[a_out], [a_full, a_saved]", "[a_out, y], [a_full, y, a_saved]")
    backward = BACKWARD.replace("dy, *a_saved)", "dy, y, *a_saved)")
    found = program(forward, backward)
    assert names(found)["a_saved"] == ["a_saved_2", "a_saved_3"]
    text = found.text(regions=True)
    assert "a_out, y, *a_saved = region_0" in text
    assert "region_1(a_full, dy, y, *a_saved)" in text
    assert zcompile.parse(text).text(regions=True) == text


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 0)])
def test_values_that_are_not_read_in_their_order_are_printed_one_by_one(order: tuple[int, ...]) -> None:
    found = program().copy()
    reader = found.nodes(Call)[1]
    *before, first, second, third = reader.args
    reader.args = (*before, *((first, second, third)[index] for index in order))
    assert "a_saved" not in names(found)
    text = found.text(regions=True)
    assert "*a_saved" not in text
    assert zcompile.parse(text).text(regions=True) == text


def test_a_value_that_nobody_reads_any_more_is_left_out_and_the_rest_stays_together() -> None:
    """A pass that reads something in place of the first, and one that erases it."""
    for erases in (False, True):
        found = program().copy()
        reader = found.nodes(Call)[1]
        first, second = found.node("a_saved_1"), found.node("a_saved_2")
        reader.replace_input_with(first, second)
        assert "a_saved" not in names(found), "a value is given twice"
        reader.replace_input_with(second, found.node("x"))
        reader.args = (*reader.args[:3], found.node("x"), second, found.node("a_saved_3"))
        if erases:
            found.graph.erase_node(first)
        assert names(found)["a_saved"] == ["a_saved_2", "a_saved_3"]
        text = found.text(regions=True)
        assert f"a_out, {'_' if erases else 'a_saved_1'}, *a_saved = region_0" in text
        assert zcompile.parse(text).text(regions=True) == text
        verify(zcompile.parse(text), ALWAYS, "")


def test_a_last_result_that_nobody_reads_is_unpacked_all_the_same() -> None:
    found = program().copy()
    last = found.node("a_saved_3")
    found.nodes(Call)[1].replace_input_with(last, found.node("x"))
    found.graph.erase_node(last)
    text = found.text(regions=True)
    assert "a_out, a_saved_1, a_saved_2, _ = region_0(a_full, x)" in text
    assert zcompile.parse(text).text(regions=True) == text


def test_all_but_the_first_result_may_be_a_list() -> None:
    forward = FORWARD.replace("a_out, *a_saved", "_, *a_saved").replace("f32[8, 4], 3 values", "3 values")
    found = program(forward.replace("return [a_out]", "return []"))
    text = found.text(regions=True)
    assert "_, *a_saved = region_0(a_full, x)" in text
    assert zcompile.parse(text).text(regions=True) == text


def test_a_name_that_a_value_has_is_no_bundles() -> None:
    found = program(FORWARD.replace(" x,", " a_saved_input,").replace(", x)", ", a_saved_input)").replace("del x", ""))
    placeholder = found.node("a_saved_input")
    assert "a_saved" in names(found)
    graph = found.graph
    with graph.inserting_before(placeholder):
        clash = graph.create_node("placeholder", "a_saved", name="a_saved")
    clash.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(clash)
    graph.erase_node(placeholder)
    assert "a_saved" not in names(found)
    text = found.text(regions=True)
    assert "region_0(a_full, a_saved)" in text
    assert zcompile.parse(text).text(regions=True) == text


def test_values_of_which_tensor_parallel_ranks_have_only_some_alike_are_not_mixed() -> None:
    found = program().copy()
    member = found.node("a_saved_2")
    member.meta["zcompile"] = replace(data(member), replicated="=")
    assert "a_saved" not in names(found)
    for name in ("a_saved_1", "a_saved_3"):
        found.node(name).meta["zcompile"] = replace(data(found.node(name)), replicated="=")
    text = found.text(regions=True)
    assert "=3 values" in text
    again = zcompile.parse(text)
    assert all(data(again.node(f"a_saved_{index}")).replicated for index in (1, 2, 3))
    assert again.text(regions=True) == text


def test_a_star_takes_results_of_regions_only() -> None:
    with pytest.raises(zcompile.ParseError, match="not a region"):
        program(FORWARD.replace("a_out, *a_saved = region_0(a_full, x)", "a_out, *a_saved = aten.topk.default(x, 2)"))


def test_lists_and_values_are_not_taken_for_each_other() -> None:
    with pytest.raises(zcompile.ParseError, match=r"'\*dy' unpacks a single value"):
        program(backward=BACKWARD.replace("a_full, dy, *a_saved", "a_full, *dy, *a_saved"))
    with pytest.raises(zcompile.ParseError, match="region_1 is given the list a_saved"):
        program(backward=BACKWARD.replace("*a_saved)", "a_saved)"))
    with pytest.raises(zcompile.ParseError, match="has no function `forward`"):
        zcompile.parse(f"{HEAD}{BACKWARD}")


def test_all_results_of_a_region_are_one_list() -> None:
    forward = FORWARD.replace("a_out, *a_saved", "a_saved").replace("f32[8, 4], 3 values", "4 values")
    found = program(
        forward.replace("return [a_out]", "return []"),
        BACKWARD.replace("dy, *a_saved", "*a_saved").replace("del a_saved, dy", "del a_saved"),
    )
    assert len(names(found)["a_saved"]) == 4
    text = found.text(regions=True)
    assert "a_saved = region_0(a_full, x)" in text
    assert zcompile.parse(text).text(regions=True) == text


def test_groups_stand_where_their_first_value_stands() -> None:
    found = program()
    groups = list(grouped(found.saved(), bundles_of(found)))
    assert [one.name for one in groups if isinstance(one, Bundle | torch.fx.Node)] == ["a_saved"]


@pytest.mark.slow
def test_a_forward_keeps_no_list_and_a_backward_frees_what_it_has_read() -> None:
    """With bundles or without, a step holds no more: what is saved is freed within the region that reads it."""
    compiled = zcompile.compile(make("gpt"), backend="eager")
    loss = compiled(*batch("gpt", 0, 0))
    text = str(compiled.programs[1])
    assert "*blocks_1_saved" in text
    assert "*blocks_1_full_grads" in text
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in compiled.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(compiled.parameters(), first, strict=True))


class Sized(nn.Module):
    """Saves sizes that vary beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x) / x.shape[0]
        return x.view(x.shape[1], x.shape[0]).square().sum()


@pytest.mark.slow
def test_sizes_that_vary_are_saved_beside_bundles() -> None:
    torch.manual_seed(0)
    plain, given = Sized(), Sized()
    given.load_state_dict(plain.state_dict())
    compiled = zcompile.compile(given, backend="eager")
    for size in (4, 7, 5, 3):
        x = torch.randn(size, 4)
        for model in (plain, compiled):
            model.zero_grad()
            model(x).backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert "*layers_1_saved" in str(compiled.programs[-1])


# -- what values are called -------------------------------------------------------------------------------------------


def finished(model: nn.Module, args: tuple[torch.Tensor, ...], **kwargs: torch.Tensor) -> Program:
    """The program of stage 3 on two ranks, prefetch 2."""
    traced = trace(model, args, kwargs)
    return Options(stage=3, prefetch=2).pipeline().run(
        replace(traced, layout=make_layout(model, STAGES[3], axes_of(2)))
    )  # fmt: skip


@pytest.mark.slow
def test_a_block_of_a_llama_is_a_few_lines_and_none_is_long() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    with torch.device("meta"):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
        tokens = torch.empty(2, 16, dtype=torch.int64)
    text = finished(model, (tokens,), labels=tokens).text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    calls = {name: lines.index(line) for line in lines for name in re.findall(r"    (\w+), \*\w+ = region", line)}
    assert calls["layers_3_out"] - calls["layers_2_out"] <= 8
    assert calls["layers_2_grad_input"] - calls["layers_3_grad_input"] <= 9
    assert text.count("all_gather(layers_5)") == 1, "its rotary tables do not part its backward"
    assert not re.search(r"getitem|view|_unsafe|primals|tangents|detach", text), "no names of ATen"


class Twice(nn.Module):
    """A block that is used again behind another one, and a loss beside another result."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.model["first"](x))
        h = torch.tanh(self.model["second"](h))
        h = torch.sin(torch.tanh(self.model["first"](h)))
        return h, h.square().sum()


def test_values_are_called_by_their_module_and_what_they_are_there() -> None:
    traced = trace(Twice(), (torch.randn(2, 4),), units=["model.first", "model.second"])
    assert {unit.name for unit in traced.layout.units} == {"model.first", "model.second"}
    found = Options(stage=3).pipeline().run(traced)
    named = {node.name for node in found.graph.nodes}
    assert {"first", "second", "first_out", "second_out", "first_out_1", "loss"} <= named
    assert {"first_out_1_grad", "loss_grad", "second_grad_input", "second_full_grads_1"} <= named
    assert all("model" not in name for name in named), "what all units have in front is left out"
    again = zcompile.parse(found.text(regions=True))
    assert again.text(regions=True) == found.text(regions=True)


class OfWeight(torch.autograd.Function):
    """x (4, 3) and w (3, 4) to x, whose gradient is said to be w transposed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0].t(), None


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OfWeight.apply(x, self.weight)


def test_a_gradient_that_is_a_view_of_a_parameter_reaches_the_input() -> None:
    compiled = zcompile.compile(Straight(), backend="eager")
    want = compiled.full_state_dict()["weight"].t().clone()
    x = torch.randn(4, 3, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, want)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, (h > 0).sum()


def test_a_number_without_gradients_is_no_loss() -> None:
    traced = trace(Counted(), (torch.randn(2, 3),))
    named = {node.name for node in Options(stage=3).pipeline().run(traced).graph.nodes}
    assert "linear_out" in named
    assert "loss" not in named


def test_the_common_module_leaves_no_number_in_front() -> None:
    assert common_module(["model.layers.0", "model.layers.1"]) == "model."
    assert common_module(["model.embed", "model.layers.0"]) == "model."
    assert common_module(["layers.0", "layers.1"]) == ""
    assert common_module(["model.embed", "model.layers.0", "lm_head"]) == "model."
    assert common_module(["model.head", "head"]) == common_module(["encoder.layers.0", "decoder.layers.0"]) == ""
    assert common_module(["a.b", "a"]) == ""
    assert common_module(["a.b.c"]) == "a.b."
    assert common_module([]) == ""


@given(st.lists(st.from_regex(r"[ab0](\.[ab0]){0,3}", fullmatch=True), min_size=1, max_size=4, unique=True))
def test_what_is_left_of_a_path_is_a_path_of_its_own(paths: list[str]) -> None:
    common = common_module(paths)
    left = [path.removeprefix(common) for path in paths]
    assert all(path.startswith(common) for path in paths if "." in path)
    assert len(set(left)) == len(paths)
    assert all(left)
    assert not common or all(path[0] != "0" for path in left)
