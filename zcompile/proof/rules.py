"""Rules: how a pass changes values that it means to change, as rewriting of terms.

    Rule("casts to bf16", "aten._to_copy.default(x, dtype=torch.bfloat16)", "x")

says that a value cast to bf16 counts as the value. Patterns are calls as programs are printed; names without a dot are
variables. What was traced and what runs are both rewritten, so the proof is one modulo the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zcompile.errors import PipelineError
from zcompile.ir.operators import known

Key = tuple[Any, ...]
"""What a term stands for: its head, and behind it terms by their numbers; strings say which leaf it is, or name what
stands behind them."""
CONSTANT, LIST = "constant", "list"


def constant_key(value: Any) -> Key:
    """The key of an argument that is no value: a number, a dtype. 1, 1.0 and True differ, as do 0.0 and -0.0."""
    return (CONSTANT, type(value).__name__, repr(value))


@dataclass(frozen=True, slots=True)
class Variable:
    """What stands for any term, and for the same one wherever it stands."""

    name: str


@dataclass(frozen=True, slots=True)
class Applied:
    """An operation and what it is applied to, or a leaf; strings as in keys."""

    head: Any
    parts: tuple[Variable | Applied | str, ...]


Pattern = Variable | Applied


@dataclass(frozen=True)
class Rule:
    """`pattern` counts as `replacement`, in what was traced and in what runs.

    Attributes:
        name: What `explain()` calls it.
        pattern: A call as programs are printed: `aten.mul.Tensor(x, 1.0)`.
        replacement: A variable of the pattern, or a call that is smaller than the pattern.

    Raises:
        PipelineError: the texts are no such calls, or the replacement has a variable that the pattern has not, or does
            not end: its own pattern is in it.
    """

    name: str
    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        subject, left, right = f"rule {self.name!r}", self.left, self.right
        if not isinstance(left, Applied):
            raise PipelineError(subject, f"{self.pattern!r} is no call", "write it as `aten.mul.Tensor(x, 1.0)`")
        if unknown := sorted({*_variables(right)}.difference(_variables(left))):
            fix = "let the replacement be made of the variables of the pattern"
            raise PipelineError(subject, f"the pattern has no {unknown[0]!r}", fix)
        if len(self.replacement) >= len(self.pattern):
            fix = "let the replacement be the shorter one of the two, so that rewriting ends"
            raise PipelineError(subject, f"{self.replacement!r} is no shorter than {self.pattern!r}", fix)

    @cached_property
    def left(self) -> Pattern:
        return _parsed(self.name, self.pattern)

    @cached_property
    def right(self) -> Pattern:
        return _parsed(self.name, self.replacement)

    def __str__(self) -> str:
        return f"{self.name}: {self.pattern} counts as {self.replacement}"


def match(pattern: Pattern, key: Key, keys: Sequence[Key]) -> dict[str, Key] | None:
    """The keys that the variables of `pattern` stand for where it is `key`; None where it is not."""
    found: dict[str, Key] = {}
    return found if _matches(pattern, key, keys, found) else None


def _matches(pattern: Pattern, key: Key, keys: Sequence[Key], found: dict[str, Key]) -> bool:
    if isinstance(pattern, Variable):
        return found.setdefault(pattern.name, key) == key
    head, *parts = key
    if head != pattern.head or len(parts) != len(pattern.parts):
        return False
    return all(
        part == wanted if isinstance(wanted, str) else type(part) is int and _matches(wanted, keys[part], keys, found)
        for wanted, part in zip(pattern.parts, parts, strict=True)
    )


def _variables(pattern: Pattern) -> Iterator[str]:
    if isinstance(pattern, Variable):
        yield pattern.name
    else:
        for part in pattern.parts:
            if not isinstance(part, str):
                yield from _variables(part)


def _parsed(name: str, text: str) -> Pattern:
    try:
        return _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        fix = "write calls as programs are printed: `aten.mul.Tensor(x, 1.0)`, with names for what may be anything"
        raise PipelineError(f"rule {name!r}", f"{text!r} cannot be read: {error}", fix) from error


def _pattern(expression: ast.expr) -> Pattern:
    match expression:
        case ast.Name(id=name):
            return Variable(name)
        case ast.Call(func=function, args=args, keywords=keywords):
            head = known(ast.unparse(function))
            if head is None:
                raise ValueError(f"{ast.unparse(function)} is no operation")
            named = [part for keyword in keywords for part in (f"{keyword.arg}=", _pattern(keyword.value))]
            return Applied(head, (*map(_pattern, args), *named))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return Applied(LIST, tuple(map(_pattern, elements)))
        case ast.Attribute():
            value = known(ast.unparse(expression))
            if value is None:
                raise ValueError(f"{ast.unparse(expression)} is unknown")
        case _:
            value = ast.literal_eval(expression)
    head, *parts = constant_key(value)
    return Applied(head, tuple(parts))
