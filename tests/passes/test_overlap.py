from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import zcompile
from tests.passes.programs import check, head_of, joined
from zcompile import Program
from zcompile.ir.operation import Data, set_data
from zcompile.ir.ops import Compute, Input, Kind
from zcompile.passes.common.overlap import overlapped
from zcompile.torch_internals.inductor import inductor_code

aten = torch.ops.aten

HEAD = head_of("a").replace('"shard 2"', '"shard 2", "sp": "sequence 2", "tp": "tensor 2"')
WAITING = """
def region_0(box):
    (
        w,                                                               # f32[4, 4]         argument 0 item 0
        x,                                                               # f32[4, 4]         argument 1
    ) = unbox(box)
    q = aten.mm.default(x, w)                                            # f32[4, 4]  +64 B  a
    k = aten.mm.default(q, w)                                            # f32[4, 4]  +64 B  a
    q_whole = ops.zcompile.all_to_all.default(q, 0, 1, 2, [0, 1], 'sp')  # f32[8, 2]  +64 B  a
    k_whole = ops.zcompile.all_to_all.default(k, 0, 1, 2, [0, 1], 'sp')  # f32[8, 2]  +64 B  a
    y = aten.mul.Tensor(q_whole, k_whole)                                # f32[8, 2]  +64 B  a
    return [y]


def region_1(box):
    (
        w,                                                        # f32[4, 4]           argument 0 item 0
        dy,                                                       # f32[8, 4]           argument 1
        x,                                                        # f32[8, 4]           argument 2
    ) = unbox(box)
    wt = aten.t.default(w)                                        # &f32[4, 4]          a
    dx = aten.mm.default(dy, wt)                                  # f32[8, 4]   +128 B  a
    s = ops._c10d_functional.all_reduce.default(dx, 'sum', 'tp')  # f32[8, 4]   +128 B  a
    dx_sum = ops._c10d_functional.wait_tensor.default(s)          # f32[8, 4]   +128 B  a
    xt = aten.t.default(x)                                        # &f32[4, 8]          a
    dw = aten.mm.default(xt, dy)                                  # f32[4, 4]   +64 B   a
    return [dx_sum, dw]
"""
OVERLAPPED = """
def region_0(box):
    (
        w,                                 # f32[4, 4]            argument 0 item 0
        x,                                 # f32[4, 4]            argument 1
    ) = unbox(box)
    q = aten.mm.default(x, w)              # f32[4, 4]     +64 B  a
    q_sent = ops.zcompile.start_all_to_all.default(q, 0, 1, 2, [0, 1], 'sp')  # f32[2, 4, 2]  +64 B  a
    k = aten.mm.default(q, w)              # f32[4, 4]     +64 B  a
    k_sent = ops.zcompile.start_all_to_all.default(k, 0, 1, 2, [0, 1], 'sp')  # f32[2, 4, 2]  +64 B  a
    q_whole = ops.zcompile.wait_all_to_all.default(q_sent, 0, 1, 2, [0, 1], 'sp')  # f32[8, 2]  +64 B  a
    k_whole = ops.zcompile.wait_all_to_all.default(k_sent, 0, 1, 2, [0, 1], 'sp')  # f32[8, 2]  +64 B  a
    y = aten.mul.Tensor(q_whole, k_whole)  # f32[8, 2]     +64 B  a
    return [y]


def region_1(box):
    (
        w,                                                        # f32[4, 4]           argument 0 item 0
        dy,                                                       # f32[8, 4]           argument 1
        x,                                                        # f32[8, 4]           argument 2
    ) = unbox(box)
    wt = aten.t.default(w)                                        # &f32[4, 4]          a
    dx = aten.mm.default(dy, wt)                                  # f32[8, 4]   +128 B  a
    s = ops._c10d_functional.all_reduce.default(dx, 'sum', 'tp')  # f32[8, 4]   +128 B  a
    xt = aten.t.default(x)                                        # &f32[4, 8]          a
    dw = aten.mm.default(xt, dy)                                  # f32[4, 4]   +64 B   a
    dx_sum = ops._c10d_functional.wait_tensor.default(s)          # f32[8, 4]   +128 B  a
    return [dx_sum, dw]
"""
PHASES = """
def forward(box):
    (
        a,              #            1 parameter  unit a
        x,              # f32[4, 4]
    ) = unbox(box)
    y = region_0(a, x)  # f32[8, 2]  +64 B        a
    del x
    return [y], []


def backward(box):
    (
        a,                        #                       1 parameter  unit a
        dy,                       # f32[8, 4]                          tangent
    ) = unbox(box)
    dx, ga = region_1(a, dy, dy)  # f32[8, 4], f32[4, 4]  +192 B       a
    del dy
    return [dx], {'a.weight': ga}
"""


