"""Mutations of what is sent along two axes of data parallelism: to wrong ranks, at a wrong time, of another unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random

from torch import fx

from benchmarks.mutators import DTYPES, Mutation, alike, hasten, pick, respell, unit_of
from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.layout import Hybrid
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.program_graph import after_items
from zcompile.ir.wire import WIRE_DTYPES
from zcompile.passes.common.axis_groups import group_of

# -- averages ---------------------------------------------------------------------------------------------------------


def skip_replicas(random: Random, program: Program) -> Program | None:
    """Averages over the ranks that shard are used as they are: replicas train apart."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    wait = next(iter(node.users), None) if node else None
    if node is None or wait is None:
        return None
    wait.replace_all_uses_with(node.all_input_nodes[1])
    for line in (wait, node) if random.random() < 0.7 else ():
        program.graph.erase_node(line)
    return program


def average_over_another_axis(random: Random, program: Program) -> Program | None:
    """What is to be averaged over the ranks outside is averaged over those of another axis."""
    return _over_another_axis(random, program, ops.ReduceOutside)


def send_average_otherwise(random: Random, program: Program) -> Program | None:
    """What replicas average travels in more or fewer bits than was asked for."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    if node is None:
        return None
    op = op_of(node, ops.ReduceOutside)
    respell(program, node, replace(op, wire=pick(random, [w for w in (None, *WIRE_DTYPES) if w is not op.wire])))
    return program


def average_outside_twice(random: Random, program: Program) -> Program | None:
    """What has been averaged outside is so once more, and that is used, or both."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    wait = next(iter(node.users), None) if node else None
    if node is None or wait is None:
        return None
    given = random.choice((wait, node.all_input_nodes[1]))
    users = list(wait.users)
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(node)
    again.name, again.args = f"{node.name}_again", (node.args[0], given, *node.args[2:])
    waited = _behind(program, again, wait)
    for user in users:
        user.replace_input_with(wait, waited)
    return program


def average_of_another_unit(random: Random, program: Program) -> Program | None:
    """Outside, a unit is given what has been averaged inside for another of the same shapes."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    if node is None:
        return None
    shards, mine, _ = node.all_input_nodes
    units = _twins(program, shards)
    other = pick(random, [one.all_input_nodes[1] for one in program.nodes(ops.ReduceOutside) if unit_of(one) in units])
    if other is None:
        return None
    node.replace_input_with(mine, other)
    return program


# -- secondary shards -------------------------------------------------------------------------------------------------


def gather_over_another_axis(random: Random, program: Program) -> Program | None:
    """Secondary shards are gathered among the ranks of another axis."""
    return _over_another_axis(random, program, ops.GatherOutside)


def send_shards_otherwise(random: Random, program: Program) -> Program | None:
    """Shards travel outside in more or fewer bits than was asked for."""
    node = pick(random, program.nodes(ops.GatherOutside))
    if node is None:
        return None
    op = op_of(node, ops.GatherOutside)
    respell(program, node, replace(op, wire=pick(random, [w for w in (None, *WIRE_DTYPES) if w is not op.wire])))
    return program


def gather_outside_again(random: Random, program: Program) -> Program | None:
    """A gather inside is of secondary shards that are sent for it alone, a second time if it is not the only one."""
    inner = pick(random, program.nodes(ops.GatherInside))
    if inner is None:
        return None
    fresh = _gathered_outside(program, inner, inner)
    _given(program, inner, fresh)
    return program


def gather_inside_of_another_unit(random: Random, program: Program) -> Program | None:
    """A unit is gathered from the secondary shards of another; or two units from each other's."""
    inner = pick(random, program.nodes(ops.GatherInside))
    if inner is None:
        return None
    units = _twins(program, inner.all_input_nodes[0])
    others = [one for one in program.nodes(ops.GatherInside) if unit_of(one) != unit_of(inner)]
    other = pick(random, [one for one in others if unit_of(one) in units] or others)
    if other is None:
        return None
    mine, theirs = inner.all_input_nodes[1], other.all_input_nodes[1]
    inner.replace_input_with(mine, theirs)
    if random.random() < 0.5:
        other.replace_input_with(theirs, mine)
    return program


def skip_secondary(random: Random, program: Program) -> Program | None:
    """A unit is gathered inside from what ranks keep of it, as if nothing divided that outside."""
    inner = pick(random, program.nodes(ops.GatherInside))
    if inner is None:
        return None
    op, wait = op_of(inner, ops.GatherInside), inner.all_input_nodes[1]
    _given(program, inner, None)
    respell(program, inner, ops.AllGather(op.unit, op.keep, op.dtype, op.at))
    if not wait.users and random.random() < 0.5:
        for line in (wait, *wait.all_input_nodes):
            program.graph.erase_node(line)
    return program


def gather_inside_behind_update(random: Random, program: Program) -> Program | None:
    """A later region reads a unit that is gathered behind its update: from stale secondary shards, or from new ones."""
    inner = {unit_of(node): node for node in program.nodes(ops.GatherInside)}
    updates = [node for node in program.nodes(ops.Update) if unit_of(node) in inner]
    update = pick(random, [node for node in updates if _twins(program, node.all_input_nodes[0])] or updates)
    if update is None:
        return None
    if random.random() < 0.9:  # there are regions behind it then
        hasten(program, update)
    gather, line = inner[unit_of(update)], update.next
    op = op_of(gather, ops.GatherInside)
    secondary = gather.all_input_nodes[1] if random.random() < 0.5 else _gathered_outside(program, gather, line)
    with program.graph.inserting_before(line):
        meta = Data(replace(op, at=None), Phase.BACKWARD, source=op.unit)
        again = program.add((gather.args[0], secondary), meta, f"{gather.name}_again")
        waits = Data(ops.WaitGather(op.unit), Phase.BACKWARD, source=op.unit)
        full = program.add((again,), waits, f"{gather.name}_full_again")
    _read_later(random, program, full)
    return program


