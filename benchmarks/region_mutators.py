"""Mutations within regions: of the operations that are compiled, and of what calls give them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import fx

from benchmarks.mutators import Mutation, pick
from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.operation import data, has_data, set_data
from zcompile.ir.program_graph import after_items
from zcompile.ir.region import Region

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
Edit = Callable[[Random, Region, fx.Graph], bool]
"""Changes the graph of a region; False where there is nothing of the kind to change."""


def _edited(edit: Edit) -> Mutation:
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
            if edit(random, region, graph):
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


def exchange_operand(random: Random, region: Region, graph: fx.Graph) -> bool:
    """An operation takes another value of the type of the right one."""
    pairs = [(node, arg) for node in _operations(graph) for arg in node.all_input_nodes if _is_tensor(arg)]
    random.shuffle(pairs)
    for node, argument in pairs:
        if other := pick(random, _twins(graph, argument, node)):
            node.replace_input_with(argument, other)
            return True
    return False


def swap_operands(random: Random, region: Region, graph: fx.Graph) -> bool:
    """An operation takes its first two arguments in the other order."""
    pairs = [node for node in _operations(graph) if len(node.args) > 1]
    nodes = [
        node
        for node in pairs
        if all(isinstance(arg, fx.Node) for arg in node.args[:2])
        and node.args[0] is not node.args[1]
        and data(node.args[0]).type == data(node.args[1]).type  # type: ignore[arg-type]
    ]
    node = pick(random, nodes)
    if node is None:
        return False
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return True


def exchange_operation(random: Random, region: Region, graph: fx.Graph) -> bool:
    """Another operation of the family is applied."""
    found = [(node, family) for node in _operations(graph) for family in FAMILIES if node.target in family]
    node, family = pick(random, found) or (None, ())
    if node is None:
        return False
    node.target = random.choice([target for target in family if target is not node.target])
    node.kwargs = {}
    return True


def skip_operation(random: Random, region: Region, graph: fx.Graph) -> bool:
    """An operation is left out: what it takes stands for what it gives."""
    found = [
        (node, arg)
        for node in _operations(graph)
        for arg in node.all_input_nodes
        if _is_tensor(node) and _is_tensor(arg) and data(node).type == data(arg).type
    ]
    node, argument = pick(random, found) or (None, None)
    if node is None or argument is None:
        return False
    node.replace_all_uses_with(argument)
    graph.erase_node(node)
    return True


def change_constant(random: Random, region: Region, graph: fx.Graph) -> bool:
    """A number, a truth or a dtype is another one."""
    nodes = [node for node in _operations(graph) if any(map(_is_constant, _leaves((node.args, node.kwargs))))]
    node = pick(random, nodes)
    if node is None:
        return False
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
    return True


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


def exchange_parameter(random: Random, region: Region, graph: fx.Graph) -> bool:
    """The region's table is left alone; its graph takes one parameter for another of its shape."""
    places = graph.find_nodes(op="placeholder")
    pairs = [(a, b) for a in places for b in places if a is not b and _is_tensor(a) and data(a).type == data(b).type]
    one, other = pick(random, pairs) or (None, None)
    if one is None or other is None:
        return False
    users = list(one.users)
    if not users:
        return False
    for user in users if random.random() < 0.5 else [random.choice(users)]:
        user.replace_input_with(one, other)
    return True


def swap_outputs(random: Random, region: Region, graph: fx.Graph) -> bool:
    """Two of the results of a type are given in the other order, or one of them twice."""
    end = graph.output_node()
    values = list(end.args[0]) if isinstance(end.args[0], (list, tuple)) else []
    pairs = [
        (i, j)
        for i, one in enumerate(values)
        for j, other in enumerate(values)
        if i != j and isinstance(one, fx.Node) and isinstance(other, fx.Node) and data(one).type == data(other).type
    ]
    i, j = pick(random, pairs) or (0, 0)
    if i == j:
        return False
    values[i], values[j] = (values[j], values[i]) if random.random() < 0.5 else (values[j], values[j])
    end.args = (values,)
    return True


def exchange_output(random: Random, region: Region, graph: fx.Graph) -> bool:
    """A result is another value of its type."""
    end = graph.output_node()
    values = list(end.args[0]) if isinstance(end.args[0], (list, tuple)) else []
    indices = [index for index, value in enumerate(values) if isinstance(value, fx.Node)]
    random.shuffle(indices)
    for index in indices:
        if other := pick(random, _twins(graph, values[index])):
            values[index] = other
            end.args = (values,)
            return True
    return False


