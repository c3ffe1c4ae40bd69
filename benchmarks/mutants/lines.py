"""Mutations of the lines of a program: each makes one mistake that a pass might make, somewhere, chosen at random."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
Edit = Callable[[Random, Program], Program | None]
"""Changes a program, or gives another one; raises `NothingToChangeError`."""
T = TypeVar("T")
_STARTS = (ops.AllGather, ops.GatherOutside, ops.Averaging, ops.Fetch)
_WAITS = (ops.WaitGather, ops.WaitSecondary, ops.WaitReduce, ops.WaitFetch)
DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
_TAKEN = ["random", "program"]


class NothingToChangeError(Exception):
    """A program has nothing of the kind that a mutation changes."""


def mutations(module: str) -> dict[str, Mutation]:
    """The public functions of a module that take a generator and a program, by what they do."""
    edits = (edit for name, edit in vars(sys.modules[module]).items() if inspect.isfunction(edit) and name[0] != "_")
    own = (edit for edit in edits if edit.__module__ == module and [*inspect.signature(edit).parameters] == _TAKEN)
    return {edit.__name__.replace("_", " "): mutation_of(edit) for edit in own}


def mutation_of(edit: Edit) -> Mutation:
    """A mutation that gives the program that is edited, or None where there is nothing to change."""

    def mutation(random: Random, program: Program) -> Program | None:
        try:
            return edit(random, program) or program
        except NothingToChangeError:
            return None

    return mutation


def pick(random: Random, among: Iterable[T]) -> T:
    """One of several; there is nothing to change if there is none."""
    every = list(among)
    if not every:
        raise NothingToChangeError
    return random.choice(every)


def only_user(node: fx.Node) -> fx.Node:
    """The line that waits for what `node` starts, say."""
    if not node.users:
        raise NothingToChangeError
    return next(iter(node.users))


def tensors(program: Program) -> list[fx.Node]:
    """The values of a program that are tensors, in its order."""
    kinds = (ops.Input, ops.Call, ops.Item, ops.Copy, ops.Store, ops.WaitFetch)
    return [node for node in program.nodes(*kinds) if data(node).type is not None and not ops.items_of(node)]


def twins(program: Program, value: fx.Node, among: Iterable[fx.Node] | None = None) -> list[fx.Node]:
    """Other tensors of the type of `value`."""
    kind = data(value).type
    others = tensors(program) if among is None else among
    return [node for node in others if node is not value and data(node).type == kind]


def same_type(values: Iterable[Any]) -> list[tuple[fx.Node, fx.Node]]:
    """All pairs of two values of one type, in both orders."""
    nodes = [value for value in values if isinstance(value, fx.Node)]
    return [(a, b) for a in nodes for b in nodes if a is not b and data(a).type == data(b).type]


def before(program: Program, line: fx.Node) -> list[fx.Node]:
    """The tensors that there are when `line` runs."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    return [node for node in tensors(program) if position[node] < position[line]]


def respell(program: Program, node: fx.Node, op: Operation) -> None:
    """Let a line be of `op`; at the place of the arena that it has, or the other lines have."""
    arena = next(iter(program.nodes(ops.Arena)), None)
    program.respell(node, op, arena)


# -- lines ------------------------------------------------------------------------------------------------------------


def drop_line(random: Random, program: Program) -> None:
    """A line that gives nothing is gone."""
    program.graph.erase_node(pick(random, program.nodes(ops.Release, ops.Update, ops.GatherAhead)))


def double_line(random: Random, program: Program) -> None:
    """A line runs twice; who reads its result reads the second."""
    once = (ops.Release, ops.Update, ops.GatherAhead)
    node = pick(random, program.nodes(*once, *_STARTS, *_WAITS, ops.Copy, ops.Store, ops.Offload, ops.Accumulate))
    users = list(node.users)
    with program.graph.inserting_after(node):
        again = program.graph.node_copy(node)
    again.name = f"{node.name}_again"
    for user in users:
        user.replace_input_with(node, again)


def move_line(random: Random, program: Program) -> None:
    """A line runs earlier or later, but not before what it takes, nor behind what takes it."""
    every = [node for phase in program.phases for node in program.body(phase)]
    lines = [node for node in every if not isinstance(data(node).op, ops.Item)]
    node = pick(random, lines)
    group = [node, *ops.items_of(node)]
    position = {one: index for index, one in enumerate(program.graph.nodes)}
    first = max((position[source] for source in node.all_input_nodes), default=0)
    last = min((position[user] for one in group for user in one.users if user not in group), default=len(position))
    places = [one for one in lines if first < position[after_items(one)] and position[after_items(one)] < last - 1]
    end = after_items(pick(random, [one for one in places if one is not node and after_items(one).next is not node]))
    for one in group:
        end.append(one)
        end = one


