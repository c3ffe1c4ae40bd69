"""The fact that a program computes the traced step: translation validation by terms.

Each program is compared with the traced step, not with the program before the last pass (Pnueli, Siegel and Singerman,
"Translation Validation", TACAS 1998): its results, the gradients of its inputs, the mean gradient of each parameter
that has one, its writes to inputs, and the number of its random draws. Claims that passes attach to a program (which
parameters are unused or frozen, which values are the same on all ranks) are derived from the traced step again.

A rank of a pipeline computes its part of a step, for every micro-batch:

    m0_h_recv = recv(pp, "f32[8, 64]", source=0, message="m0_h")      # what was traced as h, of micro-batch 0
    m0_h = wait(m0_h_recv)
    m0_y = region_1(b, m0_h)
    m0_dh_sent = send(m0_dh, pp, to=0, message="m0_dh")               # must be what was traced as dh

The step was traced once, with one micro-batch. A received value is assumed to be the value that the message names; a
sent value must be it. So if this holds for all ranks, and their messages fit together without deadlock
(`zcompile.proof.ranks`), together they compute the traced step. Summed over micro-batches, in order, are averages over
the sharding ranks under stages 2 and 3, else local gradients, in the dtype in which they are averaged. The sum is then
averaged over the remaining ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import fx

from zcompile.errors import ProofError
from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.layout import Layout, Param
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Communication, Input, Kind, Parameter, Receive, Send
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import shared_results
from zcompile.ir.side_effects import changes_division, group_of, is_collective, is_opaque
from zcompile.ir.spelling import counted
from zcompile.proof.operations import Regions, UnknownOperationError
from zcompile.proof.steps import HELD_BACK, INPUT, StepTerms, Value, mean_of, sum_of
from zcompile.proof.terms import CONSTANT, DRAW, ITEM, LIST, Key, Rule, Terms, parted, term_text
from zcompile.torch_internals.operators import OpOverload, writes_arguments

Compared = tuple[str, fx.Node | None, int, int]
"""A comparison: what is compared, the line that computes it, the term found, and the traced term."""


Values = Mapping[int, int]
"""A map from terms of the traced step to terms for one micro-batch."""


@dataclass(frozen=True)
class TracedTerms:
    """A traced step and its terms under some rules; computed once for all programs that are compared with it."""

    traced: Program
    rules: tuple[Rule, ...] = ()

    @property
    def step(self) -> StepTerms:
        return self._evaluated[0]

    @property
    def table(self) -> Terms:
        """The table of terms, which includes those of all programs that are compared with the step."""
        return self.step.terms

    @property
    def count(self) -> int:
        """The number of terms of the traced step, which are the first ones in the table."""
        return self._evaluated[1]

    @cached_property
    def _evaluated(self) -> tuple[StepTerms, int]:
        # The step of a pipeline is divided before it is cut: its stages are given parts.
        divides = not any(map(changes_division, self.traced.graph.nodes))
        step = StepTerms(self.traced, Regions(Terms(self.rules, divides=divides)))
        return step, len(step.terms.keys)

    @cached_property
    def marked(self) -> frozenset[int]:
        """Terms that are the same on all tensor-parallel ranks: see `marked`."""
        return marked(self.traced, self.step.values)

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of inputs, by term."""
        values = ((node, self.step.values[node]) for node in self.traced.nodes(Input))
        return {term: node.name for node, term in values if isinstance(term, int)}

    @cached_property
    def shared(self) -> Sequence[tuple[bool, int] | None]:
        """What each result shares memory with."""
        return shared_results(self.traced)


