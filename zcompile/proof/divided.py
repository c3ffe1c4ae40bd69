"""Terms of values that are divided over the ranks of a group: a part of a value, or a share of a sum.

    (part, "1 1 4 2", t)     each of 2 ranks has 4 rows of `t` along dimension 1, which has one run of all rows
    (share, "2", t)          `t` is the sum over 2 ranks of such values
    (in flight, "2 1 ...", t)    `t` once it has arrived, of an exchange with these arguments

Rows in zig-zag order are another part, `(part, "1 1 4 2 zigzag", t)`, of which the two halves are not neighbours.

An operation that treats rows alike gives, of parts, a part of what it gives of the whole, and one that adds up over
rows a share of it (`zcompile.ir.row_axes`). The operators of `zcompile.torch_internals.group_operators` change how a
value is divided, and nothing else; those of `zcompile.torch_internals.ring_attention` compute parts of what a kernel
gives of the whole. So the term of what is whole again is that of the traced step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Placement
from zcompile.ir.row_axes import (
    MixedRowsError,
    attended,
    gives_several,
    is_additive,
    is_attention,
    is_same_in_parts,
    resized,
    shape_of,
    tensors_of,
)
from zcompile.ir.rows import Placements, dimension
from zcompile.ir.side_effects import is_random, is_ring
from zcompile.proof.terms import ITEM, LIST, Terms
from zcompile.torch_internals.operators import OpOverload
from zcompile.torch_internals.ring_attention import OF_TOKENS, arguments_of, kernel_of

PART, SHARE, IN_FLIGHT = "part", "share", "in flight"
_OWN, _PRODUCT = torch.ops.zcompile, torch.ops.aten.mul.Tensor


class HasTerms(Protocol):
    """The terms of the values of a graph."""

    terms: Terms

    def term(self, given: Any) -> int:
        """Return the term of an argument."""


@dataclass(frozen=True, slots=True)
class HowDivided:
    """How a value is divided; a value that is a share of a sum has no rows."""

    size: int
    """The number of ranks."""
    dim: int = 0
    outer: int = 1
    """The number of runs of all rows along `dim`."""
    rows: int = 0
    """The rows of a rank."""
    zigzag: bool = False

    def of(self, terms: Terms, whole: int) -> int:
        """Return the term of a part, or a share, of what has the term `whole`."""
        if not self.rows:
            return terms.make((SHARE, str(self.size), whole))
        order = " zigzag" if self.zigzag else ""
        return terms.make((PART, f"{self.dim} {self.outer} {self.rows} {self.size}{order}", whole))

    @property
    def placement(self) -> Placement:
        """The same, as a placement."""
        return Divided(self.dim, self.outer) if self.rows else PARTIAL


class NotAlikeError(Exception):
    """An operation does something else to parts than to the whole."""


def how_divided(terms: Terms, term: int) -> tuple[HowDivided | None, int]:
    """Return how a value is divided, and the term of the whole."""
    match terms.keys[term]:
        case ("part", str(how), int(whole)):
            dim, outer, rows, size = map(int, how.removesuffix(" zigzag").split())
            return HowDivided(size, dim, outer, rows, how.endswith("zigzag")), whole
        case ("share", str(size), int(whole)):
            return HowDivided(int(size)), whole
    return None, term


def mean_over_ranks(terms: Terms, term: int, size: int) -> int:
    """Return the mean over ranks of a value: a share of a sum, times their number, has the sum as its mean."""
    how, whole = how_divided(terms, term)
    match terms.keys[whole]:
        case (operation, int(value), int(times)) if operation is _PRODUCT and how == HowDivided(size):
            return value if times == terms.constant(size) else term
    return term


def divided_result(graph: HasTerms, node: fx.Node) -> int | None:
    """Return the term of an operation on divided values, or that divides one; None for any other.

    Raises:
        NotAlikeError: the operation gives something else of parts than of the whole.
    """
    target, terms = node.target, graph.terms
    if target is _OWN.wait_all_to_all.default:
        return _arrived(terms, graph.term(node.args[0]), str(node.args[1:]))
    if target is _OWN.start_all_to_all.default:
        whole = _changed(graph, node, *how_divided(terms, graph.term(node.args[0]))) if terms.divides else None
        sent = _applied(graph, node, node.args, {}, _OWN.all_to_all.default) if whole is None else whole
        return terms.make((IN_FLIGHT, str(node.args[1:]), sent))
    if not isinstance(target, OpOverload) or not terms.divides:
        return None
    given = {source: how_divided(terms, graph.term(source)) for source in tensors_of(node)}
    if is_ring(node):
        return _ring(graph, node, given)
    if target.namespace == "zcompile":
        return _changed(graph, node, *next(iter(given.values())))
    how = {source: found for source, (found, _) in given.items() if found is not None}
    if not how:
        return _of_nothing(graph, node)
    if not all(found.rows for found in how.values()):
        return _shared(graph, node, how, given)
    if is_attention(node):
        return _attention(graph, node, how, given)
    return _parts(graph, node, how, given)


def _arrived(terms: Terms, term: int, args: str) -> int:
    """Return the term of what has arrived of an exchange that was started with these arguments."""
    match terms.keys[term]:
        case ("in flight", str(started), int(value)) if started == args:
            return value
    raise NotAlikeError("waits for what was not started so")


def _of_nothing(graph: HasTerms, node: fx.Node) -> int | None:
    """Return the term of a constant that is made like a divided value, whose numbers it does not read."""
    like = {source: how_divided(graph.terms, graph.term(source)) for source in node.all_input_nodes}
    if tensors_of(node) or not any(how for how, _ in like.values()):
        return None
    return _applied(graph, node, node.args, like)


Given = Mapping[fx.Node, tuple[HowDivided | None, int]]


def _changed(graph: HasTerms, node: fx.Node, how: HowDivided | None, whole: int) -> int:
    """Return the term of a value that is divided otherwise."""
    assert isinstance(node.target, OpOverload), "one of the group's"
    shape, name, args = shape_of(node), node.target.overloadpacket.__name__.removeprefix("start_"), node.args[1:]
    zigzag = bool(node.kwargs.get("zigzag", False))
    match name, args:
        case "shard", (int(dim), int(outer), int(size), *_) if how is None:
            return HowDivided(size, dim, outer, shape[dim] // outer, zigzag).of(graph.terms, whole)
        case "all_gather", (int(dim), int(outer), int(size), *_) if how == _along(how, size, dim, outer, zigzag):
            return whole
        case "all_reduce", (int(size), *_) if how == HowDivided(size):
            return whole
        case "all_to_all", (int(before), int(dim), int(size), *_) if how == _along(how, size, before, 1):
            rows = shape_of(node.all_input_nodes[0])[dim] // size
            return HowDivided(size, dim, 1, rows).of(graph.terms, whole)
    raise NotAlikeError(f"{name} takes a value that is divided otherwise")


def _along(how: HowDivided | None, size: int, dim: int, outer: int, zigzag: bool = False) -> HowDivided:
    """Return a part along a dimension, with the rows of `how`; not `how` itself if that has none."""
    return HowDivided(size, dim, outer, (how.rows if how else 0) or -1, zigzag)


def _shared(graph: HasTerms, node: fx.Node, how: Mapping[fx.Node, HowDivided], given: Given) -> int:
    """Return the term of an operation on shares of sums: of their sums it gives the sum of what it gives of them."""
    kinds = {*how.values()}
    scaled = node.target is _PRODUCT and [*how] == [node.args[0]] != [node.args[1]]  # by what all ranks have
    if len(kinds) != 1 or not (scaled or (is_additive(node) and len(how) == len(given))):
        raise NotAlikeError("reads a share before all ranks' have been added up")
    return kinds.pop().of(graph.terms, _applied(graph, node, node.args, given))


def _parts(graph: HasTerms, node: fx.Node, how: Mapping[fx.Node, HowDivided], given: Given) -> int:
    """Return the term of an operation that treats rows alike."""
    (first, *others) = how.values()
    if any(replace(other, dim=first.dim, outer=first.outer) != first for other in others):
        raise NotAlikeError("takes values of which ranks have different parts")
    placed, whole = Placements(first.rows), dict(given)
    rows = first.rows, first.rows * first.size
    try:
        for source, found in how.items():
            placed.put(source, found.placement, node)
        placed.follow(node)
        for source in given:
            wanted = placed.of.get(source, WHOLE)
            if source not in how and isinstance(wanted, Divided):
                whole[source] = None, _made(graph, source, wanted.dim, rows)
        gives = placed.results(node) or ()
        result = _applied(graph, node, resized(node, dimension(gives), *rows), whole)
    except MixedRowsError as error:
        raise NotAlikeError(str(error)) from error
    return _results(graph, node, result, [_how(place, first) for place in gives])


def _how(placement: Placement, like: HowDivided) -> HowDivided | None:
    if isinstance(placement, Divided):
        return replace(like, dim=placement.dim, outer=placement.outer)
    return HowDivided(like.size) if placement is PARTIAL else None


def _made(graph: HasTerms, source: fx.Node, dim: int, rows: tuple[int, int]) -> int:
    """Return the term of a constant that was made for a part, as made for the whole."""
    if not is_same_in_parts(source):
        raise NotAlikeError(f"takes {source.name} as a part, and it is whole")
    like = {one: how_divided(graph.terms, graph.term(one)) for one in source.all_input_nodes}
    return _applied(graph, source, resized(source, dim, *rows), like)


def _attention(graph: HasTerms, node: fx.Node, how: Mapping[fx.Node, HowDivided], given: Given) -> int:
    """Return the term of attention to all tokens, for some heads of all values that have heads."""
    sizes = {found.size for found in how.values()}
    for source in given:
        found, shape = how.get(source), shape_of(source)
        whole = found is None and source not in attended(node) and (len(shape) < 3 or shape[1] == 1)
        if len(shape) == 3 and "backward" not in str(node.target):  # a mask, whose heads are along another dimension
            raise NotAlikeError(f"takes {source.name}, a mask of three dimensions")
        if not whole and (found is None or found != HowDivided(found.size, 1, 1, shape[1])):
            raise NotAlikeError(f"takes {source.name} otherwise than by heads")
    if len(sizes) != 1:
        raise NotAlikeError("takes values of several groups")
    values = node.meta["val"] if gives_several(node) else [node.meta["val"]]
    heads = [isinstance(value, torch.Tensor) and value.dim() > 2 for value in values]
    (size,) = sizes
    results = [
        HowDivided(size, 1, 1, value.shape[1]) if own else None for own, value in zip(heads, values, strict=True)
    ]
    return _results(graph, node, _applied(graph, node, node.args, given), results)


def _ring(graph: HasTerms, node: fx.Node, given: Given) -> int:
    """Return the term of attention in a ring: each rank has a part of what the kernel gives of the whole."""
    kernel = kernel_of(node.target)
    assert kernel is not None, "it is a ring's"
    named = arguments_of(kernel, node.args, node.kwargs)
    query, key = (shape_of(named[name])[2] for name in ("query", "key"))
    for name, value in named.items():
        if isinstance(value, fx.Node) and value in given:
            rows = key if name in ("key", "value") else query
            wanted = HowDivided(named["size"], 2, 1, rows, True) if name in OF_TOKENS else None
            if given[value][0] != wanted:
                raise NotAlikeError(f"takes {value.name} otherwise than by tokens, which are in zig-zag order")
    if (named["is_causal"] and query != key) or named.get("grad_input_mask", [False])[-1] or is_random(node):
        raise NotAlikeError("is causal for fewer queries than keys, draws, or gives the gradient of a mask")
    kwargs = {name: value for name, value in node.kwargs.items() if name not in ("size", "group")}
    whole = _applied(graph, node, node.args, given, kernel, kwargs)
    results = list[HowDivided | None]()
    for value in node.meta["val"]:
        divided = isinstance(value, torch.Tensor) and value.dim() > 2
        rows = value.shape[2] if divided and value.dim() == 4 else query
        results.append(HowDivided(named["size"], 2, 1, rows, True) if divided else None)
    return _results(graph, node, whole, results)


def _results(graph: HasTerms, node: fx.Node, result: int, how: Sequence[HowDivided | None]) -> int:
    """Return the term of a result, or the list of those of several, which are divided as `how` says."""
    terms = graph.terms
    if not gives_several(node):
        return how[0].of(terms, result) if how and how[0] is not None else result
    items = [terms.make((ITEM, result, terms.constant(index))) for index in range(len(how))]
    return terms.make((LIST, *(h.of(terms, item) if h else item for h, item in zip(how, items, strict=True))))


def _applied(
    graph: HasTerms, node: fx.Node, args: Sequence[Any], given: Given, kernel: Any = None, kwargs: Any = None
) -> int:
    """Return the term of an operation on whole values, or of a kernel in its place."""

    def term(argument: Any) -> int:
        if isinstance(argument, fx.Node):
            return given[argument][1] if argument in given else graph.term(argument)
        if isinstance(argument, (list, tuple)):
            return graph.terms.make((LIST, *map(term, argument)))
        return graph.term(argument)

    key = [kernel or node.target, *map(term, args)]
    for name, value in (node.kwargs if kwargs is None else kwargs).items():
        key += (f"{name}=", term(value))
    return graph.terms.make(tuple(key))
