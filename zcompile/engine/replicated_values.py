"""Replicated values: what all ranks of a model-parallel mesh compute alike, proven from the traced graph.

    h = aten.mm.default(x, a)              # a is divided: another h on every rank
    s = all_reduce(h, "sum", group)        # the sum over the mesh: the same on all ranks
    y = aten.add.Tensor(x, s)              # of equal values by one operation: the same again

Each such value has a digest of how it comes about, from the call's arguments (which tensor parallelism takes to be
equal), buffers that nothing writes to, undivided parameters and collectives. What has a digest that another rank does
not know, as where each takes its own rows of a whole, is not the same on all, nor is what draws random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import Phase, data, set_data
from zcompile.ir.ops import Input, Item, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective, is_pure, is_random, is_wait
from zcompile.torch_internals.dispatch import outside_modes
from zcompile.torch_internals.operators import OpOverload

WHOLE = ("all_reduce", "all_gather_into_tensor", "broadcast")
"""Collectives whose result all ranks of their group have."""


def digests(program: Program, group: str, divided: Collection[str]) -> dict[str, str]:
    """By name: of values of a traced program's forward how they come about, where the rank that asks plays no part.

    Args:
        program: As it was traced.
        group: The name of the mesh's process group.
        divided: Parameters and buffers of which ranks have different parts or values.
    """
    result: dict[str, str] = {}
    collectives = 0
    for node in program.graph.nodes:
        collectives += is_collective(node)
        origin = _origin(program, node, group, divided)
        if origin is None or data(node).phase is not Phase.FORWARD:
            continue
        if is_collective(node):
            # What goes into it differs; that it is the same one on all ranks, its number tells.
            constants = [argument for argument in node.args if isinstance(argument, (str, int))]
            result[node.name] = _digest(f"{origin} {constants} {collectives}")
        elif all(source.name in result for source in node.all_input_nodes):
            given = fx.map_arg((node.args, node.kwargs), lambda source: result[source.name])
            result[node.name] = _digest(f"{origin} {given}")
    return result


def mark_replicated(program: Program, known: Mapping[str, str]) -> Program:
    """`program` with the values marked, by their digests, that every rank of the mesh has."""
    program = program.copy()
    for node in program.graph.nodes:
        if node.name in known:
            set_data(node, replace(data(node), replicated=known[node.name]))
    return program


def _origin(program: Program, node: fx.Node, group: str, divided: Collection[str]) -> str | None:
    """How a value comes about but for what it is made of; None if the rank that asks may play a part."""
    meta = data(node)
    match meta.op:
        case Input() as given:
            return _of_input(program, node, given, divided)
        case Parameter(name):
            return None if name in divided else f"parameter {name}"
    if isinstance(meta.op, Item) or is_wait(node) or _is_function(node) or _gives_all(node, group):
        return f"{node.target} {meta.type}"
    return None


def _of_input(program: Program, node: fx.Node, given: Input, divided: Collection[str]) -> str | None:
    """Arguments of the call count as equal, and buffers that are and stay so; what else the code finds may differ."""
    match given.kind:
        case Kind.TANGENT:
            return None
        case Kind.CONSTANT:
            return f"constant {_content(program, node)}"
    if not given.held:
        return f"argument {node.name} {data(node).type}"
    if given.held == "?" or given.held in divided or given.mutated:
        return None
    return f"buffer {given.held}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gives_all(node: fx.Node, group: str) -> bool:
    """True for a collective of `group` whose result all of its ranks have."""
    if not is_collective(node) or not isinstance(node.target, OpOverload):
        return False
    given = any(_group_name(argument) == group for argument in node.args)
    return given and node.target.overloadpacket.__name__ in WHOLE


def _group_name(argument: Any) -> Any:
    """Releases of torch give a collective its group, or the name of it."""
    return getattr(argument, "group_name", argument)


def _is_function(node: fx.Node) -> bool:
    """True for an operation of torch's own whose result follows from its arguments.

    Other libraries' may ask for the rank; memory that is not written yet holds what was there before.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return is_pure(node) and not is_random(node) and "empty" not in node.target.overloadpacket.__name__


def _content(program: Program, node: fx.Node) -> str:
    """A digest of the bytes of a constant."""
    value = program.constants.get(node.name)
    if not isinstance(value, torch.Tensor):
        return ""
    with outside_modes():
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
