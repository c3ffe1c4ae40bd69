"""outline_regions: turn runs of operations of one unit into regions, and replace them by calls.

    h = aten.mm.default(x, a)    # unit 0               u0_out = region_0(u0, x)
    y = aten.mm.default(h, b)    # unit 1       ->      u1_out = region_0(u1, u0_out)
    return [y], []                                      return [u1_out], []

Regions that are equal after renaming are merged, so a model of many equal blocks compiles only a few regions. A call's
first arguments are the full parameters of the units; values cheaply derived from them are computed inside each region.
Region boundaries do not depend on the stage, so every stage runs the same code and gets the same bits. What ranks
exchange within a region is hidden behind its compute: see `zcompile.passes.common.overlap`.

Values are named after their unit or module and their role there: see `zcompile.passes.common.value_names`. A region's
last results are values that are only saved for the backward, largest first, then gradients of parameters, in their
unit's order. A call's last arguments are saved values, in the order in which the forward returns them. So they are
printed as a single value where a single line reads them all: see `zcompile.ir.bundles`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols

from zcompile.ir.layout import Layout
from zcompile.ir.liveness import memory_of_result
from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Call, Chunked, Input, Item, Kind, Parameter, Results, Shards, region
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.placement import WHOLE, Placement, RowLoop
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.region import Region, region_name
from zcompile.ir.spelling import common_module, free, identifier
from zcompile.passes.common.overlap import overlapped
from zcompile.passes.common.recompute import runs
from zcompile.passes.common.value_names import Use, ValueNames


def outline_regions(program: Program, *, fuses: bool = True) -> Program:
    """Return a program whose body is only calls of regions; `fuses`: whether their compiler fuses operations."""
    derived = derived_values(program)
    symbols = find_symbol_binding_fx_nodes(program.graph)
    outer = _Outer(program, fuses)
    for phase in program.phases:
        outer.begin(phase)
        for run in runs([node for node in program.body(phase) if node not in derived]):
            outer.call(_Outline(program, derived, run, symbols, outer.order), phase)
    return outer.finished()


@dataclass
class _Outline:
    """One run as a region: its graph, and the outer values that a call of it takes and returns."""

    program: Program
    derived: set[fx.Node]
    run: list[fx.Node]
    symbols: Mapping[Any, fx.Node]
    """For each symbol of a dynamic size, the node that binds it."""
    order: Mapping[fx.Node, int]
    """The results of earlier calls, numbered in order."""
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
        self.values = sorted(dict.fromkeys([*self._sizes(values, members), *values]), key=self._was_saved)
        gradients = {node: index for index, node in enumerate(self._gradients())}
        gives = {n: self._use(n, members, gradients) for n in self.run if self._leaves_the_run(n, members)}
        self.gives = sorted(gives, key=gives.__getitem__)
        self.uses = [gives[node][0] for node in self.gives]
        self._fill()

    def _was_saved(self, node: fx.Node) -> int:
        """Return a sort key that puts saved values after other arguments of the backward, in the forward's order."""
        turned = data(node).phase is Phase.FORWARD and data(self.run[0]).phase is Phase.BACKWARD
        return self.order.get(node, -1) if turned else -1

    def _use(self, node: fx.Node, members: set[fx.Node], gradients: Mapping[fx.Node, int]) -> tuple[Use, int]:
        """Return a sort key for a result: its use, and its order among results of the same use."""
        if node in gradients:
            return Use.GRADIENT, gradients[node]
        phases = {data(user).phase for user in node.users if user not in members}
        returned = any(isinstance(data(user).op, Results) for user in node.users)
        meta = data(node)
        if meta.phase is Phase.BACKWARD or Phase.FORWARD in phases or returned or meta.type is None:
            return Use.ANY, 0
        return Use.SAVED, -meta.type.nbytes

    def _gradients(self) -> Iterable[fx.Node]:
        """Yield gradients of parameters that are only returned, in the order of units and their parameters."""
        found, layout = self.program.results.gradients, self.program.layout
        for param in (param for unit in layout.units for param in unit.params if param.name in found):
            node = found[param.name]
            if all(isinstance(data(user).op, Results) for user in node.users):
                yield node

    def _leaves(self, node: fx.Node, members: set[fx.Node]) -> Iterable[fx.Node]:
        """Yield the values from outside the run that `node` reads, looking through derived values to their sources."""
        for source in node.all_input_nodes:
            if source in self.derived:
                yield from self._leaves(source, members)
            elif source not in members:
                yield source

    def _sizes(self, values: list[fx.Node], members: set[fx.Node]) -> list[fx.Node]:
        """Return the inputs that bind the symbols in the shapes of this run: Inductor cannot solve `s0*s1` for `s0`."""
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
        self.loop: RowLoop | None = None
        self.sources = [*self.reads, *self.values]
        """For each placeholder, what it stands for."""
        if isinstance(op := data(self.run[0]).op, Chunked):
            self._fill_loop(op.loop)
            return
        self.inside = {node: self._placeholder(index, node) for index, node in enumerate(self.sources)}
        for node in self.run:
            self._copy(node)
        results = tuple(self.inside[node] for node in self.gives)
        set_data(self.graph.output(results if len(results) != 1 else results[0]), Data(Results()))

    def _fill_loop(self, loop: RowLoop) -> None:
        """Fill the graph with what a loop runs, and with the views of parameters that it takes."""
        call, attribute = self.run[0], self.run[0].all_input_nodes[0]
        body = self.program.modules[str(attribute.target)].graph
        inner = body.find_nodes(op="placeholder")
        sources = [node for node in call.args[1:] if isinstance(node, fx.Node)]
        given = [*zip(sources, inner, loop.takes, strict=True)]
        # Two equal values may have become one since, of which one is divided and the other whole.
        wanted: dict[tuple[fx.Node, Placement], fx.Node] = {
            (node, placement): like for node, like, placement in given if node in self.sources
        }
        derived = [node for node, *_ in given if node not in self.sources]
        others = {*self.sources} - {node for node, _ in wanted}
        wanted |= {(leaf, WHOLE): leaf for node in derived for leaf in self._leaves(node, set())}
        wanted |= {(node, WHOLE): node for node in self.sources if node in others}
        pairs = sorted(wanted, key=lambda pair: self.sources.index(pair[0]))
        self.sources = [node for node, _ in pairs]
        made = {pair: self._placeholder(index, wanted[pair], pair[0].name) for index, pair in enumerate(pairs)}
        self.inside = {node: place for (node, placement), place in made.items() if placement is WHOLE}
        values = {
            like: made[node, placement] if (node, placement) in made else self._copy(node)
            for node, like, placement in given
        }
        for node in body.nodes:
            if node.op == "call_function":
                values[node] = set_data(self.graph.node_copy(node, values.__getitem__), data(node))
        (ends,) = body.output_node().args
        indices = [op_of(node, Item).index for node in self.gives]
        results = tuple(values[ends[index]] for index in indices)  # type: ignore[index]
        set_data(self.graph.output(results if len(results) != 1 else results[0]), Data(Results()))
        factor = next((values[node].name for node in body.nodes if node.name == loop.factor), "")
        gives = tuple(loop.gives[index] for index in indices)
        takes = tuple(placement for _, placement in pairs)
        self.loop = replace(loop, takes=takes, gives=gives, factor=factor)

    def _placeholder(self, index: int, like: fx.Node, name: str = "") -> fx.Node:
        made = self.graph.create_node("placeholder", name or like.name, name=name or like.name)
        made.meta = dict(like.meta)
        return set_data(made, Data(Input(Kind.DATA, index), type=data(like).type))

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self.inside:
            for source in node.all_input_nodes:
                self._copy(source)
            copied = self.inside[node] = self.graph.node_copy(node, self.inside.__getitem__)
            set_data(copied, replace(data(node), replicated=""))  # equal regions are merged, wherever they are called
        return self.inside[node]

    @property
    def takes(self) -> tuple[tuple[int, int | None], ...]:
        items = {node: self._place(node, self.program.layout) for node in self.reads}
        numbers = {node: len(self.units) + index for index, node in enumerate(self.values)}
        return tuple(items[node] if node in items else (numbers[node], None) for node in self.sources)

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        if self.loop is not None:
            return {}
        names = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        return {name: self.program.modules[name] for name in names}

    def region(self, name: str) -> Region:
        return Region(name, overlapped(self.graph), self.takes, self.modules, rows=self.loop)


