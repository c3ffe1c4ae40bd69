from __future__ import annotations

from functools import partial

import pytest

import zcompile
from tests.passes.programs import PAIR, expect, functions, head_of, joined, parsed
from tests.passes.test_recompute_activations import BEFORE
from zcompile import OptionError, Program
from zcompile.facts import REGIONS_OUTLINED
from zcompile.ir.operation import data
from zcompile.passes.assign_units import assign_units
from zcompile.passes.chunk_rows import chunk_rows
from zcompile.passes.outline_regions import outline_regions
from zcompile.proof.values import computes
from zcompile.schedule.default_pipeline import run_passes
from zcompile.schedule.pipeline import Pass

HEAD = head_of("head").replace("f32[4, 4]", "f32[32, 4]")
LOSS = """
def forward(box):
    (
        head_weight,                                         # f32[32, 4]           parameter head.weight
        h,                                                   # f32[8, 4]
        targets,                                             # i64[8, 1]
    ) = unbox(box)
    w = aten.t.default(head_weight)                          # &f32[4, 32]          head
    logits = aten.mm.default(h, w)                           # f32[8, 32]   +1 KiB  head
    del w
    log_probs = aten._log_softmax.default(logits, 1, False)  # f32[8, 32]   +1 KiB
    del logits                                               #              -1 KiB
    picked = aten.gather.default(log_probs, 1, targets)      # f32[8, 1]    +32 B
    total = aten.sum.default(picked)                         # f32[]        +4 B
    del picked                                               #              -32 B
    loss = aten.div.Tensor(total, -8)                        # f32[]        +4 B
    del total                                                #              -4 B
    return [loss], [h, targets, log_probs]


def backward(box):
    (
        head_weight,                                    # f32[32, 4]               parameter head.weight
        h,                                              # f32[8, 4]
        targets,                                        # i64[8, 1]
        log_probs,                                      # f32[8, 32]
        dloss,                                          # f32[]                    tangent
    ) = unbox(box)
    each = aten.div.Tensor(dloss, -8)                   # f32[]        +4 B
    del dloss
    rows = aten.expand.default(each, [8, 1])            # &f32[8, 1]
    del each
    zeros = aten.zeros_like.default(log_probs)          # f32[8, 32]   +1 KiB
    ones = aten.scatter.value(zeros, 1, targets, 1.0)   # f32[8, 32]   +1 KiB
    del targets, zeros                                  #              -1 KiB
    dlog_probs = aten.mul.Tensor(ones, rows)            # f32[8, 32]   +1 KiB
    del rows, ones                                      #              -1.004 KiB
    dlogits = aten._log_softmax_backward_data.default(  # f32[8, 32]   +1 KiB
            dlog_probs, log_probs, 1, torch.float32)
    del log_probs, dlog_probs                           #              -2 KiB
    columns = aten.t.default(dlogits)                   # &f32[32, 8]              head
    dw = aten.mm.default(columns, h)                    # f32[32, 4]   +512 B      head
    del h, columns
    dh = aten.mm.default(dlogits, head_weight)          # f32[8, 4]    +128 B      head
    del dlogits                                         #              -1 KiB
    return [dh, None], {'head.weight': dw}
"""
"""A head, and the mean of a cross entropy."""
CHUNKED_HEAD = """
axes = {"dp": "shard 2"}
stage = 3
units = {
    "head": [
        "head.weight f32[32, 4]",
    ],
}
packed = {
}


@chunked(rows=8, size=3, takes=[None, 0, 0], gives=[0, 'sum', 0], factor='factor')
def region_0_in_chunks(box):
    (
        head_weight,                                         # f32[32, 4]           argument 0 item 0
        h,                                                   # f32[3, 4]            argument 1
        targets,                                             # i64[3, 1]            argument 2
    ) = unbox(box)
    w = aten.t.default(head_weight)                          # &f32[4, 32]          head
    logits = aten.mm.default(h, w)                           # f32[3, 32]   +384 B  head
    log_probs = aten._log_softmax.default(logits, 1, False)  # f32[3, 32]   +384 B
    picked = aten.gather.default(log_probs, 1, targets)      # f32[3, 1]    +12 B
    factor = aten.full.default([], 1, dtype=torch.float32, device=torch.device('cpu'), pin_memory=False)  # f32[]  +4 B
    rows = aten.expand.default(factor, [3, 1])               # &f32[3, 1]
    zeros = aten.zeros_like.default(log_probs)               # f32[3, 32]   +384 B
    ones = aten.scatter.value(zeros, 1, targets, 1.0)        # f32[3, 32]   +384 B
    dlog_probs = aten.mul.Tensor(ones, rows)                 # f32[3, 32]   +384 B
    dlogits = aten._log_softmax_backward_data.default(       # f32[3, 32]   +384 B
            dlog_probs, log_probs, 1, torch.float32)
    columns = aten.t.default(dlogits)                        # &f32[32, 3]          head
    dw = aten.mm.default(columns, h)                         # f32[32, 4]   +512 B  head
    dh = aten.mm.default(dlogits, head_weight)               # f32[3, 4]    +48 B   head
    return [picked, dw, dh]


def region_1(box):
    (
        picked_rows,                       # f32[8, 1]        argument 0
    ) = unbox(box)
    total = aten.sum.default(picked_rows)  # f32[]      +4 B
    loss = aten.div.Tensor(total, -8)      # f32[]      +4 B
    return [loss]


def region_2(box):
    (
        dloss,                                  # f32[]               argument 0
        dw_rows,                                # f32[32, 4]          argument 1
        dh_rows,                                # f32[8, 4]           argument 2
    ) = unbox(box)
    each = aten.div.Tensor(dloss, -8)           # f32[]       +4 B
    dw_scaled = aten.mul.Tensor(dw_rows, each)  # f32[32, 4]  +512 B  head
    dh_scaled = aten.mul.Tensor(dh_rows, each)  # f32[8, 4]   +128 B  head
    return [dh_scaled, dw_scaled]
"""
CHUNKED = """
def forward(box):
    (
        head,                                                     #                      1 parameter  unit head
        h,                                                        # f32[8, 4]
        targets,                                                  # i64[8, 1]
    ) = unbox(box)
    head_out, *head_saved = region_0_in_chunks(head, h, targets)  # f32[8, 1], 2 values  +672 B       head
    del h, targets
    loss = region_1(head_out)                                     # f32[]                +4 B
    del head_out                                                  #                      -32 B
    return [loss], [head_saved]


def backward(box):
    (
        head_saved,                                          # 2 values               640 B   head
        grad_output,                                         # f32[]                          tangent
    ) = unbox(box)
    head_grad_input, head_full_grad = region_2(grad_output,  # f32[8, 4], f32[32, 4]  +640 B  head
            *head_saved)
    del head_saved, grad_output                              #                        -640 B
    return [head_grad_input, None], {'head.weight': head_full_grad}
"""


