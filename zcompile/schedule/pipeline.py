"""The pipeline: passes with what they require and ensure, their order derived, a runner that checks and journals.

A pass is a function Program -> Program. It declares facts: `requires` must hold before it, `ensures` after it and after
every later pass. The order follows from them: a pass runs after all that ensure what it requires.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Any, Protocol

import networkx as nx
from rich.console import Console
from rich.table import Table
from torch import fx

from zcompile.errors import PipelineError, ZcompileError, nearest
from zcompile.facts import (
    GATHERED_BEFORE_USE,
    MESSAGES_PACKED,
    OWNED,
    PHASES_SPLIT,
    PLACES_DISJOINT,
    REGIONS_OUTLINED,
    RELEASED_ONCE,
    UNITS_ASSIGNED,
    VOLUME_RIGHT,
    WELL_FORMED,
    Fact,
    Violation,
    verify,
)
from zcompile.facts.fact import first_violation
from zcompile.ir.layout import Layout, Stage
from zcompile.ir.operation import data, has_data
from zcompile.ir.program import Program
from zcompile.proof.terms import Rule
from zcompile.proof.values import RankValues, TracedValues

ALWAYS = (WELL_FORMED, OWNED, PLACES_DISJOINT)
"""Facts that hold of every program, checked after every pass; and its values are those that were traced."""

_OF_PARAMETERS = (PHASES_SPLIT, UNITS_ASSIGNED, REGIONS_OUTLINED, MESSAGES_PACKED, GATHERED_BEFORE_USE, RELEASED_ONCE)
"""Facts that are nothing to what becomes of gradients."""


class Trait(Flag):
    """What a pass is, beside what it requires and ensures."""

    NONE = 0
    BEFORE_LAYOUT = auto()
    """Stage and world are nothing to it: programs of different ones are the same behind it."""
    SCHEDULES = auto()
    """Its result depends on how far ahead gathers start, and on what is kept full."""
    KEEPS_FULL = auto()
    """It keeps units full from the forward to the backward."""
    UPDATES = auto()
    """It is for train steps alone."""


@dataclass(frozen=True)
class Pass:
    """One rewriting: `run` with the facts it needs and the facts it leaves.

    It may not change what is computed but as its `rules` say, which hold from then on. One that takes the place of
    another in a pipeline has the other's traits, too.
    """

    name: str
    run: Callable[[Program], Program]
    requires: tuple[Fact, ...] = ()
    ensures: tuple[Fact, ...] = ()
    traits: Trait = Trait.NONE
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        _check_named(self.name, self.run)
        for field_, kind in (("requires", Fact), ("ensures", Fact), ("rules", Rule)):
            _check_tuple(self.name, field_, getattr(self, field_), kind)

    def __call__(self, program: Program) -> Program:
        return self.run(program)

    @property
    def is_own(self) -> bool:
        """True for a pass of zcompile's, which no user is to mend."""
        run: object = self.run
        while isinstance(run, functools.partial):
            run = run.func
        return str(getattr(run, "__module__", "")).partition(".")[0] == "zcompile"


def _check_named(name: object, run: object) -> None:
    """Raise PipelineError for what is no name and function."""
    if not isinstance(name, str) or not callable(run):
        fix = "give a name and a function from program to program: Pass('mine', mine)"
        raise PipelineError(f"pass {name!r}", f"has {run!r} to run", fix)


def _check_tuple(name: str, what: str, given: object, kind: type[Fact] | type[Rule]) -> None:
    """Raise PipelineError where `given` is no tuple of `kind`: one alone, above all."""
    if isinstance(given, kind):
        problem = f"has one {kind.__name__.lower()} as {what}, which is a tuple of them"
        raise PipelineError(
            f"pass {name!r}", problem, f"write parentheses and a comma: {what}=({kind.__name__.upper()},)"
        )
    if not isinstance(given, tuple) or not all(isinstance(one, kind) for one in given):
        kinds = sorted({type(one).__name__ for one in given}) if isinstance(given, tuple) else [type(given).__name__]
        problem = f"has {', '.join(kinds)} as {what}"
        raise PipelineError(f"pass {name!r}", problem, f"give a tuple of zcompile.{kind.__name__}")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of the journal: a pass, the programs before and after it, and the seconds it and its checks took."""

    step: Pass
    before: Program
    after: Program
    seconds: float
    check_seconds: float

    @property
    def name(self) -> str:
        return self.step.name


@dataclass(frozen=True, slots=True)
class Failure:
    """A pass that failed: the program that it was given, and what it made of it, if it has made one."""

    name: str
    before: Program
    after: Program | None = None


@dataclass
class Journal:
    """What a pipeline did to one program, pass by pass."""

    entries: list[JournalEntry] = field(default_factory=list)
    failure: Failure | None = None
    """Where it ended early."""
    is_own: bool = True
    """True as long as passes of zcompile alone have begun."""
    part: RankValues | None = None
    """Of the step of a pipeline's rank: what of the traced one it computes."""


