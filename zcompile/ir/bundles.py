"""Bundles: what one line leaves for one other line, printed as one value.

    layers_0_out, *layers_0_saved = region_0(layers_0_full, x)
    ...
    layers_0_grad_input, *layers_0_full_grads = region_1(layers_0_full_1, layers_1_grad_input, *layers_0_saved)
    layers_0_reduce = reduce_scatter(layers_0, layers_0_full_grads)

A program's graph holds each of these values by itself, so passes move, check and count them one by one. A value to
which a pass has given another reader is printed by its own name. The others are a list in the text that runs, which
says how many there are; the text of the region shows which ones.
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
"""What values are called that may be in a bundle, behind their module and in front of their number."""
T = TypeVar("T")
_MEMBER = re.compile(rf"((?:.*_)?(?:{SAVED}|{FULL_GRADS}))_\d+")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The last results of one call, all that are read by `reader` alone."""

    name: str
    members: tuple[fx.Node, ...]
    reader: fx.Node

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that its values take."""
        return sum(data(member).nbytes for member in self.members)

    @property
    def is_given_whole(self) -> bool:
        """True for all of the gradients that a reduction takes: it is given the list, and empties it."""
        return list(self.members) in _lists_given(self.reader)


def member_name(bundle: str, index: int) -> str:
    """The name of the value of `bundle` that is result `index` of its call."""
    return f"{bundle}_{index}"


def bundles_of(program: ProgramGraph) -> dict[fx.Node, Bundle]:
    """The bundle of each value that is in one."""
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
    """`values`, with each bundle once, where its first member stands."""
    seen: set[str] = set()
    for value in values:
        bundle = bundles.get(value) if isinstance(value, fx.Node) else None
        if bundle is None:
            yield value
        elif bundle.name not in seen:
            seen.add(bundle.name)
            yield bundle


def _last_of_one_name(program: ProgramGraph, call: fx.Node) -> Sequence[fx.Node]:
    """The last results of `call` with numbers behind one name; none where the last of its region's is not used."""
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
    """`members` as a bundle, if one line reads them all, in their order and beside each other."""
    readers = {user for member in members for user in member.users or (None,)}
    alike = len({(bool(data(member).replicated), data(member).type is None) for member in members}) == 1
    if len(readers) != 1 or not alike or data(members[0]).type is None:
        return None
    (reader,) = readers
    if reader is None:
        return None
    lists = [list(reader.args)] if isinstance(data(reader).op, Call) else _lists_given(reader)
    given = next((one for one in lists if members[0] in one), None)
    if given is None:
        return None
    start = given.index(members[0])
    alone = all(sum(one.count(member) for one in lists) == 1 for member in members)
    together = given[start : start + len(members)] == list(members) and alone
    return Bundle(_name(members[0]), tuple(members), reader) if together else None


def _lists_given(reader: fx.Node) -> list[list[object]]:
    """The lists of gradients that a line is given."""
    listed = isinstance(data(reader).op, GRADIENT_LISTS)
    return [list(argument) for argument in reader.args[1:] if isinstance(argument, (list, tuple))] if listed else []


def _index(item: fx.Node) -> int:
    return op_of(item, Item).index


def _name(item: fx.Node) -> str:
    """The name of the bundle that `item` may be in; empty if it is called otherwise."""
    match = _MEMBER.fullmatch(item.name)
    return match[1] if match else ""
