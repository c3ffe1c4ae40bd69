"""Mutations within regions: of the operations that are compiled, and of what calls give them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import fx

from benchmarks.mutants.lines import Mutation, NothingToChangeError, mutation_of, pick, same_type
from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.operation import data, has_data, op_of, set_data
from zcompile.ir.program_graph import after_items

_aten = torch.ops.aten
_UNARY = tuple(
    getattr(_aten, name).default
    for name in ("relu", "tanh", "sigmoid", "sin", "neg", "abs", "detach", "gelu", "square")
)
_BINARY = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
_BACKWARD = (_aten.tanh_backward.default, _aten.sigmoid_backward.default)
FAMILIES = (_UNARY, _BINARY, _BACKWARD)
"""Operations that take and give the same."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
_DRAWS = frozenset({_aten.native_dropout.default, _aten.rand_like.default, _aten.rand.default, _aten.bernoulli.p})
GraphEdit = Callable[[Random, fx.Graph], None]
"""Changes the graph of a region, or raises `NothingToChangeError`."""


def _edited(edit: GraphEdit) -> Mutation:
    """`edit` of a region that has something to change, in a copy of its graph."""

    def mutation(random: Random, program: Program) -> Program | None:
        names = list(program.regions)
        random.shuffle(names)
        for name in names:
            region = program.regions[name]
            graph = fx.Graph()
            outputs = graph.graph_copy(region.graph, {}, return_output_node=True)
            assert isinstance(outputs, tuple), "a region ends in its results"
            graph.output(outputs[0]).meta = dict(outputs[1].meta)
            try:
                edit(random, graph)
            except NothingToChangeError:
                continue
            return replace(program, regions={**program.regions, name: replace(region, graph=graph)})
        return None

    return mutation


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and not isinstance(data(node).op, ops.Item)]


def _is_tensor(node: fx.Node) -> bool:
    return has_data(node) and data(node).type is not None and not ops.items_of(node)


def _twins(graph: fx.Graph, value: fx.Node, before: fx.Node | None = None) -> list[fx.Node]:
    """Other values of the type of `value`, of those that there are before a line."""
    found = []
    for node in graph.nodes:
        if node is before:
            break
        if node.op != "output" and node is not value and _is_tensor(node) and data(node).type == data(value).type:
            found.append(node)
    return found


def exchange_operand(random: Random, graph: fx.Graph) -> None:
    """An operation takes another value of the type of the right one."""
    pairs = [(node, arg) for node in _operations(graph) for arg in node.all_input_nodes if _is_tensor(arg)]
    random.shuffle(pairs)
    node, argument, others = pick_first((node, arg, _twins(graph, arg, node)) for node, arg in pairs)
    node.replace_input_with(argument, random.choice(others))


def pick_first(found: Iterator[tuple[Any, Any, list[fx.Node]]]) -> tuple[Any, Any, list[fx.Node]]:
    """The first that has something to be exchanged for."""
    for one in found:
        if one[2]:
            return one
    raise NothingToChangeError


def swap_operands(random: Random, graph: fx.Graph) -> None:
    """An operation takes its first two arguments in the other order."""
    nodes = [node for node in _operations(graph) if len(node.args) > 1 and node.args[:2] in same_type(node.args[:2])]
    node = pick(random, nodes)
    node.args = (node.args[1], node.args[0], *node.args[2:])


def exchange_operation(random: Random, graph: fx.Graph) -> None:
    """Another operation of the family is applied."""
    found = [(node, family) for node in _operations(graph) for family in FAMILIES if node.target in family]
    node, family = pick(random, found)
    node.target = random.choice([target for target in family if target is not node.target])
    node.kwargs = {}


def skip_operation(random: Random, graph: fx.Graph) -> None:
    """An operation is left out: what it takes stands for what it gives."""
    pairs = [(node, arg) for node in _operations(graph) if _is_tensor(node) for arg in node.all_input_nodes]
    same = [(node, arg) for node, arg in pairs if _is_tensor(arg) and data(node).type == data(arg).type]
    node, argument = pick(random, same)
    node.replace_all_uses_with(argument)
    graph.erase_node(node)


def change_constant(random: Random, graph: fx.Graph) -> None:
    """A number, a truth or a dtype is another one."""
    nodes = [node for node in _operations(graph) if any(map(_is_constant, _leaves((node.args, node.kwargs))))]
    node = pick(random, nodes)
    count = sum(map(_is_constant, _leaves((node.args, node.kwargs))))
    chosen, seen = random.randrange(count), iter(range(count))

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(changed, value)) if type(value) in (list, tuple) else list(map(changed, value))
        if isinstance(value, Mapping):
            return {key: changed(one) for key, one in value.items()}
        return _other(random, value) if _is_constant(value) and next(seen) == chosen else value

    args, kwargs = changed(tuple(node.args)), changed(node.kwargs)
    node.args, node.kwargs = args, kwargs