@dataclass(frozen=True)
class ExpectedValues:
    """The values that programs made from a traced step must compute.

    Attributes:
        terms: The terms of the traced step.
        layout: The layout that programs must have.
    """

    terms: TracedTerms
    layout: Layout
    claim: ClassVar[str] = "values as they were traced"

    def modulo(self, rules: Sequence[Rule]) -> Self:
        """Return the same expectation with these rules added."""
        every = tuple(dict.fromkeys((*self.terms.rules, *rules)))
        return self if every == self.terms.rules else replace(self, terms=TracedTerms(self.terms.traced, every))

    @property
    def fact(self) -> Fact:
        named = f" modulo {', '.join(rule.name for rule in self.terms.rules)}" if self.terms.rules else ""
        return Fact(f"{self.claim}{named}", self.violations)

    def violations(self, program: Program) -> Iterator[Violation]:
        """Yield where `program` computes something other than the traced step, or makes a false claim."""
        yield from self._mistaken_claims(program)
        try:
            step = StepTerms(program, self.terms.step.regions, self._received)
        except UnknownOperationError as error:
            yield Violation(error.node, str(error))
            return
        yield from self._differences(step)
        drawn, of = self._drawn
        if step.draws != drawn:
            yield Violation(None, f"{step.draws} random draws; {of} has {drawn}")
        yield from self._effects(step)
        yield from self._other_groups(program)

    @property
    def _received(self) -> Mapping[str, int]:
        """The terms of values that other ranks send, by message."""
        return {}

    @property
    def _drawn(self) -> tuple[int, str]:
        """The expected number of random draws, and what has that many, for the error."""
        raise NotImplementedError

    def _differences(self, step: StepTerms) -> Iterator[Violation]:
        """Yield results that differ from the traced step."""
        raise NotImplementedError

    def _effects(self, step: StepTerms) -> Iterator[Violation]:
        """Yield effects other than results that differ from the traced step."""
        raise NotImplementedError

    def _other_groups(self, program: Program) -> Iterator[Violation]:
        """Yield operations that divide a value over other ranks than those that are given the same inputs."""
        sequence = self.layout.sequence
        wanted = f"{sequence.size} of {sequence.name!r}" if sequence else "none"
        for graph in (program.graph, *(region.graph for region in program.regions.values())):
            for node in graph.nodes:
                if changes_division(node):
                    *_, size = (None, *(arg for arg in node.args if isinstance(arg, int)))
                    if (ranks := f"{node.kwargs.get('size', size)} of {group_of(node)!r}") != wanted:
                        yield Violation(node, f"{node.name} divides a value over ranks {ranks}; want {wanted}")

    def _inside(self, param: Param, gradient: int) -> int:
        """Return the term of a gradient averaged over the sharding ranks."""
        scatter = self.layout.stage.optimizer_sharded
        axis = self.layout.sharded.name
        return mean_of(self.terms.table, param, axis, gradient, param.reduce_dtype, scatter=scatter)

    def _outside(self, param: Param, average: int) -> int:
        """Return the term of an inner average averaged over replicas, if there are any."""
        dtype, wire, scatter = param.reduce_dtype, param.outer_dtype, self.layout.has_secondary
        for axis in self.layout.outside:
            average = mean_of(self.terms.table, param, axis.name, average, dtype, scatter=scatter, wire=wire)
        return average

    def _mistaken_claims(self, program: Program) -> Iterator[Violation]:
        """Yield false claims of a program about its parameters and its layout."""
        layout = program.layout
        unused = {*layout.trainable} - self.terms.traced.results.gradients.keys()
        if program.unused != unused:
            name = min(program.unused ^ unused)
            yield Violation(None, f"{name} is said to be {'unused' if name in program.unused else 'used'}; it is not")
        for what in ("stage", "axes", "away", "hybrid"):
            if (found := getattr(layout, what)) != (wanted := getattr(self.layout, what)):
                yield Violation(
                    None, f"the {what} of the layout: {_layout_text(found)}; the traced step has {_layout_text(wanted)}"
                )
        for unit, wanted in zip(layout.units, self.layout.units, strict=False):
            if (unit.name, unit.params) != (wanted.name, wanted.params):
                yield Violation(None, f"the parameters of {unit.name} are not those that {wanted.name} was traced with")
        if len(layout.units) != len(self.layout.units):
            yield Violation(None, f"{len(layout.units)} units; the traced step has {len(self.layout.units)}")


