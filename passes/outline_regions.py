"""outline_regions: turn runs of operations of one unit into regions, and leave calls of them.

    h = aten.mm.default(x, a)    # unit 0               h = region_0(u0, x)
    y = aten.mm.default(h, b)    # unit 1       ->      y = region_0(u1, h)
    return [y], []                                      return [y], []

Regions that are equal after renaming become one, so that a model of many equal blocks compiles a few. The units' full
parameters come first among a call's arguments; what is cheaply derived from them is computed inside each region.
Where regions begin and end does not depend on the stage, so every stage runs the same code and gets the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols

from zcompile.ir.layout import Layout
from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import NAMES, Call, Input, Item, Kind, Parameter, Results, Shards, region
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.region import Region
from zcompile.ir.spelling import identifier
from zcompile.passes.common.unit_runs import runs


def outline_regions(program: Program, *, fuses: bool = True) -> Program:
    """A program whose body is calls of regions only; `fuses`: of what compiles them, see `zcompile.cost.fusion`."""
    derived = derived_values(program)
    symbols = find_symbol_binding_fx_nodes(program.graph)
    outer = _Outer(program, fuses)
    for phase in Phase:
        for run in runs([node for node in program.body(phase) if node not in derived]):
            outer.call(_Outline(program, derived, run, symbols), phase)
    return outer.finished()


@dataclass
class _Outline:
    """One run as a region: its graph, and the outer values that a call of it takes and gives."""

    program: Program
    derived: set[fx.Node]
    run: list[fx.Node]
    symbols: Mapping[Any, fx.Node]
    """Where each symbol of a varying size is an input of the program."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    inside: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        members = set(self.run)
        sources = list(dict.fromkeys(leaf for node in self.run for leaf in self._leaves(node, members)))
        layout = self.program.layout
        self.reads = [n for n in sources if isinstance(data(n).op, Parameter)]
        self.units = list(dict.fromkeys(layout.unit_of(op_of(n, Parameter).name).name for n in self.reads))
        self.reads.sort(key=lambda n: self._place(n, layout))
        values = [n for n in sources if not isinstance(data(n).op, Parameter) and n.op != "get_attr"]
        self.values = list(dict.fromkeys([*self._sizes(values, members), *values]))
        self.gives = [node for node in self.run if self._leaves_the_run(node, members)]
        self._fill()

    def _leaves(self, node: fx.Node, members: set[fx.Node]) -> Iterable[fx.Node]:
        """Values from outside that `node` needs, through what is derived."""
        for source in node.all_input_nodes:
            if source in self.derived:
                yield from self._leaves(source, members)
            elif source not in members:
                yield source

    def _sizes(self, values: list[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
        """Inputs that bind the symbols in the shapes of this run: a compiler cannot take them out of `s0*s1`."""
        shapes = [node.meta["val"] for node in (*values, *self.run) if "val" in node.meta]
        symbols = sorted({symbol for value in shapes for symbol in free_symbols(value)}, key=str)
        bound = (self.symbols.get(symbol) for symbol in symbols)
        return [node for node in bound if node is not None and node not in members]

    def _place(self, node: fx.Node, layout: Layout) -> tuple[int, int]:
        unit = layout.unit_of(op_of(node, Parameter).name)
        return self.units.index(unit.name), unit.index(op_of(node, Parameter).name)

    def _leaves_the_run(self, node: fx.Node, members: set[fx.Node]) -> bool:
        multiple = any(isinstance(data(user).op, Item) for user in node.users)
        return not multiple and any(user not in members for user in node.users)

    def _fill(self) -> None:
        for index, node in enumerate((*self.reads, *self.values)):
            inner = self.graph.create_node("placeholder", node.name, name=node.name)
            inner.meta = dict(node.meta)
            self.inside[node] = set_data(inner, Data(Input(Kind.DATA, index), type=data(node).type))
        for node in self.run:
            self._copy(node)
        results = tuple(self.inside[node] for node in self.gives)
        set_data(self.graph.output(results if len(results) != 1 else results[0]), Data(Results()))

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self.inside:
            for source in node.all_input_nodes:
                self._copy(source)
            copied = self.inside[node] = self.graph.node_copy(node, self.inside.__getitem__)
            set_data(copied, replace(data(node), replicated=""))  # equal regions are one, wherever they are called
        return self.inside[node]

    @property
    def takes(self) -> tuple[tuple[int, int | None], ...]:
        items = [self._place(node, self.program.layout) for node in self.reads]
        return (*items, *((len(self.units) + index, None) for index in range(len(self.values))))

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        names = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        return {name: self.program.modules[name] for name in names}

    def region(self, name: str) -> Region:
        return Region(name, self.graph, self.takes, self.modules)


class _Outer:
    """The outer program while it is written."""

    def __init__(self, program: Program, fuses: bool) -> None:
        self.program, self.fuses = program, fuses
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.regions: dict[str, Region] = {}
        self.equal: dict[str, Region] = {}
        self.units = {unit.name: self._shards(unit.name, identifier(unit.name)) for unit in program.layout.units}
        for node in program.nodes(Input):
            self.values[node] = self.graph.node_copy(node)

    def _shards(self, unit: str, name: str) -> fx.Node:
        name = f"{name}_" if name in NAMES else name
        node = self.graph.create_node("placeholder", name, name=name)
        return set_data(node, Data(Shards(unit)))

    def call(self, outline: _Outline, phase: Phase) -> None:
        """Append a call of the region of `outline`, and its results."""
        found = self._region(outline)
        args = [*(self.units[name] for name in outline.units), *(self.values[node] for node in outline.values)]
        source = " + ".join(outline.units) or next((data(node).source for node in outline.run if data(node).source), "")
        held = Data(Call(found.name, tuple(outline.units)), phase, source=source)
        single = outline.gives[0] if len(outline.gives) == 1 else None
        name = single.name if single else f"{found.name}_results"
        call = self.graph.create_node("call_function", region, (found.name, *args), name=name)
        if single:
            self._give(single, call, found, 0)
            held = replace(data(call), op=held.op, phase=phase, source=source, unit="")
        set_data(call, held)
        for index, node in enumerate(outline.gives if single is None else ()):
            item = self.graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
            self._give(node, item, found, index)
            set_data(item, replace(data(item), op=Item(index), phase=phase, source=source, unit=""))

    def _give(self, node: fx.Node, result: fx.Node, found: Region, index: int) -> None:
        result.meta = dict(node.meta)
        view = _shares_memory(found.outputs, index)
        kept, shown = data(_root(found.outputs[index])).nbytes, data(node).type
        storage = kept if not view and shown and kept != shown.nbytes else 0
        set_data(result, replace(data(node), view=view, storage=storage))
        self.values[node] = result

    def _region(self, outline: _Outline) -> Region:
        found = replace(outline.region(f"region_{len(self.regions)}"), fuses=self.fuses)
        same = self.equal.setdefault(found.key(), found)
        self.regions[same.name] = same
        return same

    def finished(self) -> Program:
        results = self.program.results

        def outer(value: Any) -> Any:
            return self.values[value] if isinstance(value, fx.Node) else value

        end = set_results(
            self.graph,
            outputs=map(outer, results.outputs),
            input_gradients=map(outer, results.input_gradients),
            gradients={name: outer(value) for name, value in results.gradients.items()},
        )
        assert isinstance(data(end).op, Results), "results end a program"
        return replace(self.program, graph=self.graph, regions=self.regions, modules={})


def _shares_memory(outputs: tuple[fx.Node, ...], index: int) -> bool:
    """True if a region's result is a view of one of its arguments or of a result before it."""
    root = _root(outputs[index])
    return isinstance(data(root).op, Input) or any(_root(earlier) is root for earlier in outputs[:index])


def _root(node: fx.Node) -> fx.Node:
    while data(node).view:
        node = node.all_input_nodes[0]
    return node
