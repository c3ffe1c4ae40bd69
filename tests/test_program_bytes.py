"""Values of programs as bytes, and made again."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from zcompile.frontend.step_cache import NotStorableError, dumped, loaded
from zcompile.torch_internals.sizes import FakeTensorMode


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]),
)
def test_traced_values_lie_as_they_lay(sizes: list[tuple[int, int]], offset: int, dtype: torch.dtype) -> None:
    mode = FakeTensorMode()
    shape, stride = [size for size, _ in sizes], [step for _, step in sizes]
    with mode:
        value = torch.empty(1000, dtype=dtype).as_strided(shape, stride, offset)
    again = loaded(dumped(value), other := FakeTensorMode())
    assert again.fake_mode is other
    assert (again.shape, again.stride(), again.storage_offset()) == (value.shape, value.stride(), offset)
    assert (again.dtype, again.device) == (dtype, value.device)


def graph_of(*called: Any) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in called:
        value = graph.call_function(target, (value, 2), name="y")
    graph.output((value, [value, None]))
    return graph


def test_graphs_keep_names_arguments_and_operators() -> None:
    graph = graph_of(torch.ops.aten.add.Tensor, operator.getitem, torch.ops.higher_order.cond)
    again = loaded(dumped(graph), FakeTensorMode())
    again.lint()
    assert str(again) == str(graph)
    assert [node.name for node in again.nodes] == ["x", "y", "y_1", "y_2", "output"]
    assert [node.target for node in again.nodes] == [node.target for node in graph.nodes]


def test_what_has_no_name_cannot_be_kept() -> None:
    with pytest.raises(NotStorableError):
        dumped(graph_of(lambda x, y: x))


def test_a_sparse_value_cannot_be_kept() -> None:
    with FakeTensorMode():
        value = torch.empty(3, 3).to_sparse()
    with pytest.raises(NotStorableError, match="layout torch"):
        dumped(value)
