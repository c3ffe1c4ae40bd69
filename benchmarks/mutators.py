"""Mutations of the lines of a program: each makes one mistake that a pass might make, somewhere, chosen at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import torch
from torch import fx

from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.layout import Param
from zcompile.ir.operation import Data, Operation, Phase, data, op_of, set_data
from zcompile.ir.program_graph import after_items

Mutation = Callable[[Random, Program], Program | None]
"""Gives a mutant of a program, whose graph it may change; None where there is nothing of the kind to change."""
T = TypeVar("T")
_STARTS = (ops.AllGather, ops.GatherOutside, ops.Averaging, ops.Fetch)
_WAITS = (ops.WaitGather, ops.WaitSecondary, ops.WaitReduce, ops.WaitFetch)
DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


def pick(random: Random, among: Iterable[T]) -> T | None:
    """One of several; None of none."""
    every = list(among)
    return random.choice(every) if every else None


def tensors(program: Program) -> list[fx.Node]:
    """The values of a program that are tensors, in its order."""
    kinds = (ops.Input, ops.Call, ops.Item, ops.Copy, ops.Store, ops.WaitFetch)
    return [node for node in program.nodes(*kinds) if data(node).type is not None and not ops.items_of(node)]


def twins(program: Program, value: fx.Node, among: Iterable[fx.Node] | None = None) -> list[fx.Node]:
    """Other tensors of the type of `value`."""
    kind = data(value).type
    return [
        node for node in (tensors(program) if among is None else among) if node is not value and data(node).type == kind
    ]


def before(program: Program, line: fx.Node) -> list[fx.Node]:
    """The tensors that there are when `line` runs."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    return [node for node in tensors(program) if position[node] < position[line]]


def respell(program: Program, node: fx.Node, op: Operation) -> None:
    """Let a line be of `op`; at the place of the arena that it has, or the other lines have."""
    arena = next(iter(program.nodes(ops.Arena)), None)
    program.respell(node, op, arena)


# -- lines ------------------------------------------------------------------------------------------------------------


def drop_line(random: Random, program: Program) -> Program | None:
    """A line that gives nothing is gone."""
    node = pick(random, program.nodes(ops.Release, ops.Update, ops.GatherAhead))
    if node is None:
        return None
    program.graph.erase_node(node)
    return program


def double_line(random: Random, program: Program) -> Program | None:
    """A line runs twice; who reads its result reads the second."""
    kinds = (
        ops.Release,
        ops.Update,
        ops.GatherAhead,
        *_STARTS,
        *_WAITS,
        ops.Copy,
        ops.Store,
        ops.Offload,
        ops.Accumulate,
    )
    node = pick(random, program.nodes(*kinds))
    if node is None:
        return None
    users = list(node.users)
    with program.graph.inserting_after(node):
        again = program.graph.node_copy(node)
    again.name = f"{node.name}_again"
    for user in users:
        user.replace_input_with(node, again)
    return program


def move_line(random: Random, program: Program) -> Program | None:
    """A line runs earlier or later, but not before what it takes, nor behind what takes it."""
    lines = [
        node for phase in program.phases for node in program.body(phase) if not isinstance(data(node).op, ops.Item)
    ]
    node = pick(random, lines)
    if node is None:
        return None
    group = [node, *ops.items_of(node)]
    position = {one: index for index, one in enumerate(program.graph.nodes)}
    first = max((position[source] for source in node.all_input_nodes), default=0)
    last = min((position[user] for one in group for user in one.users if user not in group), default=len(position))
    places = [one for one in lines if first < position[after_items(one)] and position[after_items(one)] < last - 1]
    place = pick(random, [one for one in places if one is not node and after_items(one).next is not node])
    if place is None:
        return None
    end = after_items(place)
    for one in group:
        end.append(one)
        end = one
    return program


def exchange_lines(random: Random, program: Program) -> Program | None:
    """Two lines of a kind stand where the other one stood."""
    rare = (ops.ReduceOutside, ops.GatherOutside, ops.WaitSecondary)
    kinds = (ops.AllGather, ops.Reduce, ops.Release, ops.Update, ops.GatherAhead, *rare, *_WAITS)
    kind = pick(random, [kind for kind in dict.fromkeys(kinds) if kind not in rare or program.nodes(kind)])
    assert kind is not None, "there are kinds"
    lines = program.nodes(kind)
    if len(lines) < 2:
        return None
    first, second = sorted(random.sample(range(len(lines)), 2))
    one, other = lines[first], lines[second]
    behind = other.prev
    one.prepend(other)
    if behind is not one:
        behind.append(one)
    return program


