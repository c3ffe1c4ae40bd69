"""Mutations of what is sent along two axes of data parallelism: to wrong ranks, at a wrong time, of another unit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from torch import fx

from benchmarks.mutants.lines import (
    DTYPES,
    NothingToChangeError,
    alike,
    hasten,
    mutations,
    only_user,
    other_value,
    pick,
    respell,
    unit_of,
    wait_again,
)
from zcompile import Program
from zcompile.ir import ops
from zcompile.ir.layout import WIRE_DTYPES, Hybrid
from zcompile.ir.operation import Data, Phase, data, op_of
from zcompile.ir.program_graph import after_items
from zcompile.passes.common.lines import group_of

_WIRES = (None, *WIRE_DTYPES)

# -- averages ---------------------------------------------------------------------------------------------------------


def skip_replicas(random: Random, program: Program) -> None:
    """Averages over the ranks that shard are used as they are: replicas train apart."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    wait = only_user(node)
    wait.replace_all_uses_with(node.all_input_nodes[1])
    for line in (wait, node) if random.random() < 0.7 else ():
        program.graph.erase_node(line)


def average_over_another_axis(random: Random, program: Program) -> None:
    """What is to be averaged over the ranks outside is averaged over those of another axis."""
    _over_another_axis(random, program, ops.ReduceOutside)


def send_average_otherwise(random: Random, program: Program) -> None:
    """What replicas average travels in more or fewer bits than was asked for."""
    other_value(random, program, (ops.ReduceOutside,), "wire", _WIRES)


def average_outside_twice(random: Random, program: Program) -> None:
    """What has been averaged outside is so once more, and that is used, or both."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    wait = only_user(node)
    given = random.choice((wait, node.all_input_nodes[1]))
    users = list(wait.users)
    with program.graph.inserting_after(wait):
        again = program.graph.node_copy(node)
    again.name, again.args = f"{node.name}_again", (node.args[0], given, *node.args[2:])
    waited = wait_again(program, again, wait)
    for user in users:
        user.replace_input_with(wait, waited)


def average_of_another_unit(random: Random, program: Program) -> None:
    """Outside, a unit is given what has been averaged inside for another of the same shapes."""
    node = pick(random, program.nodes(ops.ReduceOutside))
    shards, mine, _ = node.all_input_nodes
    units = _twins(program, shards)
    others = [one.all_input_nodes[1] for one in program.nodes(ops.ReduceOutside) if unit_of(one) in units]
    node.replace_input_with(mine, pick(random, others))


# -- secondary shards -------------------------------------------------------------------------------------------------


def gather_over_another_axis(random: Random, program: Program) -> None:
    """Secondary shards are gathered among the ranks of another axis."""
    _over_another_axis(random, program, ops.GatherOutside)


def send_shards_otherwise(random: Random, program: Program) -> None:
    """Shards travel outside in more or fewer bits than was asked for."""
    other_value(random, program, (ops.GatherOutside,), "wire", _WIRES)


def gather_outside_again(random: Random, program: Program) -> None:
    """A gather inside is of secondary shards that are sent for it alone, a second time if it is not the only one."""
    inner = pick(random, program.nodes(ops.GatherInside))
    fresh, wait = _gathered_outside(program, inner, inner), inner.all_input_nodes[1]
    inner.args = (inner.args[0], fresh)
    if not wait.users:
        _erase_wait(program, wait)


def gather_inside_of_another_unit(random: Random, program: Program) -> None:
    """A unit is gathered from the secondary shards of another; or two units from each other's."""
    inner = pick(random, program.nodes(ops.GatherInside))
    units = _twins(program, inner.all_input_nodes[0])
    others = [one for one in program.nodes(ops.GatherInside) if unit_of(one) != unit_of(inner)]
    other = pick(random, [one for one in others if unit_of(one) in units] or others)
    mine, theirs = inner.all_input_nodes[1], other.all_input_nodes[1]
    inner.replace_input_with(mine, theirs)
    if random.random() < 0.5:
        other.replace_input_with(theirs, mine)


