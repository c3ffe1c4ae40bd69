"""ATen operations as terms: evaluates a graph line by line, traced or of a region.

Operations that copy a value or detach it from autograd do not change its term. A random operation has its draw as an
extra argument: draws are numbered in execution order, and an operation that is replayed under a saved generator state
has the same draw.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.operators import is_known
from zcompile.ir.ops import Chunked, chunked
from zcompile.ir.placement import WHOLE, RowLoop
from zcompile.ir.region import Region, graph_text
from zcompile.ir.row_axes import MixedRowsError
from zcompile.ir.rows import Placements, is_scaled, with_rows
from zcompile.ir.shared_memory import root_of
from zcompile.ir.side_effects import draws, is_opaque, is_random
from zcompile.proof.divided import IN_FLIGHT, HowDivided, NotAlikeError, divided_result, how_divided
from zcompile.proof.terms import DRAW, DRAWN_UNDER, FACTOR, ITEM, LIST, PAIR, PER, STATE, Terms
from zcompile.torch_internals.operators import (
    HigherOrderOperator,
    OpOverload,
    replayed_random,
    saved_random,
    writes_arguments,
    written_arguments,
)

_aten = torch.ops.aten
_SAME = frozenset({_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default})
"""Operations whose result equals their argument."""
_BY_STRIDES = frozenset({_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default})
"""Operations whose result depends on the strides of their argument, and so on whether it was copied."""
AFTER, NO_VALUE = "after", "no value"
"""A value after an operation wrote to it; a line that has no value."""
_REGION_DRAW = "draw of a region"


class UnknownOperationError(Exception):
    """A line of a graph is not an operation that a traced graph may have."""

    def __init__(self, node: fx.Node, problem: str) -> None:
        super().__init__(problem)
        self.node = node


@dataclass
class GraphTerms:
    """The terms of a graph's values.

    Attributes:
        terms: The table of terms.
        modules: Graphs that higher-order operations call, by attribute name.
        values: The value of each line, for an operation a term. The caller sets the values of placeholders.
        draw: The head of terms of random draws.
        draws: The number of random draws so far.
        writes: The nodes whose memory was written to, directly or through a view, and their terms afterwards, in order.
        opaque: Operations with possible undeclared effects: the line, its name, and the term of its result.
    """

    terms: Terms
    modules: Mapping[str, fx.GraphModule]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    draw: str = DRAW
    draws: int = 0
    writes: list[tuple[fx.Node, int]] = field(default_factory=list)
    opaque: list[tuple[fx.Node, str, int]] = field(default_factory=list)
    _views: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def term(self, given: Any) -> int:
        """Return the term of an argument or a result; a value without a term gets a unique one."""
        if isinstance(given, fx.Node):
            found = self.values[given]
            return found if isinstance(found, int) else self.terms.make((NO_VALUE, given.name))
        if isinstance(given, (list, tuple)):
            return self.terms.make((LIST, *map(self.term, given)))
        return self.terms.constant(given)

    def evaluate(self, node: fx.Node) -> int:
        """Evaluate an operation, whose arguments are in `values`; store its term there and return it."""
        if node.op == "get_attr":
            result = self.terms.make(("graph", graph_text(self.modules[str(node.target)])))
        elif node.target is chunked:
            result = self._chunked(node)
        elif node.op == "call_function" and _is_operation(node.target):
            result = self._result(node)
            if _may_do_more(node.target) and is_opaque(self._operation_of(node)):
                self.opaque.append((node, node.name, result))
        else:
            problem = f"{node.name} calls {node.target}, which is not an operation of a traced graph"
            raise UnknownOperationError(node, problem)
        self.values[node] = result
        if (root := root_of(node)) is not node:
            self._views.setdefault(root, []).append(node)
        return result

    def _chunked(self, node: fx.Node) -> int:
        """Return the list of a loop's results: what its graph computes of all rows."""
        graph, *given = node.args
        assert isinstance(graph, fx.Node), "a loop has a graph"
        body, loop = self.modules[str(graph.target)].graph, op_of(node, Chunked).loop
        for value, inner, placement in zip(given, body.find_nodes(op="placeholder"), loop.takes, strict=True):
            wanted = loop.whole(data(inner).type, placement)
            if not isinstance(value, fx.Node) or data(value).type != wanted:
                raise UnknownOperationError(node, f"{node.name} takes {value}, and not {wanted}")
        terms, opaque = rows_terms(body, loop, [self.term(value) for value in given], self.terms)
        self.opaque += [(node, name, term) for name, term in opaque]
        return self.terms.make((LIST, *terms))

    def _operation_of(self, node: fx.Node) -> Any:
        """Return the operation that a line calls, directly or under a saved or restored generator state."""
        if node.target is saved_random or node.target is replayed_random:
            operation = node.args[node.target is replayed_random]
            if not isinstance(operation, OpOverload):
                problem = f"{node.name} draws by {operation}, which is not an operation of torch's"
                raise UnknownOperationError(node, problem)
            return operation
        return node.target

    def _plain(self, node: fx.Node, args: Sequence[Any]) -> int:
        if node.target in _SAME and not node.kwargs and not self._is_unfinished(args[0]):
            return self.term(args[0])
        return self._applied(node.target, args, node.kwargs)

    def _result(self, node: fx.Node) -> int:
        target, terms = node.target, self.terms
        if target in _SAME and not node.kwargs and not self._is_unfinished(node.args[0]):
            return self.term(node.args[0])
        try:
            divided = divided_result(self, node)
        except NotAlikeError as error:
            raise UnknownOperationError(node, f"{node.name} {error}") from error
        if divided is not None:
            return divided
        if _is_plain(target):
            return self._by_strides(node) if target in _BY_STRIDES else self._plain(node, node.args)
        if target is saved_random:
            return self._saved(node)
        if target is replayed_random:
            state, operation, *args = node.args
            again = draws(operation, args, node.kwargs)
            drawn = terms.make((DRAWN_UNDER, self.term(state))) if again else None
            return self._applied(operation, args, node.kwargs, drawn)
        if not isinstance(target, OpOverload):
            head = ITEM if target is operator.getitem else target
            return self._applied(head, node.args, node.kwargs)
        result = self._applied(target, node.args, node.kwargs, self._drawn() if is_random(node) else None)
        if writes_arguments(target):
            self._write(node, result)
        return result

    def _is_unfinished(self, source: Any) -> bool:
        """Return True for what an exchange has started to write: a copy of it is not what arrives."""
        return bool(self.terms.keys[self.term(source)][0] == IN_FLIGHT)

    def _drawn(self) -> int:
        """Return the term of the next random draw."""
        self.draws += 1
        return self.terms.make((self.draw, str(self.draws - 1)))

    def _applied(self, head: Any, args: Iterable[Any], kwargs: Mapping[str, Any], drawn: int | None = None) -> int:
        key = [head, *map(self.term, args)]
        for name, value in kwargs.items():
            key += (f"{name}=", self.term(value))
        if drawn is not None:
            key += ("draw=", drawn)
        return self.terms.make(tuple(key))

    def _by_strides(self, node: fx.Node) -> int:
        source, *given = node.args
        copied = isinstance(source, fx.Node) and source.target is _aten.clone.default
        head = (node.target, "copied") if copied else node.target
        return self._applied(head, (source, *given), node.kwargs)

    def _saved(self, node: fx.Node) -> int:
        """Return the pair of the generator's state before an operation, and its result."""
        operation, *args = node.args
        drawn = self._drawn() if draws(operation, args, node.kwargs) else None
        result = self._applied(operation, args, node.kwargs, drawn)
        state = self.terms.make((STATE, self.terms.constant(None) if drawn is None else drawn))
        return self.terms.make((PAIR, state, result))

    def _write(self, node: fx.Node, result: int) -> None:
        """Record the memory that `node` writes to, and change the terms of all values that alias it."""
        assert isinstance(node.target, OpOverload), "operations of torch declare what they write to"
        for index, name in written_arguments(node.target):
            given = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            for written in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(written, fx.Node):
                    root = root_of(written)
                    for alias in (root, *self._views.get(root, ())):
                        self.values[alias] = self.terms.make((AFTER, result, self.values[alias]))
                    self.writes.append((root, self.values[root]))