def exchange_draw(random: Random, region: Region, graph: fx.Graph) -> bool:
    """Random numbers are drawn in another order, or those of one draw are used twice."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and _is_draw(node)]
    pairs = [(a, b) for a in drawing for b in drawing if a is not b and a.target is b.target]
    one, other = pick(random, pairs) or (None, None)
    if one is None or other is None:
        return False
    position = {node: index for index, node in enumerate(graph.nodes)}
    first, second = sorted((one, other), key=position.__getitem__)
    if random.random() < 0.5 and max(map(position.__getitem__, second.all_input_nodes), default=0) < position[first]:
        first.prepend(second)
    else:
        _used_twice(first, second)
    return True


def _used_twice(first: fx.Node, second: fx.Node) -> None:
    """Let who reads the second draw read the first."""
    of_first = {data(item).op.index: item for item in ops.items_of(first)}  # type: ignore[attr-defined]
    for item in ops.items_of(second):
        item.replace_all_uses_with(of_first.get(data(item).op.index, item))  # type: ignore[attr-defined]
    if not of_first:
        second.replace_all_uses_with(first)


def _is_draw(node: fx.Node) -> bool:
    return node.target in _DRAWS or (bool(node.args) and node.args[0] in _DRAWS)


def draw_again(random: Random, region: Region, graph: fx.Graph) -> bool:
    """What was drawn is drawn once more, in place of being read."""
    node = pick(random, [node for node in _operations(graph) if node.target in _DRAWS])
    if node is None:
        return False
    with graph.inserting_after(node):
        again = graph.node_copy(node)
    again.name = f"{node.name}_again"
    return True


def write_in_place(random: Random, region: Region, graph: fx.Graph) -> bool:
    """An operation writes to what the region is given, or to a view of it."""
    floats = [place for place in graph.find_nodes(op="placeholder") if _is_floating(place)]
    place = pick(random, floats)
    if place is None:
        return False
    behind = random.choice([*graph.find_nodes(op="placeholder")[-1:], *_operations(graph)])
    with graph.inserting_after(after_items(behind)):
        shown = graph.call_function(_aten.detach.default, (place,)) if random.random() < 0.5 else place
    with graph.inserting_after(shown if shown is not place else after_items(behind)):
        written = graph.call_function(_aten.add_.Tensor, (shown, 1.0))
    for node in {shown, written} - {place}:
        node.meta["val"] = place.meta.get("val")
        set_data(node, replace(data(place), op=ops.Compute(), view=True))
    return True


def insert_effect(random: Random, region: Region, graph: fx.Graph) -> bool:
    """Something that nobody reads writes to a value, draws a random number, or sets the generator."""
    values = [node for node in _operations(graph) if _is_tensor(node) and _is_floating(node)]
    value = pick(random, values)
    if value is None:
        return False
    chosen: tuple[Any, tuple[Any, ...]] = random.choice(
        (
            (operator.imul, (value, 2.0)),
            (operator.setitem, (value, slice(None), 3.0)),
            ("mul_", (value, 2.0)),
            (_aten.mul_.Tensor, (value, 2.0)),
            (torch.manual_seed, (7,)),
            (torch.rand, (3,)),
            (torch.nn.init.zeros_, (value,)),
            (torch.ops.aten.native_batch_norm.default, (value, None, None, value, value, True, 1.0, 1e-5)),
        )
    )
    target, args = chosen
    with graph.inserting_after(after_items(value)):
        node = graph.call_method(target, args) if isinstance(target, str) else graph.call_function(target, args)
    set_data(node, replace(data(value), op=ops.Compute()))
    return True


def _is_floating(node: fx.Node) -> bool:
    kind = data(node).type
    return kind is not None and kind.dtype.is_floating_point


def exchange_takes(random: Random, program: Program) -> Program | None:
    """A region's table takes one parameter, or one argument, for another."""
    found = []
    for name, region in program.regions.items():
        places = region.graph.find_nodes(op="placeholder")
        kinds = [data(place).type for place in places]
        numbers = range(len(places))
        found += [(name, i, j) for i in numbers for j in numbers if i != j and kinds[i] == kinds[j] is not None]
    chosen = pick(random, found)
    if chosen is None:
        return None
    name, i, j = chosen
    region = program.regions[name]
    takes = list(region.takes)
    takes[i], takes[j] = (takes[j], takes[i]) if random.random() < 0.5 else (takes[j], takes[j])
    return replace(program, regions={**program.regions, name: replace(region, takes=tuple(takes))})


_EDITS: tuple[Edit, ...] = (
    exchange_operand,
    swap_operands,
    exchange_operation,
    skip_operation,
    change_constant,
    exchange_parameter,
    swap_outputs,
    exchange_output,
    exchange_draw,
    draw_again,
    write_in_place,
    insert_effect,
)
REGIONS: Mapping[str, Mutation] = {
    **{f"region: {edit.__name__.replace('_', ' ')}": _edited(edit) for edit in _EDITS},
    "region: exchange takes": exchange_takes,
}
"""Mutations by what they do."""