# -- a whole step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedValues(ExpectedValues):
    """The values that programs of a whole step must compute.

    Attributes:
        holds_back: True for programs that accumulate gradients instead of reducing them, as under `no_sync`.
    """

    holds_back: bool = False

    @classmethod
    def of(cls, traced: Program) -> TracedValues:
        return cls(TracedTerms(traced), traced.layout)

    @property
    def _drawn(self) -> tuple[int, str]:
        return self.terms.step.draws, "the traced step"

    def _mistaken_claims(self, program: Program) -> Iterator[Violation]:
        yield from super()._mistaken_claims(program)
        if _inputs(program) != _inputs(self.terms.traced):
            yield Violation(None, "the inputs are not those of the traced step, in their order")

    def _differences(self, step: StepTerms) -> Iterator[Violation]:
        yield from self._repeated(step)
        for what, line, found, wanted in (*self._results(step), *self._gradients(step), *self._writes(step)):
            if found != wanted:
                yield self._difference(step, what, line, found, wanted)

    def _effects(self, step: StepTerms) -> Iterator[Violation]:
        yield from self._untraced(step)
        yield from self._not_replicated(step)
        yield from self._newly_shared(step.program)

    def _untraced(self, step: StepTerms) -> Iterator[Violation]:
        """Yield operations with possible undeclared effects that were not traced with these arguments."""
        for node, name, term in step.opaque:
            if term >= self.terms.count and is_opaque(step.terms.keys[term][0]):
                problem = f"{name}, {self._text(term)}, was not traced, and it is not known all that it does"
                yield Violation(node, f"{label(node)} computes {problem}")

    def _not_replicated(self, step: StepTerms) -> Iterator[Violation]:
        for node, term in step.replicated.items():
            if not is_replicated(term, self.terms.marked, step.terms):
                value = node.all_input_nodes[0].name
                yield Violation(node, f"{value} is not known to be the same on all ranks, of which each keeps a shard")

    def _newly_shared(self, program: Program) -> Iterator[Violation]:
        """Yield results that share memory with an input or another result, unlike in the traced step."""
        results = [*program.results.outputs, *program.results.input_gradients]
        for value, now, before in zip(results, shared_results(program), self.terms.shared, strict=False):
            if now != before and now is not None:
                problem = f"{value.name} is returned, and shows memory that another value has"
                yield Violation(value, f"{problem}; want a copy")

    # -- terms ----------------------------------------------------------------------------------------------------

    def _results(self, step: StepTerms) -> Iterator[Compared]:
        now, before = step.program.results, self.terms.traced.results
        for what, found, wanted in (
            ("result", now.outputs, before.outputs),
            ("gradient of an input", now.input_gradients, before.input_gradients),
        ):
            if len(found) != len(wanted):
                yield f"the number of {what}s", None, step.term(len(found)), step.term(len(wanted))
            for value, traced in zip(found, wanted, strict=False):
                line = value if isinstance(value, fx.Node) else None
                yield f"{what} {line.name if line else value}", line, step.term(value), self.terms.step.term(traced)

    def _gradients(self, step: StepTerms) -> Iterator[Compared]:
        """Yield comparisons of the gradients of parameters: averaged, or local before reductions are inserted."""
        wanted, raw = self.terms.traced.results.gradients, step.program.results.gradients
        none = step.term(None)
        for name in dict.fromkeys((*wanted, *raw, *step.gradients)):
            what, traced = f"the gradient of {name}", self.terms.step.term(wanted.get(name))
            if name in raw:
                yield what, raw[name], step.mean(step.term(raw[name])), traced
            elif name not in step.gradients:
                yield what, None, none, traced
            averaged = self._averaged(step, name, traced) if name in wanted and name not in raw else none
            for line, term in step.gradients.get(name, ()):
                yield what, line, term, averaged

    def _repeated(self, step: StepTerms) -> Iterator[Violation]:
        """Yield gradients that are returned more than once."""
        traced = self.terms.traced.results.gradients
        for name, found in step.gradients.items():
            wanted = self._averaged(step, name, self.terms.step.term(traced.get(name)))
            if len(found) > 1:
                line = next((line for line, term in found if term != wanted), found[-1][0])
                by = " and ".join(line.name for line, _ in found)
                yield Violation(line, f"the gradient of {name} is handed back {len(found)} times, by {by}; want once")

    def _averaged(self, step: StepTerms, name: str, gradient: int) -> int:
        """Return the term of what the optimizer must receive for a local gradient."""
        param = self.layout.param(name)
        if self.holds_back:
            return step.terms.make((HELD_BACK, str(param.dtype), gradient))
        return self._outside(param, self._inside(param, gradient))

    def _writes(self, step: StepTerms) -> Iterator[Compared]:
        now, before, none = step.written, self.terms.step.written, step.term(None)
        for index in range(max(len(now), len(before))):
            found, wanted = (writes[index] if index < len(writes) else none for writes in (now, before))
            yield "what is written in place", None, found, wanted

    def _difference(self, step: StepTerms, what: str, line: fx.Node | None, found: int, wanted: int) -> Violation:
        """Return the violation that names the first line that differs, and what was traced there."""
        terms, none = step.terms, step.term(None)
        if found == none:
            line = line or step.line_of(wanted)
            return Violation(line, f"{what} is missing; want {self._text(wanted)}{self._source(wanted)}")
        if wanted == none:
            return Violation(line or step.line_of(found), f"{what} is {self._text(found)}; want none")
        place = parted(found, wanted, terms, self.terms.count)
        inner, outer = place.around or (place.found, place.wanted)
        line = step.line_of(inner) or line
        where = f"{label(line)} computes" if line is not None else "it is"
        if place.around is None:
            differs = f"want {self._text(outer)}"
        else:
            mine, theirs = self._text(place.found), self._text(place.wanted)
            if mine == theirs:  # such as a parameter in two dtypes, or terms that differ below the printed depth
                mine, theirs = (" ".join(map(str, terms.keys[term][1:])) for term in (place.found, place.wanted))
            differs = f"with {mine} in place of {theirs}"
        return Violation(
            line, f"{what} is not what was traced: {where} {self._text(inner)}, {differs}{self._source(outer)}"
        )

    def _text(self, term: int) -> str:
        return term_text(term, self.terms.table, self.terms.names)

    def _source(self, term: int) -> str:
        """Return the layer that a term was traced in, for the error."""
        line = self.terms.step.line_of(term)
        return f" (traced in {data(line).source})" if line is not None and data(line).source else ""