def exchange_lines(random: Random, program: Program) -> None:
    """Two lines of a kind stand where the other one stood."""
    rare = (ops.ReduceOutside, ops.GatherOutside, ops.WaitSecondary)
    kinds = (ops.AllGather, ops.Reduce, ops.Release, ops.Update, ops.GatherAhead, *rare, *_WAITS)
    kind = pick(random, [kind for kind in dict.fromkeys(kinds) if kind not in rare or program.nodes(kind)])
    lines = program.nodes(kind)
    if len(lines) < 2:
        raise NothingToChangeError
    first, second = sorted(random.sample(range(len(lines)), 2))
    one, other = lines[first], lines[second]
    behind = other.prev
    one.prepend(other)
    if behind is not one:
        behind.append(one)


# -- arguments --------------------------------------------------------------------------------------------------------


def exchange_argument(random: Random, program: Program) -> None:
    """A region is given another value of the type of the right one."""
    call = pick(random, program.nodes(ops.Call))
    argument = pick(random, (node for node in call.all_input_nodes if node in tensors(program)))
    call.replace_input_with(argument, pick(random, twins(program, argument, before(program, call))))


def swap_arguments(random: Random, program: Program) -> None:
    """A region is given two values of a type in the other order."""
    pairs = []
    for call in program.nodes(ops.Call):
        given = [node for node in call.args if isinstance(node, fx.Node) and data(node).type is not None]
        pairs += [(call, a, b) for a, b in same_type(given)]
    call, one, other = pick(random, pairs)
    exchanged = {one: other, other: one}
    call.args = tuple(exchanged.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in call.args)


def exchange_saved(random: Random, program: Program) -> None:
    """The backward reads another of the values that the forward saves, or might have saved."""
    backward = [call for call in program.nodes(ops.Call) if data(call).phase is Phase.BACKWARD]
    forward = [node for node in tensors(program) if data(node).phase is Phase.FORWARD]
    pairs = [(call, node) for call in backward for node in call.all_input_nodes if node in forward]
    call, argument = pick(random, pairs)
    call.replace_input_with(argument, pick(random, twins(program, argument, forward)))


def exchange_full(random: Random, program: Program) -> None:
    """A region is given the parameters of another unit, which have the same shapes."""
    _another_full(random, program, of_its_unit=False)


def read_stale_copy(random: Random, program: Program) -> None:
    """A region is given what was gathered for another, and may be released by then."""
    _another_full(random, program, of_its_unit=True)


def _another_full(random: Random, program: Program, *, of_its_unit: bool) -> None:
    kinds = (ops.WaitGather, ops.Shards)
    calls = program.nodes(ops.Call)
    call, full = pick(random, [(c, n) for c in calls for n in c.all_input_nodes if isinstance(data(n).op, kinds)])
    others = [node for node in alike(program, full) if (unit_of(node) == unit_of(full)) is of_its_unit]
    call.replace_input_with(full, pick(random, others))


def unit_of(node: fx.Node) -> str:
    """The unit that a line names."""
    return str(data(node).op.unit)  # type: ignore[attr-defined]


def alike(program: Program, full: fx.Node) -> list[fx.Node]:
    """What else gives parameters of the same shapes."""

    def shapes(node: fx.Node) -> list[tuple[int, ...]]:
        return [param.shape for param in program.layout.unit(unit_of(node)).params]

    others = program.nodes(ops.WaitGather, ops.Shards)
    return [node for node in others if node is not full and shapes(node) == shapes(full)]


def exchange_unit(random: Random, program: Program) -> None:
    """A line is of another unit, of the same shapes."""
    node = pick(random, program.nodes(ops.AllGather, ops.GatherOutside, ops.GatherAhead, ops.Averaging, ops.Update))
    shards = node.args[0]
    assert isinstance(shards, fx.Node), "communication is of a unit"
    other = pick(random, (one for one in alike(program, shards) if isinstance(data(one).op, ops.Shards)))
    node.replace_input_with(shards, other)
    if random.random() < 0.5:  # what the table says of the line, too
        op, layout = data(node).op, program.layout
        names = dict(zip(layout.unit(unit_of(shards)).names, layout.unit(unit_of(other)).names, strict=True))
        changes: dict[str, Any] = {"unit": unit_of(other)}
        if isinstance(op, (ops.Averaging, ops.Update)):
            changes["params"] = tuple(names[name] for name in op.params)
        set_data(node, replace(data(node), op=replace(op, **changes)))  # type: ignore[type-var]


