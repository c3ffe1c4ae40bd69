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

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from zcompile._torch import sequence_number
from zcompile.errors import CaptureError, OptionError, nearest
from zcompile.ir.operation import Data, Phase, data, op_of, set_data
from zcompile.ir.ops import Compute, Input, Item, Kind, Parameter
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.program_graph import set_results
from zcompile.ir.side_effects import is_pure, is_random
from zcompile.ir.spelling import identifier
from zcompile.passes.assign_units import assign_units
from zcompile.passes.common.boundary import Boundary, Crossing, End, Lending, PipelineStage, written_results


def cut_stages(program: Program, *, starts: Sequence[str]) -> list[PipelineStage]:
    """The stages of a traced step, each but the first beginning with one of the units `starts`.

    Raises:
        OptionError: a unit is not computed with, or begins before the one that it stands behind.
        CaptureError: the backward cannot be cut: a gradient is computed where its parameter is not read; or a buffer is
            written to in another stage than it is read in.
    """
    cut = _Cut(assign_units(program), tuple(starts))
    cut.check_buffers()
    return [_Part(cut, number).stage() for number in range(cut.count)]


def units_in_order(program: Program) -> list[str]:
    """The units of a traced step in the order in which its forward computes with them first."""
    return list(_begins(assign_units(program)))


def _begins(program: Program) -> dict[str, int]:
    """Where in the forward each unit begins, by the number of the node."""
    known = known_everywhere(program)
    begins: dict[str, int] = {}
    for index, node in enumerate(program.graph.nodes):
        if data(node).phase is Phase.FORWARD and data(node).unit and node not in known:
            begins.setdefault(data(node).unit, index)
    return begins


def work_of_units(program: Program, work: Callable[[fx.Node], float]) -> dict[str, float]:
    """The sum of `work` over what is computed from where each unit begins to where the next one does, and its backward.

    So what computes with parameters of an earlier unit, as a tied head does, counts where it stands.
    """
    program = assign_units(program)
    begins = {index: unit for unit, index in _begins(program).items()}
    found, homes = dict.fromkeys(begins.values(), 0.0), dict[int, str]()
    unit = next(iter(found), "")
    for index, node in enumerate(program.graph.nodes):
        if not isinstance(data(node).op, Compute):
            continue
        number = sequence_number(node)
        if data(node).phase is Phase.FORWARD:
            unit = begins.get(index, unit)
            if number is not None:
                homes[number] = unit
        else:
            unit = unit if number is None else homes.get(number, unit)
        found[unit] = found.get(unit, 0.0) + work(node)
    return found


def known_everywhere(program: Program) -> set[fx.Node]:
    """What each stage can compute for itself: out of inputs alone, or cheaply out of parameters."""
    known = {node for node in program.nodes(Input) if not op_of(node, Input).mutated}
    tangents = {node for node in known if op_of(node, Input).kind is Kind.TANGENT}
    for node in program.graph.nodes:
        op = data(node).op
        pure = node.op == "get_attr" or isinstance(op, Item) or (isinstance(op, Compute) and _is_repeatable(node))
        if pure and all(source in known and source not in tangents for source in node.all_input_nodes):
            known.add(node)
    return known | derived_values(program)


def _is_repeatable(node: fx.Node) -> bool:
    return is_pure(node) and not is_random(node)