def skip_secondary(random: Random, program: Program) -> None:
    """A unit is gathered inside from what ranks keep of it, as if nothing divided that outside."""
    inner = pick(random, program.nodes(ops.GatherInside))
    op, wait = op_of(inner, ops.GatherInside), inner.all_input_nodes[1]
    inner.args = (inner.args[0],)
    respell(program, inner, ops.AllGather(op.unit, op.keep, op.dtype, op.at))
    if not wait.users and random.random() < 0.5:
        _erase_wait(program, wait)


def gather_inside_behind_update(random: Random, program: Program) -> None:
    """A later region reads a unit that is gathered behind its update: from stale secondary shards, or from new ones."""
    inner = {unit_of(node): node for node in program.nodes(ops.GatherInside)}
    updates = [node for node in program.nodes(ops.Update) if unit_of(node) in inner]
    update = pick(random, [node for node in updates if _twins(program, node.all_input_nodes[0])] or updates)
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


def secondary_in_another_dtype(random: Random, program: Program) -> None:
    """Secondary shards are sent in another dtype, and gathered inside in it, too."""
    wait = pick(random, program.nodes(ops.WaitSecondary))
    lines = [*wait.all_input_nodes, *wait.users]
    dtype = pick(random, [dtype for dtype in DTYPES if dtype is not data(lines[0]).op.dtype])  # type: ignore[attr-defined]
    for line in lines:
        if isinstance(op := data(line).op, (ops.GatherOutside, ops.GatherInside)):
            respell(program, line, replace(op, dtype=dtype))


def turn_hybrid(random: Random, program: Program) -> Program:
    """Ranks are said to keep other parts of parameters, or to keep secondary shards for longer or less long."""
    layout = program.layout
    if not layout.outside:
        raise NothingToChangeError
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
) -> None:
    """A line of `kind` is given the group of another axis, or names it, or both."""
    node = pick(random, program.nodes(kind))
    op, group = op_of(node, kind), node.all_input_nodes[-1]
    axis = pick(random, [axis for axis in program.layout.axes if axis.name != op.axis])
    how = random.choice(("is given", "names", "both"))
    if how != "names":
        node.replace_input_with(group, group_of(program, axis))
    if how != "is given":
        respell(program, node, replace(op, axis=axis.name))


def _gathered_outside(program: Program, inner: fx.Node, line: fx.Node) -> fx.Node:
    """What is sent outside once more, before `line`, of the unit that `inner` gathers."""
    wait = inner.all_input_nodes[1]
    (start,) = wait.all_input_nodes
    phase = data(line).phase
    with program.graph.inserting_before(line):
        op = op_of(start, ops.GatherOutside)
        started = program.add(start.args, replace(data(start), op=op, phase=phase), f"{start.name}_again")
        return program.add((started,), replace(data(wait), phase=phase), f"{wait.name}_again")


def _erase_wait(program: Program, wait: fx.Node) -> None:
    for line in (wait, *wait.all_input_nodes):
        program.graph.erase_node(line)


def _read_later(random: Random, program: Program, full: fx.Node) -> None:
    """Let a region behind `full` read it in place of another unit of the same shapes, and release it behind that."""
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    others = alike(program, full)
    calls = [call for call in program.nodes(ops.Call, phase=Phase.BACKWARD) if position[call] > position[full]]
    pairs = [(call, other) for call in calls for other in others if other in call.all_input_nodes]
    end = full
    if pairs:
        end, other = random.choice(pairs)
        end.replace_input_with(other, full)
    with program.graph.inserting_after(after_items(end)):
        unit = unit_of(full)
        program.add((full,), Data(ops.Release(unit), Phase.BACKWARD, source=unit), f"{full.name}_release")


AXES = mutations(__name__)
