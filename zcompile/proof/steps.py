"""Steps as terms: the lines of a program evaluated in their order, its regions inlined.

A gather and its wait give whole parameters, in the dtype that the line names; a reduction gives, for each parameter,
the mean of its gradient. Copying, storing, moving away and fetching, releasing and deferring leave terms as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.layout import Layout, Param, Unit
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import memory_of_values, root_of
from zcompile.ir.tensor_type import dtype_text
from zcompile.proof.operations import AFTER, OperationTerms, Regions, UnknownOperationError, draw
from zcompile.proof.terms import Terms

PARAMETER, UPDATED, INPUT, CONSTANT_TENSOR = "parameter", "updated parameter", "input", "tensor"
MEAN, SUM, HELD_BACK, CONTIGUOUS, NO_VALUE = "mean", "sum", "held_back", "contiguous", "no value"


@dataclass(frozen=True, slots=True)
class FullUnit:
    """Whole parameters of a unit; those that are computed with in `dtype` are cast to it."""

    unit: Unit
    dtype: torch.dtype | None
    updated: bool = False
    """True if the optimizer has stepped for them before."""
    wire: torch.dtype | None = None
    """In which their shards have travelled outside, of those that do: that is one more cast."""


@dataclass(frozen=True, slots=True)
class SecondaryUnit:
    """Secondary shards of a unit: what ranks at one place outside have of it, once they have sent it to each other."""

    full: FullUnit
    axis: str


@dataclass(frozen=True, slots=True)
class Started:
    """What a line has started, until it is waited for."""

    gives: FullUnit | SecondaryUnit | Mapping[str, int] | int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """An activation that is elsewhere."""

    term: int
    place: fx.Node


Value = int | FullUnit | SecondaryUnit | Started | Offloaded | Mapping[str, int] | Sequence[int] | None
"""What a line gives: a term, averaged gradients by the names of their parameters, the results of a region, or what is
no tensor yet."""


@dataclass
class StepTerms:
    """The terms of a program's values.

    Attributes:
        program: What is evaluated.
        regions: The terms of regions, and the table.
        values: What each line gives.
        gradients: By parameter the terms that are returned, or used for an update, as its averaged gradient, each with
            the line that has reduced it, or held it back.
        writes: What inputs, parameters and arguments of regions hold once they are written to, in order.
        replicated: Values of which each rank of an axis keeps a shard, by line.
        draws: How many random draws there are.
        calls: The draws before each call of a region.
        written: The buffers that lines write to, with their new terms, in order.
        opaque: What operations give that may do more than their schema says, with the line and the name.
        received: What other pipeline stages send, by the message.
    """

    program: Program
    regions: Regions
    received: Mapping[str, int] = field(default_factory=dict)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    gradients: dict[str, list[tuple[fx.Node, int]]] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)
    replicated: dict[fx.Node, int] = field(default_factory=dict)
    draws: int = 0
    calls: dict[fx.Node, int] = field(default_factory=dict)
    written: list[tuple[fx.Node, int]] = field(default_factory=list)
    opaque: list[tuple[fx.Node, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.terms = self.regions.terms
        self.inputs: dict[ops.Kind, int] = dict.fromkeys(ops.Kind, 0)
        self.flat = OperationTerms(self.terms, self._draw, self.program.modules, self.values)  # type: ignore[arg-type]
        for node in self.program.graph.nodes:
            self.values[node] = _EVALUATORS[type(data(node).op)](self, node)
        self.opaque += [(node, node.name, term) for node, term in self.flat.opaque]
        self.writes = [term for node, term in self.flat.writes if not _is_own(root_of(node))]
        for node in self.program.results.reduced:
            self.deliver(node)

    def term(self, value: Any) -> int:
        """The term of what a line, or the end of the program, is given."""
        found = self.values[value] if isinstance(value, fx.Node) else self.flat.argument(value)
        return found if isinstance(found, int) else self.terms.make((NO_VALUE, value.name))

    def arguments(self, call: fx.Node) -> tuple[int, ...]:
        """The terms of what a region is given in a call, by its placeholders."""
        region = self.program.regions[op_of(call, ops.Call).region]
        return tuple(self._argument(call.args[1 + argument], item) for argument, item in region.takes)

    def line_of(self, term: int) -> fx.Node | None:
        """The first line that computes a term, itself or within its region."""
        for node, value in self.values.items():
            if value == term:
                return node
            if node in self.calls:
                found = self.regions.of(self.program.regions[op_of(node, ops.Call).region])
                if term in self.regions.instances(found, self.arguments(node), self.calls[node]).values():
                    return node
        return None

    def write(self, argument: fx.Node, term: int) -> None:
        """Note that a region has written to an argument; from here on all that show its memory read otherwise."""
        memory = memory_of_values(self.program)
        result = self.terms.keys[term][1]
        for node, shown in self.values.items():
            if isinstance(shown, int) and memory[node] == memory[argument]:
                self.values[node] = term if node is argument else self.terms.make((AFTER, result, shown))
        self.flat.writes.append((argument, term))

    def deliver(self, gradients: fx.Node) -> None:
        """Note averaged gradients that are returned, or used for an update."""
        found = self.values[gradients]
        line = gradients.all_input_nodes[0] if isinstance(data(gradients).op, ops.WaitReduce) else gradients
        for name, term in found.items() if isinstance(found, Mapping) else ():
            self.gradients.setdefault(name, []).append((line, term))

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

    def _draw(self) -> int:
        self.draws += 1
        return draw(self.terms, self.draws - 1)


def _is_own(value: fx.Node) -> bool:
    """True for what a traced operation gives: what is written to it ends with the step."""
    made = value.all_input_nodes[0] if isinstance(data(value).op, ops.Item) else value
    return isinstance(data(made).op, ops.Compute)


def _input(step: StepTerms, node: fx.Node) -> Value:
    op = op_of(node, ops.Input)
    kind, number = op.kind, step.inputs[op.kind]
    if step.program.phases == (Phase.STEP,) and kind is not ops.Kind.CONSTANT:
        which = () if op.microbatch is None else (str(op.microbatch),)
        return step.terms.make((INPUT, str(kind), str(op.index), *which))
    step.inputs[kind] += 1
    if kind is ops.Kind.CONSTANT:
        return step.terms.make((CONSTANT_TENSOR, node.name, str(id(step.program.constants.get(node.name)))))
    return step.terms.make((INPUT, str(kind), str(number)))


def _parameter(step: StepTerms, node: fx.Node) -> Value:
    type_ = data(node).type
    assert type_ is not None, "parameters are tensors"
    param = step.program.layout.param(op_of(node, ops.Parameter).name)
    return step.terms.make((PARAMETER, param.name, sent(str(type_.dtype), param.outer_gather_dtype)))


def _shards(step: StepTerms, node: fx.Node) -> Value:
    # Read as they are where nothing has to be gathered, and until it is: a fact says when that has to be done.
    unit = step.program.layout.unit(op_of(node, ops.Shards).unit)
    return FullUnit(unit, unit.compute_dtype, wire=unit.outer_gather_dtype)


def _no_value(step: StepTerms, node: fx.Node) -> Value:
    return None


def _operation(step: StepTerms, node: fx.Node) -> Value:
    step.flat.evaluate((node,))
    return step.values[node]


def _item(step: StepTerms, node: fx.Node) -> Value:
    results = step.values[node.all_input_nodes[0]]
    if not isinstance(results, Sequence):
        return _operation(step, node)
    return results[op_of(node, ops.Item).index]


def _call(step: StepTerms, node: fx.Node) -> Value:
    region = step.program.regions[op_of(node, ops.Call).region]
    try:
        found = step.regions.of(region)
    except UnknownOperationError as error:
        raise UnknownOperationError(node, f"in {region.name}: {error}") from error
    step.calls[node] = step.draws
    results, written = step.regions.call(found, step.arguments(node), step.draws)
    if found.opaque:
        instances = step.regions.instances(found, step.arguments(node), step.draws)
        step.opaque += [(node, name, instances.get(term, term)) for name, term in found.opaque]
    step.draws += len(found.draws)
    for (number, _), term in zip(found.writes, written, strict=True):
        argument = node.args[1 + step.program.regions[op_of(node, ops.Call).region].takes[number][0]]
        assert isinstance(argument, fx.Node), "regions write to values"
        step.write(argument, term)
    return results[0] if len(results) == 1 else results


def _all_gather(step: StepTerms, node: fx.Node) -> Value:
    """Of primary shards that are divided outside, too, it gives no whole parameters."""
    shards = step.values[node.all_input_nodes[0]]
    if not isinstance(shards, FullUnit) or (step.program.layout.has_secondary and shards.unit.is_sharded):
        return None
    return Started(replace(shards, dtype=op_of(node, ops.AllGather).dtype))


def _gather_outside(step: StepTerms, node: fx.Node) -> Value:
    op, shards = op_of(node, ops.GatherOutside), step.values[node.all_input_nodes[0]]
    if not isinstance(shards, FullUnit):
        return None
    return Started(SecondaryUnit(replace(shards, dtype=op.dtype, wire=op.wire), op.axis))


def _gather_inside(step: StepTerms, node: fx.Node) -> Value:
    """Whole parameters, as they were when they were sent outside: of shards that an update has changed since, none."""
    shards, secondary = (step.values[given] for given in node.all_input_nodes[:2])  # behind them the arena
    outer, dtype = step.program.layout.replicated, op_of(node, ops.GatherInside).dtype
    if not isinstance(secondary, SecondaryUnit) or not isinstance(shards, FullUnit):
        return None
    now = replace(shards, dtype=dtype, wire=secondary.full.wire)
    fresh = secondary.full == now and outer is not None and secondary.axis == outer.name
    return Started(secondary.full) if fresh else None


def _wait(step: StepTerms, node: fx.Node) -> Value:
    started = step.values[node.all_input_nodes[0]]
    return started.gives if isinstance(started, Started) else None


def _reduce(step: StepTerms, node: fx.Node) -> Value:
    """The means of gradients in the dtype in which they are sent; what was held back before is added to any."""
    op, axis = op_of(node, ops.Reduce), step.program.layout.sharded
    result = {}
    for param, gradient in _given(step, node):
        how = "scattered" if op.scatter and param.shards else "whole"
        result[param.name] = _mean(step, op, axis.name, param, how, gradient)
    return Started(result)


def _reduce_outside(step: StepTerms, node: fx.Node) -> Value:
    """The means outside of what are means inside of the same unit already; of what is none nothing."""
    op, (shards, found) = op_of(node, ops.ReduceOutside), (step.values[given] for given in node.all_input_nodes[:2])
    if not isinstance(found, Mapping) or not isinstance(shards, FullUnit):
        return None
    params = {param.name: param for param in shards.unit.params}
    if not found.keys() <= params.keys():
        return None
    means = {}
    for name, term in found.items():
        scattered = op.scatter and bool(params[name].shards)
        how = sent("scattered" if scattered else "whole", op.wire if op.wire is params[name].outer_dtype else None)
        means[name] = _mean(step, op, op.axis, params[name], how, term)
    return Started(means)


def sent(how: str, wire: torch.dtype | None) -> str:
    """How an average is made, or the dtype of a parameter, of what travels as `wire`, if that is named."""
    return how if wire is None else f"{how}, sent in {dtype_text(wire)}"


def _mean(step: StepTerms, op: ops.Averaging, axis: str, param: Param, how: str, gradient: int) -> int:
    sent = op.dtype if param.reduction_dtype is op.dtype else None
    return step.terms.make((MEAN, axis, how, str(sent or param.full_dtype), gradient))


def _sum(step: StepTerms, node: fx.Node) -> Value:
    """For each parameter of a unit its gradients, added in order; what is added may lack some."""
    shards, *given = node.args
    assert isinstance(shards, fx.Node), "a sum is one of a unit"
    first, second = (_by_parameter(step, shards, one) for one in given)
    if first is None or second is None or not second.keys() <= first.keys():
        return None
    op = data(node).op
    dtype = op.dtype if isinstance(op, ops.Sum) else None
    params = step.program.layout.unit(op_of(shards, ops.Shards).unit).params
    casts = {param.name: dtype if param.sum_dtype is dtype else None for param in params}
    return {**first, **{name: sum_in(step.terms, casts[name], first[name], term) for name, term in second.items()}}


def _plus(step: StepTerms, node: fx.Node) -> Value:
    first, second = map(step.term, node.args)
    return sum_in(step.terms, op_of(node, ops.Plus).dtype, first, second)


def _by_parameter(step: StepTerms, shards: fx.Node, given: Any) -> Mapping[str, int] | None:
    """Gradients of a unit by parameter: those in a list, or what a sum or a wait gives."""
    if isinstance(given, fx.Node):
        found = step.values[given]
        return found if isinstance(found, Mapping) else None
    params = step.program.layout.unit(op_of(shards, ops.Shards).unit).params
    pairs = zip(params, given, strict=True)
    return {param.name: _dense(step, gradient) for param, gradient in pairs if gradient is not None}


def sum_of(terms: Terms, gradients: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """The sum of gradients of the micro-batches, in their order, and in `dtype`, if not in their own."""
    total = gradients[0]
    for number, gradient in enumerate(gradients[1:]):
        total = sum_in(terms, None if number else dtype, total, gradient)
    return total


def sum_in(terms: Terms, dtype: torch.dtype | None, one: int, other: int) -> int:
    """The sum of two, of which the first one is cast to `dtype` before."""
    return terms.make((SUM, "" if dtype is None else dtype_text(dtype), one, other))


def average_of(terms: Terms, layout: Layout, param: Param, gradient: int) -> int:
    """What the ranks' averaging makes of a gradient."""
    return outside_of(terms, layout, param, inside_of(terms, layout, param, gradient))