WIDE = """
def forward(box):
    (
        a_weight,                         # f32[4, 16]         parameter a.weight
        b_weight,                         # f32[16, 4]         parameter b.weight
        x,                                # f32[6, 4]
    ) = unbox(box)
    h = aten.mm.default(x, a_weight)      # f32[6, 16]  +384 B a
    y = aten.relu.default(h)              # f32[6, 16]  +384 B
    z = aten.mm.default(y, b_weight)      # f32[6, 4]   +96 B  b
    return [z], [x, h, y]


def backward(box):
    (
        a_weight,                         # f32[4, 16]         parameter a.weight
        b_weight,                         # f32[16, 4]         parameter b.weight
        x,                                # f32[6, 4]
        h,                                # f32[6, 16]         a
        y,                                # f32[6, 16]         b
        dz,                               # f32[6, 4]          tangent
    ) = unbox(box)
    bt = aten.t.default(b_weight)         # &f32[4, 16]        b
    dy = aten.mm.default(dz, bt)          # f32[6, 16]  +384 B b
    yt = aten.t.default(y)                # &f32[16, 6]        b
    db = aten.mm.default(yt, dz)          # f32[16, 4]  +256 B b
    dh = aten.threshold_backward.default(dy, h, 0)  # f32[6, 16]  +384 B
    xt = aten.t.default(x)                # &f32[4, 6]         a
    da = aten.mm.default(xt, dh)          # f32[4, 16]  +256 B a
    at = aten.t.default(a_weight)         # &f32[16, 4]        a
    dx = aten.mm.default(dh, at)          # f32[6, 4]   +96 B  a
    return [dx], {'b.weight': db, 'a.weight': da}
"""
"""Two layers with a wide value between them."""


def outlined(program: Program, rows: int) -> Program:
    steps = Pass("assign_units", assign_units), Pass("outline_regions", partial(outline_regions, fuses=False))
    return run_passes(steps, chunk_rows(program, rows=rows))


def test_a_loss_and_its_gradients_are_computed_for_some_rows_after_the_other() -> None:
    traced = parsed(HEAD, LOSS)
    program = outlined(traced, 3)
    expect(program, CHUNKED_HEAD, CHUNKED)
    assert program.notes == ("chunk_rows: logits, 1 KiB, is computed for 3 of 8 rows at once, 384 B",)
    assert not list(computes(traced).violations(program))


def test_a_program_without_a_backward_is_computed_in_chunks_too() -> None:
    head = functions(LOSS)
    program = outlined(
        zcompile.parse(joined(HEAD, head["def forward"].replace(", [h, targets, log_probs]", ", []"))), 3
    )
    (loop,) = [region for region in program.regions.values() if region.rows]
    assert str(loop.rows) == "rows=8, size=3, takes=[None, 0, 0], gives=[0]"


