"""Compiled regions: one for each structure, whichever programs call it."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zcompile.engine.calls.blank_tangents import Blank, without
from zcompile.engine.cuda_graphs import Graphs
from zcompile.engine.eager_regions import fit_kernels
from zcompile.engine.region_strides import keep_strides
from zcompile.engine.row_loops import looped, turn_of
from zcompile.ir.placement import RowLoop
from zcompile.ir.region import Region
from zcompile.ir.side_effects import group_of, is_collective
from zcompile.torch_internals.dispatch import outside_modes
from zcompile.torch_internals.inductor import compile_with_inductor, inductor_code
from zcompile.torch_internals.modules import submodules_of
from zcompile.torch_internals.operators import replayed_random, saved_random
from zcompile.torch_internals.sizes import is_symbolic

Run = Callable[[list[Any]], list[Any]]
"""A compiled region: takes the values of its placeholders in a list, which it empties, and returns its results."""


@dataclass
class RegionCache:
    """Compiled regions by structure, for all programs of one model."""

    backend: str
    rank: int = 0
    graphs: Graphs | None = None
    """Captures the regions that programs want captured."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """The names of process groups by those of axes, for operators that send."""
    ready: Callable[[], None] = lambda: None
    """Returns when the backend may compile."""
    note: Callable[[str], None] = lambda _: None
    """Called with what is compiled now."""
    compiled: dict[str, Run] = field(default_factory=dict)
    seconds: float = 0.0
    """Spent compiling so far."""

    def get_all(self, found: Mapping[str, Region], blank: Set[str] = frozenset()) -> dict[str, Callable[..., Any]]:
        """All of `found` compiled, by name; those in `blank` may get a `Blank` in place of a tensor.

        Each rank starts at another region: if ranks share Inductor's cache, one finds what another has compiled. No
        rank waits for another, and one that finds nothing compiles all.
        """
        names = list(found)
        start = int(len(names) * spread(self.rank))
        for number, name in enumerate((*names[start:], *names[:start]), 1):
            if self.backend != "eager":
                self.note(f"compiling region {number} of {len(names)}")
            self._run(found[name])
        return {name: self._filled(region) if name in blank else self.get(region) for name, region in found.items()}

    def get(self, region: Region) -> Callable[..., Any]:
        """`region` as a function of a call's arguments; equal regions of any program are compiled once.

        The arguments come in a list, which is emptied: units' full parameters, then values. It returns its result, or a
        list of them. Captures are for this one program: `torch.compiler.reset()` ends graphs and programs.
        """
        run = self._run(region)
        if self.graphs is not None and region.fixed is not None:
            run = self.graphs.captured(region, run)
        return _called(region, run)

    def _filled(self, region: Region) -> Callable[..., Any]:
        """Like `get`, for a region that is compiled once more for each combination of missing tensors."""
        whole = self._run(region)
        made: dict[tuple[int, ...], Run | None] = {(): whole}

        def run(values: list[Any]) -> list[Any]:
            blanks = tuple(index for index, value in enumerate(values) if isinstance(value, Blank))
            if blanks not in made:
                left = without(region, blanks) if region.rows is None else None
                made[blanks] = None if left is None else self._run(left)
            if (of_rest := made[blanks]) is not None:
                return of_rest(_drained(values, lambda _: []) if blanks else values)
            return whole(_drained(values, lambda blank: [blank.zeros()]))

        return _called(region, run) if region.fixed is None else self.get(region)

    def _bound(self, region: Region) -> Region:
        """A region whose operators name process groups in place of axes."""
        if not any(group_of(node) in self.groups for node in region.graph.nodes if is_collective(node)):
            return region
        graph = fx.Graph()
        graph.output(graph.graph_copy(region.graph, {}))
        for node in filter(is_collective, graph.nodes):
            bound = self.groups.get(group := group_of(node), group)
            if "group" in node.kwargs:
                node.update_kwarg("group", bound)
            else:
                node.update_arg(len(node.args) - 1, bound)
        return replace(region, graph=graph)

    def _looped(self, region: Region, loop: RowLoop) -> Run:
        """A region that a loop over rows runs, compiled for a turn, and for the rows that are left of the last one."""
        return looped(loop, lambda rows: self._run(turn_of(region, rows)))

    def _run(self, region: Region) -> Run:
        key = region.key()
        if key not in self.compiled:
            started = time.perf_counter()
            self.ready()
            with outside_modes():  # a mode of the user's that compares sizes would specialize the region for them
                self.compiled[key] = (
                    self._looped(region, region.rows) if region.rows else _compile(self._bound(region), self.backend)
                )
            self.seconds += time.perf_counter() - started
        return self.compiled[key]


def spread(rank: int) -> float:
    """A different position in [0, 1) for each rank, neighbours far apart: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    return int(f"{rank:b}"[::-1], 2) / (1 << rank.bit_length())


def generated_code(region: Region) -> str:
    """Inductor's code for a region, as text; compiles it again.

    Inductor does not compile operations that save or replay the state of a random generator: then it is a line that
    says so.
    """
    if any(_is_replay(node) for node in region.graph.nodes):
        return "# It keeps or replays the state of a random number generator, and is compiled in pieces.\n"
    module = _module(region)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    keep_strides(module, inputs)
    return inductor_code(module, inputs)


