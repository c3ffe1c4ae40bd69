"""Flows: through which results of the forward a parameter gets its gradient.

Where a loss leaves results out, autograd tells the backward so, and a parameter that is reached through none of the
others has no gradient: `.grad` stays None, as without zcompile, where zeros would let an optimizer move it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program

Flow = frozenset[int | None]
"""Results of the forward by number; None stands for one that is not known."""


class Flows:
    """The parameters with a gradient in a program, in groups that are reached through the same results."""

    def __init__(self, traced: Program) -> None:
        """`traced`: the program as it was captured, before reductions are inserted."""
        through = _through(traced)
        result = {name: through[gradient] for name, gradient in sorted(traced.results.gradients.items())}
        self.groups = tuple(dict.fromkeys(result.values()))
        self._group = {name: self.groups.index(flow) for name, flow in result.items()}
        self.digest = int(hashlib.sha256(str(self._group).encode()).hexdigest()[:12], 16)
        """Equal on ranks that have the same parameters in the same groups."""

    def live(self, flowing: Sequence[bool] | None) -> set[int]:
        """The numbers of the groups that a gradient reaches, which comes to these results of the forward."""
        if flowing is None:
            return set(range(len(self.groups)))
        return {
            number
            for number, flow in enumerate(self.groups)
            if not flow or any(result is None or flowing[result] for result in flow)
        }

    def around(self, names: Collection[str]) -> set[int]:
        """The numbers of the groups that some of these parameters are in."""
        return {self._group[name] for name in names if name in self._group}

    def unreached(self, live: Collection[int]) -> set[str]:
        """The parameters that are in none of these groups."""
        return {name for name, number in self._group.items() if number not in live}


def _through(traced: Program) -> dict[fx.Node, Flow]:
    through: dict[fx.Node, Flow] = {}
    nothing: Flow = frozenset()
    for node in traced.graph.nodes:
        op = data(node).op
        if isinstance(op, Input) and op.kind is Kind.TANGENT:
            through[node] = frozenset({op.result})
        elif node.op != "output":
            through[node] = nothing.union(*(through[source] for source in node.all_input_nodes))
    return through
