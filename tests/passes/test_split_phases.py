from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.passes.programs import check, head_of, parsed
from zcompile.facts import PHASES_SPLIT
from zcompile.ir.operation import Phase, data, op_of, set_data
from zcompile.ir.ops import Input, Kind
from zcompile.passes.assign_units import assign_units
from zcompile.passes.pipelining.cut_stages import cut_stages
from zcompile.passes.split_phases import split_phases
from zcompile.tools.llama import Llama, LlamaShape
from zcompile.tools.tracing import trace

HEAD = head_of("a")

JOINT = """
def forward(box):
    (
        a_weight,                 # f32[4, 4]           parameter a.weight
        x,                        # f32[8, 4]
    ) = unbox(box)
    t = aten.t.default(a_weight)  # &f32[4, 4]          a
    y = aten.mm.default(x, t)     # f32[8, 4]   +128 B  a
    return [y], [x, t]


def backward(box):
    (
        x,                         # f32[8, 4]
        t,                         # &f32[4, 4]          a
        dy,                        # f32[8, 4]           tangent
    ) = unbox(box)
    t_1 = aten.t.default(t)        # &f32[4, 4]          a
    del t
    dx = aten.mm.default(dy, t_1)  # f32[8, 4]   +128 B  a
    del t_1
    t_2 = aten.t.default(dy)       # &f32[4, 8]          a
    del dy
    dw = aten.mm.default(t_2, x)   # f32[4, 4]   +64 B   a
    del x, t_2
    return [dx], {'a.weight': dw}
"""

SPLIT = """
def forward(box):
    (
        a_weight,                 # f32[4, 4]           parameter a.weight
        x,                        # f32[8, 4]
    ) = unbox(box)
    t = aten.t.default(a_weight)  # &f32[4, 4]          a
    y = aten.mm.default(x, t)     # f32[8, 4]   +128 B  a
    del t
    return [y], [x]


def backward(box):
    (
        a_weight,                   # f32[4, 4]           parameter a.weight
        x,                          # f32[8, 4]
        dy,                         # f32[8, 4]           tangent
    ) = unbox(box)
    t_3 = aten.t.default(a_weight)  # &f32[4, 4]          a
    t_1 = aten.t.default(t_3)       # &f32[4, 4]          a
    del t_3
    dx = aten.mm.default(dy, t_1)   # f32[8, 4]   +128 B  a
    del t_1
    t_2 = aten.t.default(dy)        # &f32[4, 8]          a
    del dy
    dw = aten.mm.default(t_2, x)    # f32[4, 4]   +64 B   a
    del x, t_2
    return [dx], {'a.weight': dw}
"""

CAST = """
def forward(box):
    (
        a_weight,                                              # f32[4, 4]           parameter a.weight
        x,                                                     # bf16[8, 4]
    ) = unbox(box)
    w = aten._to_copy.default(a_weight, dtype=torch.bfloat16)  # bf16[4, 4]   +32 B  a
    t = aten.t.default(w)                                      # &bf16[4, 4]         a
    del w
    y = aten.mm.default(x, t)                                  # bf16[8, 4]   +64 B  a
    del x
    return [y], [t]


def backward(box):
    (
        t,                         # &bf16[4, 4]         a
        dy,                        # bf16[8, 4]          tangent
    ) = unbox(box)
    t_1 = aten.t.default(t)        # &bf16[4, 4]         a
    del t
    dx = aten.mm.default(dy, t_1)  # bf16[8, 4]   +64 B  a
    del dy, t_1                    #              -32 B
    return [dx], []
"""

CAST_SPLIT = """
def forward(box):
    (
        a_weight,                                              # f32[4, 4]           parameter a.weight
        x,                                                     # bf16[8, 4]
    ) = unbox(box)
    w = aten._to_copy.default(a_weight, dtype=torch.bfloat16)  # bf16[4, 4]   +32 B  a
    t = aten.t.default(w)                                      # &bf16[4, 4]         a
    del w
    y = aten.mm.default(x, t)                                  # bf16[8, 4]   +64 B  a
    del x, t                                                   #              -32 B
    return [y], []


def backward(box):
    (
        a_weight,                                                # f32[4, 4]           parameter a.weight
        dy,                                                      # bf16[8, 4]          tangent
    ) = unbox(box)
    w_1 = aten._to_copy.default(a_weight, dtype=torch.bfloat16)  # bf16[4, 4]   +32 B  a
    t_2 = aten.t.default(w_1)                                    # &bf16[4, 4]         a
    del w_1
    t_1 = aten.t.default(t_2)                                    # &bf16[4, 4]         a
    del t_2
    dx = aten.mm.default(dy, t_1)                                # bf16[8, 4]   +64 B  a
    del dy, t_1                                                  #              -32 B
    return [dx], []
"""