def operations_of(region: Region) -> fx.GraphModule:
    """The operations of a region as `backend="eager"` runs them, for an interpreter."""
    module = _module(region)
    fit_kernels(module.graph)
    module.recompile()
    return module


def _module(region: Region) -> fx.GraphModule:
    graph = fx.Graph()
    result: Any = graph.graph_copy(region.graph, {}, return_output_node=True)
    graph.output(result[0] if isinstance(result[0], tuple) else (result[0],))
    root = torch.nn.Module()
    for name, module in region.modules.items():
        setattr(root, name, module)
    return fx.GraphModule(root, graph)


def _compile(region: Region, backend: str) -> Run:
    root = _module(region)
    if backend == "eager":
        fit_kernels(root.graph)
    return _by_inductor(root.graph, root) if backend == "inductor" else _boxed(root, root.graph)


def _called(region: Region, run: Run) -> Callable[..., Any]:
    taken, single = values_taken(region), len(region.outputs) == 1

    def call(box: list[Any]) -> Any:
        results = run(taken(box))
        return results[0] if single else list(results)

    return call


def values_taken(region: Region) -> Callable[[list[Any]], list[Any]]:
    """A function of a call's arguments, in a list that it empties; returns the values of the region's placeholders."""
    takes, units = region.takes, sorted({index for index, item in region.takes if item is not None})

    def taken(box: list[Any]) -> list[Any]:
        for unit in units:  # once for all of its parameters, as each step reads them
            box[unit] = box[unit].tensors
        values = [box[index] if item is None else box[index][item] for index, item in takes]
        box.clear()
        return values

    return taken


def _drained(values: list[Any], instead: Callable[[Blank], list[torch.Tensor]]) -> list[Any]:
    """`values`, which are emptied, with blanks replaced."""
    given: list[Any] = []
    for value in values:
        given += instead(value) if isinstance(value, Blank) else [value]
    values.clear()
    return given


def _boxed(root: torch.nn.Module, graph: fx.Graph) -> Callable[[list[Any]], Any]:
    """`graph` as Python that takes a list and empties it: each value is freed after its last use."""
    boxed = fx.Graph()
    box = boxed.placeholder("box")
    values: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        values[node] = boxed.call_function(operator.getitem, (box, index))
    boxed.call_method("clear", (box,))
    boxed.output(boxed.graph_copy(graph, values))
    run: Callable[[list[Any]], Any] = fx.GraphModule(root, boxed).forward
    return run


def _by_inductor(graph: fx.Graph, root: torch.nn.Module) -> Callable[[list[Any]], Any]:
    """`graph` compiled; Inductor gets the pieces between operations that save or replay a generator's state."""
    if not any(_is_replay(node) for node in graph.nodes):
        module = fx.GraphModule(root, graph)
        inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        keep_strides(module, inputs)
        return compile_with_inductor(module, inputs)
    outer = fx.Graph()
    values: dict[fx.Node, fx.Node] = {node: outer.node_copy(node) for node in graph.find_nodes(op="placeholder")}
    sizes = [node for node in values if is_symbolic(node.meta.get("val"))]
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for replays, piece in itertools.groupby((n for call in calls for n in _with_items(call)), _is_replay):
        if replays:
            for node in piece:
                values[node] = outer.node_copy(node, values.__getitem__)
        else:
            _append(outer, values, list(piece), sizes, root)
    outer.output(fx.map_arg(graph.output_node().args[0], values.__getitem__))
    return _boxed(root, outer)


def _append(
    outer: fx.Graph, values: dict[fx.Node, fx.Node], nodes: Sequence[fx.Node], sizes: list[fx.Node], root: Any
) -> None:
    """Append to `outer` a call of `nodes`, compiled; `values` are the known values of `outer`."""
    inside: dict[fx.Node, fx.Node] = {}
    piece, members = fx.Graph(), set(nodes)
    read = [source for node in nodes for source in node.all_input_nodes if source not in members]
    taken = list(dict.fromkeys([*sizes, *(source for source in read if source.op != "get_attr")]))
    given = [node for node in nodes if not members.issuperset(node.users)]
    for node in taken:
        inside[node] = piece.node_copy(node) if node.op == "placeholder" else piece.placeholder(node.name)
        inside[node].meta = dict(node.meta)
    for node in (*(source for source in read if source.op == "get_attr"), *nodes):
        if node not in inside:
            inside[node] = piece.node_copy(node, inside.__getitem__)
    piece.output(tuple(inside[node] for node in given))
    name = f"piece_{len(submodules_of(root))}"
    root.add_module(name, _Piece(_by_inductor(piece, root)))
    called = outer.call_module(name, ([values[node] for node in taken],))
    for index, node in enumerate(given):
        values[node] = outer.call_function(operator.getitem, (called, index))


class _Piece(torch.nn.Module):
    """A compiled function, for a graph to call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


def _with_items(node: fx.Node) -> Iterator[fx.Node]:
    """An operation and the items of its results, recursively."""
    yield node
    for user in node.users:
        if user.target is operator.getitem:
            yield from _with_items(user)


def _is_replay(node: fx.Node) -> bool:
    """True for a random operation whose generator state is saved or replayed, and for its results."""
    if node.target is operator.getitem:
        return _is_replay(node.all_input_nodes[0])
    return node.target in (saved_random, replayed_random)
