"""Rows: each operation of the table, on parts of the rows and on all of them, by what torch computes."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from zcompile.engine.row_loops import looped
from zcompile.ir.operation import Data, set_data
from zcompile.ir.ops import Compute, Input, Item, Kind, Results
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Placement, RowLoop, placement_of
from zcompile.ir.row_axes import BY_OPERATION, POINTWISE, VIEWS, MixedRowsError, is_pointwise, resized
from zcompile.ir.rows import Placements, is_scaled, through_view, with_rows
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.inductor import inductor_decompositions
from zcompile.torch_internals.operators import OpOverload
from zcompile.torch_internals.sizes import FakeTensorMode

aten = torch.ops.aten
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
ROWS = 6


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def positive(*shape: int) -> Tensor:
    return real(*shape).abs() / 4 + 0.25


def whole(most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(most))


def yes(*shape: int) -> Tensor:
    return real(*shape) > 0


Case = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def case(op: OpOverload, *args: Any, **kwargs: Any) -> Case:
    return op, args, kwargs


def _pointwise() -> Iterator[Case]:
    """Each overload of the elementwise operations, with arguments that broadcast, of a dtype that it takes."""
    for name in POINTWISE.split():
        packet = getattr(aten, name)
        for overload in (getattr(packet, overload) for overload in packet.overloads()):
            if is_pointwise(overload):
                yield from itertools.islice(_taken(overload), 1)


def _taken(op: OpOverload) -> Iterator[Case]:
    alike = "backward" in op.overloadpacket.__name__
    for make in (positive, partial(whole, 8), yes):
        shapes = itertools.cycle([(5, ROWS, 3)] if alike else [(5, ROWS, 3), (ROWS, 1), (1, 3)])
        given = [argument for argument in op._schema.arguments if not argument.has_default_value()]
        numbers = {"bool": True, "float": 0.5}
        args = [make(*next(shapes)) if str(a.type) == "Tensor" else numbers.get(str(a.type), 2) for a in given]
        places = [place for place, a in enumerate(given) if not a.kwarg_only]
        keywords = {a.name: args[place] for place, a in enumerate(given) if a.kwarg_only}
        with contextlib.suppress(RuntimeError, TypeError):
            op(*(args[place] for place in places), **keywords)
            yield op, tuple(args[place] for place in places), keywords


_WITH_NUMBERS = (("hardtanh", [-1.0, 1.0]), ("leaky_relu", [0.5, False]), ("softplus", [1.0, 20.0]))
OTHERS: list[Case] = [
    case(aten.where.self, yes(ROWS, 1), real(5, ROWS, 3), torch.tensor(0.0)),
    case(aten.masked_fill.Scalar, real(5, ROWS, 3), yes(ROWS, 1), 2.0),
    *(case(getattr(aten, name).default, real(ROWS, 3)) for name in ("clone", "detach", "alias", "lift_fresh_copy")),
    *(
        case(getattr(aten, f"{name}_backward").default, real(ROWS, 3), real(ROWS, 3), *rest)
        for name, rest in (("hardsigmoid", []), ("hardswish", []), ("mish", []), *_WITH_NUMBERS)
    ),
    case(aten.elu_backward.default, real(ROWS, 3), 1.0, 1.0, 1.0, False, real(ROWS, 3)),
    case(aten.hardswish.default, real(ROWS, 3)),
    case(aten.ones_like.default, real(ROWS, 3)),
    case(aten.full_like.default, real(ROWS, 3), 2.0),
    case(aten._to_copy.default, real(ROWS, 3), dtype=torch.bfloat16),
    case(aten.clamp.default, real(ROWS, 3), -0.5, 0.5),
    case(aten.zeros_like.default, real(ROWS, 3), pin_memory=False),
    case(aten.mm.default, real(ROWS, 4), real(4, 5)),
    case(aten.mm.default, real(4, ROWS), real(ROWS, 5)),
    case(aten.bmm.default, real(ROWS, 4, 3), real(ROWS, 3, 5)),
    case(aten.bmm.default, real(2, 4, ROWS), real(2, ROWS, 5)),
    case(aten.mv.default, real(ROWS, 4), real(4)),
    case(aten.dot.default, real(ROWS), real(ROWS)),
    case(aten.addmm.default, real(5), real(ROWS, 4), real(4, 5)),
    case(aten.addmm.default, real(ROWS, 5), real(ROWS, 4), real(4, 5)),
    case(aten.addmm.default, real(ROWS, 1), real(ROWS, 4), real(4, 5)),
    case(aten.sum.default, real(ROWS, 4)),
    case(aten.sum.dim_IntList, real(5, ROWS, 4), [1], True),
    case(aten.sum.dim_IntList, real(5, ROWS, 4), [-1, 0]),
    *(case(getattr(aten, name).default, real(5, ROWS, 4), [0, 2]) for name in ("amax", "amin", "logsumexp")),
    *(case(getattr(aten, name).dim, real(5, ROWS, 4), [0], True) for name in ("mean",)),
    *(case(getattr(aten, name).dim, yes(5, ROWS, 4), 2, True) for name in ("any", "all")),
    *(case(getattr(aten, name).default, real(5, ROWS)) for name in ("mean", "prod", "max", "min", "argmax", "argmin")),
    *(case(getattr(aten, name).default, yes(5, ROWS)) for name in ("any", "all")),
    *(case(getattr(aten, name).default, real(5, ROWS), 0) for name in ("argmax", "argmin")),
    *(case(getattr(aten, name).dim, real(5, ROWS), 0) for name in ("max", "min")),
    case(aten.prod.dim_int, real(5, ROWS), 0),
    *(
        case(getattr(aten, name).correction, real(5, ROWS, 4), [0], correction=1, keepdim=True)
        for name in ("var", "std", "var_mean")
    ),
    *(case(getattr(aten, name).default, real(5, ROWS, 4), 2, False) for name in ("_softmax", "_log_softmax")),
    *(
        case(getattr(aten, f"{name}_backward_data").default, real(ROWS, 4), real(ROWS, 4), 1, torch.float32)
        for name in ("_softmax", "_log_softmax")
    ),
    case(aten.cumsum.default, real(ROWS, 4), 1),
    case(aten.gather.default, real(ROWS, 4), 1, whole(4, ROWS, 2)),
    case(aten.scatter.value, real(ROWS, 4), 1, whole(4, ROWS, 2), -1.0),
    case(aten.scatter.src, real(ROWS, 4), 1, whole(4, ROWS, 1), real(ROWS, 4)),
    case(aten.scatter_add.default, real(ROWS, 4), 1, whole(4, ROWS, 2), real(ROWS, 2)),
    case(aten.embedding.default, real(9, 4), whole(9, 5, ROWS)),
    case(aten.embedding_dense_backward.default, real(5, ROWS, 4), whole(9, 5, ROWS), 9, -1, False),
    *(
        case(
            aten.nll_loss_backward.default,
            *(gradient, real(ROWS, 9), whole(9, ROWS), weight, reduction, 3, torch.tensor(5.0)),
        )
        for reduction, gradient in ((0, real(ROWS)), (2, torch.tensor(0.5)))
        for weight in (None, positive(9))
    ),
    case(aten.native_layer_norm.default, real(5, ROWS, 4), [4], real(4), real(4), 1e-5),
    case(
        aten.native_layer_norm_backward.default,
        *(real(5, ROWS, 4), real(5, ROWS, 4), [4], real(5, ROWS, 1), positive(5, ROWS, 1), real(4), real(4)),
        [True, True, True],
    ),
    case(aten._fused_rms_norm.default, real(5, ROWS, 4), [4], real(4), 1e-5),
    case(
        aten._fused_rms_norm_backward.default,
        *(real(5, ROWS, 4), real(5, ROWS, 4), [4], positive(5, ROWS, 1), real(4), [True, True]),
    ),
    case(aten.t.default, real(ROWS, 4)),
    case(aten.transpose.int, real(5, ROWS, 4), -2, 0),
    case(aten.permute.default, real(5, ROWS, 4), [2, 0, 1]),
    case(aten.expand.default, real(ROWS, 1), [5, ROWS, 4]),
    case(aten.select.int, real(5, ROWS, 4), 0, 3),
    case(aten.unbind.int, real(3, ROWS, 4), 0),
    case(aten.slice.Tensor, real(5, ROWS, 4), 2, 1, 3),
    case(aten.slice.Tensor, real(5, ROWS, 4), 1, 0, 9223372036854775807),
    case(aten.split.Tensor, real(ROWS, 4), 2, 1),
    case(aten.split.Tensor, real(4 * ROWS, 3), 2 * ROWS),
    case(aten.split.Tensor, real(ROWS, 8 * ROWS), 2 * ROWS, -1),
    case(aten.split.Tensor, real(4 * ROWS, ROWS), 9),
    case(aten.split.Tensor, real(4 * ROWS, ROWS), 4),
    case(aten.split_with_sizes.default, real(ROWS, 4), [1, 3], -1),
    case(aten.slice_backward.default, real(ROWS, 2), [ROWS, 5], 1, 1, 3, 1),
    case(aten.select_backward.default, real(ROWS, 4), [3, ROWS, 4], 0, 1),
    *(case(GATHER, real(*shape), 2, "0") for shape in ((ROWS, 4), (5, 2 * ROWS))),
    case(aten.cat.default, [real(ROWS, 4), real(ROWS, 2)], 1),
    case(aten.constant_pad_nd.default, real(ROWS, 4), [1, 2], 0.5),
    case(aten.constant_pad_nd.default, real(ROWS, 4), [1, -1], 0.5),
    case(aten.index_put.default, real(5, ROWS), [yes(5, ROWS)], torch.tensor(2.0)),
    case(aten.index_put.default, real(ROWS, 5, 4), [yes(ROWS, 5)], torch.tensor(2.0)),
    case(aten.view.default, real(5, ROWS, 4), [5 * ROWS, 4]),
    case(aten.view.default, real(5 * ROWS, 4), [5, ROWS, -1]),
    case(aten._unsafe_view.default, real(ROWS * 4, 3), [ROWS, 12]),
    case(aten.reshape.default, real(ROWS, 4, 3), [ROWS, 12]),
    case(aten.unsqueeze.default, real(ROWS, 4), 1),
    case(aten.squeeze.dim, real(ROWS, 1, 4), 1),
    case(aten.squeeze.dims, real(ROWS, 1, 4, 1), [1, 3]),
    case(aten.squeeze.default, real(ROWS, 1, 4)),
]
MADE: list[Case] = [
    case(aten.full.default, [ROWS, 4], 2.0, pin_memory=False),
    case(aten.zeros.default, [5, ROWS]),
    case(aten.ones.default, [ROWS]),
    case(aten.scalar_tensor.default, 2.0),
    case(aten.new_zeros.default, real(4), [ROWS, 2]),
    case(aten.new_ones.default, real(ROWS, 4), [ROWS, 2]),
    case(aten.new_full.default, real(4), [ROWS, 2], 3.0),
]
"""Operations that read no numbers of a tensor: their rows are where those want them that read them."""
CASES = [*_pointwise(), *OTHERS]


def graph_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.Graph, list[Tensor]]:
    """The graph of one operation, which returns all of its results, and the tensors that it takes."""
    graph, mode, given = fx.Graph(), FakeTensorMode(), list[Tensor]()

    def placeholder(value: Any) -> Any:
        if isinstance(value, list):
            return [placeholder(one) for one in value]
        if not isinstance(value, Tensor):
            return value
        given.append(value)
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = mode.from_tensor(value)
        return set_data(node, Data(Input(Kind.DATA, len(given) - 1), type=TensorType.of(node.meta["val"])))

    made = graph.call_function(op, tuple(map(placeholder, args)), kwargs)
    fake: Any = fx.map_arg((made.args, made.kwargs), lambda node: node.meta["val"])
    with mode:
        made.meta["val"] = value = op(*fake[0], **fake[1])
    set_data(made, Data(Compute(), type=TensorType.of(value)))
    results = [made]
    if isinstance(value, (tuple, list)):
        results = []
        for index, one in enumerate(value):
            item = graph.call_function(operator.getitem, (made, index))
            item.meta["val"] = one
            results.append(set_data(item, Data(Item(index), type=TensorType.of(one))))
    set_data(graph.output(tuple(results)), Data(Results()))
    return graph, given


class OnCpu(fx.Interpreter):
    """Runs a graph, by its decomposition what has no kernel on CPUs."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return computed(target, args, kwargs)