PLAIN = """
def forward(box):
    (
        a_weight,                     # f32[4, 4]          parameter a.weight
        x,                            # f32[8, 4]
    ) = unbox(box)
    y = aten.mm.default(x, a_weight)  # f32[8, 4]  +128 B  a
    del x
    s = aten.sin.default(y)           # f32[8, 4]  +128 B  a
    return [s], [y]


def backward(box):
    (
        a_weight,                 # f32[4, 4]           parameter a.weight
        y,                        # f32[8, 4]           a
        dy,                       # f32[8, 4]           tangent
    ) = unbox(box)
    c = aten.cos.default(y)       # f32[8, 4]   +128 B  a
    del y                         #             -128 B
    ds = aten.mul.Tensor(dy, c)   # f32[8, 4]   +128 B  a
    del dy, c                     #             -128 B
    t = aten.t.default(a_weight)  # &f32[4, 4]          a
    dx = aten.mm.default(ds, t)   # f32[8, 4]   +128 B  a
    del ds, t                     #             -128 B
    return [dx], []
"""

default = partial(split_phases, partition="default")


def test_a_view_of_a_parameter_is_taken_again_in_the_backward() -> None:
    program = check(default, HEAD, JOINT, SPLIT)
    assert not list(PHASES_SPLIT.violations(program))


def test_a_cast_of_a_parameter_is_made_again_in_the_backward() -> None:
    check(default, HEAD, CAST, CAST_SPLIT)


def test_a_split_step_is_left_alone() -> None:
    check(default, HEAD, SPLIT, SPLIT)


def test_what_is_saved_from_activations_stays_saved() -> None:
    check(default, HEAD, PLAIN, PLAIN)


def test_the_fact_refuses_a_saved_view_of_a_parameter() -> None:
    (violation,) = PHASES_SPLIT.violations(parsed(HEAD, JOINT))
    assert violation.message == "t is derived from a parameter, yet saved for t_1"


@pytest.mark.parametrize("name", ["x", "dy", "t_1"])
def test_the_fact_refuses_what_is_said_to_be_of_the_other_phase(name: str) -> None:
    program = parsed(HEAD, SPLIT)
    node = program.node(name)
    other = Phase.FORWARD if data(node).phase is Phase.BACKWARD else Phase.BACKWARD
    set_data(node, replace(data(node), phase=other))
    assert any(name in violation.message for violation in PHASES_SPLIT.violations(program))


def test_min_cut_saves_no_more_than_default_and_reads_parameters_again_too() -> None:
    for text in (JOINT, PLAIN):
        program = parsed(HEAD, text)
        small, usual = split_phases(program, partition="min_cut"), default(program)
        saved = [sum(node.meta["val"].nbytes for node in found.saved()) for found in (small, usual)]
        assert saved[0] <= saved[1]
        assert not list(PHASES_SPLIT.violations(small))


DETACHED = """
def forward(box):
    (
        a_weight,                     # f32[4, 4]           parameter a.weight
        x,                            # f32[8, 4]
    ) = unbox(box)
    y = aten.mm.default(x, a_weight)  # f32[8, 4]   +128 B  a
    del x
    y_1 = aten.detach.default(y)      # &f32[8, 4]          a
    y_2 = aten.detach.default(y_1)    # &f32[8, 4]          a
    del y_1
    shown = aten.detach.default(y)    # &f32[8, 4]          a
    return [y, shown], [y_2]


def backward(box):
    (
        y_2,                        # &f32[8, 4]          a
        dy,                         # f32[8, 4]           tangent
    ) = unbox(box)
    y_3 = aten.detach.default(y_2)  # &f32[8, 4]          a
    del y_2
    dx = aten.mul.Tensor(dy, y_3)   # f32[8, 4]   +128 B  a
    del dy, y_3
    return [dx], []
"""


def test_values_are_read_themselves_where_they_were_read_detached() -> None:
    traced = parsed(HEAD, DETACHED)
    program = split_phases(traced)
    assert "detach" in traced.text()
    assert [node.name for node in program.saved()] == ["y"]
    assert program.text().count("aten.detach.default") == 1, "of a result, which is a value of its own, it stays"


@pytest.mark.slow
def test_what_a_pipeline_stage_computes_again_waits_for_its_tangent() -> None:
    """Torch's partitioner puts it in front of the whole backward where it does not know the tangents."""
    with torch.device("meta"):
        model, tokens = Llama(LlamaShape(4, 256, 512, 4, 2), 512), torch.empty(1, 64, dtype=torch.int64)
    traced = trace(model, (tokens, tokens), dtype=torch.bfloat16, device="cuda")
    stage, _ = cut_stages(traced, starts=["layers.3"])
    program = assign_units(split_phases(stage.program, partition="min_cut"))
    (tangent,) = [node for node in program.nodes(Input) if op_of(node, Input).kind is Kind.TANGENT]
    body = program.body(Phase.BACKWARD)
    first = min(body.index(user) for user in tangent.users)
    assert {data(node).unit for node in body} >= {"layers.0", "layers.1", "layers.2"}
    assert {data(node).unit for node in body[:first]} <= {"layers.2", ""}
