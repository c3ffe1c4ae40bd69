"""merge_regions: let regions that follow each other be one, which one CUDA graph captures.

    ya = region_0(a, x)
    yb = region_0(b, ya)       ->      ya, yb = region_3(a, b, x)
    return [yb], [x, ya]               return [yb], [x, ya]

Only what is called between two other lines, such as communications, is merged: what is alive at any line stays so. A
region that cannot be captured, and a loop over rows, remain by themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from zcompile.ir.captured_regions import obstacle
from zcompile.ir.liveness import memory_of_result
from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Call, Input, Item, Kind, Results, region
from zcompile.ir.program import Program
from zcompile.ir.region import Region, region_name
from zcompile.ir.spelling import free

Source = tuple[fx.Node, int | None]
"""What a placeholder of a region stands for: a value, or a parameter of a unit, by its number."""


def merge_regions(program: Program) -> Program:
    """Return a program in which no two regions that can be captured follow each other."""
    runs = {run[0]: run for phase in program.phases for run in _runs(program, phase)}
    members = {call for run in runs.values() for call in run}
    merging = _Merging(program)
    for node in program.graph.nodes:
        if node in runs:
            merging.call(runs[node])
        elif node not in members and not (_is_item(node) and node.args[0] in members):
            merging.outside[node] = merging.graph.node_copy(node, merging.outside.__getitem__)
    made = replace(program, graph=merging.graph, regions=merging.regions)
    called = {op_of(call, Call).region for call in made.nodes(Call)}
    return replace(made, regions={name: found for name, found in made.regions.items() if name in called})


def _runs(program: Program, phase: Phase) -> Iterator[list[fx.Node]]:
    """Yield calls of regions with no other line between them, several each."""
    run = list[fx.Node]()
    for node in program.body(phase):
        if isinstance(data(node).op, Call) and _merges(program.regions[op_of(node, Call).region]):
            run.append(node)
        elif not _is_item(node):
            yield from [run] if len(run) > 1 else []
            run = []
    yield from [run] if len(run) > 1 else []


def _merges(found: Region) -> bool:
    return found.rows is None and not obstacle(found)


def _is_item(node: fx.Node) -> bool:
    return isinstance(data(node).op, Item)


@dataclass
class _Merging:
    """The outer program under construction."""

    program: Program
    graph: fx.Graph = field(default_factory=fx.Graph)
    outside: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The values of the program in the new one."""

    def __post_init__(self) -> None:
        self.regions = dict(self.program.regions)
        self.equal = {found.key(): found for found in self.regions.values()}

    def call(self, run: Sequence[fx.Node]) -> None:
        """Append a call of one region in place of those of a run."""
        merged = _Merged(self.program, run)
        found = self._named(merged)
        names = [op_of(call, Call).units for call in run]
        units = tuple(dict.fromkeys(name for given in names for name in given))
        sources = list(dict.fromkeys(data(call).source for call in run if data(call).source))
        meta = Data(Call(found.name, units), data(run[0]).phase, source=" + ".join(sources))
        given = [self.outside[source] for source in merged.arguments]
        single = merged.gives[0] if len(merged.gives) == 1 else None
        name = single.name if single is not None else free(f"{found.name}_results")
        made = self.graph.create_node("call_function", region, (found.name, *given), name=name)
        set_data(made, meta)
        for index, value in enumerate(merged.gives):
            result = made
            if single is None:
                result = self.graph.create_node("call_function", operator.getitem, (made, index), name=value.name)
            result.meta = dict(value.meta)
            view, storage = memory_of_result(found, index)
            op = Item(index) if single is None else meta.op
            set_data(result, replace(data(value), op=op, view=view, storage=storage))
            self.outside[value] = result
        if single is not None:
            set_data(made, replace(data(made), source=meta.source))

    def _named(self, merged: _Merged) -> Region:
        """Return the region, or an equal one that there is already."""
        number = 1 + max(int(name.split("_")[1]) for name in self.regions)
        found = merged.region(region_name(number, None))
        same = self.equal.setdefault(found.key(), found)
        self.regions[same.name] = same
        return same


class _Merged:
    """The graph of a run of calls, and the values that a call of it takes and gives."""

    def __init__(self, program: Program, run: Sequence[fx.Node]) -> None:
        self.graph, self.parts = fx.Graph(), [program.regions[op_of(call, Call).region] for call in run]
        members = {*run, *(item for call in run for item in call.users if _is_item(item))}
        self.arguments = [source for source in _arguments(run) if source not in members]
        self.inside: dict[fx.Node, fx.Node] = {}
        """What the calls of the run give, in the graph."""
        taken = [self._sources(call, part) for call, part in zip(run, self.parts, strict=True)]
        made = self._placeholders({key: like for part in taken for like, key in part.items() if key[0] not in members})
        for call, part, sources in zip(run, self.parts, taken, strict=True):
            self._append(call, part, {like: made.get(key) or self.inside[key[0]] for like, key in sources.items()})
        left = [value for value in self.inside if any(user not in members for user in value.users)]
        self.gives = sorted(left, key=_is_saved)
        ends = tuple(self.inside[value] for value in self.gives)
        set_data(self.graph.output(ends if len(ends) != 1 else ends[0]), Data(Results()))

    def _placeholders(self, wanted: Mapping[Source, fx.Node]) -> dict[Source, fx.Node]:
        """Add placeholders, like those of the parts, in the order of arguments and of their parameters."""
        number = {source: index for index, source in enumerate(self.arguments)}
        order = sorted(wanted, key=lambda key: (number[key[0]], key[1] or 0))
        self.takes = tuple((number[source], item) for source, item in order)
        return {key: self._placeholder(index, wanted[key]) for index, key in enumerate(order)}

    def _append(self, call: fx.Node, part: Region, values: dict[fx.Node, fx.Node]) -> None:
        """Append what a call computes; `values`: what its placeholders stand for."""
        for node in part.graph.nodes:
            if node.op not in ("placeholder", "output"):
                values[node] = self.graph.node_copy(node, values.__getitem__)
        results = [values[value] for value in part.outputs]
        items = [user for user in call.users if _is_item(user)]
        self.inside |= {item: results[op_of(item, Item).index] for item in items} if items else {call: results[0]}

    def _sources(self, call: fx.Node, part: Region) -> dict[fx.Node, Source]:
        placeholders = part.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, part.takes, strict=True)
        return {like: (call.args[1 + argument], item) for like, (argument, item) in pairs}  # type: ignore[misc]

    def _placeholder(self, index: int, like: fx.Node) -> fx.Node:
        made = self.graph.create_node("placeholder", like.name, name=like.name)
        made.target = made.name  # several parts may have the same name
        made.meta = dict(like.meta)
        return set_data(made, Data(Input(Kind.DATA, index), type=data(like).type))

    def region(self, name: str) -> Region:
        """Return the region."""
        modules = {key: module for part in self.parts for key, module in part.modules.items()}
        return Region(name, self.graph, self.takes, modules, self.parts[0].fuses)


def _arguments(run: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield what calls take, units first, each once."""
    units, values = dict[Any, None](), dict[Any, None]()
    for call in run:
        count = len(op_of(call, Call).units)
        units |= dict.fromkeys(call.args[1:][:count])
        values |= dict.fromkeys(call.args[1:][count:])
    yield from (*units, *(value for value in values if value not in units))


def _is_saved(value: fx.Node) -> bool:
    """Return True for a value of the forward that only the backward reads: these are a region's last results."""
    return data(value).phase is Phase.FORWARD and all(data(user).phase is Phase.BACKWARD for user in value.users)
