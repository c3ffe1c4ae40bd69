"""Pipelines of passes: their order, derived from the facts they require and ensure, and the runner that checks these.

A pass is a function Program -> Program. It declares facts: `requires` must hold before it, `ensures` after it and after
every later pass. The order follows from them: a pass runs after all passes that ensure what it requires.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Any, Protocol

import networkx as nx
from rich.table import Table
from torch import fx

from zcompile.cost.text_console import TextConsole
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
"""Facts that hold for every program, checked after every pass, together with the fact about its values."""

_OF_PARAMETERS = (PHASES_SPLIT, UNITS_ASSIGNED, REGIONS_OUTLINED, MESSAGES_PACKED, GATHERED_BEFORE_USE, RELEASED_ONCE)
"""Facts that do not depend on what happens to gradients."""


class Trait(Flag):
    """Properties of a pass other than the facts that it requires and ensures."""

    NONE = 0
    BEFORE_LAYOUT = auto()
    """Independent of stage and world: its result is the same for all of them."""
    SCHEDULES = auto()
    """Its result depends on how far ahead gathers start, or on which units are kept full."""
    KEEPS_FULL = auto()
    """It keeps units full from the forward to the backward."""
    UPDATES = auto()
    """It is only for train steps."""


@dataclass(frozen=True)
class Pass:
    """A pass: the function `run`, with the facts that it requires and ensures.

    It may change computed values only as its `rules` allow, which hold from then on. A pass that replaces another one
    in a pipeline inherits its traits.
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
        """True for a pass of zcompile, which users cannot fix."""
        run: object = self.run
        while isinstance(run, functools.partial):
            run = run.func
        return str(getattr(run, "__module__", "")).partition(".")[0] == "zcompile"


def _check_named(name: object, run: object) -> None:
    """Raise PipelineError unless given a name and a function."""
    if not isinstance(name, str) or not callable(run):
        fix = "give a name and a function from program to program: Pass('mine', mine)"
        raise PipelineError(f"pass {name!r}", f"has {run!r} to run", fix)