def _applied(step: Pass, program: Program, fix: str) -> Program:
    """What a pass makes of `program`, which it must leave as it is: the journal shows it, and others begin with it."""
    before = _state(program)
    try:
        after: object = step(program)
    except ZcompileError:
        raise
    except Exception as error:
        raise PipelineError(step.name, f"raised {type(error).__name__}: {error}", fix) from error
    if not isinstance(after, Program):
        raise PipelineError(step.name, f"returned {type(after).__name__}", "let the pass return the program")
    if _state(program) != before:
        raise PipelineError(step.name, "changes the program that it is given", "let it change program.copy()")
    return after


def _state(program: Program) -> list[tuple[Any, ...]]:
    graphs = (program.graph, *(region.graph for region in program.regions.values()))
    nodes = (node for graph in graphs for node in graph.nodes if has_data(node))
    return [(node, node.target, node.args, node.kwargs, data(node)) for node in nodes]


class Values(Protocol):
    """What a program has to compute."""

    @property
    def fact(self) -> Fact: ...

    def modulo(self, rules: Sequence[Rule]) -> Values: ...


@dataclass(frozen=True)
class Verified:
    """A program, what it has to compute, and the facts that were found to hold of it."""

    program: Program
    values: Values
    facts: tuple[Fact, ...] = ALWAYS

    @classmethod
    def traced(cls, program: Program) -> Verified:
        """A step as it was traced: what it computes, all that passes make of it has to compute."""
        return cls(program, TracedValues.of(program))

    @classmethod
    def passed(cls, traced: Program, pipeline: Pipeline, program: Program) -> Verified:
        """`program` once more, which was found to be what `pipeline` makes of `traced`."""
        rules = tuple(rule for step in pipeline.passes for rule in step.rules)
        ensured = (fact for step in pipeline.passes for fact in step.ensures)
        return cls(program, TracedValues.of(traced).modulo(rules), tuple(dict.fromkeys((*ALWAYS, *ensured))))

    def laid_out(self, layout: Layout) -> Verified:
        """The same with another layout, before a pass has looked at the first."""
        assert isinstance(self.values, TracedValues), "a step of one micro-batch"
        return replace(self, program=replace(self.program, layout=layout), values=replace(self.values, layout=layout))

    def holding_back(self) -> Verified:
        """The same where gradients are to be held back, with none of the facts of reductions."""
        assert isinstance(self.values, TracedValues), "a step of one micro-batch"
        kept = tuple(fact for fact in self.facts if fact in (*ALWAYS, *_OF_PARAMETERS))
        return replace(self, values=replace(self.values, holds_back=True), facts=kept)

    def after(self, passes: Iterable[Pass], journal: Journal | None = None) -> Verified:
        """What `passes` make of the program, its values and every fact checked after each of them.

        Raises:
            ProgramError: a fact failed; the message names the pass and marks the line.
            PipelineError: a pass raised something, returned no program, or changed the one that it was given.
        """
        result, journal = self, Journal() if journal is None else journal
        for step in passes:
            journal.failure = Failure(step.name, result.program)
            journal.is_own &= step.is_own
            started = time.perf_counter()
            after = _applied(step, result.program, "fix the pass" if not journal.is_own else _fix_of_zcompile(None))
            ran = time.perf_counter()
            notes = (f"{step.name} changes values, by the rule {rule}" for rule in step.rules)
            after = replace(after, notes=(*after.notes, *notes))
            journal.failure = replace(journal.failure, after=after)
            checked = result._checked(step, after, journal)
            journal.failure = None
            seconds = ran - started, time.perf_counter() - ran
            journal.entries.append(JournalEntry(step, result.program, after, *seconds))
            result = checked
        return result

    def _checked(self, step: Pass, after: Program, journal: Journal) -> Verified:
        """What is known of `after`, which `step` has made of this program.

        Raises:
            ProgramError: a fact failed.
        """
        values = self.values.modulo(step.rules)
        facts = tuple(dict.fromkeys((*self.facts, *step.ensures)))

        def advice(fact: Fact, violation: Violation) -> str:
            if journal.is_own:
                return _fix_of_zcompile(violation.node)
            if fact == values.fact:
                return f"fix the pass {step.name}; one that means to change values says so by its rules"
            return _fix_of_pass(step.name, self.program, fact, violation, journal.entries)

        verify(after, (*facts, values.fact), f"after {step.name}", advice)
        return Verified(after, values, facts)


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order derived from their facts; a value, printed as a table.

    Raises:
        PipelineError: two passes of one name, a requirement that no pass ensures, or a circle.
    """

    stage: Stage
    passes: tuple[Pass, ...]
    goals: tuple[Fact, ...] = (VOLUME_RIGHT,)
    """Facts that the finished program must have, whichever pass brings them about."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", _ordered(self.passes))

    def run(self, program: Program, journal: Journal | None = None) -> Program:
        """Run all passes over `program`, checking facts after each.

        Raises:
            ProgramError: a fact failed; the message names the pass and marks the line.
            PipelineError: a pass raised something, returned no program, or changed the one that it was given.
        """
        return self.verified(program, journal).program

    def verified(self, program: Program, journal: Journal | None = None) -> Verified:
        """What `run` gives, with what is known of it.

        Raises:
            ProgramError, PipelineError: as `run`.
        """
        journal = Journal() if journal is None else journal
        finished = Verified.traced(program).after(self.passes, journal)

        self.check_goals(finished.program, journal)
        return finished

    def check_goals(self, finished: Program, journal: Journal) -> None:
        """Check what the finished program must have; `journal` has what made it.

        Raises:
            ProgramError: it has it not.
        """

        def advice(fact: Fact, violation: Violation) -> str:
            if journal.is_own:
                return _fix_of_zcompile(violation.node)
            return _fix_of_goal(fact, violation, journal.entries)

        journal.failure = Failure("end", finished)
        verify(finished, self.goals, "at the end of the pipeline", advice)
        journal.failure = None

    @property
    def names(self) -> list[str]:
        return [step.name for step in self.passes]

    def __getitem__(self, name: str) -> Pass:
        """The pass of that name.

        Raises:
            PipelineError: there is none.
        """
        self._known(name)
        return next(step for step in self.passes if step.name == name)

    def until(self, trait: Trait) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
        """The passes before the first that has `trait`, and the rest."""
        first = next((index for index, step in enumerate(self.passes) if trait in step.traits), len(self.passes))
        return self.passes[:first], self.passes[first:]

    def without_any(self, trait: Trait) -> Pipeline:
        """This pipeline with all passes left out that have `trait`."""
        return replace(self, passes=tuple(step for step in self.passes if trait not in step.traits))

    def changed(self, changes: Mapping[str, Pass | None]) -> Pipeline:
        """This pipeline with passes replaced or added (a Pass) and left out (None), by name.

        Raises:
            PipelineError: there is no such pass to leave out, or another one needs what it ensures.
        """
        passes = {step.name: step for step in self.passes}
        for name, step in changes.items():
            if step is None:
                self._known(name)
                del passes[name]
            elif step.name != name:
                raise PipelineError(f"passes[{name!r}]", f"the pass is called {step.name!r}", "use one name for both")
            else:
                known = passes.get(name)
                passes[name] = replace(step, traits=step.traits | known.traits) if known else step
        return replace(self, passes=tuple(passes.values()))

    def _known(self, name: str) -> None:
        if name not in self.names:
            raise PipelineError(f"pass {name!r}", "there is no such pass", nearest(name, self.names))

    def __str__(self) -> str:
        table = Table(title=f"stage {self.stage.number}", title_justify="left")
        for heading in ("pass", "requires", "ensures"):
            table.add_column(heading, overflow="fold")
        for step in self.passes:
            table.add_row(step.name, "\n".join(map(str, step.requires)), "\n".join(map(str, step.ensures)))
        text = io.StringIO()
        Console(file=text, width=120).print(table)
        return text.getvalue().rstrip()


