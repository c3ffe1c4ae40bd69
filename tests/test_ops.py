"""The table of operations: what it says is what the runtime takes, what is printed, and what is read back."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch

import zcompile
from tests.passes.programs import CHAIN, GATHERED, REDUCED, joined, parsed
from zcompile import ParseError, ProgramError, facts
from zcompile.ir import ops
from zcompile.ir.operation import Data, Operation, Role, keywords_of, options_of
from zcompile.ir.ops import (
    AllGather,
    Compute,
    Fetch,
    GatherInside,
    GatherOutside,
    Group,
    Reduce,
    ReduceOutside,
    Release,
    Shards,
    Update,
    WaitFetch,
    WaitGather,
    WaitReduce,
    WaitSecondary,
)
from zcompile.runtime.executor import OPERATIONS

ROWS = [row for row in vars(ops).values() if isinstance(row, type) and issubclass(row, Operation) and is_dataclass(row)]
LINES = [row for row in ROWS if row.functions]


def test_every_function_is_the_runtimes() -> None:
    assert set(OPERATIONS) == {*ops.FUNCTIONS, "unbox"}


@pytest.mark.parametrize("row", LINES, ids=lambda row: row.__name__)
def test_what_a_line_is_given_is_what_the_runtime_takes(row: type[Operation]) -> None:
    by_name = set()
    for function in row.functions:
        parameters = inspect.signature(OPERATIONS[function]).parameters.values()
        positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        required = [one for one in positional if one.default is one.empty]
        assert len(required) <= len(row.takes or ()) <= len(positional)  # two kinds of lines may call one function
        by_name |= {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}.items()
    sharing = [one for one in LINES if set(one.functions) & set(row.functions)]
    assert options_of(row).items() <= by_name
    assert by_name <= {item for one in sharing for item in options_of(one).items()}


def test_every_row_says_what_it_does() -> None:
    assert {row.role for row in ROWS} == set(Role)
    assert all(row.takes is not None for row in LINES)


def test_what_may_be_left_out_gives_nothing() -> None:
    assert not [row for row in ROWS if row.inert and row.gives]


@pytest.mark.parametrize(
    ("function", "given", "keywords", "meant"),
    [
        ("all_gather", (Shards("b"),), {}, AllGather("b")),
        ("all_gather", (Shards("b"),), {"keep": True, "at": (0, 64)}, AllGather("b", keep=True, at=(0, 64))),
        ("reduce_scatter", (Shards("b"), [Compute()]), {}, Reduce("b", ("b.weight",), scatter=True)),
        ("all_reduce", (Shards("b"), [None]), {"dtype": torch.bfloat16}, Reduce("b", (), False, torch.bfloat16)),
        ("wait", (Fetch(),), {}, WaitFetch()),
        ("wait", (Reduce("b", ("b.weight",), True),), {}, WaitReduce("b", ("b.weight",))),
        (
            "all_reduce",
            (Shards("b"), WaitReduce("b", ("b.weight",)), Group("outer")),
            {},
            ReduceOutside("b", ("b.weight",), "outer", scatter=False),
        ),
        (
            "reduce_scatter",
            (Shards("b"), WaitReduce("b", ("b.weight",)), Group("outer")),
            {"wire": torch.int8},
            ReduceOutside("b", ("b.weight",), "outer", scatter=True, wire=torch.int8),
        ),
        ("all_gather", (Shards("b"), Group("outer")), {"keep": True}, GatherOutside("b", "outer", keep=True)),
        (
            "all_gather",
            (Shards("b"), Group("outer")),
            {"wire": torch.int8},
            GatherOutside("b", "outer", wire=torch.int8),
        ),
        ("wait", (GatherOutside("b", "outer"),), {}, WaitSecondary("b")),
        ("all_gather", (Shards("b"), WaitSecondary("b")), {}, GatherInside("b")),
        ("wait", (GatherInside("b"),), {}, WaitGather("b")),
        ("update", (Shards("b"), WaitReduce("b", ("b.weight",))), {}, Update("b", ("b.weight",))),
    ],
)
def test_a_call_is_read_as_what_was_written(
    function: str, given: tuple[Any, ...], keywords: dict[str, Any], meant: Operation
) -> None:
    layout = parsed(CHAIN, REDUCED).layout
    assert ops.operation(function, given, keywords, layout) == meant
    assert meant.function == function
    assert keywords_of(meant) == keywords


def test_a_line_is_added_and_changed_in_data_and_text_alike() -> None:
    program = parsed(CHAIN, GATHERED).copy()
    full = program.node("a_full")
    with program.graph.inserting_after(full):
        line = program.add((full,), Data(Release("a"), source="a"), "early")
    gather = program.node("a_gather")
    program.respell(gather, AllGather("a", keep=True))
    text = program.text()
    assert line.target is ops.FUNCTIONS["release"]
    assert "    release(a_full)" in text
    assert "a_gather = all_gather(a, keep=True)" in text


def test_what_stands_in_a_graph_does_not_run() -> None:
    with pytest.raises(TypeError, match="all_gather stands for an operation of the runtime"):
        ops.FUNCTIONS["all_gather"]()


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("all_gather(b)", "all_gather(b, at=3)"),
        ("reduce_scatter(b, [gb])", "reduce_scatter(b)"),
        ("reduce_scatter(b, [gb])", "reduce_scatter(b, [gb, gb])"),
        ("reduce_scatter(b, [gb])", "reduce_scatter([gb], b)"),
        ("reduce_scatter(b, [gb])", "reduce_scatter()"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, instead: str) -> None:
    phases = GATHERED if "gather" in line else REDUCED
    assert line in phases
    with pytest.raises(ParseError, match=r"^line \d+: '.*' is given what \w+ does not take"):
        zcompile.parse(joined(CHAIN, phases).replace(line, instead, 1))


@pytest.mark.parametrize(
    ("line", "instead", "found"),
    [
        ("all_gather(b)", "all_gather(b, kepp=True)", "is written otherwise than its data says"),
        ("all_gather(b)", "all_gather([b])", "which a AllGather does not take"),
        ("release(b_full)", "release(b_full, at=b[0:4])", "is written otherwise than its data says"),
        ("wait(b_gather)", "wait(b)", "which a WaitGather does not take"),
        ("wait(b_gather)", "wait()", "which a WaitGather does not take"),
    ],
)
def test_a_line_that_is_not_built_as_meant_is_refused(line: str, instead: str, found: str) -> None:
    program = zcompile.parse(joined(CHAIN, GATHERED).replace(line, instead, 1))
    with pytest.raises(ProgramError, match=found):
        zcompile.verify(program, [facts.WELL_FORMED], "here")