def _check_tuple(name: str, what: str, given: object, kind: type[Fact] | type[Rule]) -> None:
    """Raise PipelineError unless `given` is a tuple of `kind`; a missing tuple is the most common mistake."""
    if isinstance(given, kind):
        problem = f"has one {kind.__name__.lower()} as {what}, which is a tuple of them"
        raise PipelineError(
            f"pass {name!r}", problem, f"write parentheses and a comma: {what}=({kind.__name__.upper()},)"
        )
    if not isinstance(given, tuple) or not all(isinstance(item, kind) for item in given):
        kinds = sorted({type(item).__name__ for item in given}) if isinstance(given, tuple) else [type(given).__name__]
        problem = f"has {', '.join(kinds)} as {what}"
        raise PipelineError(f"pass {name!r}", problem, f"give a tuple of zcompile.{kind.__name__}")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An entry of the journal: a pass, the programs before and after it, and the seconds of the pass and its checks."""

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
    """A pass that failed, the program that it received, and the program that it returned, if any."""

    name: str
    before: Program
    after: Program | None = None


@dataclass
class Journal:
    """What a pipeline did to one program, pass by pass."""

    entries: list[JournalEntry] = field(default_factory=list)
    failure: Failure | None = None
    """The pass at which the pipeline stopped early."""
    is_own: bool = True
    """True as long as only passes of zcompile have started."""
    part: RankValues | None = None
    """For the step of a pipeline rank, its part of the traced step."""


def _applied(step: Pass, program: Program, fix: str) -> Program:
    """Run a pass on `program`, which it must not change: the journal shows it, and other passes start from it."""
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
    """The values that a program must compute."""

    @property
    def fact(self) -> Fact: ...

    def modulo(self, rules: Sequence[Rule]) -> Values: ...


@dataclass(frozen=True)
class Verified:
    """A program, the values that it must compute, and the facts that were verified for it."""

    program: Program
    values: Values
    facts: tuple[Fact, ...] = ALWAYS

    @classmethod
    def traced(cls, program: Program) -> Verified:
        """Return a traced step, whose values all programs made from it must compute."""
        return cls(program, TracedValues.of(program))

    @classmethod
    def passed(cls, traced: Program, pipeline: Pipeline, program: Program) -> Verified:
        """Return `program`, which was already verified to be the result of `pipeline` on `traced`."""
        rules = tuple(rule for step in pipeline.passes for rule in step.rules)
        ensured = (fact for step in pipeline.passes for fact in step.ensures)
        return cls(program, TracedValues.of(traced).modulo(rules), tuple(dict.fromkeys((*ALWAYS, *ensured))))

    def laid_out(self, layout: Layout) -> Verified:
        """Return the same with another layout, before any pass has used the old one."""
        assert isinstance(self.values, TracedValues), "a step of one micro-batch"
        return replace(self, program=replace(self.program, layout=layout), values=replace(self.values, layout=layout))

    def holding_back(self) -> Verified:
        """Return the same for accumulating gradients, without the facts about reductions."""
        assert isinstance(self.values, TracedValues), "a step of one micro-batch"
        kept = tuple(fact for fact in self.facts if fact in (*ALWAYS, *_OF_PARAMETERS))
        return replace(self, values=replace(self.values, holds_back=True), facts=kept)

    def after(self, passes: Iterable[Pass], journal: Journal | None = None) -> Verified:
        """Run `passes`, checking values and all facts after each of them.

        Raises:
            ProgramError: a fact failed; the message names the pass and marks the line.
            PipelineError: a pass raised an error, did not return a program, or changed its input.
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
        """Verify `after`, the result of `step` on this program.

        Raises:
            ProgramError: a fact failed.
        """
        values = self.values.modulo(step.rules)
        facts = tuple(dict.fromkeys((*self.facts, *step.ensures)))

        def advice(fact: Fact, violation: Violation) -> str:
            if journal.is_own:
                return _fix_of_zcompile(violation.node)
            if fact == values.fact:
                return f"fix the pass {step.name}; a pass that changes values on purpose must declare rules"
            return _fix_of_pass(step.name, self.program, fact, violation, journal.entries)

        verify(after, (*facts, values.fact), f"after {step.name}", advice)
        return Verified(after, values, facts)


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order derived from their facts; immutable, prints as a table.

    Raises:
        PipelineError: two passes have the same name, no pass ensures a requirement, or requirements are cyclic.
    """

    stage: Stage
    passes: tuple[Pass, ...]
    goals: tuple[Fact, ...] = (VOLUME_RIGHT,)
    """Facts that must hold for the finished program, whichever pass establishes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", _ordered(self.passes))

    def run(self, program: Program, journal: Journal | None = None) -> Program:
        """Run all passes on `program`, checking facts after each.

        Raises:
            ProgramError: a fact failed; the message names the pass and marks the line.
            PipelineError: a pass raised an error, did not return a program, or changed its input.
        """
        return self.verified(program, journal).program

    def verified(self, program: Program, journal: Journal | None = None) -> Verified:
        """Run all passes as `run` does, and return the program with its verified facts.

        Raises:
            ProgramError, PipelineError: as for `run`.
        """
        journal = Journal() if journal is None else journal
        finished = Verified.traced(program).after(self.passes, journal)

        self.check_goals(finished.program, journal)
        return finished

    def check_goals(self, finished: Program, journal: Journal) -> None:
        """Check the goals of the finished program; `journal`: the passes that made it.

        Raises:
            ProgramError: a goal does not hold.
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
        """Return the pass called `name`.

        Raises:
            PipelineError: there is no such pass.
        """
        self._known(name)
        return next(step for step in self.passes if step.name == name)

    def until(self, trait: Trait) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
        """Return the passes before the first one with `trait`, and the rest."""
        first = next((index for index, step in enumerate(self.passes) if trait in step.traits), len(self.passes))
        return self.passes[:first], self.passes[first:]

    def without_any(self, trait: Trait) -> Pipeline:
        """Return this pipeline without the passes that have `trait`."""
        return replace(self, passes=tuple(step for step in self.passes if trait not in step.traits))

    def changed(self, changes: Mapping[str, Pass | None]) -> Pipeline:
        """Return this pipeline with passes replaced or added (a Pass) or removed (None), by name.

        Raises:
            PipelineError: a pass to remove does not exist, or another pass requires what it ensures.
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
        console = TextConsole(120)
        console.print(table)
        return console.text.rstrip()


