"""Bundles: several values that one line computes for a single other line, printed as one value.

    layers_0_out, *layers_0_saved = region_0(layers_0_full, x)
    ...
    layers_0_grad_input, *layers_0_full_grads = region_1(layers_0_full_1, layers_1_grad_input, *layers_0_saved)
    layers_0_reduce = reduce_scatter(layers_0, layers_0_full_grads)

In a program's graph each of these values is a node of its own, so passes move, check and count them individually. If a
pass gives one of them another reader, it is printed under its own name. In the text, which is executed, a bundle is a
list; the margin shows its length, and the text of the region its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import GRADIENT_LISTS, Call, Item, items_of
from zcompile.ir.program_graph import ProgramGraph

SAVED, FULL_GRADS = "saved", "full_grads"
"""The middle part of the names of values that may be in a bundle, between their module and their number."""
T = TypeVar("T")
_MEMBER = re.compile(rf"((?:.*_)?(?:{SAVED}|{FULL_GRADS}))_\d+")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Trailing results of one call, read by `reader` alone."""

    name: str
    members: tuple[fx.Node, ...]
    reader: fx.Node

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the bundled values."""
        return sum(data(member).nbytes for member in self.members)

    @property
    def is_given_whole(self) -> bool:
        """True if the bundle is the whole list of gradients of a line, which then receives the list and empties it."""
        return list(self.members) in _lists_given(self.reader)


def member_name(bundle: str, index: int) -> str:
    """Return the name of the value in `bundle` that is result `index` of its call."""
    return f"{bundle}_{index}"


def bundles_of(program: ProgramGraph) -> dict[fx.Node, Bundle]:
    """Map each value that is in a bundle to its bundle."""
    taken = {node.name for node in program.graph.nodes}
    result: dict[fx.Node, Bundle] = {}
    for call in program.nodes(Call):
        members = _last_of_one_name(program, call)
        while len(members) > 1:
            if (bundle := _bundle(members)) is not None and bundle.name not in taken:
                taken.add(bundle.name)
                result |= dict.fromkeys(members, bundle)
                break
            members = members[1:]
    return result


def grouped(values: Iterable[T], bundles: Mapping[fx.Node, Bundle]) -> Iterator[T | Bundle]:
    """Yield `values`, with each bundle in place of its members, at the position of the first."""
    seen: set[str] = set()
    for value in values:
        bundle = bundles.get(value) if isinstance(value, fx.Node) else None
        if bundle is None:
            yield value
        elif bundle.name not in seen:
            seen.add(bundle.name)
            yield bundle


def _last_of_one_name(program: ProgramGraph, call: fx.Node) -> Sequence[fx.Node]:
    """Return the trailing results of `call` that share a bundle name; none if the region's last result is unused."""
    items = sorted(items_of(call), key=_index)
    region = program.regions.get(op_of(call, Call).region)
    if not items or (region is not None and _index(items[-1]) + 1 != len(region.outputs)):
        return ()
    start = len(items) - 1
    while (
        start and _name(items[start - 1]) == _name(items[-1]) and _index(items[start - 1]) + 1 == _index(items[start])
    ):
        start -= 1
    return items[start:] if _name(items[-1]) else ()


def _bundle(members: Sequence[fx.Node]) -> Bundle | None:
    """Return `members` as a bundle if a single line reads them all, adjacent and in order."""
    readers = {user for member in members for user in member.users or (None,)}
    alike = len({(bool(data(member).replicated), data(member).type is None) for member in members}) == 1
    if len(readers) != 1 or not alike or data(members[0]).type is None:
        return None
    (reader,) = readers
    if reader is None:
        return None
    lists = [list(reader.args)] if isinstance(data(reader).op, Call) else _lists_given(reader)
    given = next((values for values in lists if members[0] in values), None)
    if given is None:
        return None
    start = given.index(members[0])
    alone = all(sum(values.count(member) for values in lists) == 1 for member in members)
    together = given[start : start + len(members)] == list(members) and alone
    return Bundle(_name(members[0]), tuple(members), reader) if together else None


def _lists_given(reader: fx.Node) -> list[list[object]]:
    """Return the lists of gradients among a line's arguments."""
    listed = isinstance(data(reader).op, GRADIENT_LISTS)
    return [list(argument) for argument in reader.args[1:] if isinstance(argument, (list, tuple))] if listed else []


def _index(item: fx.Node) -> int:
    return op_of(item, Item).index


def _name(item: fx.Node) -> str:
    """Return the name of the bundle that `item` may be in; "" if its name does not fit."""
    match = _MEMBER.fullmatch(item.name)
    return match[1] if match else ""