@dataclass(frozen=True)
class _Cut:
    """Which stage each operation of a traced step belongs to, and what the stages give each other."""

    program: Program
    starts: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.starts) + 1

    @cached_property
    def known(self) -> set[fx.Node]:
        return known_everywhere(self.program)

    @cached_property
    def stages(self) -> dict[fx.Node, int]:
        """The stage of each operation that is of one stage alone."""
        bounds, result = self._bounds(), dict[fx.Node, int]()
        homes: dict[int | str, int] = {}
        for index, node in enumerate(self.program.graph.nodes):
            if node in self.known or not isinstance(data(node).op, (Compute, Item)):
                continue
            of = data(node).unit if (number := sequence_number(node)) is None else number
            if data(node).phase is Phase.BACKWARD:
                result[node] = self._stage_of_backward(node, result, homes.get(of))
                continue
            result[node] = sum(index >= bound for bound in bounds)
            if of != "":
                homes[of] = max(result[node], homes.get(of, 0))
        return result

    def _bounds(self) -> list[int]:
        """The numbers of the nodes at which stages begin."""
        begins, bounds = _begins(self.program), list[int]()
        for unit in self.starts:
            if unit not in begins:
                problem = f"names {unit!r}, which is no unit that the model computes with"
                raise OptionError("split", problem, nearest(unit, begins))
            if begins[unit] <= (bounds[-1] if bounds else min(begins.values())):
                problem = f"has {unit!r} begin a stage, and nothing is computed between that and what stands before it"
                raise OptionError("split", problem, f"give units in the order of the forward: {', '.join(begins)}")
            bounds.append(begins[unit])
        return bounds

    def _stage_of_backward(self, node: fx.Node, stages: Mapping[fx.Node, int], home: int | None) -> int:
        given = [source for source in node.all_input_nodes if source in stages]
        backward = [stages[source] for source in given if data(source).phase is Phase.BACKWARD]
        if backward or home is not None:
            return min([*backward, *([home] if home is not None else [])])
        return max((stages[source] for source in given), default=self.count - 1)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The stages that read each parameter, in order."""
        derived, found = derived_values(self.program), dict[str, set[int]]()
        roots: dict[fx.Node, set[str]] = {}
        for node in self.program.graph.nodes:
            names = set[str]().union(*(roots.get(source, ()) for source in node.all_input_nodes))
            if isinstance(data(node).op, Parameter):
                roots[node] = {op_of(node, Parameter).name}
            elif node in derived:
                roots[node] = names
            elif node in self.stages:
                for name in names:
                    found.setdefault(name, set()).add(self.stages[node])
        return {name: sorted(stages) for name, stages in found.items()}

    @cached_property
    def homes(self) -> dict[str, int]:
        """The stage that keeps each parameter: of those that read it the first that computes a gradient of it.

        Of one that nobody reads, it is the stage of the parameter before it.
        """
        result: dict[str, int] = {}
        last, gradients = 0, self.program.results.gradients
        for param in self.program.layout.params:
            readers, gradient = self.readers.get(param.name, [last]), gradients.get(param.name)
            parts = () if gradient is None else _summands(gradient, self.sums)
            differentiated = {self.stages.get(part) for part in parts}
            last = result[param.name] = next((stage for stage in readers if stage in differentiated), readers[0])
        return result

    @cached_property
    def shared(self) -> dict[str, fx.Node]:
        """The parameters that several stages read."""
        nodes = {op_of(node, Parameter).name: node for node in self.program.nodes(Parameter)}
        return {name: nodes[name] for name, stages in self.readers.items() if len(stages) > 1}

    @cached_property
    def gradients(self) -> list[dict[str, tuple[fx.Node, ...]]]:
        """For each stage the gradients of its parameters: of one that several stages read, what is to be summed."""
        result: list[dict[str, tuple[fx.Node, ...]]] = [{} for _ in range(self.count)]
        for name, gradient in self.program.results.gradients.items():
            readers = self.readers.get(name, [])
            for part in _summands(gradient, self.sums):
                stage = self.stages.get(part, self.homes[name])
                if stage not in (readers or [stage]):
                    problem = f"has a gradient that is computed in stage {stage}, and is read in {readers}"
                    raise CaptureError(name, problem, "begin the stages with other units: split=[...]")
                result[stage][name] = (*result[stage].get(name, ()), part)
        return result

    @cached_property
    def sums(self) -> set[fx.Node]:
        """The sums of gradients of one parameter that several stages compute: no stage makes these."""
        found = set[fx.Node]()
        for name, gradient in self.program.results.gradients.items():
            if len(self.readers.get(name, ())) > 1:
                found |= set(_sums(gradient, self.stages))
        return found

    def own(self, stage: int) -> list[fx.Node]:
        """The operations of `stage`."""
        return [node for node, home in self.stages.items() if home == stage and node not in self.sums]

    def used_in(self, stage: int) -> Iterator[fx.Node]:
        """What `stage` reads, or hands back, in the order of the traced step; some of it several times."""
        for node in self.own(stage):
            yield from node.all_input_nodes
        yield from (part for parts in self.gradients[stage].values() for part in parts)
        for result in self.program.results.outputs:
            if isinstance(result, fx.Node) and result in self.known and stage == self.count - 1:
                yield result

    @cached_property
    def crossings(self) -> list[tuple[fx.Node, int, int]]:
        """What is sent, from which stage to which, in the order in which it is computed."""
        wanted: dict[fx.Node, set[int]] = {}
        for stage in range(self.count):
            for node in self._closed(self.used_in(stage)):
                if self.stages.get(node, stage) != stage:
                    wanted.setdefault(node, set()).add(stage)
        result = []
        for node in self.program.graph.nodes:
            made, stages = self.stages.get(node, 0), wanted.get(node, set())
            later = [made, *sorted(stage for stage in stages if stage > made)]
            earlier = [made, *sorted((stage for stage in stages if stage < made), reverse=True)]
            for path in (later, earlier):
                result += [(node, one, other) for one, other in itertools.pairwise(path)]
        return result

    def name_of(self, node: fx.Node) -> str:
        """What a value that is sent is called: by the unit that has computed it, or by that in front of it."""
        before = node
        while (
            not data(before).unit and before.prev.op == "call_function" and data(before.prev).phase is data(node).phase
        ):
            before = before.prev
        what = "out" if data(node).phase is Phase.FORWARD else "grad_input"
        return identifier(f"{data(before).unit or node.name}_{what}")

    def _closed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """`nodes`, and what those of them are computed from that every stage computes for itself."""
        found, waiting = set[fx.Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes if node in self.known else ()
        return found

    def wanted_in(self, stage: int) -> set[fx.Node]:
        """All that the graph of `stage` has: its operations, and what they are computed from as far as it does so."""
        written = (self.inputs[number] for number in self.written_in(stage).values())
        return {*self.own(stage), *self._closed(self.used_in(stage)), *written}

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """What the call is given, by number."""
        return [node for node in self.program.nodes(Input) if op_of(node, Input).kind is Kind.DATA]

    def written_in(self, stage: int) -> dict[int, int]:
        """By number the results that are new values of inputs, and which inputs these are."""
        outputs = self.program.results.outputs
        return {r: i for r, i in written_results(self.program).items() if self.stage_of_result(outputs[r]) == stage}

    def check_buffers(self) -> None:
        """Raise CaptureError for a buffer of which one stage would read what another has not sent."""
        for writer in range(self.count):
            written = {self.inputs[number] for number in self.written_in(writer).values()}
            for reader in (stage for stage in range(self.count) if stage != writer):
                for node in sorted(written & self.wanted_in(reader), key=lambda node: node.name):
                    problem = f"is a buffer that stage {writer} writes to and stage {reader} reads"
                    fix = "begin the stages with other units, so that one has both: split=[...]"
                    raise CaptureError(op_of(node, Input).held or node.name, problem, fix)

    def stage_of_result(self, result: object) -> int:
        """The stage that gives a result of the step."""
        return self.stages.get(result, self.count - 1) if isinstance(result, fx.Node) else 0


def _sums(gradient: fx.Node, stages: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """The sums that a gradient is made by, as far as parts of them come from several stages."""
    is_sum = gradient.target is torch.ops.aten.add.Tensor and not gradient.kwargs
    parts = [one for one in gradient.args if one in stages] if is_sum and len(gradient.users) == 1 else []
    if len(parts) == 2:
        inner = [one for part in parts for one in _sums(part, stages)]  # type: ignore[arg-type]
        if inner or len({stages[part] for part in parts}) > 1:  # type: ignore[index]
            yield from (gradient, *inner)


def _summands(gradient: fx.Node, sums: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What is summed by some of `sums`, in their order; a gradient that none of them makes is its own."""
    for part in gradient.all_input_nodes if gradient in sums else ():
        yield from _summands(part, sums)
    if gradient not in sums:
        yield gradient


@dataclass
class _Part:
    """The program of one stage, while it is made."""

    cut: _Cut
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
        shares = lends, collects, self.cut.written_in(self.number), self._summands()
        boundary = Boundary(inputs, tangents, outputs, tuple(given), self._draws(), *shares)
        program = self._program(gradients)
        return PipelineStage(self.number, program, boundary, self._lent(program, lends) if lends else None)

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

    def _lent(self, program: Program, lends: Sequence[Lending]) -> Program:
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
        drawn = [node for node in self.cut.program.graph.nodes if is_random(node)]
        forward, backward = (
            tuple(n for n, node in enumerate(drawn) if node in self.wanted and data(node).phase is phase)
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