# -- arguments --------------------------------------------------------------------------------------------------------


def exchange_argument(random: Random, program: Program) -> Program | None:
    """A region is given another value of the type of the right one."""
    call = pick(random, program.nodes(ops.Call))
    argument = pick(random, (node for node in call.all_input_nodes if node in tensors(program))) if call else None
    other = pick(random, twins(program, argument, before(program, call))) if call and argument else None
    return _given(program, call, argument, other)


def swap_arguments(random: Random, program: Program) -> Program | None:
    """A region is given two values of a type in the other order."""
    pairs = []
    for call in program.nodes(ops.Call):
        given = [node for node in call.args if isinstance(node, fx.Node) and data(node).type is not None]
        pairs += [(call, a, b) for a in given for b in given if a is not b and data(a).type == data(b).type]
    found = pick(random, pairs)
    if found is None:
        return None
    call, one, other = found
    exchanged = {one: other, other: one}
    call.args = tuple(exchanged.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in call.args)
    return program


def exchange_saved(random: Random, program: Program) -> Program | None:
    """The backward reads another of the values that the forward saves, or might have saved."""
    backward = [call for call in program.nodes(ops.Call) if data(call).phase is Phase.BACKWARD]
    forward = [node for node in tensors(program) if data(node).phase is Phase.FORWARD]
    pairs = [(call, node) for call in backward for node in call.all_input_nodes if node in forward]
    call, argument = pick(random, pairs) or (None, None)
    other = pick(random, twins(program, argument, forward)) if argument else None
    return _given(program, call, argument, other)


def exchange_full(random: Random, program: Program) -> Program | None:
    """A region is given the parameters of another unit, which have the same shapes."""
    pairs = [(call, full) for call in program.nodes(ops.Call) for full in call.all_input_nodes if _is_full(full)]
    call, full = pick(random, pairs) or (None, None)
    other = pick(random, (node for node in alike(program, full) if unit_of(node) != unit_of(full))) if full else None
    return _given(program, call, full, other)


def read_stale_copy(random: Random, program: Program) -> Program | None:
    """A region is given what was gathered for another, and may be released by then."""
    pairs = [(call, full) for call in program.nodes(ops.Call) for full in call.all_input_nodes if _is_full(full)]
    call, full = pick(random, pairs) or (None, None)
    others = [node for node in alike(program, full) if unit_of(node) == unit_of(full)] if full else []
    return _given(program, call, full, pick(random, others))


def _is_full(node: fx.Node) -> bool:
    return isinstance(data(node).op, (ops.WaitGather, ops.Shards))


def unit_of(node: fx.Node) -> str:
    """The unit that a line names."""
    return str(data(node).op.unit)  # type: ignore[attr-defined]


def alike(program: Program, full: fx.Node) -> list[fx.Node]:
    """What else gives parameters of the same shapes."""
    shapes = [param.shape for param in program.layout.unit(unit_of(full)).params]
    others = program.nodes(ops.WaitGather, ops.Shards)
    return [
        node
        for node in others
        if node is not full and [param.shape for param in program.layout.unit(unit_of(node)).params] == shapes
    ]


def exchange_unit(random: Random, program: Program) -> Program | None:
    """A line is of another unit, of the same shapes."""
    lines = program.nodes(ops.AllGather, ops.GatherOutside, ops.GatherAhead, ops.Averaging, ops.Update)
    node = pick(random, lines)
    shards = node.args[0] if node else None
    if node is None or not isinstance(shards, fx.Node):
        return None
    other = pick(random, (one for one in alike(program, shards) if isinstance(data(one).op, ops.Shards)))
    if other is None:
        return None
    node.replace_input_with(shards, other)
    if random.random() < 0.5:  # what the table says of the line, too
        op = data(node).op
        names = dict(
            zip(program.layout.unit(unit_of(shards)).names, program.layout.unit(unit_of(other)).names, strict=True)
        )
        changes: dict[str, Any] = {"unit": unit_of(other)}
        if isinstance(op, (ops.Averaging, ops.Update)):
            changes["params"] = tuple(names[name] for name in op.params)
        set_data(node, replace(data(node), op=replace(op, **changes)))  # type: ignore[type-var]
    return program