def inside_of(terms: Terms, layout: Layout, param: Param, gradient: int) -> int:
    """What averaging over the ranks that shard makes of a gradient."""
    how = "scattered" if layout.stage.optimizer_sharded and param.shards else "whole"
    return terms.make((MEAN, layout.sharded.name, how, str(param.reduce_dtype), gradient))


def outside_of(terms: Terms, layout: Layout, param: Param, average: int) -> int:
    """What averaging over replicas, where there are any, makes of an average inside."""
    if layout.replicated is None:
        return average
    how = sent("scattered" if layout.has_secondary and param.shards else "whole", param.outer_dtype)
    return terms.make((MEAN, layout.replicated.name, how, str(param.reduce_dtype), average))


def _receive(step: StepTerms, node: fx.Node) -> Value:
    term = step.received.get(op_of(node, ops.Receive).message)
    return None if term is None else Started(term)


def _accumulate(step: StepTerms, node: fx.Node) -> Value:
    return {param.name: step.terms.make((HELD_BACK, str(param.dtype), term)) for param, term in _given(step, node)}


def _given(step: StepTerms, node: fx.Node) -> list[tuple[Any, int]]:
    """The parameters of a unit that a line is given gradients of, with these."""
    shards, gradients = node.args[:2]
    assert isinstance(shards, fx.Node), "a reduction is one of a unit"
    if isinstance(gradients, fx.Node):
        found, unit = step.values[gradients], step.program.layout.unit(op_of(shards, ops.Shards).unit)
        named = found if isinstance(found, Mapping) else {}
        return [(param, named[param.name]) for param in unit.params if param.name in named]
    params = step.program.layout.unit(op_of(shards, ops.Shards).unit).params
    pairs = zip(params, gradients, strict=True)  # type: ignore[arg-type]
    return [(param, _dense(step, gradient)) for param, gradient in pairs if gradient is not None]


