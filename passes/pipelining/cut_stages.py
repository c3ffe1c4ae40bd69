"""cut_stages: cut a traced step into the programs of pipeline stages.

    h = aten.mm.default(x, a)        # unit a               h = aten.mm.default(x, a)
    y = aten.mm.default(h, b)        # unit b       ->      return [h], ...
    gb = aten.mm.default(h_t, dy)                           ga = aten.mm.default(x_t, dh)       # dh is received
    dh = aten.mm.default(dy, b_t)
    ga = aten.mm.default(x_t, dh)                           y = aten.mm.default(h, b)           # h is received
                                                            return [y], ...
                                                            gb = aten.mm.default(h_t, dy)
                                                            dh = aten.mm.default(dy, b_t)       # and sent back

The forward is cut where units begin, in the order in which it runs. An operation of the backward belongs to the stage
of the forward's operation whose gradient it computes; where gradients of several stages meet, to the first of these.
So values go in one direction in the forward, and in the other one in the backward. What several stages need is sent to
the next that needs it, and by that on to the one behind.

What follows from the inputs alone (masks, positions), and what is cheaply derived from parameters, is computed in each
stage that needs it. A parameter that several stages read, such as a tied embedding, is kept by one of them, which lends
the others its value; it has a gradient in each of them: their sum is taken apart.
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
    """The stages of a traced step, each but the first beginning with one of the units `starts`.

    Args:
        program: The traced step.
        starts: The units with which stages begin, but for the first one.
        homes: The stage that keeps each parameter, where that is settled already; None to choose it.

    Raises:
        OptionError: a unit is not computed with, or begins before the one that it stands behind.
        CaptureError: the backward cannot be cut: a gradient is computed where its parameter is not read; or a buffer is
            written to in another stage than it is read in.
    """
    cut = StageAssignment(assign_units(program), tuple(starts), homes)
    cut.check_buffers()
    return [_Part(cut, number).stage() for number in range(cut.count)]


def units_in_order(program: Program) -> list[str]:
    """The units of a traced step in the order in which its forward computes with them first."""
    return list(begins_of_units(assign_units(program)))


def work_of_units(program: Program, work: Callable[[fx.Node], float]) -> dict[str, float]:
    """The sum of `work` over what a stage of each unit alone would compute.

    So what computes with parameters of an earlier unit, as a tied head does, counts where it stands.
    """
    names, assignment = one_unit_per_stage(program)
    return {name: sum(map(work, own)) for name, own in zip(names, assignment.own, strict=True)}


def one_unit_per_stage(program: Program) -> tuple[list[str], StageAssignment]:
    """The units of a traced step in order, and what each of them computes if it is a stage of its own."""
    program = assign_units(program)
    names = list(begins_of_units(program))
    return names, StageAssignment(program, tuple(names[1:]))


@dataclass
class _Part:
    """The program of one stage, while it is made."""

    cut: StageAssignment
    number: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    inside: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def stage(self) -> PipelineStage:
        sent = [one for one in self.cut.crossings if one[1] == self.number]
        received = {node: source for node, source, to in self.cut.crossings if to == self.number}
        inputs, tangents = self._placeholders(received)
        for node in self.cut.program.graph.nodes:
            if node in self.wanted and node not in self.inside:
                self._copy(node)
        outputs, results = self._outputs([one for one in sent if one[2] > self.number])
        back = [one for one in sent if one[2] < self.number]
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
        """A parameter that another stage keeps."""
        return Lending(name, self.cut.shared[name].name, self.cut.homes[name])

    def _lends(self) -> tuple[tuple[Lending, ...], tuple[Lending, ...]]:
        """The parameters of this stage that others read; of these stages, those that compute gradients of them."""
        read = [
            Lending(name, node.name, reader)
            for name, node in self.cut.shared.items()
            for reader in self.cut.readers[name]
            if self.cut.homes[name] == self.number != reader
        ]
        return tuple(read), tuple(one for one in read if one.param in self.cut.gradients[one.stage])

    def _summands(self) -> dict[str, tuple[str, ...]]:
        found = self.cut.gradients[self.number]
        return {name: tuple(part.name for part in parts) for name, parts in found.items() if name in self.cut.shared}

    def _with_lent_copies(self, program: Program, lends: Sequence[Lending]) -> Program:
        """What gives copies of the parameters that this stage lends: theirs may be released before they have gone."""
        graph, copies = fx.Graph(), list[fx.Node]()
        for node in dict.fromkeys(self.cut.shared[one.param] for one in lends):
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
        """Parameters, the step's own inputs, and what is received: by kind, where each comes from."""
        found: dict[Kind, list[End]] = {kind: [] for kind in Kind}
        number = dict.fromkeys(Kind, 0)
        for node in self.cut.program.graph.find_nodes(op="placeholder"):
            op = data(node).op
            if isinstance(op, Parameter) and node in self.wanted and self.cut.homes[op.name] != self.number:
                self.inside[node] = self._received(node, Input(Kind.DATA, len(found[Kind.DATA])), identifier(op.name))
                found[Kind.DATA].append(self._borrowed(op.name))
            elif node in self.wanted:
                self.inside[node] = self.graph.node_copy(node)
            if isinstance(op, Input):
                if node in self.wanted:
                    set_data(self.inside[node], replace(data(node), op=replace(op, index=len(found[op.kind]))))
                    found[op.kind].append(number[op.kind])
                number[op.kind] += 1
        for node, source in received.items():
            kind = Kind.DATA if source < self.number else Kind.TANGENT
            self.inside[node] = self._received(node, Input(kind, len(found[kind])), self.cut.name_of(node))
            found[kind].append(Crossing(node.name, source))
        return tuple(found[Kind.DATA]), tuple(found[Kind.TANGENT])

    def _received(self, node: fx.Node, op: Input, name: str) -> fx.Node:
        """A placeholder for what another stage computes; partitioners know what it is by its target."""
        phase = Phase.FORWARD if op.kind is Kind.DATA else Phase.BACKWARD
        what = "primals" if op.kind is Kind.DATA else "tangents"
        placeholder = self.graph.create_node("placeholder", f"{what}_{node.name}", name=name)
        placeholder.meta = {"val": node.meta.get("val"), "partitioner_tag": f"is_{phase}"}
        return set_data(placeholder, Data(op, phase, data(node).type, data(node).source))

    def _copy(self, node: fx.Node) -> None:
        self.inside[node] = copied = self.graph.node_copy(node, self.inside.__getitem__)
        set_data(copied, replace(data(node), unit=""))

    def _outputs(self, ahead: Sequence[tuple[fx.Node, int, int]]) -> tuple[tuple[End, ...], list[object]]:
        """The results of the step that this stage has, and behind them what it sends to later ones."""
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
        """The sum of the parts of a gradient that this stage computes."""
        first, *others = (self.inside[part] for part in parts)
        for other in others:
            added = self.graph.call_function(torch.ops.aten.add.Tensor, (first, other))
            added.meta = {**first.meta, "partitioner_tag": "is_backward"}
            first = set_data(added, replace(data(first), op=Compute(), phase=Phase.BACKWARD, view=False))
        return first

    def _draws(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of the traced step's draws that this stage makes, in the forward and in the backward."""
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
