"""The fact that a program computes what was traced: translation validation by terms.

Each program is compared with the traced step, not with the program before the last pass (Pnueli, Siegel and Singerman,
"Translation Validation", TACAS 1998): what it returns, the gradients of its inputs, for each parameter with a gradient
the mean of it, what it writes to inputs, and how many random numbers it draws. What passes say beside a program (which
parameters are unused or frozen, what is the same on all ranks) is found out from the traced step again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from torch import fx

from zcompile.errors import ProofError
from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.layout import Layout
from zcompile.ir.operation import data, op_of
from zcompile.ir.ops import Communication, Input, Parameter
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import shared_results
from zcompile.ir.side_effects import is_collective, is_opaque
from zcompile.proof.operations import Regions, UnknownOperationError
from zcompile.proof.rules import CONSTANT, LIST, Key, Rule
from zcompile.proof.steps import HELD_BACK, StepTerms, Value, average_of
from zcompile.proof.terms import ITEM, Terms, parted, term_text
from zcompile.torch_internals.operators import OpOverload, writes_arguments

Compared = tuple[str, fx.Node | None, int, int]
"""What is compared: what it is, the line that gives it, the term that was found and the one that was traced."""


@dataclass(frozen=True)
class TracedTerms:
    """A traced step, and its terms with some rules; made once for all programs that are compared with it."""

    traced: Program
    rules: tuple[Rule, ...] = ()

    @property
    def step(self) -> StepTerms:
        return self._evaluated[0]

    @property
    def count(self) -> int:
        """How many terms were traced: the first ones in the table."""
        return self._evaluated[1]

    @cached_property
    def _evaluated(self) -> tuple[StepTerms, int]:
        step = StepTerms(self.traced, Regions(Terms(self.rules)))
        return step, len(step.terms.keys)

    @cached_property
    def marked(self) -> frozenset[int]:
        """What the step begins with that is the same on all tensor-parallel ranks."""
        return marked(self.traced, self.step.values)

    @cached_property
    def names(self) -> dict[int, str]:
        """What terms of inputs are called."""
        values = ((node, self.step.values[node]) for node in self.traced.nodes(Input))
        return {term: node.name for node, term in values if isinstance(term, int)}

    @cached_property
    def shared(self) -> Sequence[tuple[bool, int] | None]:
        """What results share their memory with."""
        return shared_results(self.traced)


@dataclass(frozen=True)
class ExpectedValues:
    """What programs that passes make of a traced step have to compute.

    Attributes:
        terms: The terms of the traced step.
        layout: How programs are laid out.
    """

    terms: TracedTerms
    layout: Layout
    claim: ClassVar[str] = "values as they were traced"

    def modulo(self, rules: Sequence[Rule]) -> Self:
        """The same where these rules say what counts as equal, too."""
        every = tuple(dict.fromkeys((*self.terms.rules, *rules)))
        return self if every == self.terms.rules else replace(self, terms=TracedTerms(self.terms.traced, every))

    @property
    def fact(self) -> Fact:
        named = f" modulo {', '.join(rule.name for rule in self.terms.rules)}" if self.terms.rules else ""
        return Fact(f"{self.claim}{named}", self.violations)

    def violations(self, program: Program) -> Iterator[Violation]:
        """Where `program` computes something else than was traced, or says what does not hold."""
        raise NotImplementedError

    def _mistaken_claims(self, program: Program) -> Iterator[Violation]:
        """What does not hold of what a program says of its parameters and its layout."""
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


@dataclass(frozen=True)
class TracedValues(ExpectedValues):
    """What programs of a whole step have to compute.

    Attributes:
        holds_back: True for programs that hold gradients back, for backwards under `no_sync`.
    """

    holds_back: bool = False

    @classmethod
    def of(cls, traced: Program) -> TracedValues:
        return cls(TracedTerms(traced), traced.layout)

    def violations(self, program: Program) -> Iterator[Violation]:
        """Where `program` computes something else than was traced, or says what does not hold."""
        yield from self._mistaken_claims(program)
        if _inputs(program) != _inputs(self.terms.traced):
            yield Violation(None, "the inputs are not those of the traced step, in their order")
        try:
            step = StepTerms(program, self.terms.step.regions)
        except UnknownOperationError as error:
            yield Violation(error.node, str(error))
            return
        yield from self._repeated(step)
        for what, line, found, wanted in (*self._results(step), *self._gradients(step), *self._writes(step)):
            if found != wanted:
                yield self._difference(step, what, line, found, wanted)
        if step.draws != self.terms.step.draws:
            yield Violation(None, f"{step.draws} random draws; the traced step has {self.terms.step.draws}")
        yield from self._untraced(step)
        yield from self._not_replicated(step)
        yield from self._newly_shared(program)

    def _untraced(self, step: StepTerms) -> Iterator[Violation]:
        """Operations that may do more than their schema says, and were not traced with what they are given."""
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
        """A result that shows the memory of an input, or of another result, as it did not when it was traced."""
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
            for one, other in zip(found, wanted, strict=False):
                line = one if isinstance(one, fx.Node) else None
                yield f"{what} {line.name if line else one}", line, step.term(one), self.terms.step.term(other)

    def _gradients(self, step: StepTerms) -> Iterator[Compared]:
        """The gradients of parameters: averaged, or as they are until reductions are inserted."""
        wanted, raw = self.terms.traced.results.gradients, step.program.results.gradients
        none = step.term(None)
        for name in dict.fromkeys((*wanted, *raw, *step.gradients)):
            what, traced = f"the gradient of {name}", self.terms.step.term(wanted.get(name))
            if name in raw:
                yield what, raw[name], step.term(raw[name]), traced
            elif name not in step.gradients:
                yield what, None, none, traced
            averaged = self._averaged(step, name, traced) if name in wanted and name not in raw else none
            for line, term in step.gradients.get(name, ()):
                yield what, line, term, averaged

    def _repeated(self, step: StepTerms) -> Iterator[Violation]:
        """Gradients that are handed back more than once."""
        traced = self.terms.traced.results.gradients
        for name, found in step.gradients.items():
            wanted = self._averaged(step, name, self.terms.step.term(traced.get(name)))
            if len(found) > 1:
                line = next((line for line, term in found if term != wanted), found[-1][0])
                by = " and ".join(line.name for line, _ in found)
                yield Violation(line, f"the gradient of {name} is handed back {len(found)} times, by {by}; want once")

    def _averaged(self, step: StepTerms, name: str, gradient: int) -> int:
        """What is handed to the optimizer for a gradient of this rank's."""
        param = self.layout.param(name)
        if self.holds_back:
            return step.terms.make((HELD_BACK, str(param.dtype), gradient))
        return average_of(step.terms, self.layout, param, gradient)

    def _writes(self, step: StepTerms) -> Iterator[Compared]:
        now, before, none = step.writes, self.terms.step.writes, step.term(None)
        for index in range(max(len(now), len(before))):
            found, wanted = (writes[index] if index < len(writes) else none for writes in (now, before))
            yield "what is written in place", None, found, wanted

    def _difference(self, step: StepTerms, what: str, line: fx.Node | None, found: int, wanted: int) -> Violation:
        """The line that computes what differs first, and what was traced there."""
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
            if mine == theirs:  # as of a parameter in two dtypes, or of terms that differ deep inside
                mine, theirs = (" ".join(map(str, terms.keys[term][1:])) for term in (place.found, place.wanted))
            differs = f"with {mine} in place of {theirs}"
        return Violation(
            line, f"{what} is not what was traced: {where} {self._text(inner)}, {differs}{self._source(outer)}"
        )

    def _text(self, term: int) -> str:
        return term_text(term, self.terms.step.terms, self.terms.names)

    def _source(self, term: int) -> str:
        """The layer that a term was traced in."""
        line = self.terms.step.line_of(term)
        return f" (traced in {data(line).source})" if line is not None and data(line).source else ""