def _leaves(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _leaves(one)
    elif isinstance(given, Mapping):
        yield from _leaves(list(given.values()))
    else:
        yield given


def _is_constant(value: Any) -> bool:
    return isinstance(value, (bool, int, float, torch.dtype))


def _other(random: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return random.choice([dtype for dtype in _DTYPES if dtype is not value])
    if isinstance(value, int):
        return value + random.choice((-1, 1))
    return random.choice((value * 2, value + 0.25, -value - 0.125))


def exchange_parameter(random: Random, graph: fx.Graph) -> None:
    """The region's table is left alone; its graph takes one parameter for another of its shape."""
    places = graph.find_nodes(op="placeholder")
    one, other = pick(random, same_type(filter(_is_tensor, places)))
    users = list(one.users)
    if not users:
        raise NothingToChangeError
    for user in users if random.random() < 0.5 else [random.choice(users)]:
        user.replace_input_with(one, other)


def _results(graph: fx.Graph) -> list[Any]:
    (results,) = graph.output_node().args
    return list(results) if isinstance(results, (list, tuple)) else []


def swap_outputs(random: Random, graph: fx.Graph) -> None:
    """Two of the results of a type are given in the other order, or one of them twice."""
    values = _results(graph)
    nodes = [(index, value) for index, value in enumerate(values) if isinstance(value, fx.Node)]
    pairs = [(i, j) for i, one in nodes for j, other in nodes if i != j and data(one).type == data(other).type]
    i, j = pick(random, pairs)
    values[i], values[j] = (values[j], values[i]) if random.random() < 0.5 else (values[j], values[j])
    graph.output_node().args = (values,)


def exchange_output(random: Random, graph: fx.Graph) -> None:
    """A result is another value of its type."""
    values = _results(graph)
    indices = [index for index, value in enumerate(values) if isinstance(value, fx.Node)]
    random.shuffle(indices)
    index, _, others = pick_first((index, None, _twins(graph, values[index])) for index in indices)
    values[index] = random.choice(others)
    graph.output_node().args = (values,)


def exchange_draw(random: Random, graph: fx.Graph) -> None:
    """Random numbers are drawn in another order, or those of one draw are used twice."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and _is_draw(node)]
    one, other = pick(random, [(a, b) for a in drawing for b in drawing if a is not b and a.target is b.target])
    position = {node: index for index, node in enumerate(graph.nodes)}
    first, second = sorted((one, other), key=position.__getitem__)
    if random.random() < 0.5 and max(map(position.__getitem__, second.all_input_nodes), default=0) < position[first]:
        first.prepend(second)
        return
    of_first = {op_of(item, ops.Item).index: item for item in ops.items_of(first)}
    for item in ops.items_of(second):
        item.replace_all_uses_with(of_first.get(op_of(item, ops.Item).index, item))
    if not of_first:
        second.replace_all_uses_with(first)


def _is_draw(node: fx.Node) -> bool:
    return node.target in _DRAWS or (bool(node.args) and node.args[0] in _DRAWS)


def draw_again(random: Random, graph: fx.Graph) -> None:
    """What was drawn is drawn once more, in place of being read."""
    node = pick(random, [node for node in _operations(graph) if node.target in _DRAWS])
    with graph.inserting_after(node):
        again = graph.node_copy(node)
    again.name = f"{node.name}_again"


def write_in_place(random: Random, graph: fx.Graph) -> None:
    """An operation writes to what the region is given, or to a view of it."""
    place = pick(random, [place for place in graph.find_nodes(op="placeholder") if _is_floating(place)])
    behind = random.choice([*graph.find_nodes(op="placeholder")[-1:], *_operations(graph)])
    with graph.inserting_after(after_items(behind)):
        shown = graph.call_function(_aten.detach.default, (place,)) if random.random() < 0.5 else place
    with graph.inserting_after(shown if shown is not place else after_items(behind)):
        written = graph.call_function(_aten.add_.Tensor, (shown, 1.0))
    for node in {shown, written} - {place}:
        node.meta["val"] = place.meta.get("val")
        set_data(node, replace(data(place), op=ops.Compute(), view=True))


def insert_effect(random: Random, graph: fx.Graph) -> None:
    """Something that nobody reads writes to a value, draws a random number, or sets the generator."""
    value = pick(random, [node for node in _operations(graph) if _is_tensor(node) and _is_floating(node)])
    effects: list[tuple[Any, tuple[Any, ...]]] = [
        (operator.imul, (value, 2.0)),
        (operator.setitem, (value, slice(None), 3.0)),
        ("mul_", (value, 2.0)),
        (_aten.mul_.Tensor, (value, 2.0)),
        (torch.manual_seed, (7,)),
        (torch.rand, (3,)),
        (torch.nn.init.zeros_, (value,)),
        (torch.ops.aten.native_batch_norm.default, (value, None, None, value, value, True, 1.0, 1e-5)),
    ]
    target, args = random.choice(effects)
    with graph.inserting_after(after_items(value)):
        node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
    set_data(node, replace(data(value), op=ops.Compute()))


def _is_floating(node: fx.Node) -> bool:
    kind = data(node).type
    return kind is not None and kind.dtype.is_floating_point


def exchange_takes(random: Random, program: Program) -> Program:
    """A region's table takes one parameter, or one argument, for another."""
    found = []
    for name, region in program.regions.items():
        kinds = [data(place).type for place in region.graph.find_nodes(op="placeholder")]
        numbers = range(len(kinds))
        found += [(name, i, j) for i in numbers for j in numbers if i != j and kinds[i] == kinds[j] is not None]
    name, i, j = pick(random, found)
    region = program.regions[name]
    takes = list(region.takes)
    takes[i], takes[j] = (takes[j], takes[i]) if random.random() < 0.5 else (takes[j], takes[j])
    return replace(program, regions={**program.regions, name: replace(region, takes=tuple(takes))})


_OF_GRAPHS: tuple[GraphEdit, ...] = (
    *(exchange_operand, swap_operands, exchange_operation, skip_operation, change_constant, exchange_parameter),
    *(swap_outputs, exchange_output, exchange_draw, draw_again, write_in_place, insert_effect),
)
REGIONS: Mapping[str, Mutation] = {
    **{f"region: {edit.__name__.replace('_', ' ')}": _edited(edit) for edit in _OF_GRAPHS},
    "region: exchange takes": mutation_of(exchange_takes),
}
"""Mutations by what they do."""