def exchange_region(random: Random, program: Program) -> None:
    """A call is one of another region, which takes and gives as much."""
    call = pick(random, program.nodes(ops.Call))
    op = op_of(call, ops.Call)
    mine = program.regions[op.region]
    others = [region for region in program.regions.values() if region is not mine and region.takes == mine.takes]
    name = pick(random, [region.name for region in others if len(region.outputs) == len(mine.outputs)])
    call.args = (name, *call.args[1:])
    set_data(call, replace(data(call), op=replace(op, region=name)))


def _results_of_a_type(random: Random, program: Program) -> tuple[fx.Node, fx.Node]:
    """Two results of one call."""
    pairs = [(a, b) for a in program.nodes(ops.Item) for b in ops.items_of(a.all_input_nodes[0])]
    return pick(random, [(a, b) for a, b in pairs if a is not b and data(a).type == data(b).type])


def exchange_result(random: Random, program: Program) -> None:
    """Who reads one of a call's results reads another of its type."""
    one, other = _results_of_a_type(random, program)
    pick(random, one.users).replace_input_with(one, other)


def swap_results(random: Random, program: Program) -> None:
    """Two of a call's results of a type are taken for each other."""
    one, other = _results_of_a_type(random, program)
    first, second = (op_of(node, ops.Item).index for node in (one, other))
    for node, index in ((one, second), (other, first)):
        node.args = (node.args[0], index)
        set_data(node, replace(data(node), op=ops.Item(index)))


# -- gradients --------------------------------------------------------------------------------------------------------


def _reduction(random: Random, program: Program) -> tuple[fx.Node, list[Any], fx.Node]:
    """A line that takes gradients, what it takes, and one of them."""
    node = pick(random, program.nodes(ops.Reduce, ops.Accumulate))
    given: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    return node, given, pick(random, [value for value in given if value is not None])


def exchange_gradient(random: Random, program: Program) -> None:
    """A parameter is given another value of the shape of its gradient."""
    node, given, gradient = _reduction(random, program)
    other = pick(random, twins(program, gradient, before(program, node)))
    node.args = (node.args[0], [other if value is gradient else value for value in given])


def swap_gradients(random: Random, program: Program) -> None:
    """Two parameters of a shape are given each other's gradients."""
    lines = program.nodes(ops.Reduce, ops.Accumulate)
    node, one, other = pick(random, [(n, a, b) for n in lines for a, b in same_type(n.args[1])])  # type: ignore[arg-type]
    exchanged = {one: other, other: one}
    given: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    node.args = (node.args[0], [exchanged.get(value, value) for value in given])


def drop_gradient(random: Random, program: Program) -> Program:
    """A gradient is left out, and its parameter may be said to be unused: it is never trained."""
    node, given, gradient = _reduction(random, program)
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


def drop_reduction(random: Random, program: Program) -> None:
    """The gradients of a unit are averaged, and go nowhere: micro-batches are missing from a sum."""
    wait = pick(random, program.results.reduced)
    _end_with(program, reduced=[node for node in program.results.reduced if node is not wait])


def reduce_twice(random: Random, program: Program) -> None:
    """Gradients are averaged once more, in the memory that the first reduction works on."""
    node = pick(random, program.nodes(ops.Reduce))
    wait = only_user(node)
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(node)
    again.name = f"{node.name}_again"
    waited = wait_again(program, again, wait)
    choice = random.choice(("both", "second", "updated"))
    reduced = list(program.results.reduced)
    if choice == "both" and wait in reduced:
        _end_with(program, reduced=[*reduced, waited])
        return
    for user in list(wait.users):
        user.replace_input_with(wait, waited)


def wait_again(program: Program, started: fx.Node, wait: fx.Node) -> fx.Node:
    """A wait for what `started` starts, as `wait` is one."""
    with program.graph.inserting_after(started):
        waited = program.graph.node_copy(wait, lambda _: started)
    waited.name = f"{wait.name}_again"
    return waited