def _dense(step: StepTerms, gradient: Any) -> int:
    """The term of a gradient; how it is laid out does not matter to who sends it."""
    head, *parts = step.terms.keys[term := step.term(gradient)]
    return int(parts[0]) if head == CONTIGUOUS else term


def _update(step: StepTerms, node: fx.Node) -> Value:
    shards, gradients = node.all_input_nodes
    full = step.values[shards]
    if isinstance(full, FullUnit):
        step.values[shards] = replace(full, updated=True)
    step.deliver(gradients)
    return None


def _copy(step: StepTerms, node: fx.Node) -> Value:
    term = step.term(node.args[0])
    return term if op_of(node, ops.Copy).strided else step.terms.make((CONTIGUOUS, term))


def _write(step: StepTerms, node: fx.Node) -> Value:
    buffer, value = node.args
    assert isinstance(buffer, fx.Node), "a buffer is an input"
    step.values[buffer] = term = step.term(value)
    step.written.append((buffer, term))
    return None


def _store(step: StepTerms, node: fx.Node) -> Value:
    return step.term(node.args[0])


def _offload(step: StepTerms, node: fx.Node) -> Value:
    value, place = node.all_input_nodes
    if isinstance(data(place).op, ops.Group):
        step.replicated[node] = step.term(value)
    return Offloaded(step.term(value), place)


