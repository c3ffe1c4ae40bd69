"""The tensor-parallel group: ranks of an axis that trace and run the same program on parts of a model.

Sizes of their parts may differ, and so may predicted memory and the choices that depend on it. But they communicate
within regions, so they must reach the same regions and fetches in the same order.

Values that all of them compute alike are proven from the traced graph:

    h = aten.mm.default(x, a)              # a is divided: another h on every rank
    s = all_reduce(h, "sum", group)        # the sum over the mesh: the same on all ranks
    y = aten.add.Tensor(x, s)              # of equal values by one operation: the same again

Each such value has a digest of how it is computed, from the call's arguments (which tensor parallelism assumes to be
equal), buffers that nothing writes to, undivided parameters and collectives. A value whose digest another rank lacks,
as when each rank takes its own rows of a tensor, is not the same on all, nor is one that draws random numbers.
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
    """Checks that the ranks of a tensor-parallel group make together. Every method is collective."""

    def __init__(self, parallel: ModelParallel, device: torch.device) -> None:
        self.parallel = parallel
        self.communicator = Communicator(parallel.mesh, device)
        (self.axis,) = parallel.mesh.mesh_dim_names or ("tp",)
        self._agreement = Agreement(self.communicator)
        self._agreed: set[str] = set()

    def lockstep(self, steps: Callable[[], tuple[int, int]], settings: OptimizerSettings) -> Lockstep:
        """The group's lockstep; `steps` and `settings` as for `Lockstep`."""
        return Lockstep(self.communicator, self._agreement.number, steps, settings)

    def together(self, make: Callable[[], T]) -> T:
        """The result of `make`; an error on one rank is the same error on all."""
        return self._agreement.attempt("the program", make)[0]

    def marked(self, traced: Program) -> Program:
        """`traced` with marks on the values that all ranks are known to share."""
        mine = digests(traced, self.communicator.group.group_name, self.parallel.divided)
        shared = self._agreement.share("the traced program", json.dumps(sorted(set(mine.values()))))
        on_all = set[str].intersection(*(set(json.loads(text)) for text in shared))
        return mark_replicated(traced, {name: digest for name, digest in mine.items() if digest in on_all})

    def agree(self, program: Program) -> None:
        """Check that they communicate with each other in the same order.

        Raises:
            AgreementError: on every rank: they do not, for example because each has chosen by its own memory what to
                save.
        """
        lines = [line for phase in program.phases for node in program.body(phase) if (line := _line(program, node))]
        if (text := "\n".join(lines)) not in self._agreed:
            self._agreement.reach("the communication of tensor-parallel ranks", lines)
            self._agreed.add(text)


def _line(program: Program, node: fx.Node) -> str:
    """The communication of a line in the tensor-parallel group; empty if there is none."""
    op = data(node).op
    if isinstance(op, Call):
        region = program.regions[op_of(node, Call).region]
        sent = ", ".join(str(inner.target) for inner in region.graph.nodes if is_collective(inner))
        return f"{sent}, for {region.rows.size} of {region.rows.rows} rows" if sent and region.rows else sent
    if isinstance(op, Fetch):
        offloaded, place = node.all_input_nodes
        value = data(offloaded.all_input_nodes[0])
        return f"gather {value.type} {value.replicated}" if isinstance(data(place).op, Group) else ""
    return ""


WHOLE = ("all_reduce", "all_gather_into_tensor", "broadcast")
"""Collectives that give all ranks of their group the same result."""


def digests(program: Program, group: str, divided: Collection[str]) -> dict[str, str]:
    """By name, how values of a traced forward are computed, for those that do not depend on the rank.

    Args:
        program: As it was traced.
        group: The name of the mesh's process group.
        divided: Parameters and buffers with different parts or values on the ranks.
    """
    result: dict[str, str] = {}
    collectives = 0
    for node in program.graph.nodes:
        collectives += is_collective(node)
        origin = _origin(program, node, group, divided)
        if origin is None or data(node).phase is not Phase.FORWARD:
            continue
        if is_collective(node):
            # Its arguments differ by rank; its number identifies it on all ranks.
            constants = [argument for argument in node.args if isinstance(argument, (str, int))]
            result[node.name] = _digest(f"{origin} {constants} {collectives}")
        elif all(source.name in result for source in node.all_input_nodes):
            given = fx.map_arg((node.args, node.kwargs), lambda source: result[source.name])
            result[node.name] = _digest(f"{origin} {given}")
    return result


def mark_replicated(program: Program, known: Mapping[str, str]) -> Program:
    """`program` with marks on the values that every rank of the mesh has, by their digests."""
    program = program.copy()
    for node in program.graph.nodes:
        if node.name in known:
            set_data(node, replace(data(node), replicated=known[node.name]))
    return program


def _origin(program: Program, node: fx.Node, group: str, divided: Collection[str]) -> str | None:
    """How a value is computed, apart from its operands; None if that may depend on the rank."""
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
    """Arguments of the call count as equal, as do buffers that nothing changes; other inputs may differ."""
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
    """True for a collective of `group` that gives all its ranks the same result."""
    if not is_collective(node) or not isinstance(node.target, OpOverload):
        return False
    given = any(_group_name(argument) == group for argument in node.args)
    return given and node.target.overloadpacket.__name__ in WHOLE


def _group_name(argument: Any) -> Any:
    """The name of a collective's group; releases of torch pass the group, or its name."""
    return getattr(argument, "group_name", argument)


def _is_function(node: fx.Node) -> bool:
    """True for an operation of torch's own whose result depends only on its arguments.

    Those of other libraries may query the rank; uninitialised memory holds what was there before.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return is_pure(node) and not is_random(node) and "empty" not in node.target.overloadpacket.__name__


def _content(program: Program, node: fx.Node) -> str:
    """A digest of a constant's bytes."""
    value = program.constants.get(node.name)
    if not isinstance(value, torch.Tensor):
        return ""
    with outside_modes():
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