def hold_back(random: Random, program: Program) -> None:
    """Gradients are held back, and not averaged: each rank trains on its own."""
    node = pick(random, program.nodes(ops.Reduce))
    wait, op = only_user(node), op_of(node, ops.Reduce)
    with program.graph.inserting_before(node):
        meta = Data(ops.Accumulate(op.unit, op.params), data(node).phase, source=op.unit)
        held = program.add(node.args, meta, f"{wait.name}_held")
    wait.replace_all_uses_with(held)
    program.graph.erase_node(wait)
    program.graph.erase_node(node)


def exchange_end(random: Random, program: Program) -> None:
    """What is handed back is in another order, or another value, or is left out."""
    (mapping,) = program.graph.output_node().args
    assert isinstance(mapping, dict), "a program ends in its results"
    key = pick(random, (key for key in ("outputs", "input_gradients", "reduced") if mapping[key]))
    values: list[Any] = list(mapping[key])
    index = random.randrange(len(values))
    how = random.choice(("another", "swapped", "left out"))
    if how == "left out":
        values[index : index + 1] = [] if key == "reduced" else [None]
    elif how == "swapped" or key == "reduced" or not isinstance(values[index], fx.Node):
        other = random.randrange(len(values))
        values[index], values[other] = values[other], values[index]
    else:
        values[index] = pick(random, twins(program, values[index]))
    _end_with(program, **{key: values})


def _end_with(program: Program, **changes: Sequence[Any]) -> None:
    end = program.graph.output_node()
    (mapping,) = end.args
    assert isinstance(mapping, dict), "a program ends in its results"
    end.args = ({**mapping, **{key: list(values) for key, values in changes.items()}},)


# -- what lines say ---------------------------------------------------------------------------------------------------


def other_value(
    random: Random, program: Program, kinds: tuple[type[Operation], ...], key: str, values: Sequence[Any]
) -> None:
    """Let a line of these kinds say something else."""
    node = pick(random, program.nodes(*kinds))
    op = data(node).op
    value = pick(random, [value for value in values if value != getattr(op, key)])
    respell(program, node, replace(op, **{key: value}))  # type: ignore[type-var]


_GATHERS = (ops.AllGather, ops.GatherOutside, ops.GatherAhead)


def gather_in_another_dtype(random: Random, program: Program) -> None:
    """Parameters are sent in another dtype."""
    other_value(random, program, _GATHERS, "dtype", DTYPES)


def reduce_in_another_dtype(random: Random, program: Program) -> None:
    """Gradients are averaged in another dtype."""
    other_value(random, program, (ops.Averaging,), "dtype", DTYPES)


def flip_keep(random: Random, program: Program) -> None:
    """A gathered copy is kept that was not to be, or the other way round."""
    other_value(random, program, _GATHERS, "keep", (True, False))


def flip_scatter(random: Random, program: Program) -> None:
    """Averages are scattered that were to be whole, or the other way round."""
    other_value(random, program, (ops.Averaging,), "scatter", (True, False))


def another_bucket(random: Random, program: Program) -> None:
    """Gradients are sent in pieces of another size."""
    other_value(random, program, (ops.Reduce,), "bucket", (None, 64, 256, 1 << 20))