def computes(traced: Program) -> Fact:
    """Return the fact that a program computes the same as the traced step `traced`, for `zcompile.verify`.

    Raises:
        ProofError: `traced` communicates, so passes have already changed it.
    """
    if traced.nodes(Communication):
        fix = "give it the step as it was traced: compiled.journals[0].entries[0].before"
        raise ProofError("computes", "was given a program that communicates, which no traced step does", fix)
    return TracedValues.of(traced).fact


# -- the step of a pipeline rank --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages read and one of them keeps.

    Attributes:
        name: The name of the parameter.
        value: Its name in the traced step.
        home: The stage that keeps it.
        readers: The other stages that read it.
        parts: By stage, the values of the traced step whose sum is its gradient there; only stages that have one.
    """

    name: str
    value: str
    home: int
    readers: tuple[int, ...]
    parts: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class RankValues(ExpectedValues):
    """The values that programs of a rank's step must compute; the traced step has one micro-batch.

    `layout` has only the rank's own units.

    Attributes:
        microbatches: The number of micro-batches.
        results: The results of its programs, in order: (number in the traced step, micro-batch).
        received: Names of the values that other ranks send, and how many stages of this rank receive each.
        draws: The random draws of its programs, in order: (micro-batch, number in the traced step).
    """

    claim = "values of each micro-batch as they were traced"
    microbatches: int
    results: tuple[tuple[int, int], ...]
    received: Mapping[str, int]
    draws: tuple[tuple[int, int], ...] = ()
    returned: frozenset[str] = frozenset()
    """Names of values of this rank that it receives back, through another rank's stage between two of its own."""
    shared: tuple[SharedParameter, ...] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    """Maps the number of each result that is the new value of a buffer to the number of that input."""
    writes: tuple[tuple[int, int], ...] = ()
    """The writes of its programs to buffers, in order: (number of the result with the new value, micro-batch)."""

    @property
    def _drawn(self) -> tuple[int, str]:
        return len(self.draws), "this rank's part"

    @property
    def _received(self) -> Mapping[str, int]:
        received = {
            f"m{number}_{name}": values[self._term(name)]
            for number, values in enumerate(self._values)
            for name in {*self.received, *self.returned}
        }
        return received | self._once

    def _differences(self, step: StepTerms) -> Iterator[Violation]:
        yield from self._messages(step)
        yield from self._returned(step)
        yield from self._gradients(step)

    def _effects(self, step: StepTerms) -> Iterator[Violation]:
        yield from self._written(step)
        known = {term for values in self._values for term in values.values()}
        for node, name, term in step.opaque:
            if term not in known and is_opaque(step.terms.keys[term][0]):
                yield Violation(node, f"{label(node)} computes {name}, which was not traced so")

    # -- the traced step, for each micro-batch ----------------------------------------------------------------------

    def _term(self, name: str) -> int:
        """Return the term of a value of the traced step."""
        return self.terms.step.term(self._nodes[name])

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.terms.traced.graph.nodes}

    @cached_property
    def _values(self) -> list[Values]:
        found: list[Values] = []
        for number in range(self.microbatches):
            found.append(self._of_microbatch(number, found[-1] if found else {}))
        return found

    def _of_microbatch(self, number: int, before: Values) -> Values:
        """Map terms of the traced step to terms for a micro-batch; a received value is a leaf.

        Buffers that are written to have their values after the previous micro-batch, from the map `before`.
        """
        step, terms = self.terms.step, self.terms.table
        values: dict[int, int] = {}
        outputs = self.terms.traced.results.outputs
        for result, index in self.written.items() if number else ():
            values[step.term(self._inputs[index])] = before[step.term(outputs[result])]
        for index, node in enumerate(self._inputs):
            if not op_of(node, Input).held:
                values[step.term(node)] = terms.make((INPUT, str(Kind.DATA), str(index), str(number)))
        for place, (microbatch, draw) in enumerate(self.draws):
            if microbatch == number:
                values[terms.make((DRAW, str(draw)))] = terms.make((DRAW, str(place)))
        for name in self.received:
            values[self._term(name)] = terms.make(("received", name, str(number)))
        body = [term for term in range(self.terms.count) if term not in values]
        terms.instances(body, values)
        return values

    @cached_property
    def _once(self) -> dict[str, int]:
        """The terms of messages sent once per step: values of shared parameters, and sums of their gradients."""
        result: dict[str, int] = {}
        for param in self.shared:
            for reader in param.readers:
                result[f"stage{reader}_{param.value}"] = self._term(param.value)
                if reader in param.parts:
                    dtype = self.terms.traced.layout.param(param.name).sum_dtype
                    total = sum_of(self.terms.table, self._part(param, reader), dtype)
                    result[f"stage{reader}_{param.value}_grad"] = total
        return result

    def _part(self, shared: SharedParameter, stage: int) -> list[int]:
        """Return a stage's part of the gradient of a shared parameter, for each micro-batch."""
        terms, result = self.terms.table, []
        for number in range(self.microbatches):
            first, *others = (self._of_microbatch_at(number, name) for name in shared.parts[stage])
            for other in others:
                first = terms.make((torch.ops.aten.add.Tensor, first, other))
            result.append(first)
        return result

    def _of_microbatch_at(self, number: int, name: str) -> int:
        """Return the term of a traced value for a micro-batch, also if another rank computes it."""
        term = self._term(name)
        found = self._values[number].get(term)
        return self.terms.table.make(("elsewhere", name, str(number))) if found is None else found

    @cached_property
    def _inputs(self) -> list[fx.Node]:
        traced = self.terms.traced
        return [node for node in traced.nodes(Input) if op_of(node, Input).kind is Kind.DATA]

    # -- comparisons ------------------------------------------------------------------------------------------------

    def _written(self, step: StepTerms) -> Iterator[Violation]:
        """Yield writes to buffers that differ from those of the traced step, repeated for each micro-batch in order."""
        if step.written:
            yield Violation(None, "a region writes to a value in place; none did, in the traced step")
        if len(step.buffers) != len(self.writes):
            yield Violation(None, f"{len(step.buffers)} new values of buffers; want {len(self.writes)}")
        for (node, term), (result, number) in zip(step.buffers, self.writes, strict=False):
            value = self.terms.traced.results.outputs[result]
            wanted, op = self._values[number].get(self.terms.step.term(value)), op_of(node, Input)
            if op.index != self.written[result]:
                yield Violation(node, f"{node.name} gets what is new of another buffer")
            if term != wanted:
                problem = f"what {node.name} gets of micro-batch {number} is not what was traced"
                yield Violation(node, f"{problem}: {self._text(step, term)}")

    def _mistaken_shares(self) -> Iterator[Violation]:
        """Yield shared parameters whose traced gradient is not exactly the sum of the parts that stages compute."""
        for param in self.shared:
            gradient = self.terms.traced.results.gradients.get(param.name)
            parts = [name for names in param.parts.values() for name in names]
            found = [] if gradient is None else [node.name for node in _added(gradient, set(parts))]
            if sorted(found) != sorted(parts):
                yield Violation(None, f"the gradient of {param.name} is the sum of {found}; stages compute {parts}")

    def _messages(self, step: StepTerms) -> Iterator[Violation]:
        """Yield sent values that are not what their message names, and unexpected or repeated receives."""
        yield from self._mistaken_shares()
        for node in step.program.nodes(Send):
            message, wanted = op_of(node, Send).message, None
            number, _, name = message.removeprefix("m").partition("_")
            if message in self._once:
                wanted = self._once[message]
            elif number.isdigit() and int(number) < self.microbatches and name in self._nodes:
                wanted = self._values[int(number)].get(self._term(name))
            else:
                yield Violation(node, f"{node.name} sends {message!r}, which is not a value of a micro-batch")
                continue
            yield from self._compared(step, f"{message}, which {node.name} sends", node.all_input_nodes[0], wanted)
        lines = [(node, op_of(node, Receive).message) for node in step.program.nodes(Receive)]
        taken = Counter(message for _, message in lines)
        for node, message in lines:
            if message not in step.received:
                yield Violation(node, f"{node.name} receives {message!r}, which no other rank computes")
            elif taken[message] > (most := self.received.get(message.partition("_")[2], 1)):
                times, want = counted(taken[message], "time"), most if most > 1 else "once"
                yield Violation(node, f"{message} is received {times}; want {want}")

    def _returned(self, step: StepTerms) -> Iterator[Violation]:
        outputs, traced = step.program.results.outputs, self.terms.traced.results.outputs
        if len(outputs) != len(self.results):
            yield Violation(None, f"{len(outputs)} results; want {len(self.results)}")
        for output, (result, number) in zip(outputs, self.results, strict=False):
            wanted = self._values[number].get(self.terms.step.term(traced[result]))
            yield from self._compared(step, f"result {result} of micro-batch {number}", output, wanted)

    def _gradients(self, step: StepTerms) -> Iterator[Violation]:
        """Yield differences in the gradients of this rank's parameters: per micro-batch until they are reduced."""
        traced, raw = self.terms.traced.results.gradients, step.program.results.gradients
        for name in self.layout.trainable:
            if name not in traced:
                continue
            each = self._each(name)
            if name in raw:
                found = list(raw[name])  # type: ignore[call-overload]
                if len(found) != len(each):
                    yield Violation(None, f"{name} has {len(found)} gradients to add up; want {len(each)}")
                for number, (node, wanted) in enumerate(zip(found, each, strict=False)):
                    yield from self._compared(step, f"gradient {number} of {name}", node, wanted)
                continue
            given = step.gradients.get(name, [])
            if len(given) != 1:
                line = given[-1][0] if given else None
                yield Violation(line, f"the gradient of {name} is handed back {len(given)} times; want once")
            for line, term in given:
                if term != self._summed(name, each):
                    text = self._text(step, term)
                    yield Violation(line, f"the gradient of {name} is not the sum over micro-batches in order: {text}")
        for name in step.gradients:
            if name not in traced or name not in self.layout.trainable:
                yield Violation(step.gradients[name][0][0], f"a gradient of {name} is handed back; want none")

    def _each(self, name: str) -> list[int]:
        """Return the summands of a parameter's gradient, in order: of each micro-batch, then of other stages."""
        shared = next((param for param in self.shared if param.name == name), None)
        if shared is None:
            gradient = self.terms.step.term(self.terms.traced.results.gradients[name])
            return [values[gradient] for values in self._values]
        others = [f"stage{reader}_{shared.value}_grad" for reader in shared.readers if reader in shared.parts]
        return [*self._part(shared, shared.home), *(self._once[message] for message in others)]

    def _summed(self, name: str, each: Iterable[int]) -> int:
        param, terms = self.layout.param(name), self.terms.table
        if self.layout.stage.gradients_sharded:
            return self._outside(param, sum_of(terms, [self._inside(param, gradient) for gradient in each]))
        return self._outside(param, self._inside(param, sum_of(terms, list(each), param.sum_dtype)))

    def _compared(self, step: StepTerms, what: str, found: Any, wanted: int | None) -> Iterator[Violation]:
        term = step.term(found)
        if term != wanted:
            line = step.line_of(term) if isinstance(found, fx.Node) else None
            says = "nothing that this rank has" if wanted is None else self._text(step, wanted)
            yield Violation(line or found, f"{what}, is not what was traced: {self._text(step, term)}; want {says}")

    def _text(self, step: StepTerms, term: int) -> str:
        names = {
            values[self.terms.step.term(node)]: f"m{number}_{node.name}"
            for number, values in enumerate(self._values)
            for node in self._inputs
            if self.terms.step.term(node) in values
        }
        return term_text(term, step.terms, names)


