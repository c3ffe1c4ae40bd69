"""Peers: the ranks of a model-parallel mesh, which know of some activations that all of them have the same."""

from __future__ import annotations

import json

import torch

from zcompile.ops import Fetch, Peers, data
from zcompile.program import Program
from zcompile.replicated import digests, mark_replicated
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator
from zcompile.runtime.placing import ModelParallel


class ModelPeers:
    """What the ranks of a model-parallel mesh find out of their programs together. Every method is collective."""

    def __init__(self, parallel: ModelParallel, device: torch.device) -> None:
        self.parallel = parallel
        self.communicator = Communicator(parallel.mesh, device)
        self._agreement = Agreement(self.communicator)
        self._agreed: set[str] = set()

    def marked(self, traced: Program) -> Program:
        """`traced` with the values marked that all of them are known to have."""
        mine = digests(traced, self.communicator.group.group_name, self.parallel.divided)
        shared = self._agreement.share("the traced program", json.dumps(sorted(set(mine.values()))))
        on_all = set[str].intersection(*(set(json.loads(text)) for text in shared))
        return mark_replicated(traced, {name: digest for name, digest in mine.items() if digest in on_all})

    def agree(self, program: Program) -> None:
        """See that they gather the same activations in the same order.

        Raises:
            AgreementError: on every rank: they do not, as where each has chosen checkpoints by its own memory.
        """
        places = (node.all_input_nodes[1] for node in program.nodes(Fetch))
        fetched = [
            n for n, place in zip(program.nodes(Fetch), places, strict=True) if isinstance(data(place).op, Peers)
        ]
        stashed = (node.all_input_nodes[0].all_input_nodes[0] for node in fetched)
        lines = [f"{data(node).type} {data(node).replicated}" for node in stashed]
        if (text := "\n".join(lines)) not in self._agreed:
            self._agreement.reach("the partitioned activations", lines)
            self._agreed.add(text)
