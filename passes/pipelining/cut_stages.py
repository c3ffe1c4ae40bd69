"""cut_stages: cut a traced step into the programs of pipeline stages.

    h = aten.mm.default(x, a)        # unit a               h = aten.mm.default(x, a)
    y = aten.mm.default(h, b)        # unit b       ->      return [h], ...
    gb = aten.mm.default(h_t, dy)                           ga = aten.mm.default(x_t, dh)       # dh is received
    dh = aten.mm.default(dy, b_t)
    ga = aten.mm.default(x_t, dh)                           y = aten.mm.default(h, b)           # h is received
                                                            return [y], ...
                                                            gb = aten.mm.default(h_t, dy)
                                                            dh = aten.mm.default(dy, b_t)       # and sent back

The forward is cut where units begin, in execution order. An operation of the backward belongs to the stage of the
forward operation whose gradient it computes; where gradients of several stages meet, to the first of these stages. So
values go in one direction in the forward and in the opposite direction in the backward. A value that several stages
need is sent to the nearest of them, which forwards it to the next.

Values that depend on inputs alone (masks, positions), and values cheaply derived from parameters, are computed in each
stage that needs them. A parameter that several stages read, such as a tied embedding, is kept by one of them, which
lends its value to the others. Each of these stages computes a gradient of it; the traced sum of these is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Compute, Input, Kind, Parameter
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.spelling import identifier
from zcompile.passes.assign_units import assign_units
from zcompile.passes.common.boundary import Boundary, Crossing, End, Lending, PipelineStage
from zcompile.passes.common.stage_assignment import StageAssignment, begins_of_units


def cut_stages(
    program: Program, *, starts: Sequence[str], homes: Mapping[str, int] | None = None
) -> list[PipelineStage]:
    """Cut a traced step into pipeline stages, each but the first beginning with one of the units `starts`.

    Args:
        program: The traced step.
        starts: The units with which stages begin, except for the first stage.
        homes: The stage that keeps each parameter, if already decided; None to choose it here.

    Raises:
        OptionError: a unit in `starts` is not computed with, or does not begin after the unit before it in the list.
        CaptureError: a gradient is computed in a stage that does not read its parameter, or a buffer is written in one
            stage and read in another.
    """
    cut = StageAssignment(assign_units(program), tuple(starts), homes)
    cut.check_buffers()
    return [_Part(cut, number).stage() for number in range(cut.count)]


def units_in_order(program: Program) -> list[str]:
    """Return the units of a traced step in the order in which its forward first computes with them."""
    return list(begins_of_units(assign_units(program)))


def work_of_units(program: Program, work: Callable[[fx.Node], float]) -> dict[str, float]:
    """Return, for each unit, the sum of `work` over the operations of a stage of that unit alone.

    So operations that read parameters of an earlier unit, as a tied head does, count where they run.
    """
    names, assignment = one_unit_per_stage(program)
    return {name: sum(map(work, own)) for name, own in zip(names, assignment.own, strict=True)}


def one_unit_per_stage(program: Program) -> tuple[list[str], StageAssignment]:
    """Return the units of a traced step in order, and the assignment that makes each unit a stage of its own."""
    program = assign_units(program)
    names = list(begins_of_units(program))
    return names, StageAssignment(program, tuple(names[1:]))


@dataclass
class _Part:
    """The program of one stage, under construction."""

    cut: StageAssignment
    number: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    inside: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def stage(self) -> PipelineStage:
        sent = [crossing for crossing in self.cut.crossings if crossing[1] == self.number]
        received = {node: source for node, source, to in self.cut.crossings if to == self.number}
        inputs, tangents = self._placeholders(received)
        for node in self.cut.program.graph.nodes:
            if node in self.wanted and node not in self.inside:
                self._copy(node)
        outputs, results = self._outputs([crossing for crossing in sent if crossing[2] > self.number])
        back = [crossing for crossing in sent if crossing[2] < self.number]
        gradients = {name: self._summed(parts) for name, parts in self.cut.gradients[self.number].items()}
        others = {name: gradients.pop(name) for name in list(gradients) if self.cut.homes[name] != self.number}
        set_results(
            self.graph,
            outputs=results,
            input_gradients=[*(self.inside[node] for node, _, _ in back), *others.values()],
            gradients=gradients,
        )
        given: list[End] = [Crossing(node.name, to) for node, _, to in back]
        given += map(self._borrowed, others)
        lends, collects = self._lends()
        shares = lends, collects, self.cut.written_in[self.number], self._summands()
        boundary = Boundary(inputs, tangents, outputs, tuple(given), self._draws(), *shares)
        program = self._program(gradients)
        return PipelineStage(self.number, program, boundary, self._with_lent_copies(program, lends) if lends else None)

    def _borrowed(self, name: str) -> Lending:
        """Return the lending of a parameter that another stage keeps."""
        return Lending(name, self.cut.shared[name].name, self.cut.homes[name])

    def _lends(self) -> tuple[tuple[Lending, ...], tuple[Lending, ...]]:
        """Return the parameters of this stage that others read, and those that others compute gradients of."""
        read = [
            Lending(name, node.name, reader)
            for name, node in self.cut.shared.items()
            for reader in self.cut.readers[name]
            if self.cut.homes[name] == self.number != reader
        ]
        return tuple(read), tuple(lending for lending in read if lending.param in self.cut.gradients[lending.stage])

    def _summands(self) -> dict[str, tuple[str, ...]]:
        found = self.cut.gradients[self.number]
        return {name: tuple(part.name for part in parts) for name, parts in found.items() if name in self.cut.shared}

    def _with_lent_copies(self, program: Program, lends: Sequence[Lending]) -> Program:
        """Return a program that copies the lent parameters: the originals may be released before they are sent."""
        graph, copies = fx.Graph(), list[fx.Node]()
        for node in dict.fromkeys(self.cut.shared[lending.param] for lending in lends):
            copied = graph.call_function(torch.ops.aten.clone.default, (graph.node_copy(node),))
            copied.meta = {"val": node.meta.get("val"), "partitioner_tag": "is_forward"}
            source = program.layout.unit_of(op_of(node, Parameter).name).name
            copies.append(set_data(copied, Data(Compute(), Phase.FORWARD, data(node).type, source)))
        set_results(graph, outputs=copies)
        return replace(program, graph=graph, constants={}, unused=frozenset(program.layout.trainable))

    @cached_property
    def wanted(self) -> set[fx.Node]:
        return self.cut.wanted_in(self.number)

    def _placeholders(self, received: Mapping[fx.Node, int]) -> tuple[tuple[End, ...], tuple[End, ...]]:
        """Add placeholders for parameters, inputs and received values; return the ends of inputs and of tangents."""
        ends: dict[Kind, list[End]] = {kind: [] for kind in Kind}
        number = dict.fromkeys(Kind, 0)
        for node in self.cut.program.graph.find_nodes(op="placeholder"):
            op = data(node).op
            if isinstance(op, Parameter) and node in self.wanted and self.cut.homes[op.name] != self.number:
                self.inside[node] = self._received(node, Input(Kind.DATA, len(ends[Kind.DATA])), identifier(op.name))
                ends[Kind.DATA].append(self._borrowed(op.name))
            elif node in self.wanted:
                self.inside[node] = self.graph.node_copy(node)
            if isinstance(op, Input):
                if node in self.wanted:
                    set_data(self.inside[node], replace(data(node), op=replace(op, index=len(ends[op.kind]))))
                    ends[op.kind].append(number[op.kind])
                number[op.kind] += 1
        for node, source in received.items():
            kind = Kind.DATA if source < self.number else Kind.TANGENT
            self.inside[node] = self._received(node, Input(kind, len(ends[kind])), self.cut.name_of(node))
            ends[kind].append(Crossing(node.name, source))
        return tuple(ends[Kind.DATA]), tuple(ends[Kind.TANGENT])

    def _received(self, node: fx.Node, op: Input, name: str) -> fx.Node:
        """Add a placeholder for a value of another stage; partitioners recognize its kind by its target."""
        phase = Phase.FORWARD if op.kind is Kind.DATA else Phase.BACKWARD
        prefix = "primals" if op.kind is Kind.DATA else "tangents"
        placeholder = self.graph.create_node("placeholder", f"{prefix}_{node.name}", name=name)
        placeholder.meta = {"val": node.meta.get("val"), "partitioner_tag": f"is_{phase}"}
        return set_data(placeholder, Data(op, phase, data(node).type, data(node).source))

    def _copy(self, node: fx.Node) -> None:
        self.inside[node] = copied = self.graph.node_copy(node, self.inside.__getitem__)
        set_data(copied, replace(data(node), unit=""))

    def _outputs(self, ahead: Sequence[tuple[fx.Node, int, int]]) -> tuple[tuple[End, ...], list[object]]:
        """Return the ends and values of this stage's results: results of the step, then values for later stages."""
        ends: list[End] = []
        values: list[object] = []
        for index, result in enumerate(self.cut.program.results.outputs):
            if self.cut.stage_of_result(result) == self.number:
                ends.append(index)
                values.append(self.inside[result] if isinstance(result, fx.Node) else result)
        for node, _, to in ahead:
            ends.append(Crossing(node.name, to))
            values.append(self.inside[node])
        return tuple(ends), values

    def _summed(self, parts: tuple[fx.Node, ...]) -> fx.Node:
        """Return the sum of the parts of a gradient that this stage computes."""
        first, *others = (self.inside[part] for part in parts)
        for other in others:
            added = self.graph.call_function(torch.ops.aten.add.Tensor, (first, other))
            added.meta = {**first.meta, "partitioner_tag": "is_backward"}
            first = set_data(added, replace(data(first), op=Compute(), phase=Phase.BACKWARD, view=False))
        return first

    def _draws(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of the traced step's random draws in this stage's forward and in its backward."""
        forward, backward = (
            tuple(n for n, node in enumerate(self.cut.draws) if node in self.wanted and data(node).phase is phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        return forward, backward

    def _program(self, gradients: Mapping[str, fx.Node]) -> Program:
        program = self.cut.program
        layout = program.layout.restricted({name for name, home in self.cut.homes.items() if home == self.number})
        present = {node.name for node in self.graph.find_nodes(op="placeholder")}
        return replace(
            program,
            graph=self.graph,
            layout=layout,
            constants={name: value for name, value in program.constants.items() if name in present},
            unused=frozenset(layout.trainable) - gradients.keys(),
        )
