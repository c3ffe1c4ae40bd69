"""Facts of how a program is built: values, phases, units, regions."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zcompile.derived import derived_values
from zcompile.facts.fact import Fact, Violation, label
from zcompile.ops import (
    AllGather,
    Arena,
    Call,
    Compute,
    GatherAhead,
    Parameter,
    Phase,
    Reduce,
    Results,
    Shards,
    WaitGather,
    all_gather,
    all_reduce,
    data,
    gather_ahead,
    op_of,
    reduce_scatter,
)
from zcompile.program import PLACEHOLDERS, Program


def _well_formed(program: Program) -> Iterator[Violation]:
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                yield Violation(node, f"{label(node)} uses {source.name} before it is there")
        seen.add(node)
        yield from _spelled_as_meant(node)
    for value in program.results.outputs:
        if isinstance(value, fx.Node) and isinstance(data(value).op, (Shards, AllGather, WaitGather)):
            yield Violation(value, f"{value.name} is returned, but is no value of the model's")


def _spelled_as_meant(node: fx.Node) -> Iterator[Violation]:
    """The text that runs comes from a node's target and arguments; facts and digest read its data."""
    op = data(node).op
    match op:
        case Reduce():
            given = node.kwargs.get("dtype"), node.kwargs.get("bucket"), _written_place(node)
            meant = op.dtype, op.bucket, op.at
            right = node.target is (reduce_scatter if op.scatter else all_reduce) and given == meant
        case AllGather() | GatherAhead():
            asked = bool(node.kwargs.get("keep", False)), node.kwargs.get("dtype"), _written_place(node)
            target, at = (all_gather, op.at) if isinstance(op, AllGather) else (gather_ahead, None)
            right = node.target is target and asked == (op.keep, op.dtype, at)
        case Call():
            right = node.args[0] == op.region
        case _:
            right = True
    if not right:
        yield Violation(node, f"{label(node)} is written otherwise than its data says: {op}")


def _written_place(node: fx.Node) -> tuple[object, ...] | None:
    """The bytes of the arena that a line's text names."""
    match node.kwargs.get("at"):
        case (fx.Node() as arena, start, stop) if isinstance(data(arena).op, Arena):
            return start, stop
        case None:
            return None
        case other:
            return (other,)


def _phases_split(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    seen_backward = False
    for node in program.graph.nodes:
        held = data(node)
        if isinstance(held.op, PLACEHOLDERS):
            continue
        seen_backward |= held.phase is Phase.BACKWARD
        if seen_backward and held.phase is Phase.FORWARD:
            yield Violation(node, f"{node.name} belongs to the forward but stands in the backward")
        for source in node.all_input_nodes:
            crosses = data(source).phase is Phase.FORWARD and held.phase is Phase.BACKWARD
            if crosses and source in derived and not isinstance(held.op, Results):
                yield Violation(node, f"{source.name} is derived from a parameter, yet saved for {node.name}")


def _units_assigned(program: Program) -> Iterator[Violation]:
    derived = derived_values(program)
    for node in program.nodes(Compute):
        for source in node.all_input_nodes:
            op = data(source).op
            if isinstance(op, Parameter) and node not in derived and not data(node).unit:
                yield Violation(node, f"{node.name} reads {op.name} and belongs to no unit")


def _regions_outlined(program: Program) -> Iterator[Violation]:
    for node in program.nodes(Compute, Parameter):
        yield Violation(node, f"{node.name} stands outside a region")
    for node in program.nodes(Call):
        op = op_of(node, Call)
        if op.region not in program.regions:
            yield Violation(node, f"{node.name} calls {op.region}, which is not there")
        else:
            yield from _mistaken_arguments(program, node, op)


def _mistaken_arguments(program: Program, node: fx.Node, op: Call) -> Iterator[Violation]:
    """Parameters given to a region whose shape or dtype is not the one it was traced with."""
    found = program.regions[op.region]
    for inner, (argument, item) in zip(found.graph.find_nodes(op="placeholder"), found.takes, strict=True):
        wanted = data(inner).type
        if item is None or wanted is None:
            continue
        param = program.layout.unit(op.units[argument]).params[item]
        if (param.shape, param.full_dtype) != (wanted.shape, wanted.dtype):
            yield Violation(node, f"{label(node)} takes {param.name} where it was traced with {wanted}")


WELL_FORMED = Fact("values defined before use, operations written as meant", _well_formed)
PHASES_SPLIT = Fact("phases split, parameters read again and never saved", _phases_split)
UNITS_ASSIGNED = Fact("reads of parameters assigned to units", _units_assigned)
REGIONS_OUTLINED = Fact("compute outlined into regions", _regions_outlined)
