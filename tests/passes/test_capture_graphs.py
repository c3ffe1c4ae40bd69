from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import zcompile
from tests.passes.programs import CHAIN, GATHERED, OUTLINED, REDUCED, at_stage, check, joined, parsed
from zcompile import ParseError, Program, ProgramError, facts, verify
from zcompile.ir.ops import Copy
from zcompile.passes.accumulate_gradients import accumulate_gradients
from zcompile.passes.capture_graphs import capture_graphs
from zcompile.passes.insert_reductions import insert_reductions
from zcompile.passes.plan_memory import plan_memory
from zcompile.torch_internals.sizes import FakeTensor

CAPTURED = """
def forward(box):
    (
        a,                            #            1 parameter  unit a
        b,                            #            1 parameter  unit b
        c,                            #            1 parameter  unit c
        x,                            # f32[8, 4]
    ) = unbox(box)
    ya = region_0(a, x)               # f32[8, 4]  +128 B       a
    yb = region_0(b, ya)              # f32[8, 4]  +128 B       b
    yc = region_0(c, yb)              # f32[8, 4]  +128 B       c
    yc_copy = copy(yc, strided=True)  # f32[8, 4]  +128 B       c
    del yc                            #            -128 B
    return [yc_copy], [x, ya, yb]
"""
HELD = """
def backward(box):
    (
        a,                                   #                       1 parameter  unit a
        b,                                   #                       1 parameter  unit b
        c,                                   #                       1 parameter  unit c
        x,                                   # f32[8, 4]
        ya,                                  # f32[8, 4]                          a
        yb,                                  # f32[8, 4]                          b
        dy,                                  # f32[8, 4]                          tangent
    ) = unbox(box)
    db, gc = region_1(c, dy, yb)             # f32[8, 4], f32[4, 4]  +192 B       c
    del yb, dy                               #                       -128 B
    gc_copy = copy(gc)                       # f32[4, 4]             +64 B        c
    del gc                                   #                       -64 B
    c_grads_held = accumulate(c, [gc_copy])  #                                    c
    del gc_copy                              #                       -64 B
    da, gb = region_1(b, db, ya)             # f32[8, 4], f32[4, 4]  +192 B       b
    del ya, db                               #                       -256 B
    gb_copy = copy(gb)                       # f32[4, 4]             +64 B        b
    del gb                                   #                       -64 B
    b_grads_held = accumulate(b, [gb_copy])  #                                    b
    del gb_copy                              #                       -64 B
    ga = region_2(da, x)                     # f32[4, 4]             +64 B        a.lin
    del x, da                                #                       -128 B
    ga_copy = copy(ga)                       # f32[4, 4]             +64 B        a.lin
    del ga                                   #                       -64 B
    a_grads_held = accumulate(a, [ga_copy])  #                                    a
    del ga_copy                              #                       -64 B
    return [None], [c_grads_held, b_grads_held, a_grads_held]
"""
FIXED = {"region_0": [0], "region_1": [0], "region_2": []}


def on_gpu(step: Callable[[Program], Program]) -> Callable[[Program], Program]:
    """`step` on a program whose regions have been traced with tensors of a GPU."""

    def run(program: Program) -> Program:
        for region in program.regions.values():
            for node in region.graph.nodes:
                if isinstance(value := node.meta.get("val"), FakeTensor):
                    with value.fake_mode:
                        node.meta["val"] = torch.empty_like(value, device="cuda")
        return step(program)

    return run


def decorated(head: str) -> str:
    for name, fixed in FIXED.items():
        head = head.replace(f"def {name}(", f"@cuda_graph(fixed={fixed})\ndef {name}(")
    return head


def fixed_of(program: Program) -> dict[str, list[int] | None]:
    return {name: None if r.fixed is None else sorted(r.fixed) for name, r in program.regions.items()}


def test_what_is_returned_is_copied_out_of_the_memory_of_graphs() -> None:
    head = at_stage(CHAIN, 0)
    captured = check(on_gpu(capture_graphs), head, OUTLINED, CAPTURED, decorated(head))
    verify(captured, (facts.RESULTS_OWNED,), "here")
    assert captured.notes[-1] == "CUDA graphs: 3 of 3 regions"
    assert fixed_of(zcompile.parse(captured.text(regions=True))) == FIXED


def test_gradients_that_are_held_back_are_copied_and_those_that_are_scattered_are_not() -> None:
    captured = on_gpu(capture_graphs)(parsed(at_stage(CHAIN, 1), REDUCED))
    assert [node.name for node in captured.nodes(Copy)] == ["yc_copy"]
    assert HELD.strip() in str(accumulate_gradients(captured))


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 1), (3, 1)])
def test_gradients_that_stay_where_they_are_are_copied(stage: int, world: int) -> None:
    head = at_stage(CHAIN, stage).replace("shard 2", f"shard {world}")
    captured = on_gpu(capture_graphs)(insert_reductions(parsed(head, OUTLINED)))
    assert [node.name for node in captured.nodes(Copy)] == ["yc_copy", "gc_copy", "gb_copy", "ga_copy"]


def test_parameters_are_fixed_that_have_a_place() -> None:
    gathered = parsed(CHAIN, GATHERED)
    assert fixed_of(on_gpu(capture_graphs)(plan_memory(gathered))) == FIXED
    assert fixed_of(on_gpu(capture_graphs)(gathered)) == {name: [] for name in FIXED}


def test_what_runs_on_the_host_is_not_captured() -> None:
    captured = capture_graphs(parsed(CHAIN, GATHERED))
    assert fixed_of(captured) == dict.fromkeys(FIXED)
    assert not captured.nodes(Copy)
    reason = ", ".join(f"{name} (it has tensors on the host)" for name in FIXED)
    assert captured.notes[-1] == f"CUDA graphs: 0 of 3 regions; not {reason}"


def test_a_result_in_the_memory_of_a_graph_is_refused() -> None:
    program = zcompile.parse(joined(decorated(CHAIN), GATHERED))
    with pytest.raises(ProgramError, match="yc outlives the step, and the next one's CUDA graphs write to its memory"):
        verify(program, (facts.RESULTS_OWNED,), "here")


@pytest.mark.parametrize("decorator", ["@cuda_graph", "@cuda_graph(fixed=['a'])", "@cached", "@cuda_graph(0)"])
def test_other_decorators_are_refused(decorator: str) -> None:
    head = CHAIN.replace("def region_1(", f"{decorator}\ndef region_1(")
    with pytest.raises(ParseError, match="region_1 has a decorator that says nothing"):
        zcompile.parse(joined(head, GATHERED))