def exchange_region(random: Random, program: Program) -> Program | None:
    """A call is one of another region, which takes and gives as much."""
    call = pick(random, program.nodes(ops.Call))
    if call is None:
        return None
    op = data(call).op
    assert isinstance(op, ops.Call), "it is a call"
    mine = program.regions[op.region]
    alike = [r.name for r in program.regions.values() if r is not mine and r.takes == mine.takes]
    name = pick(random, [name for name in alike if len(program.regions[name].outputs) == len(mine.outputs)])
    if name is None:
        return None
    call.args = (name, *call.args[1:])
    set_data(call, replace(data(call), op=replace(op, region=name)))
    return program


def exchange_result(random: Random, program: Program) -> Program | None:
    """Who reads one of a call's results reads another of its type."""
    pairs = [(a, b) for a in program.nodes(ops.Item) for b in ops.items_of(a.all_input_nodes[0])]
    one, other = pick(random, [(a, b) for a, b in pairs if a is not b and data(a).type == data(b).type]) or (None, None)
    user = pick(random, one.users) if one else None
    return _given(program, user, one, other)


def swap_results(random: Random, program: Program) -> Program | None:
    """Two of a call's results of a type are taken for each other."""
    pairs = [(a, b) for a in program.nodes(ops.Item) for b in ops.items_of(a.all_input_nodes[0])]
    one, other = pick(random, [(a, b) for a, b in pairs if a is not b and data(a).type == data(b).type]) or (None, None)
    if one is None or other is None:
        return None
    first, second = (data(node).op.index for node in (one, other))  # type: ignore[attr-defined]
    for node, index in ((one, second), (other, first)):
        node.args = (node.args[0], index)
        set_data(node, replace(data(node), op=ops.Item(index)))
    return program


def _given(program: Program, user: fx.Node | None, value: fx.Node | None, other: fx.Node | None) -> Program | None:
    """`program` in which `user` is given another value; None where there is none."""
    if user is None or value is None or other is None:
        return None
    user.replace_input_with(value, other)
    return program


# -- gradients --------------------------------------------------------------------------------------------------------


def _reduction(random: Random, program: Program) -> tuple[fx.Node, list[Any]] | None:
    """A line that takes gradients, and what it takes."""
    node = pick(random, program.nodes(ops.Reduce, ops.Accumulate))
    return (node, list(node.args[1])) if node else None  # type: ignore[arg-type]


def exchange_gradient(random: Random, program: Program) -> Program | None:
    """A parameter is given another value of the shape of its gradient."""
    node, given = _reduction(random, program) or (None, [])
    gradient = pick(random, [value for value in given if value is not None])
    other = pick(random, twins(program, gradient, before(program, node))) if node and gradient else None
    if node is None or other is None:
        return None
    node.args = (node.args[0], [other if value is gradient else value for value in given])
    return program


def swap_gradients(random: Random, program: Program) -> Program | None:
    """Two parameters of a shape are given each other's gradients."""
    pairs = []
    for node in program.nodes(ops.Reduce, ops.Accumulate):
        given = [value for value in node.args[1] if value is not None]  # type: ignore[union-attr]
        pairs += [(node, a, b) for a in given for b in given if a is not b and data(a).type == data(b).type]  # type: ignore[arg-type]
    found = pick(random, pairs)
    if found is None:
        return None
    node, one, other = found
    exchanged = {one: other, other: one}
    node.args = (node.args[0], [exchanged.get(value, value) for value in node.args[1]])  # type: ignore[union-attr]
    return program


def drop_gradient(random: Random, program: Program) -> Program | None:
    """A gradient is left out, and its parameter may be said to be unused: it is never trained."""
    node, given = _reduction(random, program) or (None, [])
    gradient = pick(random, [value for value in given if value is not None])
    if node is None or gradient is None:
        return None
    param = program.layout.unit(unit_of(node.args[0])).params[given.index(gradient)]  # type: ignore[arg-type]
    node.args = (node.args[0], [None if value is gradient else value for value in given])
    for line in _behind(node):
        op = data(line).op
        if isinstance(op, (ops.Averaging, ops.WaitReduce, ops.Update, ops.Accumulate)):
            left = tuple(name for name in op.params if name != param.name)
            set_data(line, replace(data(line), op=replace(op, params=left)))  # type: ignore[type-var]
    return replace(program, unused=program.unused | {param.name}) if random.random() < 0.8 else program


def _behind(node: fx.Node) -> list[fx.Node]:
    """A reduction, and all lines through which its averages go."""
    lines = [node]
    for line in lines:
        lines += [user for user in line.users if not isinstance(data(user).op, ops.Results) and user not in lines]
    return lines


