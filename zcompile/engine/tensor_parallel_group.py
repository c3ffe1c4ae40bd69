"""The tensor-parallel group: the ranks of an axis which trace and run the same program on parts of a model.

Sizes of their parts may differ, and so what a rank predicts of its memory and what it chooses by that. But they
communicate within regions, so they must come by the same regions and fetches in the same order.

What all of them compute alike is proven from the traced graph:

    h = aten.mm.default(x, a)              # a is divided: another h on every rank
    s = all_reduce(h, "sum", group)        # the sum over the mesh: the same on all ranks
    y = aten.add.Tensor(x, s)              # of equal values by one operation: the same again

Each such value has a digest of how it comes about, from the call's arguments (which tensor parallelism takes to be
equal), buffers that nothing writes to, undivided parameters and collectives. What has a digest that another rank does
not know, as where each takes its own rows of a whole, is not the same on all, nor is what draws random numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from zcompile.ir.operation import Phase, data, op_of, set_data
from zcompile.ir.ops import Call, Fetch, Group, Input, Item, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective, is_pure, is_random, is_wait
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.lockstep import Lockstep
from zcompile.runtime.optimizer_settings import OptimizerSettings
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.torch_internals.dispatch import outside_modes
from zcompile.torch_internals.operators import OpOverload

T = TypeVar("T")


class TensorParallelGroup:
    """What the ranks of a tensor-parallel group find out of their programs together. Every method is collective."""

    def __init__(self, parallel: ModelParallel, device: torch.device) -> None:
        self.parallel = parallel
        self.communicator = Communicator(parallel.mesh, device)
        (self.axis,) = parallel.mesh.mesh_dim_names or ("tp",)
        self._agreement = Agreement(self.communicator)
        self._agreed: set[str] = set()

    def lockstep(self, steps: Callable[[], tuple[int, int]], settings: OptimizerSettings) -> Lockstep:
        """By what they tell each other of their runs; `steps` and `settings` as for `Lockstep`."""
        return Lockstep(self.communicator, self._agreement.number, steps, settings)

    def together(self, make: Callable[[], T]) -> T:
        """What `make` gives; an error on one of them is the same error on all."""
        return self._agreement.attempt("the program", make)[0]

    def marked(self, traced: Program) -> Program:
        """`traced` with the values marked that all of them are known to have."""
        mine = digests(traced, self.communicator.group.group_name, self.parallel.divided)
        shared = self._agreement.share("the traced program", json.dumps(sorted(set(mine.values()))))
        on_all = set[str].intersection(*(set(json.loads(text)) for text in shared))
        return mark_replicated(traced, {name: digest for name, digest in mine.items() if digest in on_all})

    def agree(self, program: Program) -> None:
        """See that they communicate with each other in the same order.

        Raises:
            AgreementError: on every rank: they do not, as where each has chosen by its own memory what to save.
        """
        lines = [line for phase in program.phases for node in program.body(phase) if (line := _line(program, node))]
        if (text := "\n".join(lines)) not in self._agreed:
            self._agreement.reach("the communication of tensor-parallel ranks", lines)
            self._agreed.add(text)


def _line(program: Program, node: fx.Node) -> str:
    """What a line of the program does in the tensor-parallel group; empty if nothing."""
    op = data(node).op
    if isinstance(op, Call):
        inside = program.regions[op_of(node, Call).region].graph.nodes
        return ", ".join(str(inner.target) for inner in inside if is_collective(inner))
    if isinstance(op, Fetch):
        offloaded, place = node.all_input_nodes
        value = data(offloaded.all_input_nodes[0])
        return f"gather {value.type} {value.replicated}" if isinstance(data(place).op, Group) else ""
    return ""


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