@functools.cache
def _is_operation(target: Any) -> bool:
    return isinstance(target, (OpOverload, HigherOrderOperator)) or is_known(target)


@functools.cache
def _may_do_more(target: Any) -> bool:
    """Return True for an operation that is opaque, or calls one that may be."""
    return target in (saved_random, replayed_random) or is_opaque(target)


@functools.cache
def _is_plain(target: Any) -> bool:
    """Return True for a pure, deterministic operation."""
    if not isinstance(target, OpOverload) or writes_arguments(target):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


@dataclass(frozen=True)
class RegionTerms:
    """The terms of a region, independent of its calls.

    Attributes:
        arguments: A leaf for each argument.
        draws: A leaf for each random draw.
        results: The terms of its results.
        writes: The numbers of the arguments that it writes to, and their terms afterwards.
        opaque: Operations with possible undeclared effects: the names of their lines, and their terms.
        body: The terms that differ between calls, each after its parts.
    """

    arguments: tuple[int, ...]
    draws: tuple[int, ...]
    results: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    opaque: tuple[tuple[str, int], ...]
    body: tuple[int, ...]


@dataclass
class Regions:
    """The terms of regions and of their calls, all in one table."""

    terms: Terms
    _known: dict[Any, tuple[fx.Graph, list[Any], RegionTerms]] = field(default_factory=dict)
    _calls: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def of(self, region: Region, how: Sequence[HowDivided | None] = ()) -> RegionTerms:
        """Return the terms of `region`, evaluated once per graph unless the graph was edited since.

        `how`: how its arguments are divided, if they are; they are called with the terms of the whole.
        """
        graph = region.graph
        lines: list[Any] = [region.rows, *((node.op, node.target, node.args, node.kwargs) for node in graph.nodes)]
        lines += [graph_text(module) for module in region.modules.values()]
        key = id(graph), tuple(how) if any(how) else ()
        _, before, known = self._known.get(key, (None, None, None))
        if known is None or before != lines:
            known = _evaluated(region, self.terms, key[1])
            self._known[key] = graph, lines, known
        return known

    def call(self, found: RegionTerms, arguments: Sequence[int], drawn: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the terms of a call's results and of its writes; `drawn`: the number of draws before the call."""
        key = found.results, found.writes, tuple(arguments), drawn if found.draws else 0
        if key not in self._calls:
            values = self.instances(found, arguments, drawn)
            written = tuple(values.get(term, term) for _, term in found.writes)
            self._calls[key] = tuple(values.get(term, term) for term in found.results), written
        return self._calls[key]

    def instances(self, found: RegionTerms, arguments: Sequence[int], drawn: int) -> dict[int, int]:
        """Map the terms of a region to those of a call."""
        values = dict(zip(found.arguments, arguments, strict=True))
        for index, leaf in enumerate(found.draws):
            values[leaf] = self.terms.make((DRAW, str(drawn + index)))
        self.terms.instances(found.body, values)
        return values


def _evaluated(region: Region, terms: Terms, how: Sequence[HowDivided | None]) -> RegionTerms:
    placeholders = region.graph.find_nodes(op="placeholder")
    leaves = [terms.make(("argument", str(number))) for number in range(len(placeholders))]
    pairs = zip(how or [None] * len(leaves), leaves, strict=True)
    given = [one.of(terms, leaf) if one else leaf for one, leaf in pairs]
    if region.rows is not None:
        looped, sent = rows_terms(region.graph, region.rows, given, terms)
        body = _varying({*leaves}, [*looped, *(term for _, term in sent)], terms)
        return RegionTerms(tuple(leaves), (), tuple(looped), (), tuple(sent), body)
    graph = GraphTerms(terms, region.modules, dict(zip(placeholders, given, strict=True)), _REGION_DRAW)
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "output"):
            graph.evaluate(node)
    draws = [terms.make((_REGION_DRAW, str(number))) for number in range(graph.draws)]
    results = tuple(map(graph.term, region.outputs))
    writes = tuple((placeholders.index(node), term) for node, term in graph.writes if node in placeholders)
    opaque = tuple((name, term) for _, name, term in graph.opaque)
    body = _varying({*leaves, *draws}, [*results, *(term for _, term in (*writes, *opaque))], terms)
    return RegionTerms(tuple(leaves), tuple(draws), results, writes, opaque, body)