def _ordered(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Return `passes` in an order that their facts allow, as close as possible to the given order."""
    passes = tuple(passes)
    by_name = {step.name: step for step in passes}
    if len(by_name) != len(passes):
        double = next(step.name for step in passes if by_name[step.name] is not step)
        raise PipelineError(f"pass {double!r}", "is in the pipeline twice", "give one of the two another name")
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


# -- advice on which pass to fix --------------------------------------------------------------------------------------


def _fix_of_zcompile(node: fx.Node | None) -> str:
    """Return advice for an error in the line of `node` after only zcompile's own passes have run."""
    module = "" if node is None else data(node).source
    where = f"of {module}" if module else "of the module whose code this is"
    return (
        "this is an error in zcompile, not in your model: please report it with the dump. To go on, put "
        f"@torch.compiler.disable on the forward {where}, which runs as plain Python then"
    )


def _fix_of_pass(name: str, before: Program, fact: Fact, violation: Violation, earlier: Sequence[JournalEntry]) -> str:
    """Return advice if `fact` does not hold after the pass called `name`, which received `before`.

    If it held before, the pass broke it. If it did not, the pass should ensure it, but may have received a program that
    it cannot repair: from the pass after which the fact no longer held, or the last one to write or move the line.
    """
    if first_violation(fact, before) is None:
        return f"fix the pass {name}: this held before it ran, and does not hold after it"
    breaker, writer = _breaker(fact, earlier), _writer(violation.node, earlier)
    other = f", or {writer}, the last pass before it to write or move the line" if writer else ""
    other = f", or {breaker}, after which it no longer held" if breaker else other
    return f"fix the pass {name}, which should ensure this{other}"


def _fix_of_goal(fact: Fact, violation: Violation, changes: Sequence[JournalEntry]) -> str:
    """Return advice if `fact` does not hold at the end: fix the pass after which it no longer did."""
    if (breaker := _breaker(fact, changes)) is not None:
        return f"fix the pass {breaker}: this held before it ran, and does not hold after it"
    writer = _writer(violation.node, changes)
    return "add a pass that ensures this" + (f", or fix {writer}, the last to write or move the line" if writer else "")


def _breaker(fact: Fact, changes: Sequence[JournalEntry]) -> str | None:
    """Return the last pass before which `fact` held."""
    return next((entry.name for entry in reversed(changes) if first_violation(fact, entry.before) is None), None)


def _writer(node: fx.Node | None, changes: Sequence[JournalEntry]) -> str | None:
    """Return the last pass that wrote or moved the line of `node`."""
    return None if node is None else next((e.name for e in reversed(changes) if _touches(e, node.name)), None)


def _touches(change: JournalEntry, node: str) -> bool:
    """Return True if a pass inserted a line, changed it, or moved it across a line that was there before."""
    before, after = _line_texts(change.before), _line_texts(change.after)
    if node not in after:
        return False
    if node not in before or before[node] != after[node]:
        return True
    common = before.keys() & after.keys()
    return _preceding(before, node, common) != _preceding(after, node, common)


def _line_texts(program: Program) -> dict[str, object]:
    """Return the content of each line, in order, by the name of its node."""
    return {node.name: (str(node.args), str(node.kwargs), data(node).op) for node in program.graph.nodes}


def _preceding(lines: dict[str, object], node: str, among: set[str]) -> set[str]:
    names = list(lines)
    return among.intersection(names[: names.index(node)])
