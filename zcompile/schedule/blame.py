"""Which pass to fix where a fact does not hold: not always the one that ran last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

from zcompile.facts import Fact, Violation
from zcompile.facts.fact import first_violation
from zcompile.ir.operation import data
from zcompile.ir.program import Program


class Change(Protocol):
    """What a pass has made of a program."""

    @property
    def name(self) -> str: ...

    @property
    def before(self) -> Program: ...

    @property
    def after(self) -> Program: ...


def of_zcompile(node: fx.Node | None) -> str:
    """What to do where nothing but zcompile's own passes have run, and the line of `node` is wrong."""
    module = "" if node is None else data(node).source
    where = f"of {module}" if module else "of the module whose code this is"
    return (
        "this is an error in zcompile, not in your model: please report it with the dump. To go on, put "
        f"@torch.compiler.disable on the forward {where}, which runs as plain Python then"
    )


def of_pass(name: str, before: Program, fact: Fact, violation: Violation, earlier: Sequence[Change]) -> str:
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


def of_goal(fact: Fact, violation: Violation, changes: Sequence[Change]) -> str:
    """What to fix where `fact` does not hold at the end: the pass after which it no longer did."""
    if (breaker := _breaker(fact, changes)) is not None:
        return f"fix the pass {breaker}: this held before it ran, and does not hold after it"
    writer = _writer(violation.node, changes)
    return "add a pass that ensures this" + (f", or fix {writer}, the last to write or move the line" if writer else "")


def _breaker(fact: Fact, changes: Sequence[Change]) -> str | None:
    """The pass before which `fact` held for the last time."""
    return next((one.name for one in reversed(changes) if first_violation(fact, one.before) is None), None)


def _writer(node: fx.Node | None, changes: Sequence[Change]) -> str | None:
    """The pass that last wrote or moved the line of `node`."""
    return None if node is None else next((one.name for one in reversed(changes) if _touches(one, node.name)), None)


def _touches(change: Change, node: str) -> bool:
    """True if a pass has put in a line, changed it, or moved it over another one that it found."""
    before, after = _lines(change.before), _lines(change.after)
    if node not in after:
        return False
    if node not in before or before[node] != after[node]:
        return True
    common = before.keys() & after.keys()
    return _preceding(before, node, common) != _preceding(after, node, common)


def _lines(program: Program) -> dict[str, object]:
    """What each line says, by the name of its node, in their order."""
    return {node.name: (str(node.args), str(node.kwargs), data(node).op) for node in program.graph.nodes}


def _preceding(lines: dict[str, object], node: str, among: set[str]) -> set[str]:
    names = list(lines)
    return among.intersection(names[: names.index(node)])
