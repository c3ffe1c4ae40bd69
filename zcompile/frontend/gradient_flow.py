"""Flows: the results of the forward through which each parameter gets its gradient.

If a loss does not use all results, autograd tells the backward, and a parameter reached through no used result has no
gradient: `.grad` stays None, as without zcompile. With zeros, an optimizer could change the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Input, Kind
from zcompile.ir.program import Program

Flow = frozenset[int | None]
"""Indices of results of the forward; None for an unknown result."""


class Flows:
    """The parameters with a gradient in a program, grouped by the results through which they are reached."""

    def __init__(self, traced: Program) -> None:
        """`traced`: the captured program, before reductions are inserted."""
        through = _through(traced)
        result = {name: through[gradient] for name, gradient in sorted(traced.results.gradients.items())}
        self.groups = tuple(dict.fromkeys(result.values()))
        self._group = {name: self.groups.index(flow) for name, flow in result.items()}
        self.digest = int(hashlib.sha256(str(self._group).encode()).hexdigest()[:12], 16)
        """Equal on ranks that have the same parameters in the same groups."""

    def live(self, flowing: Sequence[bool] | None) -> set[int]:
        """Return the groups that get a gradient if `flowing[i]` says whether result i has one; None for all results."""
        if flowing is None:
            return set(range(len(self.groups)))
        return {
            number
            for number, flow in enumerate(self.groups)
            if not flow or any(result is None or flowing[result] for result in flow)
        }

    def around(self, names: Collection[str]) -> set[int]:
        """Return the groups of these parameters."""
        return {self._group[name] for name in names if name in self._group}

    def unreached(self, live: Collection[int]) -> set[str]:
        """Return the parameters that are in none of these groups."""
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