def _added(gradient: fx.Node, parts: Collection[str]) -> Iterator[fx.Node]:
    """Yield the summands of a traced gradient; values in `parts` are not divided further."""
    if gradient.name in parts or gradient.target is not torch.ops.aten.add.Tensor or gradient.kwargs:
        yield gradient
        return
    for summand in gradient.all_input_nodes:
        yield from _added(summand, parts)


# -- claims of programs -----------------------------------------------------------------------------------------------


def _layout_text(value: Any) -> str:
    """Return the text of a field of a layout, such as its stage or its axes."""
    if isinstance(value, tuple):
        return ", ".join(f"{axis.name}: {axis}" for axis in value)
    return str(getattr(value, "number", value))


def _inputs(program: Program) -> list[Input]:
    """Return the inputs of a program, sorted by kind, each kind in order."""
    return sorted((op_of(node, Input) for node in program.nodes(Input)), key=lambda given: given.kind)


# -- replication -------------------------------------------------------------------------------------------------------


def marked(traced: Program, values: Mapping[fx.Node, Value]) -> frozenset[int]:
    """Return the terms of inputs, parameters and collectives of a traced step that are marked as replicated.

    These are arguments of the call, undivided parameters, buffers, and collectives that return the same on all ranks.
    Marks set by passes do not count.
    """
    origins = (n for n in traced.graph.nodes if isinstance(data(n).op, (Input, Parameter)) or is_collective(n))
    return frozenset(term for n in origins if data(n).replicated and isinstance(term := values[n], int))


def is_replicated(term: int, origins: Collection[int], terms: Terms) -> bool:
    """Return True if a term is computed from `origins` alone by deterministic operations."""
    known: set[int] = set()
    for part in terms.below([term]):
        key = terms.keys[part]
        if part in origins or (_is_function(key) and all(arg in known for arg in key[1:] if type(arg) is int)):
            known.add(part)
    return term in known


def _is_function(key: Key) -> bool:
    """Return True for a value determined by its parts; `empty` is not, as its memory has arbitrary content."""
    head = key[0]
    if not isinstance(head, OpOverload):
        return head in (CONSTANT, LIST, ITEM)
    name = head.overloadpacket.__name__
    own = head.namespace in ("aten", "prims") or name == "wait_tensor"
    return own and "draw=" not in key and "empty" not in name and not writes_arguments(head)