def secondary_in_another_dtype(random: Random, program: Program) -> Program | None:
    """Secondary shards are sent in another dtype, and gathered inside in it, too."""
    wait = pick(random, program.nodes(ops.WaitSecondary))
    if wait is None:
        return None
    lines = [*wait.all_input_nodes, *wait.users]
    dtype = pick(random, [dtype for dtype in DTYPES if dtype is not data(lines[0]).op.dtype])  # type: ignore[attr-defined]
    for line in lines:
        if isinstance(op := data(line).op, (ops.GatherOutside, ops.GatherInside)):
            respell(program, line, replace(op, dtype=dtype))
    return program


def turn_hybrid(random: Random, program: Program) -> Program | None:
    """Ranks are said to keep other parts of parameters, or to keep secondary shards for longer or less long."""
    layout = program.layout
    if layout.replicated is None:
        return None
    turned = replace(layout, hybrid=random.choice([one for one in Hybrid if one is not layout.hybrid]))
    for node in program.nodes(ops.GatherOutside, ops.ReduceOutside) if random.random() < 0.7 else ():
        op = data(node).op
        if isinstance(op, ops.GatherOutside):
            respell(program, node, replace(op, keep=turned.keeps_secondary))
        elif isinstance(op, ops.ReduceOutside):
            respell(program, node, replace(op, scatter=turned.has_secondary))
    return replace(program, layout=turned)


def _twins(program: Program, shards: fx.Node) -> set[str]:
    """Other units of the same shapes."""
    return {unit_of(one) for one in alike(program, shards)} - {unit_of(shards)}


def _over_another_axis(
    random: Random, program: Program, kind: type[ops.ReduceOutside] | type[ops.GatherOutside]
) -> Program | None:
    """A line of `kind` is given the group of another axis, or names it, or both."""
    node = pick(random, program.nodes(kind))
    if node is None:
        return None
    op, group = op_of(node, kind), node.all_input_nodes[-1]
    axis = pick(random, [axis for axis in program.layout.axes if axis.name != op.axis])
    assert axis is not None, "there are two"
    how = random.choice(("is given", "names", "both"))
    if how != "names":
        node.replace_input_with(group, group_of(program, axis))
    if how != "is given":
        respell(program, node, replace(op, axis=axis.name))
    return program


def _gathered_outside(program: Program, inner: fx.Node, line: fx.Node) -> fx.Node:
    """What is sent outside once more, before `line`, of the unit that `inner` gathers."""
    wait = inner.all_input_nodes[1]
    (start,) = wait.all_input_nodes
    phase = data(line).phase
    with program.graph.inserting_before(line):
        op = op_of(start, ops.GatherOutside)
        started = program.add(start.args, replace(data(start), op=op, phase=phase), f"{start.name}_again")
        return program.add((started,), replace(data(wait), phase=phase), f"{wait.name}_again")


def _given(program: Program, inner: fx.Node, secondary: fx.Node | None) -> None:
    """Let a gather inside be of `secondary`; what nobody reads then is gone."""
    wait = inner.all_input_nodes[1]
    inner.args = (inner.args[0],) if secondary is None else (inner.args[0], secondary)
    if secondary is not None and not wait.users:
        for line in (wait, *wait.all_input_nodes):
            program.graph.erase_node(line)


def _read_later(random: Random, program: Program, full: fx.Node) -> None:
    """Let a region behind `full` read it in place of another unit of the same shapes, and release it behind that."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    others = alike(program, full)
    calls = [call for call in program.nodes(ops.Call, phase=Phase.BACKWARD) if position[call] > position[full]]
    pairs = [(call, other) for call in calls for other in others if other in call.all_input_nodes]
    call, other = pick(random, pairs) or (full, None)
    if other is not None:
        call.replace_input_with(other, full)
    with program.graph.inserting_after(after_items(call)):
        unit = unit_of(full)
        program.add((full,), Data(ops.Release(unit), Phase.BACKWARD, source=unit), f"{full.name}_release")


def _behind(program: Program, started: fx.Node, wait: fx.Node) -> fx.Node:
    """A wait for what `started` starts, as `wait` is one."""
    with program.graph.inserting_after(started):
        waited = program.graph.node_copy(wait, lambda _: started)
    waited.name = f"{wait.name}_again"
    return waited


def _every() -> Iterator[Mutation]:
    yield from (skip_replicas, average_over_another_axis, send_average_otherwise)
    yield from (average_outside_twice, average_of_another_unit)
    yield from (gather_over_another_axis, send_shards_otherwise, gather_outside_again, gather_inside_of_another_unit)
    yield from (skip_secondary, gather_inside_behind_update, secondary_in_another_dtype, turn_hybrid)


AXES: Mapping[str, Mutation] = {mutation.__name__.replace("_", " "): mutation for mutation in _every()}
"""Mutations by what they do."""
