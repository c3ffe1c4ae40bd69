"""What a fact is, and the verifier: the loop over facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from zcompile.errors import ProgramError
from zcompile.ir.operation import data
from zcompile.ir.ops import Call
from zcompile.ir.printer import lines_with_nodes
from zcompile.ir.program import Program


@dataclass(frozen=True, slots=True)
class Violation:
    """Where a fact fails (None: nowhere in particular), and how."""

    node: fx.Node | None
    message: str


@dataclass(frozen=True)
class Fact:
    """A property of programs. Two facts are one if their names are."""

    name: str
    violations: Callable[[Program], Iterator[Violation]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


def _usual_advice(fact: Fact, violation: Violation) -> str:
    return "change the program, or the pass that made it, so that this holds"


def verify(
    program: Program,
    facts: Iterable[Fact],
    where: str,
    advice: Callable[[Fact, Violation], str] = _usual_advice,
) -> None:
    """Check all `facts`.

    Args:
        program: The program that they must hold of.
        facts: These.
        where: What has made the program, for the message.
        advice: Gives what to do about a violation.

    Raises:
        ProgramError: naming the fact, what is wrong, and the line with a mark in the printed program.
    """
    for fact in facts:
        if (violation := first_violation(fact, program)) is not None:
            fix = f"{advice(fact, violation)}\n{_marked(program, violation.node)}"
            raise ProgramError(f"{where}: {fact.name}", violation.message, fix)


def first_violation(fact: Fact, program: Program) -> Violation | None:
    """The first violation of `fact`; a program that the check cannot even be made of is one, too."""
    try:
        return next(fact.violations(program), None)
    except Exception as error:
        return Violation(None, f"the program is so broken that this cannot be checked: {type(error).__name__}: {error}")


def _marked(program: Program, node: fx.Node | None) -> str:
    """The printed lines around `node`, its own with an arrow; nothing for no node."""
    if node is None:
        return ""
    try:
        lines = lines_with_nodes(program)
    except Exception as error:  # what is wrong may be what keeps it from being printed
        return f"    (it cannot be printed: {type(error).__name__}: {error})"
    at = [index for index, (_, name) in enumerate(lines) if name == node.name]
    if not at:  # one of several results, on the line of its call; an argument; or what only a result names
        named = re.compile(rf"\b{re.escape(node.name)}\b")
        at = [index for index, (text, _) in enumerate(lines) if named.search(text.partition("#")[0])][:1]
    shown = range(max(0, at[0] - 3), min(len(lines), at[-1] + 4)) if at else ()
    return "\n".join(f"{'-->' if i in at else '   '} {i + 1:4} {lines[i][0]}" for i in shown)


def label(node: fx.Node) -> str:
    """What a message calls a node: a call by its region and units, anything else by its name."""
    op = data(node).op
    return f"{op.region} of {data(node).source}" if isinstance(op, Call) else node.name


def in_training(fact: Fact) -> Fact:
    """`fact` of programs with a backward: without one nothing is saved that could be computed again."""

    def violations(program: Program) -> Iterator[Violation]:
        if program.has_backward:
            yield from fact.violations(program)

    return Fact(f"{fact.name} in training", violations)
