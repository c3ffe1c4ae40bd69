"""Which pipeline stage each operation of a traced step belongs to, and which values stages exchange.

The forward is cut where units begin; everything else follows from that, as `cut_stages` describes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from zcompile.errors import CaptureError, OptionError, nearest
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Compute, Input, Item, Kind, Parameter
from zcompile.ir.parameter_views import derived_values
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_pure, is_random
from zcompile.ir.spelling import identifier
from zcompile.passes.common.boundary import written_results
from zcompile.torch_internals.aot_autograd import sequence_number


def begins_of_units(program: Program) -> dict[str, int]:
    """Return the index of the node at which each unit begins in the forward."""
    known = known_everywhere(program)
    begins: dict[str, int] = {}
    for index, node in enumerate(program.graph.nodes):
        if data(node).phase is Phase.FORWARD and data(node).unit and node not in known:
            begins.setdefault(data(node).unit, index)
    return begins


def known_everywhere(program: Program) -> set[fx.Node]:
    """Return the nodes that each stage can compute for itself: from inputs alone, or cheaply from parameters."""
    known = {node for node in program.nodes(Input) if not op_of(node, Input).mutated}
    tangents = {node for node in known if op_of(node, Input).kind is Kind.TANGENT}
    for node in program.graph.nodes:
        op = data(node).op
        pure = (
            node.op == "get_attr"
            or isinstance(op, Item)
            or (isinstance(op, Compute) and is_pure(node) and not is_random(node))
        )
        if pure and all(source in known and source not in tangents for source in node.all_input_nodes):
            known.add(node)
    return known | derived_values(program)


@dataclass(frozen=True)
class StageAssignment:
    """Which stage each operation of a traced step belongs to, and which values the stages exchange."""

    program: Program
    starts: tuple[str, ...]
    settled: Mapping[str, int] | None = None
    """The home stage of each parameter, if already chosen for another program of the model."""

    @property
    def count(self) -> int:
        return len(self.starts) + 1

    @cached_property
    def known(self) -> set[fx.Node]:
        return known_everywhere(self.program)

    @cached_property
    def stages(self) -> dict[fx.Node, int]:
        """The stage of each operation that belongs to a single stage."""
        bounds, result = self._bounds(), dict[fx.Node, int]()
        homes: dict[int | str, int] = {}
        for index, node in enumerate(self.program.graph.nodes):
            if node in self.known or not isinstance(data(node).op, (Compute, Item)):
                continue
            origin = data(node).unit if (number := sequence_number(node)) is None else number
            if data(node).phase is Phase.BACKWARD:
                result[node] = self._stage_of_backward(node, result, homes.get(origin))
                continue
            result[node] = sum(index >= bound for bound in bounds)
            if origin != "":
                homes[origin] = max(result[node], homes.get(origin, 0))
        return result

    def _bounds(self) -> list[int]:
        """Return the indices of the nodes at which stages begin, except for the first stage."""
        begins, bounds = begins_of_units(self.program), list[int]()
        for unit in self.starts:
            if unit not in begins:
                problem = f"names {unit!r}, which is not a unit that the model computes with"
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
        """The stages that read each parameter, sorted; parameters in program order, which is the same on all ranks."""
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
        in_order = (op_of(node, Parameter).name for node in self.program.nodes(Parameter))
        return {name: sorted(found[name]) for name in in_order if name in found}

    @cached_property
    def homes(self) -> dict[str, int]:
        """The stage that keeps each parameter: the first of its readers that computes a gradient of it.

        A parameter without readers is in the stage of the parameter before it.
        """
        if self.settled is not None:
            return dict(self.settled)
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
        """The parameters that are read by a stage other than their home stage."""
        nodes = {op_of(node, Parameter).name: node for node in self.program.nodes(Parameter)}
        return {name: nodes[name] for name, stages in self.readers.items() if stages != [self.homes[name]]}

    @cached_property
    def gradients(self) -> list[dict[str, tuple[fx.Node, ...]]]:
        """For each stage, the gradients of the parameters that it reads; for shared parameters, the summands."""
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
        """The additions of gradients from several stages to the same parameter, which no stage computes."""
        found = set[fx.Node]()
        for name, gradient in self.program.results.gradients.items():
            if len(self.readers.get(name, ())) > 1:
                found |= set(_sums(gradient, self.stages))
        return found

    @cached_property
    def own(self) -> list[list[fx.Node]]:
        """The operations of each stage."""
        result: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node, stage in self.stages.items():
            if node not in self.sums:
                result[stage].append(node)
        return result

    def used_in(self, stage: int) -> Iterator[fx.Node]:
        """Yield the values that `stage` reads, then its results; values may repeat."""
        for node in self.own[stage]:
            yield from node.all_input_nodes
        yield from (part for parts in self.gradients[stage].values() for part in parts)
        for result in self.program.results.outputs:
            if isinstance(result, fx.Node) and result in self.known and stage == self.count - 1:
                yield result

    @cached_property
    def crossings(self) -> list[tuple[fx.Node, int, int]]:
        """Each value that is sent, with the sending and the receiving stage, in the order in which it is computed."""
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
                result += [(node, sender, to) for sender, to in itertools.pairwise(path)]
        return result

    def name_of(self, node: fx.Node) -> str:
        """Return the name of a sent value: after the unit that computes it, or for glue the nearest unit before it."""
        before = node
        while (
            not data(before).unit and before.prev.op == "call_function" and data(before.prev).phase is data(node).phase
        ):
            before = before.prev
        suffix = "out" if data(node).phase is Phase.FORWARD else "grad_input"
        return identifier(f"{data(before).unit or node.name}_{suffix}")

    def _closed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return `nodes` and, for values that every stage computes for itself, all that they are computed from."""
        found, waiting = set[fx.Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes if node in self.known else ()
        return found

    def wanted_in(self, stage: int) -> set[fx.Node]:
        """Return all nodes of the traced step in the graph of `stage`: its operations, what they read, and buffers."""
        written = (self.inputs[number] for number in self.written_in[stage].values())
        return {*self.own[stage], *self._closed(self.used_in(stage)), *written}

    @cached_property
    def draws(self) -> list[fx.Node]:
        """The nodes that draw random numbers, in order."""
        return [node for node in self.program.graph.nodes if is_random(node)]

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the call, in order."""
        return [node for node in self.program.nodes(Input) if op_of(node, Input).kind is Kind.DATA]

    @cached_property
    def written_in(self) -> list[dict[int, int]]:
        """For each stage, a map from the number of each result that is an input's new value to that input's number."""
        found: list[dict[int, int]] = [{} for _ in range(self.count)]
        outputs = self.program.results.outputs
        for result, number in written_results(self.program).items():
            found[self.stage_of_result(outputs[result])][result] = number
        return found

    def check_buffers(self) -> None:
        """Raise CaptureError for a buffer that one stage writes to and another stage reads."""
        for writer in range(self.count):
            written = {self.inputs[number] for number in self.written_in[writer].values()}
            for reader in (stage for stage in range(self.count) if written and stage != writer):
                for node in sorted(written & self.wanted_in(reader), key=lambda node: node.name):
                    problem = f"is a buffer that stage {writer} writes to and stage {reader} reads"
                    fix = "begin the stages with other units, so that one has both: split=[...]"
                    raise CaptureError(op_of(node, Input).held or node.name, problem, fix)

    def stage_of_result(self, result: object) -> int:
        """Return the stage that returns a result of the step."""
        return self.stages.get(result, self.count - 1) if isinstance(result, fx.Node) else 0


def _sums(gradient: fx.Node, stages: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the additions that compute a gradient out of parts from several stages."""
    is_sum = gradient.target is torch.ops.aten.add.Tensor and not gradient.kwargs
    parts = [part for part in gradient.args if part in stages] if is_sum and len(gradient.users) == 1 else []
    if len(parts) == 2:
        inner = [total for part in parts for total in _sums(part, stages)]  # type: ignore[arg-type]
        if inner or len({stages[part] for part in parts}) > 1:  # type: ignore[index]
            yield from (gradient, *inner)


def _summands(gradient: fx.Node, sums: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield the operands of the additions in `sums` that compute `gradient`; without any, `gradient` itself."""
    for part in gradient.all_input_nodes if gradient in sums else ():
        yield from _summands(part, sums)
    if gradient not in sums:
        yield gradient