def computed(target: Any, args: Any, kwargs: Any) -> Any:
    if target is aten._fused_rms_norm_backward.default:
        return inductor_decompositions()[target](*args, **kwargs)
    if target is GATHER:
        return torch.cat([args[0]] * args[1])  # from ranks that have the same
    return target(*args, **kwargs)


def run(graph: fx.Graph) -> Callable[[list[Any]], Sequence[Any]]:
    interpreter = OnCpu(fx.GraphModule({}, graph))
    return lambda box: interpreter.run(*box)


def divided(value: Tensor) -> Iterator[Divided]:
    """The ways in which ROWS rows divide a tensor."""
    for dim, size in enumerate(value.shape):
        if size % ROWS == 0:
            yield from (Divided(dim, outer) for outer in range(1, size // ROWS + 1) if size // ROWS % outer == 0)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_operation_computes_of_parts_what_it_computes_of_all_rows(number: int) -> None:
    """Wherever the table says so: joined or added up, what torch computes of four rows and of two is that of six."""
    op, args, kwargs = CASES[number]
    graph, given = graph_of(op, args, kwargs)
    wanted, found = computed(op, args, kwargs), 0
    wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
    placeholders = graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, given, strict=True):
        for placement in divided(value):
            placed = Placements(ROWS)
            try:
                placed.place(graph, {node: placement})
            except MixedRowsError:
                continue
            takes = tuple(placed.of.get(other, WHOLE) for other in placeholders)
            gives = tuple(placed.of[result] for result in graph.output_node().args[0])  # type: ignore[union-attr]
            if WHOLE in gives or not given:
                continue
            found += 1
            small = with_rows(graph, takes, ROWS, 4)
            loop = RowLoop(ROWS, 4, takes, gives)
            graphs = {rows: run(with_rows(small, takes, 4, rows)) for rows in (4, 2)}
            for result, value_of_all in zip(looped(loop, graphs.__getitem__)([*given]), wanted, strict=True):
                torch.testing.assert_close(result, value_of_all, equal_nan=True)
    assert found or op in MIXING, f"{op} divides nothing"


@pytest.mark.parametrize(
    ("op", "args"), [(aten.slice.Tensor, (0, 0, 0)), (aten.split.Tensor, (0,)), (aten.split_with_sizes.default, ([0],))]
)
def test_parts_of_nothing_have_rows(op: OpOverload, args: tuple[Any, ...]) -> None:
    graph, _ = graph_of(op, (real(0, ROWS), *args), {})
    placed = Placements(ROWS)
    placed.place(graph, dict.fromkeys(graph.find_nodes(op="placeholder"), Divided(1)))
    assert {placed.of[result] for result in graph.output_node().args[0]} == {Divided(1)}  # type: ignore[union-attr]


MIXING = {
    *(getattr(aten, name).default for name in ("mean", "prod", "max", "min", "argmax", "argmin", "any", "all")),
}
"""Operations over all elements, which add nothing up."""


def test_every_operation_of_the_table_has_a_case() -> None:
    known = {op for op, _, _ in (*CASES, *MADE)} | {aten.arange.default}
    known |= {torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default}
    assert set(BY_OPERATION) | VIEWS <= known
    assert set(POINTWISE.split()) <= {op.overloadpacket.__name__ for op in known}


def putting(numbers: Callable[[fx.Node], fx.Node] = lambda node: node, rows: int = ROWS) -> fx.Graph:
    """A graph that puts a value into the column of each row that an index says, as a loss over parts of words does."""
    graph, mode = fx.Graph(), FakeTensorMode()
    given = real(rows, 4), whole(4, ROWS), real(ROWS)
    nodes = []
    for name, value in zip("xtv", given, strict=True):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = mode.from_tensor(value)
        set_data(nodes[-1], Data(Input(Kind.DATA, len(nodes) - 1), type=TensorType.of(value)))
    count = graph.call_function(aten.arange.default, (ROWS,), {"pin_memory": False})
    put = graph.call_function(aten.index_put.default, (nodes[0], [numbers(count), nodes[1]], nodes[2]))
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        args: Any = fx.map_arg(node.args, lambda one: one.meta["val"])
        with mode:
            node.meta["val"] = node.target(*args, **node.kwargs)  # type: ignore[operator]
        set_data(node, Data(Compute(), type=TensorType.of(node.meta["val"])))
    set_data(graph.output((put,)), Data(Results()))
    return graph


def test_the_numbers_of_rows_index_some_rows_as_they_do_all() -> None:
    graph, takes = putting(), (Divided(0), Divided(0), Divided(0))
    loop, given = RowLoop(ROWS, 4, takes, (Divided(0),)), [real(ROWS, 4), whole(4, ROWS), real(ROWS)]
    parts = looped(loop, lambda rows: run(with_rows(graph, takes, ROWS, rows)))([*given])
    assert torch.equal(parts[0], given[0].index_put((torch.arange(ROWS), given[1]), given[2]))


@pytest.mark.parametrize(
    "graph",
    [
        putting(lambda node: node.graph.call_function(aten.sub.Tensor, (ROWS - 1, node))),
        putting(lambda node: node.graph.call_function(aten.add.Tensor, (node, node)), rows=2 * ROWS),
        putting(rows=2 * ROWS),
    ],
)
def test_numbers_that_are_not_those_of_rows_are_refused(graph: fx.Graph) -> None:
    (_, index, _) = graph.find_nodes(op="placeholder")
    with pytest.raises(MixedRowsError):
        Placements(ROWS).place(graph, {index: Divided(0)})


@pytest.mark.parametrize("number", range(len(MADE)))
def test_what_reads_no_tensor_has_rows_where_they_are_wanted(number: int) -> None:
    op, args, kwargs = MADE[number]
    graph, _ = graph_of(op, args, kwargs)
    (made,) = [node for node in graph.nodes if node.op == "call_function"]
    for placement in divided(made.meta["val"]):
        placed = Placements(ROWS)
        placed.put(made, placement, made)
        placed.follow(made)
        assert placed.of == {made: placement}


@pytest.mark.parametrize(
    ("op", "args", "dim"),
    [
        (aten._softmax.default, (real(ROWS, 4), 0, False), 0),
        (aten.cumsum.default, (real(ROWS, 4), 0), 0),
        (aten.mean.dim, (real(ROWS, 4), [0]), 0),
        (aten.amax.default, (real(ROWS, 4), [0]), 0),
        (aten.var.correction, (real(ROWS, 4), [0]), 0),
        (aten.gather.default, (real(ROWS, 4), 0, whole(ROWS, ROWS, 4)), 0),
        (aten.gather.default, (real(ROWS, 4), 1, whole(4, ROWS - 1, 2)), 0),
        (aten.scatter.value, (real(ROWS, 4), 0, whole(ROWS, 1, 4), 1.0), 0),
        (aten.slice.Tensor, (real(ROWS, 4), 0, 1), 0),
        (aten.slice.Tensor, (real(ROWS, 4), 0, 0, ROWS), 0),  # all of these rows, and not of more
        (aten.slice_backward.default, (real(ROWS, 4), [ROWS, 4], 0, 0, ROWS, 1), 0),
        (aten.split.Tensor, (real(ROWS, 4), 2), 0),
        (aten.cat.default, ([real(ROWS, 4), real(ROWS, 4)],), 0),
        (aten.constant_pad_nd.default, (real(ROWS, 4), [0, 0, 1, 0]), 0),
        (aten.constant_pad_nd.default, (real(ROWS, 4), [0, 0, 1, -1]), 0),
        (aten.select.int, (real(ROWS, 4), 0, 1), 0),
        (aten.flip.default, (real(ROWS, 4), [0]), 0),
        (aten.sort.default, (real(ROWS, 4), 1), 0),
        (aten.bernoulli.default, (positive(ROWS, 4),), 0),
        (aten.native_dropout.default, (real(ROWS, 4), 0.5, True), 0),
        (aten.native_batch_norm.default, (real(ROWS, 4), None, None, None, None, True, 0.1, 1e-5), 0),
        (aten.embedding_dense_backward.default, (real(ROWS, 4), whole(9, ROWS), 9, -1, True), 0),
        (aten.view.default, (real(ROWS, 4), [4, ROWS]), 0),
        (aten.view.default, (real(4, ROWS), [4 * ROWS]), -1),
    ],
)
def test_what_mixes_rows_is_refused(op: OpOverload, args: tuple[Any, ...], dim: int) -> None:
    graph, _ = graph_of(op, args, {})
    node = graph.find_nodes(op="placeholder")[0]
    placed = Placements(ROWS)
    if dim < 0:  # four groups of all rows are one dimension, so another placement than that is none
        placed.place(graph, {node: Divided(1)})
        assert placed.of[graph.output_node().args[0][0]] == Divided(0, 4)  # type: ignore[index]
        return
    with pytest.raises(MixedRowsError):
        placed.place(graph, {node: Divided(dim)})


def test_the_gradient_of_a_mean_over_rows_is_refused() -> None:
    given = (torch.tensor(0.5), real(ROWS, 4), whole(4, ROWS), None, 1, 0, torch.tensor(5.0))
    graph, _ = graph_of(aten.nll_loss_backward.default, given, {})
    with pytest.raises(MixedRowsError):
        Placements(ROWS).place(graph, {graph.find_nodes(op="placeholder")[1]: Divided(0)})


def test_a_shape_that_has_other_rows_is_refused() -> None:
    graph, _ = graph_of(aten.view.default, (real(ROWS, 4), [ROWS, 2, 2]), {})
    (view,) = [node for node in graph.nodes if node.op == "call_function"]
    assert resized(view, 0, ROWS, 4)[1] == [4, 2, 2]
    view.args = (view.args[0], [ROWS + 1, 2, 2])
    with pytest.raises(MixedRowsError, match="does not have 6 rows"):
        resized(view, 0, ROWS, 4)


def test_a_value_that_is_taken_in_two_ways_is_refused() -> None:
    graph, _ = graph_of(aten.mm.default, (real(ROWS, ROWS), real(ROWS, ROWS)), {})
    (mm,) = [node for node in graph.nodes if node.op == "call_function"]
    first = mm.args[0]
    mm.args = (first, first)
    with pytest.raises(MixedRowsError, match="takes a value twice"):
        Placements(ROWS).place(graph, {first: Divided(0)})  # type: ignore[dict-item]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_rows_are_found_again_behind_a_view(shape: list[int], data: st.DataObject) -> None:
    """A view to another shape with the elements in the same order, and back."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    full = [*shape]
    full[dim] *= 3
    joined = data.draw(st.integers(0, len(full) - 1))
    other = [*full[:joined], *([full[joined] * full[joined + 1]] if joined + 1 < len(full) else full[joined:])]
    other += full[joined + 2 :]
    there = through_view(full, Divided(dim), other, 3)
    assert there is not None
    numbers = torch.arange(torch.Size(full).numel())
    one = numbers.view(full).unflatten(dim, (3, -1)).select(dim, 1)
    two = numbers.view(other).unflatten(there.dim, (there.outer, 3, -1)).select(there.dim + 1, 1)
    assert sorted(one.flatten().tolist()) == sorted(two.flatten().tolist())


@pytest.mark.parametrize("placement", [WHOLE, PARTIAL, Divided(1), Divided(0, 4)])
def test_a_placement_is_read_as_it_is_printed(placement: Placement) -> None:
    printed = str(RowLoop(4, 2, (placement,), ()))
    said = eval(f"dict({printed})")
    assert placement_of(said["takes"][0]) == placement


LINEAR: list[tuple[str, bool]] = [
    ("mul(x, s)", True),
    ("add(mul(x, s), mul(s, 2.0))", True),
    ("where(mask, mul(x, s), zero)", True),
    ("where(mask, s, one)", False),
    ("add(mul(x, s), one)", False),
    ("add(mul(x, s), 1.0)", False),
    ("mul(s, s)", False),
    ("div(x, s)", False),
    ("exp(mul(x, s))", False),
    ("sub(mul(x, s), mul(mul(x, x), s))", True),
    ("cat([mul(x, s), zero])", True),
    ("cat([mul(x, s), one])", False),
    ("masked_fill(mul(x, s), mask, 0.0)", True),
    ("masked_fill(mul(x, s), mask, 1.0)", False),
    ("masked_fill(x, s, 0.0)", False),
    ("xlogy(s, x)", True),
    ("xlogy(x, s)", False),
    ("x", False),
]


@pytest.mark.parametrize(("text", "wanted"), LINEAR)
def test_what_is_linear_in_a_factor_is_known(text: str, wanted: bool) -> None:
    graph = fx.Graph()
    operations = {"mul": aten.mul.Tensor, "add": aten.add.Tensor, "sub": aten.sub.Tensor, "div": aten.div.Tensor}
    operations |= {"where": aten.where.self, "exp": aten.exp.default, "cat": aten.cat.default}
    operations |= {"masked_fill": aten.masked_fill.Scalar, "xlogy": aten.xlogy.Tensor}
    names: dict[str, Any] = {}
    for name in ("x", "s", "mask"):
        names[name] = set_data(graph.placeholder(name), Data(Input(Kind.DATA, 0)))
    for name, value in (("zero", 0), ("one", 1)):
        names[name] = set_data(graph.call_function(aten.full.default, ([3], value)), Data(Compute()))

    def call(op: OpOverload) -> Callable[..., fx.Node]:
        return lambda *args: set_data(graph.call_function(op, args), Data(Compute()))

    result = eval(text, {**names, **{name: call(op) for name, op in operations.items()}})
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert is_scaled(nodes, names["s"], [result]) is wanted
