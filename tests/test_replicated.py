"""What every rank of a model-parallel mesh is known to have, from the programs of its ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.passes.programs import CHAIN, PAIR, joined
from tests.passes.test_partition_activations import SAME
from tests.ranks import Ranks
from zcompile import AgreementError
from zcompile.engine.tensor_parallel_group import TensorParallelGroup, digests, mark_replicated
from zcompile.ir.operation import data, set_data
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program
from zcompile.passes.partition_activations import partition_activations
from zcompile.runtime.tensors.placement import ModelParallel

BODY = """
def forward(box):
    (
        a,  # f32[4, 4]  parameter a.weight
        b,  # f32[4, 4]  parameter b.weight
        x,  # f32[8, 4]
    ) = unbox(box)
    {lines}
    return [y], []
"""
SUM = "s = ops._c10d_functional.all_reduce.default(h, 'sum', 'tp')  # f32[8, 4]"
WAITED = "w = ops._c10d_functional.wait_tensor.default(s)  # f32[8, 4]"


def program(*lines: str) -> Program:
    return zcompile.parse(joined(PAIR, BODY.format(lines="\n    ".join(lines))))


def known(*lines: str) -> set[str]:
    """The names that this rank holds to be the same on all; `a` is divided."""
    return {*digests(program(*lines), "tp", {"a.weight"})}


def test_a_sum_over_the_mesh_is_the_same_whatever_goes_in() -> None:
    lines = ("h = aten.mm.default(x, a)  # f32[8, 4]", SUM, WAITED, "y = aten.add.Tensor(x, w)  # f32[8, 4]")
    assert known(*lines) == {"x", "b", "s", "w", "y"}


def test_what_follows_from_a_divided_parameter_is_not() -> None:
    lines = ("h = aten.mm.default(x, a)  # f32[8, 4]", "y = aten.add.Tensor(x, h)  # f32[8, 4]")
    assert known(*lines) == {"x", "b"}


@pytest.mark.parametrize(
    "line",
    [
        "y = ops._c10d_functional.all_reduce.default(x, 'sum', 'dp')  # f32[8, 4]",
        "y = ops._c10d_functional.reduce_scatter_tensor.default(x, 'sum', 2, 'tp')  # f32[4, 4]",
        "y = aten.bernoulli.default(x)  # f32[8, 4]",
        "y = aten.empty_like.default(x)  # f32[8, 4]",
        "y = ops.zcompile_tests.rank_of.default(x)  # f32[8, 4]",
    ],
    ids=["another group", "parts of a sum", "random", "unwritten", "another library"],
)
def test_what_may_differ_is_not_taken_to_be_the_same(line: str) -> None:
    assert "y" not in known(line)


@torch.library.custom_op("zcompile_tests::rank_of", mutates_args=())
def rank_of(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def taking(start: int, *before: str) -> tuple[str, ...]:
    return (
        *before,
        f"r = aten.slice.Tensor(x, 0, {start}, {start + 4})  # &f32[4, 4]",
        "h = aten.mm.default(x, b)  # f32[8, 4]",
        "y = aten.add.Tensor(h, 1)  # f32[8, 4]",
    )


def same(first: Program, second: Program) -> list[set[str]]:
    """Names in each that both ranks know by their digests."""
    found = [digests(one, "tp", {"a.weight"}) for one in (first, second)]
    return [{name for name, digest in one.items() if digest in other.values()} for one, other in (found, found[::-1])]


def test_rows_of_its_own_are_known_to_one_rank_alone() -> None:
    assert same(program(*taking(0)), program(*taking(4))) == [{"x", "b", "h", "y"}] * 2
    assert "r" in same(program(*taking(0)), program(*taking(0)))[0]


@pytest.mark.parametrize(
    ("given", "is_known"),
    [
        (Input(Kind.DATA, 0), True),
        (Input(Kind.DATA, 0, held="table"), True),
        (Input(Kind.DATA, 0, held="own"), False),
        (Input(Kind.DATA, 0, mutated=True, held="table"), False),
        (Input(Kind.DATA, 0, held="?"), False),
    ],
    ids=["argument", "buffer", "buffer that differs", "buffer that is written", "attribute"],
)
def test_of_inputs_arguments_and_constant_buffers_are_the_same(given: Input, is_known: bool) -> None:
    traced = program("y = aten.add.Tensor(x, 1)  # f32[8, 4]")
    set_data(traced.node("x"), replace(data(traced.node("x")), op=given))
    assert ("y" in digests(traced, "tp", {"a.weight", "own"})) is is_known


def test_another_buffer_is_another_value() -> None:
    found = []
    for name in ("one", "other"):
        traced = program("y = aten.add.Tensor(x, 1)  # f32[8, 4]")
        set_data(traced.node("x"), replace(data(traced.node("x")), op=Input(Kind.DATA, 0, held=name)))
        found.append(digests(traced, "tp", ())["y"])
    assert found[0] != found[1]


def test_the_order_of_arguments_counts() -> None:
    before = "z = aten.mul.Tensor(x, 3)  # f32[8, 4]"
    one, other = (
        digests(program(before, f"y = aten.cat.default([{given}])  # f32[24, 4]"), "tp", ())["y"]
        for given in ("z, x, z", "z, z, x")
    )
    assert one != other


def test_names_and_what_one_rank_does_beside_do_not_matter() -> None:
    more = "h_1 = aten.mul.Tensor(x, 3)  # f32[8, 4]"
    one, other = same(program(*taking(0)), program(*taking(4, more)))
    assert one == other == {"x", "b", "h", "y"}


def test_marks_are_printed_and_read_again() -> None:
    lines = ("h = aten.mm.default(x, a)  # f32[8, 4]", SUM, WAITED, "y = aten.add.Tensor(x, w)  # f32[8, 4]")
    traced = program(*lines)
    marked = mark_replicated(traced, digests(traced, "tp", {"a.weight"}))
    text = marked.text(regions=True)
    (line,) = (line for line in text.splitlines() if "y = aten.add.Tensor(x, w)" in line)
    assert "# =f32[8, 4]" in line
    assert zcompile.parse(text).text(regions=True) == text
    assert not data(traced.node("y")).replicated, "the argument is left alone"


def compared(rank: int, other: str) -> list[str]:
    """What comes of comparing partitioned programs: one again, and one that is another on the second rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    group = TensorParallelGroup(ModelParallel(mesh["tp"], mesh, mesh["tp"], frozenset()), torch.device("cpu"))
    parts, head = (
        partial(partition_activations, least=1),
        CHAIN.replace('"shard 2"', '"shard 1, stride 2", "tp": "tensor 2"'),
    )
    found = []
    for text in (SAME, SAME, other if rank else SAME.replace("8, 4", "6, 4")):
        try:
            group.agree(parts(zcompile.parse(joined(head, text))))
            found.append("agreed")
        except AgreementError as error:
            found.append(str(error))
    return found


def test_ranks_that_would_gather_different_parts_are_told(ranks: Ranks) -> None:
    for found in ranks.run(2, compared, SAME.replace("8, 4", "5, 4")):
        assert found[:2] == ["agreed", "agreed"]
        assert "rank 0: 'gather f32[6, 4] ='; rank 1: 'gather f32[5, 4] ='" in found[2]
