"""Steps as terms: evaluates the lines of a program in order, with regions inlined.

A gather and its wait give full parameters, in the dtype that the line names; a reduction gives the mean gradient of
each parameter. Copying, storing, offloading and fetching, releasing and deferring do not change terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.layout import Param, Unit
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import memory_of_values, root_of
from zcompile.ir.tensor_type import dtype_text
from zcompile.proof.divided import HowDivided, how_divided, mean_over_ranks
from zcompile.proof.operations import AFTER, NO_VALUE, GraphTerms, Regions, UnknownOperationError
from zcompile.proof.terms import Terms

PARAMETER, UPDATED, INPUT, CONSTANT_TENSOR = "parameter", "updated parameter", "input", "tensor"
MEAN, SUM, HELD_BACK, CONTIGUOUS = "mean", "sum", "held_back", "contiguous"


@dataclass(frozen=True, slots=True)
class FullUnit:
    """The full parameters of a unit; those that compute in `dtype` are cast to it."""

    unit: Unit
    dtype: torch.dtype | None
    updated: bool = False
    """True if the optimizer has updated them in this program."""
    wire: torch.dtype | None = None
    """The dtype in which shards were sent along the outer axis, for parameters that use it: an additional cast."""


@dataclass(frozen=True, slots=True)
class SecondaryUnit:
    """The secondary shards of a unit, gathered along the outer axis."""

    full: FullUnit
    axis: str


@dataclass(frozen=True, slots=True)
class Started:
    """Asynchronous work: its result, until it is waited for."""

    gives: FullUnit | SecondaryUnit | Mapping[str, int] | int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """An offloaded activation, and the storage that it is in."""

    term: int
    place: fx.Node


Value = int | FullUnit | SecondaryUnit | Started | Offloaded | Mapping[str, int] | Sequence[int] | None
"""The value of a line: a term, gradients by parameter name, the results of a region, or a value that is not a
tensor."""


class StepTerms(GraphTerms):
    """The terms of a program's values.

    Args:
        program: The program to evaluate.
        regions: The terms of regions, and the table.
        received: The terms of values that other pipeline stages send, by message.

    Attributes:
        gradients: By parameter, the terms that are returned or used for an update as its averaged gradient, each with
            the line that reduced or accumulated it.
        replicated: The terms of values that are sharded over the ranks of an axis, by line.
        buffers: The buffers that lines write to, with their new terms, in order.
        calls: The number of random draws before each call of a region.
    """

    def __init__(self, program: Program, regions: Regions, received: Mapping[str, int] | None = None) -> None:
        super().__init__(regions.terms, program.modules)
        self.program, self.regions, self.received = program, regions, received or {}
        self.gradients: dict[str, list[tuple[fx.Node, int]]] = {}
        self.replicated: dict[fx.Node, int] = {}
        self.buffers: list[tuple[fx.Node, int]] = []
        self.calls: dict[fx.Node, int] = {}
        self.inputs: dict[ops.Kind, int] = dict.fromkeys(ops.Kind, 0)
        for node in program.graph.nodes:
            self.values[node] = self._line(node)
        for node in program.results.reduced:
            self._deliver(node)

    @property
    def written(self) -> list[int]:
        """The terms written to inputs, parameters and arguments of regions, in order."""
        return [term for node, term in self.writes if not _is_own(root_of(node))]

    def line_of(self, term: int) -> fx.Node | None:
        """Return the first line that computes a term, directly or within its region."""
        for node, value in self.values.items():
            if value == term:
                return node
            if node in self.calls and term in self._instances(node).values():
                return node
        return None

    def _line(self, node: fx.Node) -> Value:
        """Return the value of a line."""
        layout, sources = self.program.layout, node.all_input_nodes
        match data(node).op:
            case ops.Compute():
                return self.evaluate(node)
            case ops.Call() as op:
                return self._call(node, op)
            case ops.Item(index):
                results = self.values[sources[0]]
                return results[index] if isinstance(results, Sequence) else self.evaluate(node)
            case ops.Input() as op:
                return self._input(node, op)
            case ops.Parameter(name):
                type_ = data(node).type
                assert type_ is not None, "parameters are tensors"
                dtype = sent(str(type_.dtype), layout.param(name).outer_gather_dtype)
                return self.terms.make((PARAMETER, name, dtype))
            case ops.Shards(name):
                # Shards count as full parameters: another fact checks that they are gathered where they must be.
                unit = layout.unit(name)
                return FullUnit(unit, unit.compute_dtype, wire=unit.outer_gather_dtype)
            case ops.AllGather() | ops.GatherOutside() as op:
                return self._gather(op, *(self.values[source] for source in sources[:2]))
            case ops.Reduce() | ops.ReduceOutside() as op:
                return self._reduce(node, op)
            case ops.WaitGather() | ops.WaitSecondary() | ops.WaitReduce() | ops.WaitFetch() | ops.WaitReceive():
                started = self.values[sources[0]]
                return started.gives if isinstance(started, Started) else None
            case ops.Sum() | ops.SumAverages() as op:
                return self._sum(node, op)
            case ops.Plus(dtype):
                return sum_in(self.terms, dtype, *map(self.term, node.args))
            case ops.Accumulate():
                held = (self._by_parameter(node, 1) or {}).items()
                dtypes = {name: str(layout.param(name).dtype) for name, _ in held}
                return {name: self.terms.make((HELD_BACK, dtypes[name], term)) for name, term in held}
            case ops.Copy(strided):
                term = self.term(node.args[0])
                return term if strided else self.terms.make((CONTIGUOUS, term))
            case ops.Store():
                return self.term(node.args[0])
            case ops.Receive() as op if op.message in self.received:
                return Started(self.received[op.message])
            case ops.Offload():
                if isinstance(data(sources[1]).op, ops.Group):
                    self.replicated[node] = self.term(sources[0])
                return Offloaded(self.term(sources[0]), sources[1])
            case ops.Fetch():
                away = self.values[sources[0]]
                return Started(away.term) if isinstance(away, Offloaded) and away.place is sources[1] else None
        self._effect(node)
        return None

    def _effect(self, node: fx.Node) -> None:
        """Apply the effect of a line that has no value."""
        match data(node).op:
            case ops.Update():
                shards, gradients = node.all_input_nodes
                if isinstance(full := self.values[shards], FullUnit):
                    self.values[shards] = replace(full, updated=True)
                self._deliver(gradients)
            case ops.Write():
                buffer, value = node.args
                assert isinstance(buffer, fx.Node), "a buffer is an input"
                self.values[buffer] = term = self.term(value)
                self.buffers.append((buffer, term))
            case ops.RuntimeInput() | ops.Results() | ops.Send() | ops.Receive():
                pass  # the comparison of messages looks at sent values; a received value is unknown
            case op if not op.inert:
                where = "add a case to zcompile/proof/steps.py, or, if it changes no value, say inert = True in its row"
                raise UnknownOperationError(node, f"the proof does not know what {type(op).__name__} does: {where}")

    # -- values and regions ---------------------------------------------------------------------------------------

    def _input(self, node: fx.Node, op: ops.Input) -> int:
        kind, number = op.kind, self.inputs[op.kind]
        if self.program.phases == (Phase.STEP,) and kind is not ops.Kind.CONSTANT:
            which = () if op.microbatch is None else (str(op.microbatch),)
            return self.terms.make((INPUT, str(kind), str(op.index), *which))
        self.inputs[kind] += 1
        if kind is ops.Kind.CONSTANT:
            return self.terms.make((CONSTANT_TENSOR, node.name, str(id(self.program.constants.get(node.name)))))
        return self.terms.make((INPUT, str(kind), str(number)))

    def _call(self, node: fx.Node, op: ops.Call) -> Value:
        region = self.program.regions[op.region]
        how, whole = self._divided_arguments(node)
        try:
            found = self.regions.of(region, how)
        except UnknownOperationError as error:
            raise UnknownOperationError(node, f"in {region.name}: {error}") from error
        self.calls[node] = self.draws
        results, written = self.regions.call(found, whole, self.draws)
        if found.opaque:
            instances = self._instances(node)
            self.opaque += [(node, name, instances.get(term, term)) for name, term in found.opaque]
        self.draws += len(found.draws)
        for (number, _), term in zip(found.writes, written, strict=True):
            argument = node.args[1 + region.takes[number][0]]
            assert isinstance(argument, fx.Node), "regions write to values"
            self._write_argument(argument, term)
        return results[0] if len(results) == 1 else results

    def _instances(self, call: fx.Node) -> dict[int, int]:
        """Map the terms of a region to those of a call."""
        how, whole = self._divided_arguments(call)
        found = self.regions.of(self.program.regions[op_of(call, ops.Call).region], how)
        return self.regions.instances(found, whole, self.calls[call])

    def _divided_arguments(self, call: fx.Node) -> tuple[list[HowDivided | None], list[int]]:
        """Return how a call's arguments are divided, and the terms of the whole."""
        pairs = [how_divided(self.terms, term) for term in self._arguments(call)]
        return [how for how, _ in pairs], [whole for _, whole in pairs]

    def _arguments(self, call: fx.Node) -> tuple[int, ...]:
        """Return the terms of a call's arguments, one per placeholder of its region."""
        region = self.program.regions[op_of(call, ops.Call).region]
        return tuple(self._argument(call.args[1 + argument], item) for argument, item in region.takes)

    def _argument(self, given: Any, item: int | None) -> int:
        if item is None:
            return self.term(given)
        found = self.values[given]
        if not isinstance(found, FullUnit):
            return self.terms.make((NO_VALUE, given.name))
        param = found.unit.params[item]
        cast = not param.shards or param.compute_dtype is found.dtype
        dtype = param.full_dtype if cast else param.dtype
        wire = found.wire if found.wire is param.outer_gather_dtype else None
        return self.terms.make((UPDATED if found.updated else PARAMETER, param.name, sent(str(dtype), wire)))

    def _write_argument(self, argument: fx.Node, term: int) -> None:
        """Record that a region wrote to an argument, and change the terms of all values that alias it."""
        memory = memory_of_values(self.program)
        result = self.terms.keys[term][1]
        for node, before in self.values.items():
            if isinstance(before, int) and memory[node] == memory[argument]:
                self.values[node] = term if node is argument else self.terms.make((AFTER, result, before))
        self.writes.append((argument, term))

    # -- units ----------------------------------------------------------------------------------------------------

    def _gather(self, op: ops.AllGather | ops.GatherOutside, shards: Value, secondary: Value = None) -> Value:
        """Return the result of a gather; None if it is invalid.

        If the outer axis divides shards, too, full parameters are gathered from secondary shards, which must have been
        gathered after the last update of the shards.
        """
        layout = self.program.layout
        if not isinstance(shards, FullUnit):
            return None
        if isinstance(op, ops.GatherOutside):
            return Started(SecondaryUnit(replace(shards, dtype=op.dtype, wire=op.wire), op.axis))
        if not isinstance(op, ops.GatherInside):
            divided = layout.has_secondary and shards.unit.is_sharded
            return None if divided else Started(replace(shards, dtype=op.dtype))
        if not isinstance(secondary, SecondaryUnit) or [secondary.axis] != [axis.name for axis in layout.outside]:
            return None
        now = replace(shards, dtype=op.dtype, wire=secondary.full.wire)
        return Started(now) if secondary.full == now else None

    def _reduce(self, node: fx.Node, op: ops.Reduce | ops.ReduceOutside) -> Value:
        """Return the means of gradients, or, along the outer axis, of inner means, in the dtype that is sent."""
        given, layout = self._by_parameter(node, 1), self.program.layout
        if given is None:
            return None
        axis, wire = (op.axis, op.wire) if isinstance(op, ops.ReduceOutside) else (layout.sharded.name, None)
        means = {}
        for name, term in given.items():
            param = layout.param(name)
            named = op.dtype if op.dtype is param.reduction_dtype else None
            dtype = named or param.full_dtype
            means[name] = mean_of(self.terms, param, axis, term, dtype, scatter=op.scatter, wire=wire)
        return Started(means)

    def _sum(self, node: fx.Node, op: ops.Sum | ops.SumAverages) -> Value:
        """Return the sum of two sets of gradients by parameter; the second set may lack some."""
        first, second = self._by_parameter(node, 1), self._by_parameter(node, 2)
        if first is None or second is None or not second.keys() <= first.keys():
            return None
        dtype, total = op.dtype if isinstance(op, ops.Sum) else None, {**first}
        for name, term in second.items():
            cast = dtype if self.program.layout.param(name).sum_dtype is dtype else None
            total[name] = sum_in(self.terms, cast, first[name], term)
        return total

    def _by_parameter(self, node: fx.Node, index: int) -> Mapping[str, int] | None:
        """Return the gradients in argument `index` of a line by parameter: a list, or the result of a sum or a wait.

        None if the argument has no gradients, or those of another unit.
        """
        shards, given = node.args[0], node.args[index]
        assert isinstance(shards, fx.Node), "gradients belong to a unit"
        params = [param.name for param in self.program.layout.unit(op_of(shards, ops.Shards).unit).params]
        if isinstance(given, fx.Node):
            found = self.values[given]
            return found if isinstance(found, Mapping) and found.keys() <= {*params} else None
        gradients = zip(params, given, strict=True)  # type: ignore[arg-type]
        return {name: self._dense(gradient) for name, gradient in gradients if gradient is not None}

    def _dense(self, gradient: Any) -> int:
        """Return the term of a gradient, ignoring its strides, which do not matter for reductions."""
        head, *parts = self.terms.keys[term := self.term(gradient)]
        return self.mean(int(parts[0]) if head == CONTIGUOUS else term)

    def mean(self, gradient: int) -> int:
        """Return a gradient that is averaged over data-parallel ranks, among which those of a sequence are."""
        sequence = self.program.layout.sequence if self.terms.divides else None
        return gradient if sequence is None else mean_over_ranks(self.terms, gradient, sequence.size)

    def _deliver(self, gradients: fx.Node) -> None:
        """Record averaged gradients that are returned or used for an update."""
        found = self.values[gradients]
        line = gradients.all_input_nodes[0] if isinstance(data(gradients).op, ops.WaitReduce) else gradients
        for name, term in found.items() if isinstance(found, Mapping) else ():
            self.gradients.setdefault(name, []).append((line, term))