def drop_reduction(random: Random, program: Program) -> Program | None:
    """The gradients of a unit are averaged, and go nowhere: micro-batches are missing from a sum."""
    wait = pick(random, program.results.reduced)
    if wait is None:
        return None
    return _handed_back(program, [node for node in program.results.reduced if node is not wait])


def reduce_twice(random: Random, program: Program) -> Program | None:
    """Gradients are averaged once more, in the memory that the first reduction works on."""
    node = pick(random, program.nodes(ops.Reduce))
    wait = next(iter(node.users), None) if node else None
    if node is None or wait is None:
        return None
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(node)
    with program.graph.inserting_after(again):
        waited = program.graph.node_copy(wait, lambda _: again)
    again.name, waited.name = f"{node.name}_again", f"{wait.name}_again"
    choice = random.choice(("both", "second", "updated"))
    reduced = list(program.results.reduced)
    if choice == "both" and wait in reduced:
        return _handed_back(program, [*reduced, waited])
    for user in list(wait.users):
        user.replace_input_with(wait, waited)
    return program


def hold_back(random: Random, program: Program) -> Program | None:
    """Gradients are held back, and not averaged: each rank trains on its own."""
    node = pick(random, program.nodes(ops.Reduce))
    wait = next(iter(node.users), None) if node else None
    if node is None or wait is None:
        return None
    op = data(node).op
    assert isinstance(op, ops.Reduce), "it is a reduction"
    with program.graph.inserting_before(node):
        held = program.add(
            node.args, Data(ops.Accumulate(op.unit, op.params), data(node).phase, source=op.unit), f"{wait.name}_held"
        )
    wait.replace_all_uses_with(held)
    program.graph.erase_node(wait)
    program.graph.erase_node(node)
    return program


def exchange_end(random: Random, program: Program) -> Program | None:
    """What is handed back is in another order, or another value, or is left out."""
    (mapping,) = program.graph.output_node().args
    assert isinstance(mapping, dict), "a program ends in its results"
    key = pick(random, (key for key in ("outputs", "input_gradients", "reduced") if mapping[key]))
    if key is None:
        return None
    values: list[Any] = list(mapping[key])
    index = random.randrange(len(values))
    how = random.choice(("another", "swapped", "left out"))
    if how == "left out":
        values[index : index + 1] = [] if key == "reduced" else [None]
    elif how == "swapped" or key == "reduced" or not isinstance(values[index], fx.Node):
        other = random.randrange(len(values))
        values[index], values[other] = values[other], values[index]
    else:
        values[index] = pick(random, twins(program, values[index])) or values[index]
    _ends(program, {**mapping, key: values})
    return program


def _handed_back(program: Program, reduced: Sequence[fx.Node]) -> Program:
    (mapping,) = program.graph.output_node().args
    assert isinstance(mapping, dict), "a program ends in its results"
    _ends(program, {**mapping, "reduced": list(reduced)})
    return program


def _ends(program: Program, mapping: dict[str, Any]) -> None:
    program.graph.output_node().args = (mapping,)


# -- what lines say ---------------------------------------------------------------------------------------------------


def _other(
    random: Random, program: Program, kinds: tuple[type[Operation], ...], key: str, values: Sequence[Any]
) -> Program | None:
    """A line of these kinds that says something else."""
    node = pick(random, program.nodes(*kinds))
    if node is None:
        return None
    op = data(node).op
    value = pick(random, [value for value in values if value != getattr(op, key)])
    respell(program, node, replace(op, **{key: value}))  # type: ignore[type-var]
    return program


def gather_in_another_dtype(random: Random, program: Program) -> Program | None:
    """Parameters are sent in another dtype."""
    return _other(random, program, (ops.AllGather, ops.GatherOutside, ops.GatherAhead), "dtype", DTYPES)


def reduce_in_another_dtype(random: Random, program: Program) -> Program | None:
    """Gradients are averaged in another dtype."""
    return _other(random, program, (ops.Averaging,), "dtype", DTYPES)


def flip_keep(random: Random, program: Program) -> Program | None:
    """A gathered copy is kept that was not to be, or the other way round."""
    return _other(random, program, (ops.AllGather, ops.GatherOutside, ops.GatherAhead), "keep", (True, False))


def flip_scatter(random: Random, program: Program) -> Program | None:
    """Averages are scattered that were to be whole, or the other way round."""
    return _other(random, program, (ops.Averaging,), "scatter", (True, False))