def test_gradients_that_depend_on_what_follows_are_computed_with_the_forward_repeated() -> None:
    """Of each row again: the backward begins with a value with rows, which is not known ahead."""
    traced = zcompile.parse(joined(head_of("a", "b").replace("f32[4, 4]", "f32[4, 16]", 1), WIDE))
    traced = zcompile.parse(traced.text(regions=True).replace("b.weight f32[4, 4]", "b.weight f32[16, 4]"))
    program = outlined(traced, 4)
    loops = [region for region in program.regions.values() if region.rows]
    assert [str(region.rows) for region in loops] == [
        "rows=6, size=3, takes=[None, None, 0], gives=[0]",
        "rows=6, size=3, takes=[None, None, 0, 0, 1], gives=[0, 'sum', 'sum']",
    ]
    assert [str(node.target) for node in loops[1].graph.nodes if node.op == "call_function"].count(
        "aten.relu.default"
    ) == 1
    assert not [node for node in program.saved() if data(node).type.shape == (6, 16)]
    assert not list(computes(traced).violations(program))


def test_equal_loops_are_one_region() -> None:
    two = LOSS.replace("f32[8, 32]", "f32[8, 32]")
    program = outlined(parsed(HEAD, two), 4)
    assert [region.rows.size for region in program.regions.values() if region.rows] == [4]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("return [loss],", "return [log_probs],", "log_probs: is returned"),
        (
            "_log_softmax.default(logits, 1, False)",
            "_log_softmax.default(logits, 0, False)",
            "log_probs: aten._log_softmax.default mixes rows",
        ),
        ("_log_softmax.default(logits, 1, False)", "native_dropout.default(logits, 0.5, True)", "draws random numbers"),
        (
            "_log_softmax.default(logits, 1, False)",
            "cumsum.default(logits, 0)",
            "log_probs: aten.cumsum.default mixes rows",
        ),
        ("aten.mm.default(h, w)", "aten.flip.default(h, [0])", "not known to treat rows alike"),
    ],
)
def test_what_cannot_be_computed_in_chunks_is_refused_by_its_line(before: str, after: str, problem: str) -> None:
    """In a training step; a program without a backward stays as it is, and says why."""
    forward = functions(LOSS)["def forward"].replace(", [h, targets, log_probs]", ", []").replace(before, after)
    program = zcompile.parse(joined(HEAD, forward))
    unchanged = chunk_rows(program, rows=2)
    assert str(unchanged) == str(program)
    assert problem in unchanged.notes[0]


def test_a_program_in_which_nothing_is_wide_is_refused() -> None:
    with pytest.raises(OptionError, match="chunk: has no effect: x: is given to the step as a whole"):
        chunk_rows(zcompile.parse(joined(PAIR, BEFORE)), rows=2)
    part = chunk_rows(zcompile.parse(joined(PAIR, BEFORE)), rows=2, whole=False)
    assert part.notes == ("chunk_rows: not in chunks: x: is given to the step as a whole",)


MUTATIONS = [
    ("rows=8, size=3", "rows=6, size=3"),
    ("rows=8, size=3", "rows=9, size=3"),
    ("takes=[None, 0, 0]", "takes=[None, 1, 0]"),
    ("takes=[None, 0, 0]", "takes=[0, 0, 0]"),
    ("takes=[None, 0, 0]", "takes=[None, 0, None]"),
    ("gives=[0, 'sum', 0]", "gives=[0, 0, 0]"),
    ("gives=[0, 'sum', 0]", "gives=['sum', 'sum', 0]"),
    ("gives=[0, 'sum', 0]", "gives=[0, 'sum', 1]"),
    (", factor='factor'", ""),
    ("factor='factor'", "factor='zeros'"),
    ("full.default([], 1,", "full.default([], 2,"),
    ("_log_softmax.default(logits, 1", "_log_softmax.default(logits, 0"),
    ("mm.default(columns, h)", "mm.default(columns, zeros)"),
    ("dw_scaled = aten.mul.Tensor(dw_rows, each)", "dw_scaled = aten.mul.Tensor(dw_rows, dloss)"),
    ("dw_scaled = aten.mul.Tensor(dw_rows, each)", "dw_scaled = aten.neg.default(dw_rows)"),
    ("aten.expand.default(factor, [3, 1])", "aten.expand.default(factor, [3, 3])"),
    ("aten.mul.Tensor(ones, rows)", "aten.add.Tensor(ones, rows)"),
    ("aten.sum.default(picked_rows)", "aten.amax.default(picked_rows, [0, 1])"),
    ("return [picked, dw, dh]", "return [picked, dw, h]"),
]


@pytest.mark.parametrize(("before", "after"), MUTATIONS)
def test_a_loop_that_computes_something_else_is_refused(before: str, after: str) -> None:
    """A number of rows, an argument or a result that is said to be elsewhere, another factor, an operation that mixes."""
    traced = parsed(HEAD, LOSS)
    text = outlined(traced, 3).text(regions=True)
    assert before in text
    changed = zcompile.parse(text.replace(before, after))
    assert list(computes(traced).violations(changed)) or list(REGIONS_OUTLINED.violations(changed))