def _is_own(value: fx.Node) -> bool:
    """Return True for the result of a traced operation, to which writes have no effect outside the step."""
    made = value.all_input_nodes[0] if isinstance(data(value).op, ops.Item) else value
    return isinstance(data(made).op, ops.Compute)


def sent(how: str, wire: torch.dtype | None) -> str:
    """Return `how`, the kind of an average or a dtype, extended by the dtype in which it was sent, if given."""
    return how if wire is None else f"{how}, sent in {dtype_text(wire)}"


def mean_of(
    terms: Terms,
    param: Param,
    axis: str,
    gradient: int,
    dtype: torch.dtype,
    *,
    scatter: bool,
    wire: torch.dtype | None = None,
) -> int:
    """Return the term of a gradient's mean over the ranks along an axis, sent as `wire` if the parameter says so."""
    how = sent("scattered" if scatter and param.shards else "whole", wire if wire is param.outer_dtype else None)
    return terms.make((MEAN, axis, how, str(dtype), gradient))


def sum_of(terms: Terms, gradients: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """Return the term of the sum of gradients in order; `dtype`: the dtype of the sum, if not their own."""
    total = gradients[0]
    for number, gradient in enumerate(gradients[1:]):
        total = sum_in(terms, None if number else dtype, total, gradient)
    return total


def sum_in(terms: Terms, dtype: torch.dtype | None, first: int, second: int) -> int:
    """Return the term of the sum of two terms, with the first cast to `dtype`."""
    return terms.make((SUM, "" if dtype is None else dtype_text(dtype), first, second))