def overlap(program: Program) -> Program:
    """The program, each region of which is in the order of `overlapped`."""
    regions = {name: replace(found, graph=overlapped(found.graph)) for name, found in program.regions.items()}
    return replace(program, regions=regions)


def test_what_is_sent_comes_first_and_what_is_awaited_last() -> None:
    check(overlap, joined(HEAD, WAITING), PHASES, PHASES, joined(HEAD, OVERLAPPED))


SENT = [
    "s = ops._c10d_functional.all_reduce.default(dy, 'sum', 'tp')",
    "a = ops._c10d_functional.wait_tensor.default(s)",
]


@pytest.mark.parametrize(
    ("lines", "order"),
    [
        (["b = aten.relu.default(a)", "c = aten.relu.default(x)"], "s c a b"),
        (["b = aten.rand_like.default(a)", "c = aten.rand_like.default(x)"], "s a b c"),
        (["b = aten.relu_.default(a)", "c = aten.relu.default(x)"], "s a b c"),
        (["b = aten.relu.default(x)", "c = ops._c10d_functional.all_reduce.default(b, 'sum', 'tp')"], "s b c a"),
    ],
    ids=["compute", "draws", "writes", "collectives"],
)
def test_only_what_has_no_effect_changes_places(lines: list[str], order: str) -> None:
    taken, _, _ = WAITING.partition("    wt =")
    body = "".join(f"    {line}  # f32[8, 4]  +128 B  a\n" for line in (*SENT, *lines))
    program = zcompile.parse(joined(joined(HEAD, f"{taken}{body}    return [b, c]\n"), PHASES))
    nodes = overlap(program).regions["region_1"].graph.nodes
    assert [node.name for node in nodes if node.op == "call_function"] == order.split()


SENDS, WAITS = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
KINDS = {"add": aten.add.Tensor, "draw": aten.rand_like.default, "send": SENDS}


def graph_of(lines: list[tuple[str, int, int]]) -> fx.Graph:
    """A graph of lines of these kinds, which read earlier ones; what is sent is awaited at once, as traced."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for kind, *numbers in lines:
        first, second = (values[number % len(values)] for number in numbers)
        args: dict[str, Any] = {"add": (first, second), "draw": (first,), "send": (first, "sum", "tp")}
        made = graph.call_function(KINDS[kind], args[kind])
        values.append(graph.call_function(WAITS, (made,)) if kind == "send" else made)
    graph.output(tuple(values))
    for node in graph.nodes:
        set_data(node, Data(Compute() if node.op == "call_function" else Input(Kind.DATA, 0)))
    return graph


def computed(graph: fx.Graph) -> list[int]:
    """The results in numbers: each draw gives another one, and what is sent arrives changed."""
    values, draws = dict[fx.Node, int](), itertools.count()
    run = {KINDS["add"]: lambda a, b: 3 * a + b + 1, KINDS["draw"]: lambda a: 7 * a + next(draws), WAITS: lambda a: -a}
    for node in graph.nodes:
        if node.op == "output":
            return [values[value] for value in node.args[0]]  # type: ignore[union-attr, index]
        read = [values[source] for source in node.args if isinstance(source, fx.Node)]
        values[node] = run.get(node.target, lambda *a: sum(a, 5))(*read)  # type: ignore[no-untyped-call, call-overload]
    raise AssertionError


@given(st.lists(st.tuples(st.sampled_from([*KINDS]), st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_a_wait_comes_when_nothing_else_can_be_computed(lines: list[tuple[str, int, int]]) -> None:
    graph = graph_of(lines)
    found = overlapped(graph)
    found.lint()
    assert computed(found) == computed(graph)
    sent = [[node.name for node in one.nodes if node.target is SENDS] for one in (graph, found)]
    assert sent[0] == sent[1]
    left, known = list(found.nodes)[:-1], set[fx.Node]()
    for node in found.nodes:
        if node.target is WAITS:
            kinds = ([one for one in left if one.target is KINDS[kind]] for kind in ("draw", "send"))
            later = [one for of_kind in kinds for one in of_kind[1:]]  # which follow others of their kind
            ready = [one for one in left if known.issuperset(one.all_input_nodes) and one not in later]
            assert all(one.target is WAITS for one in ready), ready
        left.remove(node) if node in left else None
        known.add(node)


@pytest.mark.slow
def test_inductor_keeps_the_order() -> None:
    program = overlap(zcompile.parse(joined(joined(HEAD, WAITING), PHASES)))
    graph = program.regions["region_0"].graph
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    code = inductor_code(fx.GraphModule({}, graph), inputs).partition("def call")[2]
    lines = re.findall(r"extern_kernels\.mm\(|(?:start|wait)_all_to_all\.default\(", code)
    assert [line.partition("_")[0] for line in lines] == ["extern", "start", "extern", "start", "wait", "wait"]
