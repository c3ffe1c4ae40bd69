"""The classes of facts and violations, and the verifier."""

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
    """The node at which a fact fails (None if at no particular node), and how."""

    node: fx.Node | None
    message: str


@dataclass(frozen=True)
class Fact:
    """A property of programs. Facts with the same name are equal."""

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
    """Check that all `facts` hold for `program`.

    Args:
        program: The program to check.
        facts: The facts that must hold.
        where: What made the program, for the message, such as "after insert_gathers".
        advice: Returns how to fix a violation.

    Raises:
        ProgramError: a fact fails; names the fact and the problem, and marks the line in the printed program.
    """
    for fact in facts:
        if (violation := first_violation(fact, program)) is not None:
            fix = f"{advice(fact, violation)}\n{_marked(program, violation.node)}"
            raise ProgramError(f"{where}: {fact.name}", violation.message, fix)


def first_violation(fact: Fact, program: Program) -> Violation | None:
    """Return the first violation of `fact`, or None; a program on which the check raises is a violation, too."""
    try:
        return next(fact.violations(program), None)
    except Exception as error:
        return Violation(None, f"the program is so broken that this cannot be checked: {type(error).__name__}: {error}")


def _marked(program: Program, node: fx.Node | None) -> str:
    """Return the printed lines around `node`, with an arrow at its own; "" for None."""
    if node is None:
        return ""
    try:
        lines = lines_with_nodes(program)
    except Exception as error:  # the violation itself may make the program unprintable
        return f"    (it cannot be printed: {type(error).__name__}: {error})"
    at = [index for index, (_, name) in enumerate(lines) if name == node.name]
    if not at:  # an item, on the line of its call; an argument; or a node that only the return line names
        named = re.compile(rf"\b{re.escape(node.name)}\b")
        at = [index for index, (text, _) in enumerate(lines) if named.search(text.partition("#")[0])][:1]
    shown = range(max(0, at[0] - 3), min(len(lines), at[-1] + 4)) if at else ()
    return "\n".join(f"{'-->' if i in at else '   '} {i + 1:4} {lines[i][0]}" for i in shown)


def label(node: fx.Node) -> str:
    """Return the name of a node in messages: region and units for a call, else the node's name."""
    op = data(node).op
    return f"{op.region} of {data(node).source}" if isinstance(op, Call) else node.name


def in_training(fact: Fact) -> Fact:
    """Return `fact` for programs with a backward only: without one, no values are saved that could be recomputed."""

    def violations(program: Program) -> Iterator[Violation]:
        if program.has_backward:
            yield from fact.violations(program)

    return Fact(f"{fact.name} in training", violations)
