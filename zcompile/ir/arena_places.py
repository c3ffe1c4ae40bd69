"""Which lines of a program take memory from the arena, how many bytes, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from zcompile.ir.layout import Message
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import AllGather, GatherAhead, Reduce, Release
from zcompile.ir.packing import Interval, aligned
from zcompile.ir.program import Program


def placeable(program: Program) -> dict[fx.Node, Interval]:
    """Return the lines that can use the arena, each with the bytes that it needs and its lifetime.

    Memory that outlives the step is excluded: kept full copies, and units that the previous step gathered ahead.
    """
    if program.layout.sharded.size == 1:
        return {}
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    ahead = {op_of(node, GatherAhead).unit for node in program.nodes(GatherAhead)}
    result = {}
    for node in program.nodes(AllGather, Reduce):
        op, forward = data(node).op, data(node).phase is Phase.FORWARD
        if isinstance(op, AllGather) and (op.keep or (forward and op.unit in ahead)):
            continue
        if nbytes := place_bytes(program, node):
            result[node] = replace(lifetime(node, position), nbytes=nbytes)
    return result


def lifetime(node: fx.Node, position: Mapping[fx.Node, int]) -> Interval:
    """Return the lifetime of a gather, until its release, or of a reduction, until its wait; else until the end."""
    releases = [user for wait in node.users for user in wait.users if isinstance(data(user).op, Release)]
    ends = releases if isinstance(data(node).op, AllGather) else node.users
    return Interval(0, position[node], max((position[end] for end in ends), default=len(position)))


def place_bytes(program: Program, node: fx.Node) -> int:
    """Return the arena bytes of a gather or a reduction; for a reduction, only messages that are copied whole count.

    Each message has a range; a gathered message of several parameters is followed by a range for each of them, into
    which it is unpacked.
    """
    op = data(node).op
    assert isinstance(op, (AllGather, Reduce)), f"{node.name} takes no place"
    total = 0
    for message in op.messages(program.layout):
        if isinstance(op, Reduce):
            total += aligned(message.nbytes) if _is_copied(op, message) else 0
            continue
        total += aligned(message.nbytes)
        if len(message.params) > 1 and message.owner is None:  # an owner's parameters are not unpacked
            total += sum(aligned(param.padded_bytes) for param in message.params)
    return total


def _is_copied(op: Reduce, message: Message) -> bool:
    """Return True for a message that is copied as a whole before it is scattered."""
    if not op.scatter or not message.is_sharded or message.owner is not None:
        return False
    if len(message.params) > 1:
        return True
    (param,) = message.params
    pieces = op.bucket is not None and message.nbytes > op.bucket
    return not pieces and (param.padded_numel != param.numel or message.dtype is not param.full_dtype)
