"""Which regions of a program can be captured as CUDA graphs, and which values are in the memory of graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from zcompile.ir.liveness import owner_of
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Accumulate, AllGather, Call, Item, Reduce, Results, Shards
from zcompile.ir.program import Program
from zcompile.ir.region import Region
from zcompile.ir.side_effects import is_collective
from zcompile.torch_internals.dynamo import graph_obstacle


def captured_regions(program: Program) -> Mapping[str, frozenset[int] | str]:
    """Map each region's name to its placeholders with a fixed address, or to why it cannot be captured."""
    calls: dict[str, list[fx.Node]] = {name: [] for name in program.regions}
    for call in program.nodes(Call):
        calls[op_of(call, Call).region].append(call)
    return {
        name: obstacle(region) or frozenset(_fixed(program, region, calls[name]))
        for name, region in program.regions.items()
    }


def obstacle(region: Region) -> str:
    """Return why a region cannot be captured; "" if it can."""
    values = [node.meta.get("val") for node in region.graph.nodes]
    if any(value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor)):
        return "it has tensors on the host"
    if any(is_collective(node) for node in region.graph.nodes):
        return "it communicates"
    placeholders = region.graph.find_nodes(op="placeholder")
    params = {node for node, (_, item) in zip(placeholders, region.takes, strict=True) if item is not None}
    if any(isinstance(value, fx.Node) and owner_of(value) in params for value in region.outputs):
        return "a result is a view of a parameter"
    return graph_obstacle(region.graph)


def _fixed(program: Program, region: Region, calls: list[fx.Node]) -> Iterator[int]:
    """Yield the placeholders that take a parameter with a fixed address in every call."""
    for number, (argument, item) in enumerate(region.takes):
        if item is not None and all(_stays(program, call, argument, item) for call in calls):
            yield number


def _stays(program: Program, call: fx.Node, argument: int, item: int) -> bool:
    """Return True for a parameter that has the same address in each step."""
    unit = program.layout.unit(op_of(call, Call).units[argument])
    given = call.all_input_nodes[argument]
    if isinstance(data(given).op, Shards):
        return True
    gather = op_of(given.all_input_nodes[0], AllGather)
    message = next((m for m in unit.messages if item in m), ())
    sharded = bool(unit.params[item].shards)
    if gather.at is not None:
        return sharded
    # A kept full copy is gathered again into the same memory, unless it was packed with other parameters.
    return gather.keep and sharded and len(message) == 1


def is_of_graph(program: Program, value: fx.Node) -> bool:
    """Return True if a value is, or may be, in the memory of a graph."""
    call = value.all_input_nodes[0] if isinstance(data(value).op, Item) else value
    if not isinstance(data(call).op, Call):
        return False
    captured = program.regions[op_of(call, Call).region].fixed is not None
    return captured or (program.is_captured and data(value).view)


def outlives(program: Program, user: fx.Node) -> list[fx.Node]:
    """Return the arguments of a line that are still held when the step is over."""
    op = data(user).op
    if isinstance(op, Results):
        results = program.results
        return [value for value in (*results.outputs, *results.input_gradients) if isinstance(value, fx.Node)]
    assert isinstance(op, (Reduce, Accumulate)), f"{user.name} holds nothing"
    _, *gradients = user.all_input_nodes
    params = {param.name: param for param in program.layout.unit(op.unit).params}
    # An owner's average may be its own gradient, to which the gradients of the other ranks were added.
    divided = all(params[name].shards and params[name].owner is None for name in op.params)
    sharded = program.layout.sharded.size > 1 and divided
    return [] if isinstance(op, Reduce) and op.scatter and sharded else gradients