def another_place(random: Random, program: Program) -> None:
    """A line has the place of another, or one beside its own; or one where there is no arena."""
    if not program.nodes(ops.Arena):
        if random.random() >= 0.03:  # rarely of most programs, where there is nothing else to try
            raise NothingToChangeError
        other_value(random, program, (ops.AllGather, ops.Reduce), "at", [(0, 256)])
        return
    lines = [node for node in program.nodes(ops.AllGather, ops.Reduce) if data(node).op.at]  # type: ignore[attr-defined]
    node, other = pick(random, lines), pick(random, lines)
    start, stop = data(other).op.at  # type: ignore[attr-defined]
    moved = random.choice((0, 0, 256, -256))
    at = (max(start + moved, 0), max(stop + moved, 0)) if node is not other else (start, start + (stop - start) // 2)
    respell(program, node, replace(data(node).op, at=at))  # type: ignore[type-var]


def drop_wait(random: Random, program: Program) -> None:
    """What was started is read before it has arrived."""
    _skip(program, pick(random, program.nodes(*_WAITS)))


def swap_waits(random: Random, program: Program) -> None:
    """Two lines wait for what the other one was to wait for."""
    pairs = [(a, b) for kind in _WAITS for a in program.nodes(kind) for b in program.nodes(kind) if a is not b]
    one, other = pick(random, pairs)
    one.args, other.args = other.args, one.args


def drop_copy(random: Random, program: Program) -> None:
    """A value is handed on in place of its copy, or of all that are made of it."""
    node = pick(random, program.nodes(ops.Copy, ops.Store))
    for other in program.nodes(ops.Copy) if random.random() < 0.7 else ():
        if other is not node and other.args == node.args:
            _skip(program, other)
    _skip(program, node)


def _skip(program: Program, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    program.graph.erase_node(node)


def gather_ahead_early(random: Random, program: Program) -> None:
    """A unit is gathered for the next step before it is updated: a copy that nobody refreshes."""
    node = pick(random, program.nodes(ops.GatherAhead))
    updates = [update for update in program.nodes(ops.Update) if unit_of(update) == unit_of(node)]
    if not updates:
        raise NothingToChangeError
    updates[0].prepend(node)


def update_early(random: Random, program: Program) -> None:
    """Parameters are stepped as soon as their gradients are there, whatever still reads them."""
    hasten(program, pick(random, program.nodes(ops.Update)))


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


def exchange_offloaded(random: Random, program: Program) -> None:
    """Another activation is brought back, or taken away."""
    node = pick(random, program.nodes(ops.Fetch, ops.Offload))
    source = node.all_input_nodes[0]
    if isinstance(data(node).op, ops.Offload):
        others = twins(program, source, before(program, node))
    else:
        same = [other for other in program.nodes(ops.Fetch) if data(other).type == data(node).type]
        others = [other.all_input_nodes[0] for other in same if other is not node]
    node.replace_input_with(source, pick(random, others))


# -- what is said beside a program ------------------------------------------------------------------------------------


def claim(random: Random, program: Program) -> Program:
    """Parameters are said to be unused, frozen, whole, or of other shapes than they are."""
    unit = pick(random, program.layout.units)
    param = pick(random, unit.params)
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
    units = [
        replace(unit, params=tuple(other if one is param and unit.name == name else one for one in unit.params))
        for unit in program.layout.units
    ]
    return replace(program, layout=program.layout.with_units(tuple(units)))


def claim_replicated(random: Random, program: Program) -> None:
    """A value is said to be the same on all tensor-parallel ranks, and each keeps a shard of it."""
    axis = program.layout.tensor
    group = next((n for n in program.nodes(ops.Group) if axis and op_of(n, ops.Group).axis == axis.name), None)
    if group is None:
        raise NothingToChangeError
    node = pick(random, [n for n in program.saved() if not isinstance(data(n).op, (ops.Offload, ops.Input))])
    set_data(node, replace(data(node), replicated="0" * 16))
    users = [user for user in node.users if data(user).phase is Phase.BACKWARD]
    token = data(next(iter(program.nodes(ops.Offload)))).type
    made = node.all_input_nodes[0] if isinstance(data(node).op, ops.Item) else node
    with program.graph.inserting_after(after_items(made)):
        away = program.add((node, group), Data(ops.Offload(), type=token), f"{node.name}_offloaded")
    first = next(one for one in program.graph.nodes if one in users)
    with program.graph.inserting_before(first):
        meta = replace(data(node), phase=data(first).phase, view=False, replicated="")
        back = program.add((away, group), replace(meta, op=ops.Fetch()), f"{node.name}_fetch")
        there = program.add((back,), replace(meta, op=ops.WaitFetch()), f"{node.name}_back")
    for user in users:
        user.replace_input_with(node, there)


def exchange_phase(random: Random, program: Program) -> None:
    """A line, or what a program is given, is said to belong to the other phase."""
    node = pick(random, [node for node in program.graph.nodes if not isinstance(data(node).op, ops.Results)])
    other = Phase.FORWARD if data(node).phase is Phase.BACKWARD else Phase.BACKWARD
    set_data(node, replace(data(node), phase=other))


def turn_axes(random: Random, program: Program) -> Program:
    """Gradients are averaged over other ranks."""
    layout = program.layout
    axis = layout.sharded
    turned = [replace(axis, size=random.choice([size for size in (1, 2, 3, 4) if size != axis.size]))]
    if (other := layout.tensor or next(iter(layout.outside), None)) is not None:
        turned.append(replace(axis, stride=other.stride, size=other.size))
    choice = random.choice(turned)
    if choice == axis:
        choice = turned[0]
    return replace(program, layout=replace(layout, axes=tuple(choice if one is axis else one for one in layout.axes)))


LINES = mutations(__name__)
