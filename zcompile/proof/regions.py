"""Regions as terms: what each of them gives, over its arguments, and the terms of its calls.

A region is evaluated once; a call has, in place of the region's arguments, the terms that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zcompile.ir.region import Region, graph_text
from zcompile.proof.operations import OperationTerms
from zcompile.proof.terms import DRAW, Terms


@dataclass(frozen=True)
class RegionTerms:
    """What a region gives.

    Attributes:
        arguments: A leaf for each of its arguments.
        draws: A leaf for each of the random draws in it.
        results: The terms of its results.
        writes: Arguments that it writes to, by number, and their terms from then on.
        opaque: The terms of operations of which it is not known all that they do.
        body: The terms that differ from call to call, in an order in which each stands behind its parts.
    """

    arguments: tuple[int, ...]
    draws: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    opaque: tuple[tuple[str, int], ...]
    """With the names of their lines."""
    body: tuple[int, ...]


@dataclass
class Regions:
    """The terms of regions and of their calls, all in one table."""

    terms: Terms
    _known: dict[int, tuple[fx.Graph, list[Any], RegionTerms]] = field(default_factory=dict)
    _calls: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def of(self, region: Region) -> RegionTerms:
        """What `region` gives: found out once for each graph, unless somebody has edited that since."""
        graph = region.graph
        lines: list[Any] = [(node.op, node.target, node.args, node.kwargs) for node in graph.nodes]
        lines += [graph_text(module) for module in region.modules.values()]
        _, before, known = self._known.get(id(graph), (None, None, None))
        if known is None or before != lines:
            known = _evaluated(region, self.terms)
            self._known[id(graph)] = graph, lines, known
        return known

    def call(self, found: RegionTerms, arguments: Sequence[int], drawn: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The terms of a call's results and of what it has written; `drawn`: how many draws there were before it."""
        key = found.results, found.writes, tuple(arguments), drawn if found.draws else 0
        if key not in self._calls:
            values = self.instances(found, arguments, drawn)
            written = tuple(values.get(term, term) for _, term in found.writes)
            self._calls[key] = tuple(values.get(term, term) for term in found.results), written
        return self._calls[key]

    def instances(self, found: RegionTerms, arguments: Sequence[int], drawn: int) -> dict[int, int]:
        """What each term of a region is in a call."""
        values = dict(zip(found.arguments, arguments, strict=True))
        for index, leaf in enumerate(found.draws):
            values[leaf] = draw(self.terms, drawn + index)
        self.terms.instances(found.body, values)
        return values


def draw(terms: Terms, number: int) -> int:
    """The random draw of this number, in the order in which a step runs."""
    return terms.make((DRAW, str(number)))


def _evaluated(region: Region, terms: Terms) -> RegionTerms:
    draws: list[int] = []

    def next_draw() -> int:
        draws.append(terms.make(("draw of a region", str(len(draws)))))
        return draws[-1]

    placeholders = region.graph.find_nodes(op="placeholder")
    leaves = [terms.make(("argument", str(number))) for number in range(len(placeholders))]
    graph = OperationTerms(terms, next_draw, region.modules, dict(zip(placeholders, leaves, strict=True)))
    graph.evaluate(node for node in region.graph.nodes if node.op not in ("placeholder", "output"))
    results = tuple(graph.argument(value) for value in region.outputs)
    writes = tuple((placeholders.index(node), term) for node, term in graph.writes if node in placeholders)
    varying = {*leaves, *draws}
    body = []
    opaque = tuple((node.name, term) for node, term in graph.opaque)
    for term in terms.below([*results, *(term for _, term in (*writes, *opaque))]):
        if term not in varying and not varying.isdisjoint(terms.keys[term][1:]):
            varying.add(term)
            body.append(term)
    return RegionTerms(tuple(leaves), tuple(draws), results, writes, opaque, tuple(body))
