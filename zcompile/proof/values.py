"""The fact that a program computes what was traced: translation validation by terms.

Each program is compared with the traced step, not with the program before the last pass (Pnueli, Siegel and Singerman,
"Translation Validation", TACAS 1998): what it returns, the gradients of its inputs, for each parameter with a gradient
the mean of it, what it writes to inputs, and how many random numbers it draws. What passes say beside a program (which
parameters are unused or frozen, what is the same on all ranks) is found out from the traced step again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.layout import Layout
from zcompile.ir.operation import data
from zcompile.ir.ops import Accumulate, Input, Reduce
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import Memory, memory_of_values
from zcompile.proof.difference import parted, term_text
from zcompile.proof.regions import Regions
from zcompile.proof.replication import is_replicated, marked
from zcompile.proof.rules import Rule
from zcompile.proof.steps import HELD_BACK, MEAN, StepTerms
from zcompile.proof.terms import Terms


@dataclass(frozen=True)
class TracedTerms:
    """A traced step, and its terms with some rules; made once for all programs that are compared with it."""

    traced: Program
    rules: tuple[Rule, ...] = ()

    @cached_property
    def step(self) -> StepTerms:
        return StepTerms(self.traced, Regions(Terms(self.rules)))

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
class TracedValues:
    """What programs that passes make of a traced step have to compute.

    Attributes:
        terms: The terms of the traced step.
        layout: How programs are laid out.
        holds_back: True for programs that hold gradients back, for backwards under `no_sync`.
    """

    terms: TracedTerms
    layout: Layout
    holds_back: bool = False

    @classmethod
    def of(cls, traced: Program) -> TracedValues:
        return cls(TracedTerms(traced), traced.layout)

    def modulo(self, rules: Sequence[Rule]) -> TracedValues:
        """The same where these rules say what counts as equal, too."""
        every = tuple(dict.fromkeys((*self.terms.rules, *rules)))
        return self if every == self.terms.rules else replace(self, terms=TracedTerms(self.terms.traced, every))

    @property
    def fact(self) -> Fact:
        named = f" modulo {', '.join(rule.name for rule in self.terms.rules)}" if self.terms.rules else ""
        return Fact(f"values as they were traced{named}", self.violations)

    def violations(self, program: Program) -> Iterator[Violation]:
        """Where `program` computes something else than was traced, or says what does not hold."""
        yield from self._mistaken_claims(program)
        step = StepTerms(program, self.terms.step.regions)
        for what, line, found, wanted in (*self._results(step), *self._gradients(step), *self._writes(step)):
            if found != wanted:
                yield self._difference(step, what, line, found, wanted)
        if step.draws != self.terms.step.draws:
            yield Violation(None, f"{step.draws} random draws; the traced step has {self.terms.step.draws}")
        for node, term in step.replicated.items():
            if not is_replicated(term, self.terms.marked, step.terms):
                value = node.all_input_nodes[0].name
                yield Violation(node, f"{value} is not known to be the same on all ranks, of which each keeps a shard")
        yield from self._newly_shared(program)

    # -- what is said beside a program ----------------------------------------------------------------------------

    def _mistaken_claims(self, program: Program) -> Iterator[Violation]:
        traced, layout = self.terms.traced, program.layout
        unused = {*self.layout.trainable} - traced.results.gradients.keys()
        if program.unused != unused:
            name = min(program.unused ^ unused)
            yield Violation(None, f"{name} is said to be {'unused' if name in program.unused else 'used'}; it is not")
        if (layout.stage, layout.axes, layout.away) != (self.layout.stage, self.layout.axes, self.layout.away):
            yield Violation(None, "the stage, or the axes of the layout, are not those of the traced step")
        for unit, wanted in zip(layout.units, self.layout.units, strict=False):
            if (unit.name, unit.params) != (wanted.name, wanted.params):
                yield Violation(None, f"the parameters of {unit.name} are not those that {wanted.name} was traced with")
        if len(layout.units) != len(self.layout.units):
            yield Violation(None, f"{len(layout.units)} units; the traced step has {len(self.layout.units)}")
        inputs, before = ([data(node).op for node in of.nodes(Input)] for of in (program, traced))
        if inputs != before:
            yield Violation(None, "the inputs are not those of the traced step, in their order")

    def _newly_shared(self, program: Program) -> Iterator[Violation]:
        """A result that shows the memory of an input, or of another result, as it did not when it was traced."""
        results = [*program.results.outputs, *program.results.input_gradients]
        for value, now, before in zip(results, shared_results(program), self.terms.shared, strict=False):
            if now != before and now is not None:
                yield Violation(
                    value, f"{value.name} is returned, and shows memory that another value has; want a copy"
                )

    # -- terms ----------------------------------------------------------------------------------------------------

    def _results(self, step: StepTerms) -> Iterator[tuple[str, Any, int, int]]:
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

    def _gradients(self, step: StepTerms) -> Iterator[tuple[str, Any, int, int]]:
        """The gradients of parameters, each once: averaged, or as they are until reductions are inserted."""
        wanted, raw = self.terms.traced.results.gradients, step.program.results.gradients
        lines = {name: node for node in step.program.nodes(Reduce, Accumulate) for name in data(node).op.params}  # type: ignore[attr-defined]
        none = step.term(None)
        for name in dict.fromkeys((*wanted, *raw, *step.gradients)):
            traced = self.terms.step.term(wanted.get(name))
            found = step.gradients.get(name, [])
            what = f"the gradient of {name}"
            if name in raw:
                yield what, raw[name], step.term(raw[name]), traced
            elif not found:
                yield what, lines.get(name), none, traced
            for index, term in enumerate(found):
                first = index == 0 and name not in raw and name in wanted
                yield what, lines.get(name), term, self._averaged(step, name, traced) if first else none

    def _averaged(self, step: StepTerms, name: str, gradient: int) -> int:
        """What is handed to the optimizer for a gradient of this rank's."""
        param, stage = self.layout.param(name), self.layout.stage
        if self.holds_back:
            return step.terms.make((HELD_BACK, str(param.dtype), gradient))
        how = "scattered" if stage.optimizer_sharded and param.shards else "whole"
        return step.terms.make((MEAN, self.layout.sharded.name, how, str(param.reduce_dtype), gradient))

    def _writes(self, step: StepTerms) -> Iterator[tuple[str, Any, int, int]]:
        now, before, none = step.writes, self.terms.step.writes, step.term(None)
        for index in range(max(len(now), len(before))):
            found, wanted = (writes[index] if index < len(writes) else none for writes in (now, before))
            yield "what an input is overwritten with", None, found, wanted

    def _difference(self, step: StepTerms, what: str, line: Any, found: int, wanted: int) -> Violation:
        """The first of the lines that compute what differs, and what was traced there."""
        terms, place = step.terms, parted(found, wanted, step.terms)
        inner, outer = place.around or (place.found, place.wanted)
        line = step.line_of(inner) or line
        traced = self.terms.step.line_of(outer)
        source = f" in {data(traced).source}" if traced is not None and data(traced).source else ""
        mine, theirs = (term_text(term, terms, self.terms.names) for term in (place.found, place.wanted))
        where = f"{label(line)}: " if isinstance(line, fx.Node) else ""
        text = f", in {term_text(inner, terms, self.terms.names)}" if place.around else ""
        return Violation(line, f"{what} is not what was traced: {where}{mine}{text}; want {theirs}{source}")


def shared_results(program: Program) -> list[tuple[bool, int] | None]:
    """For each result and gradient of an input what it shares its memory with: an input by number, an earlier result.

    None for one that has memory of its own.
    """
    results = [*program.results.outputs, *program.results.input_gradients]
    if not any(isinstance(value, fx.Node) for value in results):
        return [None] * len(results)
    memory, inputs = memory_of_values(program), program.nodes(Input)
    found: list[tuple[bool, int] | None] = []
    first: dict[Memory, int] = {}
    for number, value in enumerate(results):
        mine = memory[value] if isinstance(value, fx.Node) else None
        if mine is None:
            found.append(None)
        elif mine.line in inputs:
            found.append((True, inputs.index(mine.line)))
        else:
            earlier = first.setdefault(mine, number)
            found.append((False, earlier) if earlier != number else None)
    return found