def computes(traced: Program) -> Fact:
    """The fact that a program computes what `traced` does, a step as it was traced; for `zcompile.verify`.

    Raises:
        ProofError: passes have been over that: it communicates.
    """
    if traced.nodes(Communication):
        fix = "give it the step as it was traced: compiled.journals[0].entries[0].before"
        raise ProofError("computes", "was given a program that communicates, which no traced step does", fix)
    return TracedValues.of(traced).fact


def _layout_text(value: Any) -> str:
    """What a layout says of its stage or its axes."""
    if isinstance(value, tuple):
        return ", ".join(f"{axis.name}: {axis}" for axis in value)
    return str(getattr(value, "number", value))


def _inputs(program: Program) -> list[Input]:
    """What a program is given, each kind in its order."""
    return sorted((op_of(node, Input) for node in program.nodes(Input)), key=lambda given: given.kind)


# -- replication -------------------------------------------------------------------------------------------------------


def marked(traced: Program, values: Mapping[fx.Node, Value]) -> frozenset[int]:
    """The terms that a traced step begins with, or that its collectives give, and that are marked as replicated.

    Marked are arguments of the call, undivided parameters, buffers, and collectives that give all ranks one result.
    Marks of passes do not count.
    """
    origins = (n for n in traced.graph.nodes if isinstance(data(n).op, (Input, Parameter)) or is_collective(n))
    return frozenset(term for n in origins if data(n).replicated and isinstance(term := values[n], int))


def is_replicated(term: int, origins: Collection[int], terms: Terms) -> bool:
    """True if a term is made of `origins` alone, by operations that give all ranks the same for the same."""
    known: set[int] = set()
    for part in terms.below([term]):
        key = terms.keys[part]
        if part in origins or (_is_function(key) and all(one in known for one in key[1:] if type(one) is int)):
            known.add(part)
    return term in known


def _is_function(key: Key) -> bool:
    """True for what follows from its parts; memory that is not written yet holds what was there before."""
    head = key[0]
    if not isinstance(head, OpOverload):
        return head in (CONSTANT, LIST, ITEM)
    name = head.overloadpacket.__name__
    own = head.namespace in ("aten", "prims") or name == "wait_tensor"
    return own and "draw=" not in key and "empty" not in name and not writes_arguments(head)