def another_bucket(random: Random, program: Program) -> Program | None:
    """Gradients are sent in pieces of another size."""
    return _other(random, program, (ops.Reduce,), "bucket", (None, 64, 256, 1 << 20))


def another_place(random: Random, program: Program) -> Program | None:
    """A line has the place of another, or one beside its own; or one where there is no arena."""
    if not program.nodes(ops.Arena):
        rarely = random.random() < 0.03  # of most programs, and there is nothing else to try
        return _other(random, program, (ops.AllGather, ops.Reduce), "at", [(0, 256)]) if rarely else None
    lines = [node for node in program.nodes(ops.AllGather, ops.Reduce) if data(node).op.at]  # type: ignore[attr-defined]
    node, other = pick(random, lines), pick(random, lines)
    if node is None or other is None:
        return None
    start, stop = data(other).op.at  # type: ignore[attr-defined]
    moved = random.choice((0, 0, 256, -256))
    at = (max(start + moved, 0), max(stop + moved, 0)) if node is not other else (start, start + (stop - start) // 2)
    respell(program, node, replace(data(node).op, at=at))  # type: ignore[type-var]
    return program


def drop_wait(random: Random, program: Program) -> Program | None:
    """What was started is read before it has arrived."""
    return _skipped(program, pick(random, program.nodes(*_WAITS)))


def swap_waits(random: Random, program: Program) -> Program | None:
    """Two lines wait for what the other one was to wait for."""
    pairs = [(a, b) for kind in _WAITS for a in program.nodes(kind) for b in program.nodes(kind) if a is not b]
    one, other = pick(random, pairs) or (None, None)
    if one is None or other is None:
        return None
    one.args, other.args = other.args, one.args
    return program


def drop_copy(random: Random, program: Program) -> Program | None:
    """A value is handed on in place of its copy, or of all that are made of it."""
    node = pick(random, program.nodes(ops.Copy, ops.Store))
    for other in program.nodes(ops.Copy) if node and random.random() < 0.7 else ():
        if other is not node and other.args == node.args:  # type: ignore[union-attr]
            _skipped(program, other)
    return _skipped(program, node)


def _skipped(program: Program, node: fx.Node | None) -> Program | None:
    if node is None:
        return None
    node.replace_all_uses_with(node.all_input_nodes[0])
    program.graph.erase_node(node)
    return program


def gather_ahead_early(random: Random, program: Program) -> Program | None:
    """A unit is gathered for the next step before it is updated: a copy that nobody refreshes."""
    node = pick(random, program.nodes(ops.GatherAhead))
    updates = [update for update in program.nodes(ops.Update) if node and unit_of(update) == unit_of(node)]
    if node is None or not updates:
        return None
    updates[0].prepend(node)
    return program


def update_early(random: Random, program: Program) -> Program | None:
    """Parameters are stepped as soon as their gradients are there, whatever still reads them."""
    update = pick(random, program.nodes(ops.Update))
    if update is None:
        return None
    hasten(program, update)
    return program


def hasten(program: Program, update: fx.Node) -> None:
    """Let an update, and all that averages its gradients, stand behind the line that makes the last of them."""
    lines = [update, update.all_input_nodes[1]]
    while not isinstance(data(lines[-1]).op, ops.Reduce):
        waits = isinstance(data(lines[-1]).op, ops.WaitReduce)
        lines.append(lines[-1].all_input_nodes[0 if waits else 1])
    made = max(lines[-1].all_input_nodes, key=list(program.graph.nodes).index)
    end = after_items(made.all_input_nodes[0] if isinstance(data(made).op, ops.Item) else made)
    for line in reversed(lines):
        end.append(line)
        end = line


def exchange_offloaded(random: Random, program: Program) -> Program | None:
    """Another activation is brought back, or taken away."""
    node = pick(random, program.nodes(ops.Fetch, ops.Offload))
    if node is None:
        return None
    source = node.all_input_nodes[0]
    if isinstance(data(node).op, ops.Offload):
        return _given(program, node, source, pick(random, twins(program, source, before(program, node))))
    same = [other for other in program.nodes(ops.Fetch) if data(other).type == data(node).type]
    return _given(program, node, source, pick(random, [o.all_input_nodes[0] for o in same if o is not node]))


# -- what is said beside a program ------------------------------------------------------------------------------------


def claim(random: Random, program: Program) -> Program | None:
    """Parameters are said to be unused, frozen, whole, or of other shapes than they are."""
    unit = pick(random, program.layout.units)
    param = pick(random, unit.params) if unit else None
    if unit is None or param is None:
        return None
    how = random.choice(("unused", "frozen", "whole", "computed", "reduced", "renamed"))
    if how == "unused":
        return replace(program, unused=program.unused ^ {param.name})
    changes: Mapping[str, dict[str, Any]] = {
        "frozen": {"trainable": not param.trainable},
        "whole": {"shards": 0 if param.shards else program.layout.sharded.size},
        "computed": {"compute_dtype": torch.float64},
        "reduced": {"reduction_dtype": torch.bfloat16 if param.reduction_dtype is None else None},
        "renamed": {"name": random.choice([one.name for one in unit.params])},
    }
    return _with_param(program, unit.name, param, replace(param, **changes[how]))


def _with_param(program: Program, name: str, param: Param, other: Param) -> Program:
    layout = program.layout
    units = tuple(
        replace(unit, params=tuple(other if one is param else one for one in unit.params))
        if unit.name == name
        else unit
        for unit in layout.units
    )
    return replace(program, layout=layout.with_units(units))


def claim_replicated(random: Random, program: Program) -> Program | None:
    """A value is said to be the same on all tensor-parallel ranks, and each keeps a shard of it."""
    axis = program.layout.tensor
    groups = [node for node in program.nodes(ops.Group) if axis and op_of(node, ops.Group).axis == axis.name]
    group = next(iter(groups), None)
    saved = [node for node in program.saved() if not isinstance(data(node).op, (ops.Offload, ops.Input))]
    node = pick(random, saved) if group else None
    if group is None or node is None:
        return None
    set_data(node, replace(data(node), replicated="0" * 16))
    users = [user for user in node.users if data(user).phase is Phase.BACKWARD]
    token = data(next(iter(program.nodes(ops.Offload)))).type
    with program.graph.inserting_after(
        after_items(node.all_input_nodes[0] if isinstance(data(node).op, ops.Item) else node)
    ):
        away = program.add((node, group), Data(ops.Offload(), type=token), f"{node.name}_offloaded")
    first = next(one for one in program.graph.nodes if one in users)
    with program.graph.inserting_before(first):
        meta = replace(data(node), phase=data(first).phase, view=False, replicated="")
        back = program.add((away, group), replace(meta, op=ops.Fetch()), f"{node.name}_fetch")
        there = program.add((back,), replace(meta, op=ops.WaitFetch()), f"{node.name}_back")
    for user in users:
        user.replace_input_with(node, there)
    return program


def exchange_phase(random: Random, program: Program) -> Program | None:
    """A line, or what a program is given, is said to belong to the other phase."""
    node = pick(random, [node for node in program.graph.nodes if not isinstance(data(node).op, ops.Results)])
    if node is None:
        return None
    other = Phase.FORWARD if data(node).phase is Phase.BACKWARD else Phase.BACKWARD
    set_data(node, replace(data(node), phase=other))
    return program


def turn_axes(random: Random, program: Program) -> Program | None:
    """Gradients are averaged over other ranks."""
    layout = program.layout
    axis = layout.sharded
    sizes = [size for size in (1, 2, 3, 4) if size != axis.size]
    turned = [replace(axis, size=random.choice(sizes))]
    if (other := layout.tensor or layout.replicated) is not None:
        turned.append(replace(axis, stride=other.stride, size=other.size))
    choice = random.choice(turned)
    if choice == axis:
        choice = turned[0]
    return replace(program, layout=replace(layout, axes=tuple(choice if one is axis else one for one in layout.axes)))


def _every() -> Iterator[Mutation]:
    yield from (drop_line, double_line, move_line, exchange_lines)
    yield from (exchange_argument, swap_arguments, exchange_saved, exchange_full, read_stale_copy, exchange_unit)
    yield from (exchange_region, exchange_result, swap_results)
    yield from (exchange_gradient, swap_gradients, drop_gradient, drop_reduction, reduce_twice, hold_back, exchange_end)
    yield from (
        gather_in_another_dtype,
        reduce_in_another_dtype,
        flip_keep,
        flip_scatter,
        another_bucket,
        another_place,
    )
    yield from (drop_wait, swap_waits, drop_copy, gather_ahead_early, update_early, exchange_offloaded)
    yield from (claim, claim_replicated, exchange_phase, turn_axes)


LINES: Mapping[str, Mutation] = {mutation.__name__.replace("_", " "): mutation for mutation in _every()}
"""Mutations by what they do."""
