"""The fact that a rank of a pipeline computes its part of a step, for every micro-batch.

    m0_h_recv = recv(pp, "f32[8, 64]", source=0, message="m0_h")      # what was traced as h, of micro-batch 0
    m0_h = wait(m0_h_recv)
    m0_y = region_1(b, m0_h)
    m0_dh_sent = send(m0_dh, pp, to=0, message="m0_dh")               # must be what was traced as dh

The step was traced once, of one micro-batch. What a rank receives is taken to be the value of that name; what it sends
must be it. So if this holds of all ranks, and what they send and receive fits together without a circle
(`zcompile.proof.ranks`), all of them together compute what was traced. Gradients are sums over the micro-batches in
their order: of averages over the ranks that shard under stages 2 and 3, else of gradients, in the dtype in which these
are averaged; the sum is averaged over all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from zcompile.facts.fact import Violation, label
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Input, Kind, Receive, Send
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_opaque
from zcompile.ir.spelling import counted
from zcompile.proof.operations import UnknownOperationError
from zcompile.proof.steps import INPUT, StepTerms, average_of, inside_of, outside_of, sum_of
from zcompile.proof.terms import DRAW, term_text
from zcompile.proof.values import ExpectedValues

Values = Mapping[int, int]
"""By a term of the traced step, what that is for one micro-batch."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages read, of which one keeps it.

    Attributes:
        name: The parameter's.
        value: Its name in the traced step.
        home: The stage that keeps it.
        readers: The others that read it.
        parts: By stage the values of the traced step whose sum is its gradient there, as far as it has one.
        sum_dtype: In which gradients are summed over micro-batches, if not in their own dtype.
    """

    name: str
    value: str
    home: int
    readers: tuple[int, ...]
    parts: Mapping[int, tuple[str, ...]]
    sum_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class RankValues(ExpectedValues):
    """What programs of a rank's step have to compute; the traced step is of one micro-batch, `layout` of its own units.

    Attributes:
        microbatches: How many there are.
        results: What its programs return, in order: results of the traced step by number, and of which micro-batch.
        received: Names of the values that other ranks send, and how many of its stages are sent each.
        draws: What each random draw is, in order: of which micro-batch, and the number of the traced one.
    """

    claim = "values of each micro-batch as they were traced"
    microbatches: int
    results: tuple[tuple[int, int], ...]
    received: Mapping[str, int]
    draws: tuple[tuple[int, int], ...] = ()
    returned: frozenset[str] = frozenset()
    """Names of values of its own that come back to it, by way of a stage between two of this rank's."""
    shared: tuple[SharedParameter, ...] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    """By the number of each result that is the new value of a buffer, which input that is."""
    writes: tuple[tuple[int, int], ...] = ()
    """What its programs write to buffers, in order: the result that is the new value, and of which micro-batch."""

    def violations(self, program: Program) -> Iterator[Violation]:
        """Where `program` computes, sends or returns something else than was traced."""
        yield from self._mistaken_claims(program)
        received = {
            f"m{number}_{name}": values[self._term(name)]
            for number, values in enumerate(self._values)
            for name in {*self.received, *self.returned}
        }
        received |= self._once
        try:
            step = StepTerms(program, self.terms.step.regions, received=received)
        except UnknownOperationError as error:
            yield Violation(error.node, str(error))
            return
        yield from self._messages(program, step)
        yield from self._returned(program, step)
        yield from self._gradients(program, step)
        if step.draws != len(self.draws):
            yield Violation(None, f"{step.draws} random draws; this rank's part has {len(self.draws)}")
        yield from self._written(step)
        known = {term for values in self._values for term in values.values()}
        for node, name, term in step.opaque:
            if term not in known and is_opaque(step.terms.keys[term][0]):
                yield Violation(node, f"{label(node)} computes {name}, which was not traced so")

    # -- what was traced, for each micro-batch ----------------------------------------------------------------------

    def _term(self, name: str) -> int:
        """The term of a value of the traced step."""
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
        """What each term of the traced step is for a micro-batch; what follows from what is received is left out.

        Buffers that are written to hold what they did behind the micro-batch `before`.
        """
        step, terms = self.terms.step, self.terms.step.terms
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
        """By message what is sent once a step: values of parameters, and sums of their gradients."""
        result: dict[str, int] = {}
        for one in self.shared:
            for reader in one.readers:
                result[f"stage{reader}_{one.value}"] = self._term(one.value)
                if reader in one.parts:
                    total = sum_of(self.terms.step.terms, self._part(one, reader), one.sum_dtype)
                    result[f"stage{reader}_{one.value}_grad"] = total
        return result

    def _part(self, shared: SharedParameter, stage: int) -> list[int]:
        """What a stage computes of the gradient of a parameter that others read, too, for each micro-batch."""
        terms, result = self.terms.step.terms, []
        for number in range(self.microbatches):
            first, *others = (self._of_microbatch_at(number, name) for name in shared.parts[stage])
            for other in others:
                first = terms.make((torch.ops.aten.add.Tensor, first, other))
            result.append(first)
        return result

    def _of_microbatch_at(self, number: int, name: str) -> int:
        """A value of the traced step for a micro-batch, whether this rank computes it or another one does."""
        term = self._term(name)
        found = self._values[number].get(term)
        return self.terms.step.terms.make(("elsewhere", name, str(number))) if found is None else found

    @cached_property
    def _inputs(self) -> list[fx.Node]:
        traced = self.terms.traced
        return [node for node in traced.nodes(Input) if op_of(node, Input).kind is Kind.DATA]

    # -- comparisons ------------------------------------------------------------------------------------------------

    def _written(self, step: StepTerms) -> Iterator[Violation]:
        """What is written in place is what was, of each micro-batch in its order."""
        if step.writes:
            yield Violation(None, "a region writes to a value in place; none did, in the traced step")
        if len(step.written) != len(self.writes):
            yield Violation(None, f"{len(step.written)} new values of buffers; want {len(self.writes)}")
        for (node, term), (result, number) in zip(step.written, self.writes, strict=False):
            value = self.terms.traced.results.outputs[result]
            wanted, op = self._values[number].get(self.terms.step.term(value)), op_of(node, Input)
            if op.index != self.written[result]:
                yield Violation(node, f"{node.name} gets what is new of another buffer")
            if term != wanted:
                problem = f"what {node.name} gets of micro-batch {number} is not what was traced"
                yield Violation(node, f"{problem}: {self._text(step, term)}")

    def _mistaken_shares(self) -> Iterator[Violation]:
        """The gradients that stages compute of a parameter which several read are all of the traced one, each once."""
        for one in self.shared:
            gradient = self.terms.traced.results.gradients.get(one.name)
            parts = [name for names in one.parts.values() for name in names]
            found = [] if gradient is None else [node.name for node in _added(gradient, set(parts))]
            if sorted(found) != sorted(parts):
                yield Violation(None, f"the gradient of {one.name} is the sum of {found}; stages compute {parts}")

    def _messages(self, program: Program, step: StepTerms) -> Iterator[Violation]:
        """What is sent is what its message says; nothing else is received, and nothing twice."""
        yield from self._mistaken_shares()
        for node in program.nodes(Send):
            message = op_of(node, Send).message
            if message in self._once:
                once = self._once[message]
                yield from self._compared(step, f"{message}, which {node.name} sends", node.all_input_nodes[0], once)
                continue
            number, _, name = message.removeprefix("m").partition("_")
            if not number.isdigit() or int(number) >= self.microbatches or name not in self._nodes:
                yield Violation(node, f"{node.name} sends {message!r}, which is no value of a micro-batch")
                continue
            wanted = self._values[int(number)].get(self._term(name))
            yield from self._compared(step, f"{message}, which {node.name} sends", node.all_input_nodes[0], wanted)
        taken = Counter(op_of(node, Receive).message for node in program.nodes(Receive))
        for node in program.nodes(Receive):
            message = op_of(node, Receive).message
            if message not in step.received:
                yield Violation(node, f"{node.name} receives {message!r}, which no other rank computes")
            elif taken[message] > (most := self.received.get(message.partition("_")[2], 1)):
                yield Violation(
                    node,
                    f"{message} is received {counted(taken[message], 'time')}; want {most if most > 1 else 'once'}",
                )

    def _returned(self, program: Program, step: StepTerms) -> Iterator[Violation]:
        outputs, traced = program.results.outputs, self.terms.traced.results.outputs
        if len(outputs) != len(self.results):
            yield Violation(None, f"{len(outputs)} results; want {len(self.results)}")
        for output, (result, number) in zip(outputs, self.results, strict=False):
            wanted = self._values[number].get(self.terms.step.term(traced[result]))
            yield from self._compared(step, f"result {result} of micro-batch {number}", output, wanted)

    def _gradients(self, program: Program, step: StepTerms) -> Iterator[Violation]:
        """The gradients of this rank's parameters: of each micro-batch, until they are reduced; then their sums."""
        traced, raw = self.terms.traced.results.gradients, program.results.gradients
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
                if term != self._summed(step, name, each):
                    text = self._text(step, term)
                    yield Violation(line, f"the gradient of {name} is not the sum over micro-batches in order: {text}")
        for name in step.gradients:
            if name not in traced or name not in self.layout.trainable:
                yield Violation(step.gradients[name][0][0], f"a gradient of {name} is handed back; want none")

    def _each(self, name: str) -> list[int]:
        """What is added up to the gradient of a parameter of this rank's: of each micro-batch, then other stages'."""
        shared = next((one for one in self.shared if one.name == name), None)
        if shared is None:
            gradient = self.terms.step.term(self.terms.traced.results.gradients[name])
            return [values[gradient] for values in self._values]
        others = [f"stage{reader}_{shared.value}_grad" for reader in shared.readers if reader in shared.parts]
        return [*self._part(shared, shared.home), *(self._once[message] for message in others)]

    def _summed(self, step: StepTerms, name: str, each: Iterable[int]) -> int:
        param, stage = self.layout.param(name), self.layout.stage
        terms = step.terms
        if stage.gradients_sharded:
            inside = [inside_of(terms, self.layout, param, gradient) for gradient in each]
            return outside_of(terms, self.layout, param, sum_of(terms, inside))
        return average_of(terms, self.layout, param, sum_of(terms, list(each), param.sum_dtype))

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
    """What a traced gradient is the sum of, as far as it is one of `parts`."""
    if gradient.name in parts or gradient.target is not torch.ops.aten.add.Tensor or gradient.kwargs:
        yield gradient
        return
    for summand in gradient.all_input_nodes:
        yield from _added(summand, parts)
