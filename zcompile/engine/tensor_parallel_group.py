"""The tensor-parallel group: the ranks of an axis which trace and run the same program on parts of a model.

Sizes of their parts may differ, and so what a rank predicts of its memory and what it chooses by that. But they
communicate within regions, so they must come by the same regions and fetches in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import fx

from zcompile.engine.replicated_values import digests, mark_replicated
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Call, Fetch, Group
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.lockstep import Lockstep
from zcompile.runtime.optimizer_settings import OptimizerSettings
from zcompile.runtime.tensors.placement import ModelParallel

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