def _ordered(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """`passes` in an order that their facts allow, otherwise as given."""
    passes = tuple(passes)
    by_name = {step.name: step for step in passes}
    if len(by_name) != len(passes):
        double = next(step.name for step in passes if by_name[step.name] is not step)
        raise PipelineError(f"pass {double!r}", "stands twice in the pipeline", "give one of the two another name")
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(by_name)
    for step in passes:
        for fact in step.requires:
            makers = [other.name for other in passes if fact in other.ensures and other is not step]
            if not makers:
                known = ", ".join(f"{other.name} ensures {fact}" for other in passes if fact in other.ensures)
                raise PipelineError(
                    f"pass {step.name!r}", f"requires {fact!s}, which no earlier pass ensures",
                    known or "put a pass that ensures it into the pipeline, or leave this one out",
                )  # fmt: skip
            graph.add_edges_from((maker, step.name) for maker in makers)
    rank = {step.name: index for index, step in enumerate(passes)}
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except nx.NetworkXUnfeasible as error:
        circle = " -> ".join(edge[0] for edge in nx.find_cycle(graph))
        raise PipelineError("the pipeline", f"passes wait for each other: {circle}", "drop a requirement") from error
    return tuple(by_name[name] for name in order)


# -- which pass to fix where a fact does not hold ----------------------------------------------------------------------


def _fix_of_zcompile(node: fx.Node | None) -> str:
    """What to do where nothing but zcompile's own passes have run, and the line of `node` is wrong."""
    module = "" if node is None else data(node).source
    where = f"of {module}" if module else "of the module whose code this is"
    return (
        "this is an error in zcompile, not in your model: please report it with the dump. To go on, put "
        f"@torch.compiler.disable on the forward {where}, which runs as plain Python then"
    )


def _fix_of_pass(name: str, before: Program, fact: Fact, violation: Violation, earlier: Sequence[JournalEntry]) -> str:
    """What to fix where `fact` does not hold after the pass called `name`, which was given `before`.

    If it held before, the pass has broken it. If it did not, the pass should ensure it, and may have been given what it
    cannot make good: by the pass after which it no longer held, or by the one that last wrote or moved the line.
    """
    if first_violation(fact, before) is None:
        return f"fix the pass {name}: this held before it ran, and does not hold after it"
    breaker, writer = _breaker(fact, earlier), _writer(violation.node, earlier)
    other = f", or {writer}, the last pass before it to write or move the line" if writer else ""
    other = f", or {breaker}, after which it no longer held" if breaker else other
    return f"fix the pass {name}, which should ensure this{other}"


def _fix_of_goal(fact: Fact, violation: Violation, changes: Sequence[JournalEntry]) -> str:
    """What to fix where `fact` does not hold at the end: the pass after which it no longer did."""
    if (breaker := _breaker(fact, changes)) is not None:
        return f"fix the pass {breaker}: this held before it ran, and does not hold after it"
    writer = _writer(violation.node, changes)
    return "add a pass that ensures this" + (f", or fix {writer}, the last to write or move the line" if writer else "")


def _breaker(fact: Fact, changes: Sequence[JournalEntry]) -> str | None:
    """The pass before which `fact` held for the last time."""
    return next((one.name for one in reversed(changes) if first_violation(fact, one.before) is None), None)


def _writer(node: fx.Node | None, changes: Sequence[JournalEntry]) -> str | None:
    """The pass that last wrote or moved the line of `node`."""
    return None if node is None else next((one.name for one in reversed(changes) if _touches(one, node.name)), None)


def _touches(change: JournalEntry, node: str) -> bool:
    """True if a pass has put in a line, changed it, or moved it over another one that it found."""
    before, after = _line_texts(change.before), _line_texts(change.after)
    if node not in after:
        return False
    if node not in before or before[node] != after[node]:
        return True
    common = before.keys() & after.keys()
    return _preceding(before, node, common) != _preceding(after, node, common)


def _line_texts(program: Program) -> dict[str, object]:
    """What each line says, by the name of its node, in their order."""
    return {node.name: (str(node.args), str(node.kwargs), data(node).op) for node in program.graph.nodes}


def _preceding(lines: dict[str, object], node: str, among: set[str]) -> set[str]:
    names = list(lines)
    return among.intersection(names[: names.index(node)])