def _varying(varying: set[int], roots: Sequence[int], terms: Terms) -> tuple[int, ...]:
    """Return the terms below `roots` that are computed from some of `varying`, which grows by them, in order."""
    body = []
    for term in terms.below(roots):
        if term not in varying and not varying.isdisjoint(terms.keys[term][1:]):
            varying.add(term)
            body.append(term)
    return tuple(body)


def rows_terms(
    graph: fx.Graph, loop: RowLoop, arguments: Sequence[int], terms: Terms
) -> tuple[list[int], list[tuple[str, int]]]:
    """Return the terms of a loop's results, given those of its arguments; and of what it sends, by its lines' names.

    Operations that treat rows alike compute of all rows, one turn's after the other's, what they compute of each
    turn's; those that add up over rows give partial sums, which add up to that of all rows. So the results are those of
    the operations on all rows, with the shapes of all rows among their arguments. What is linear in the factor, and
    computed with 1 in its place, is a term per factor: its product with a number is the term with that in its place.

    Raises:
        UnknownOperationError: an operation mixes rows, or a result is neither joined nor added up.
    """
    placed, results = Placements(loop.size), graph.output_node().args[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    try:
        placed.place(graph, dict(zip(graph.find_nodes(op="placeholder"), loop.takes, strict=True)))
        whole = with_rows(graph, loop.takes, loop.size, loop.rows)
    except MixedRowsError as error:
        raise UnknownOperationError(error.node, f"{error.node.name}: {error}") from error
    like = dict(zip(graph.nodes, whole.nodes, strict=True))
    lifted = GraphTerms(terms, {}, dict(zip(whole.find_nodes(op="placeholder"), arguments, strict=True)))
    operations = [node for node in whole.nodes if node.op == "call_function"]
    (factor,) = [node for node in operations if node.name == loop.factor] or [None]
    if factor is not None and not _is_one(factor):
        raise UnknownOperationError(factor, f"{factor.name} is the factor, and not 1")
    for node in operations:
        if node is factor:
            lifted.values[node] = terms.make((FACTOR, *arguments))
        elif node.target in _BY_STRIDES or not (_is_plain(node.target) or node.target is operator.getitem):
            raise UnknownOperationError(node, f"{node.name} calls {node.target}, which treats rows in no known way")
        else:
            lifted.evaluate(node)
    found = []
    for node, gives in zip(results, loop.gives, strict=True):
        if not isinstance(node, fx.Node) or gives is WHOLE or placed.of.get(node) != gives:
            raise UnknownOperationError(graph.output_node(), f"{node} is said to have its rows at {gives}")
        found.append(_per_factor(lifted, operations, factor, like[node]))
    return found, [(name, term) for _, name, term in lifted.opaque]


def _per_factor(lifted: GraphTerms, operations: Sequence[fx.Node], factor: fx.Node | None, result: fx.Node) -> int:
    term, terms = lifted.term(result), lifted.terms
    leaf = lifted.values[factor] if factor is not None else -1
    if factor is None or leaf not in terms.below([term]):
        return term
    if not is_scaled(operations, factor, [result]):
        raise UnknownOperationError(result, f"{result.name} is not linear in {factor.name}")
    how, whole = how_divided(terms, term)
    per = terms.make((PER, leaf, whole))
    return how.of(terms, per) if how is not None else per


def _is_one(node: fx.Node) -> bool:
    of_ones = node.target is _aten.full.default and node.args[0] == [] and bool(node.args[1] == 1)
    return of_ones and not any(value is True for value in node.kwargs.values())