class _Outer:
    """The outer program under construction."""

    def __init__(self, program: Program, fuses: bool) -> None:
        self.program, self.fuses = program, fuses
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.order: dict[fx.Node, int] = {}
        self.regions: dict[str, Region] = {}
        self.equal: dict[str, Region] = {}
        self.around = common_module(unit.name for unit in program.layout.units)
        self.units = {unit.name: self._shards(unit.name) for unit in program.layout.units}
        self.names = ValueNames(program, {unit: node.name for unit, node in self.units.items()}, self.around)

    def _shards(self, unit: str) -> fx.Node:
        name = identifier(unit.removeprefix(self.around))
        node = self.graph.create_node("placeholder", name, name=name)
        return set_data(node, Data(Shards(unit)))

    def begin(self, phase: Phase) -> None:
        """Add the program's inputs: before the backward the tangents, whose names come from the forward's results."""
        outputs = [self.values.get(value) for value in self.program.results.outputs]
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first) if first else nullcontext():
            for node in self.program.nodes(Input):
                op = op_of(node, Input)
                if (op.kind is Kind.TANGENT) is (phase is Phase.BACKWARD):
                    name = free(self.names.of_tangent(op, outputs)) if op.kind is Kind.TANGENT else node.name
                    self.values[node] = self.graph.create_node("placeholder", node.target, name=name)
                    self.values[node].meta = dict(node.meta)

    def call(self, outline: _Outline, phase: Phase) -> None:
        """Append a call of the region of `outline` and the items of its results."""
        found = self._region(outline)
        args = [*(self.units[name] for name in outline.units), *(self.values[node] for node in outline.values)]
        source = " + ".join(outline.units) or next((data(node).source for node in outline.run if data(node).source), "")
        meta = Data(Call(found.name, tuple(outline.units)), phase, source=source)
        inner = source.removeprefix(self.around)
        where = self.units[outline.units[0]].name if outline.units else identifier(inner) if inner else ""
        names = self.names.of_results(phase, where, outline.gives, outline.uses)
        single = outline.gives[0] if len(outline.gives) == 1 else None
        name = names[0] if single else f"{found.name}_results"
        call = self.graph.create_node(
            "call_function", region, (found.name, *args), name=name if single is None else free(name)
        )
        if single:
            self._give(single, call, found, 0)
            meta = replace(data(call), op=meta.op, phase=phase, source=source, unit="")
        set_data(call, meta)
        for index, node in enumerate(outline.gives if single is None else ()):
            item = self.graph.create_node("call_function", operator.getitem, (call, index), name=free(names[index]))
            self._give(node, item, found, index)
            set_data(item, replace(data(item), op=Item(index), phase=phase, source=source, unit=""))

    def _give(self, node: fx.Node, result: fx.Node, found: Region, index: int) -> None:
        result.meta = dict(node.meta)
        view, storage = memory_of_result(found, index)
        set_data(result, replace(data(node), view=view, storage=storage))
        self.values[node] = result
        self.order[node] = len(self.order)

    def _region(self, outline: _Outline) -> Region:
        found = replace(outline.region(region_name(len(self.regions), outline.loop)), fuses=self.fuses)
        same = self.equal.setdefault(found.key(), found)
        self.regions[same.name] = same
        return same

    def finished(self) -> Program:
        results = self.program.results
        end = set_results(
            self.graph,
            outputs=map(self._outer, results.outputs),
            input_gradients=map(self._outer, results.input_gradients),
            gradients={name: self._outer(value) for name, value in results.gradients.items()},
        )
        assert isinstance(data(end).op, Results), "results end a program"
        return replace(self.program, graph=self.graph, regions=self.regions, modules={})

    def _outer(self, value: Any) -> Any:
        """Return the outer node for a value of the traced program that a region has computed."""
        return self.values[value] if isinstance(value, fx.Node) else value
