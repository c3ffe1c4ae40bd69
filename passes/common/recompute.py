"""Which values the backward may recompute instead of reading them, and the rewriting that recomputes them.

A *run* is a future region: consecutive operations of one unit. A value of the forward that a run of the backward reads
is either saved over the turn, or recomputed within that run from saved values.

These are never recomputed:

- values computed from another unit's parameters: that unit would be gathered once more;
- collectives in the model's own code, unless only each unit's input is saved (`collectives`): if values are chosen
  individually, ranks whose batches differ could choose differently and would deadlock;
- operations that write to their arguments, and control flow.

Views and items cost nothing: only the value that owns the memory counts.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Chunked, Compute, Input, Item, Parameter
from zcompile.ir.parameter_views import derived_values, is_view, parameters_read
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_collective, is_pure, is_random, is_wait
from zcompile.ir.tensor_type import TensorType
from zcompile.torch_internals.operators import random_state, replayed_random, saved_random
from zcompile.torch_internals.sizes import is_symbolic


@dataclass(frozen=True, slots=True)
class RegionRun:
    """A future region; `index` counts the runs of the forward, then the runs of the backward."""

    index: int
    phase: Phase
    unit: str
    nodes: Sequence[fx.Node]


def runs(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Split `nodes` into maximal runs of one unit; glue joins the run before it, or at the start the run after it.

    Deferred operations of a divided backward form runs of their own, and so does each loop over rows.
    """
    runs: list[list[fx.Node]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    current, deferred = "", False
    for node in nodes:
        if node.op == "get_attr" and any(isinstance(data(user).op, Chunked) for user in node.users):
            continue  # the graph of a loop, which becomes the region's
        if isinstance(data(node).op, Item):
            home[node] = home[node.all_input_nodes[0]]
        else:
            unit, loops = data(node).unit, isinstance(data(node).op, Chunked)
            alone = loops or (bool(runs) and isinstance(data(runs[-1][0]).op, Chunked))
            if not runs or alone or (unit and current and unit != current) or data(node).deferred is not deferred:
                runs.append([])
                deferred, current = data(node).deferred, ""
            current = unit or current
            home[node] = runs[-1]
        home[node].append(node)
    return runs


class SavedValueAnalysis:
    """The values that cross the turn from forward to backward, in a program with phases split and units assigned."""

    def __init__(self, program: Program, *, collectives: bool = False) -> None:
        self.program, self.collectives = program, collectives
        self.derived = derived_values(program)
        self.runs: list[RegionRun] = []
        for phase in program.phases:
            for nodes in runs([node for node in program.body(phase) if node not in self.derived]):
                unit = next((data(node).unit for node in nodes if data(node).unit), "")
                self.runs.append(RegionRun(len(self.runs), phase, unit, nodes))
        self.home = {node: run.index for run in self.runs for node in run.nodes}
        self._reads = {run.index: self._units_read(run) for run in self.runs}

    @property
    def backward(self) -> list[RegionRun]:
        return [run for run in self.runs if run.phase is Phase.BACKWARD]

    @cached_property
    def needs(self) -> dict[int, list[fx.Node]]:
        """For each run of the backward, the values of the forward that it reads; for views, their sources."""
        result = {}
        for run in self.backward:
            read = dict.fromkeys(v for node in run.nodes for v in node.all_input_nodes if self.crosses(v))
            result[run.index] = list(dict.fromkeys(owner for value in read for owner in self.owners(value)))
        return result

    @cached_property
    def returned(self) -> set[fx.Node]:
        """The values that the caller holds anyway, as results or as the base of results that are views."""
        return {self.owner(value) for value in self.program.results.outputs if isinstance(value, fx.Node)}

    def crosses(self, value: fx.Node) -> bool:
        """Return True for a value that the forward computes and would have to save: no input, size or derived value."""
        meta = data(value)
        computed = value.op == "call_function" and meta.phase is Phase.FORWARD
        return computed and value not in self.derived and not is_symbolic(value.meta.get("val"))

    def owner(self, value: fx.Node) -> fx.Node:
        """Return the value that owns the memory of `value`: itself, unless it is a view."""
        while self.is_view(value):
            value = value.all_input_nodes[0]
        return value

    def is_view(self, value: fx.Node) -> bool:
        """Return True for a view of another value, and for an item of an operation that returns views."""
        if isinstance(data(value).op, Item):
            return self.is_view(value.all_input_nodes[0])
        return value.op == "call_function" and is_view(value) and bool(value.all_input_nodes)

    def operation(self, value: fx.Node) -> fx.Node:
        """Return the operation that computes `value`: the node itself, or the source of an item."""
        while isinstance(data(value).op, Item):
            value = value.all_input_nodes[0]
        return value

    def sources(self, value: fx.Node) -> list[fx.Node]:
        """Return the values of the forward that computing `value` reads, looking through views to memory owners."""
        result: dict[fx.Node, None] = {}
        for source in self.operation(value).all_input_nodes:
            if self.crosses(source):
                result |= dict.fromkeys(self.sources(source) if self.is_view(source) else [source])
        return list(result)

    def owners(self, value: fx.Node) -> list[fx.Node]:
        """Return the values that must be available to read `value`: itself, or the sources of a view."""
        return self.sources(value) if self.is_view(value) else [value]

    def may_recompute(self, value: fx.Node, run: int) -> bool:
        """Return True if `value` may be recomputed within `run` of the backward."""
        operation = self.operation(value)
        read = {self.program.layout.unit_of(op_of(p, Parameter).name).name for p in self._parameters(operation)}
        communicates = self.collectives and (is_collective(operation) or is_wait(operation))
        return (communicates or is_pure(operation)) and read <= self._reads[run]

    def _parameters(self, node: fx.Node) -> list[fx.Node]:
        views = [source for source in node.all_input_nodes if source not in self.derived and self.is_view(source)]
        return [*parameters_read(node, self.derived), *(p for view in views for p in self._parameters(view))]

    def _units_read(self, run: RegionRun) -> set[str]:
        layout = self.program.layout
        read = (p for node in run.nodes for p in parameters_read(node, self.derived))
        return {layout.unit_of(op_of(p, Parameter).name).name for p in read}


def _called(node: fx.Node) -> Any:
    """Return the operation that a node calls, typed so that it can be an argument of another node."""
    return node.target


def _is_mutated(node: fx.Node) -> bool:
    op = data(node).op
    return isinstance(op, Input) and op.mutated


# -- rewriting --------------------------------------------------------------------------------------------------------


def recompute(analysis: SavedValueAnalysis, wanted: Mapping[int, Collection[str]]) -> Program:
    """Return a program whose backward recomputes `wanted`: for each run of the backward, names of forward values.

    An operation is recomputed just before the first reader of its result. Operations that then have no reader in the
    forward are removed there. A random operation saves the generator's state, and is replayed under that state.
    """
    editor = _Editor(analysis, wanted)
    for index in analysis.needs:
        editor.rewrite(index)
    _merge_equal(editor.program)
    editor.program.graph.eliminate_dead_code()
    return editor.program


def _merge_equal(program: Program) -> None:
    """Merge equal operations of a unit's backward: torch's partitioner may already recompute some of these values."""
    known: dict[Hashable, fx.Node] = {}
    for node in program.body(Phase.BACKWARD):
        meta = data(node)
        if meta.unit and not is_random(node) and (isinstance(meta.op, Item) or is_pure(node)):
            key = meta.unit, node.target, repr((node.args, node.kwargs))
            if (same := known.setdefault(key, node)) is not node:
                node.replace_all_uses_with(same)


class _Editor:
    """A copy of a program whose backward is being rewritten to recompute values."""

    def __init__(self, analysis: SavedValueAnalysis, wanted: Mapping[int, Collection[str]]) -> None:
        self.analysis, self.wanted = analysis, wanted
        self.program = analysis.program.copy()
        pairs = zip(analysis.program.graph.nodes, self.program.graph.nodes, strict=True)
        self.copies: dict[fx.Node, fx.Node] = dict(pairs)
        self.again: dict[fx.Node, fx.Node] = {}
        self.states: dict[fx.Node, fx.Node] = {}
        """Generator states, by the random operation that was run under them."""
        self.kept: dict[fx.Node, fx.Node] = {}
        """Copies of inputs that the forward overwrites."""

    def rewrite(self, index: int) -> None:
        run = self.analysis.runs[index]
        self.again = {}
        for node in run.nodes:
            for source in node.all_input_nodes:
                read = self._read(source, run, self.copies[node])
                if read is not self.copies[source]:
                    self.copies[node].replace_input_with(self.copies[source], read)

    def _read(self, value: fx.Node, run: RegionRun, before: fx.Node) -> fx.Node:
        """Return `value` as `run` reads it: recomputed before the node `before`, or the forward's."""
        derived = value in self.analysis.derived and data(value).phase is Phase.FORWARD
        wanted = self.wanted.get(run.index, ())
        again = self.analysis.crosses(value) and any(owner.name in wanted for owner in self.analysis.owners(value))
        return self._made(value, run, before) if derived or again else self.copies[value]

    def _made(self, value: fx.Node, run: RegionRun, before: fx.Node) -> fx.Node:
        """Return `value` recomputed in `run`."""
        if value not in self.again:
            read = self._made if isinstance(data(value).op, Item) else self._read
            sources = {
                source: self._kept(source, value) if _is_mutated(source) else read(source, run, before)
                for source in value.all_input_nodes
            }
            state = self._state(value) if is_random(value) else None
            with self.program.graph.inserting_before(before):
                if state:
                    made = self._replayed(value, state, sources)
                else:
                    made = self.program.graph.node_copy(value, sources.__getitem__)
            self.again[value] = set_data(made, replace(data(value), phase=Phase.BACKWARD, unit=run.unit))
        return self.again[value]

    def _kept(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a copy of an input made before the forward overwrites it, as batch normalization does."""
        if value not in self.kept:
            with self.program.graph.inserting_before(self.copies[reader]):
                made = self.program.graph.create_node(
                    "call_function", torch.ops.aten.clone.default, (self.copies[value],), name=f"{value.name}_kept"
                )
            made.meta = dict(value.meta)
            meta = data(reader)
            self.kept[value] = set_data(
                made, Data(Compute(), type=data(value).type, source=meta.source, unit=meta.unit)
            )
        return self.kept[value]

    def _replayed(self, value: fx.Node, state: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((value.args, value.kwargs), sources.__getitem__)
        made = self.program.graph.create_node(
            "call_function", replayed_random, (state, _called(value), *args), kwargs, name=f"{value.name}_again"
        )
        made.meta = dict(value.meta)
        return made

    def _state(self, value: fx.Node) -> fx.Node:
        """Return the generator's state before the forward draws `value`; the forward now returns it with the value."""
        if value not in self.states:
            copied, graph = self.copies[value], self.program.graph
            with graph.inserting_before(copied):
                pair = graph.create_node(
                    "call_function",
                    saved_random,
                    (_called(value), *copied.args),
                    copied.kwargs,
                    name=f"{value.name}_run",
                )
                state = graph.create_node("call_function", operator.getitem, (pair, 0), name=f"{value.name}_state")
                result = graph.create_node("call_function", operator.getitem, (pair, 1), name=f"{value.name}_drawn")
            meta = data(value)
            given = random_state(value.meta["val"])
            pair.meta["val"], state.meta["val"] = (given, value.meta["val"]), given
            result.meta = dict(copied.meta)
            set_data(pair, replace(meta, op=Compute(), type=None))
            set_data(state, replace(meta, op=Item(0), type=TensorType.of(given)))
            set_data(result, replace(meta, op=Item(1)))
            copied.replace_all_uses_with(result)
            graph.erase_node(copied)
            self.copies[value], self.states[value] = result, state
        return self.states[value]