def _fetch(step: StepTerms, node: fx.Node) -> Value:
    offloaded, place = step.values[node.all_input_nodes[0]], node.all_input_nodes[1]
    return Started(offloaded.term) if isinstance(offloaded, Offloaded) and offloaded.place is place else None


_EVALUATORS: Mapping[type, Callable[[StepTerms, fx.Node], Value]] = {
    ops.Input: _input,
    ops.Parameter: _parameter,
    ops.Shards: _shards,
    **dict.fromkeys(ops.RUNTIME_INPUTS, _no_value),
    ops.Compute: _operation,
    ops.Item: _item,
    ops.Call: _call,
    ops.AllGather: _all_gather,
    ops.GatherOutside: _gather_outside,
    ops.GatherInside: _gather_inside,
    ops.GatherAhead: _no_value,
    ops.WaitGather: _wait,
    ops.WaitSecondary: _wait,
    ops.WaitReduce: _wait,
    ops.WaitFetch: _wait,
    ops.Reduce: _reduce,
    ops.ReduceOutside: _reduce_outside,
    ops.Release: _no_value,
    ops.Update: _update,
    ops.Accumulate: _accumulate,
    ops.Copy: _copy,
    ops.Write: _write,
    ops.Store: _store,
    ops.Offload: _offload,
    ops.Fetch: _fetch,
    ops.Sum: _sum,
    ops.SumAverages: _sum,
    ops.Plus: _plus,
    ops.Send: _no_value,
    ops.WaitSend: _no_value,
    ops.Receive: _receive,
    ops.WaitReceive: _wait,
    ops.Results: _no_value,
}
