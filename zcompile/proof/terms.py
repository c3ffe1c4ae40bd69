"""Terms: what a value is computed from, as expressions of which equal ones are one.

A term is a number. It stands for a key, which is what is applied, and what to:

    ("parameter", "a.weight", "torch.float32")      a leaf: strings say which one
    (aten.t.default, 3)                             an operation of what term 3 stands for
    (aten.sum.dim_IntList, 4, 7, "keepdim=", 8)     arguments by name stand behind their names

Constants are terms, too, and what Python takes for equal is told apart: 1, 1.0 and True, 0.0 and -0.0. So two values
have one term exactly if the same operations compute them from the same leaves.

Rules say how a pass changes values that it means to change:

    Rule("casts to bf16", "aten._to_copy.default(x, dtype=torch.bfloat16)", "x")

counts a value cast to bf16 as the value. Patterns are calls as programs are printed; names without a dot are
variables. What was traced and what runs are both rewritten, so the proof is one modulo the rules.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from zcompile.errors import PipelineError
from zcompile.ir.operators import known
from zcompile.ir.printer import function_text
from zcompile.torch_internals.operators import OpOverload

Key = tuple[Any, ...]
"""What a term stands for: its head, and behind it terms by their numbers; strings say which leaf it is, or name what
stands behind them."""
CONSTANT, LIST = "constant", "list"
ITEM, PAIR = "item", "pair"
STATE, DRAW, DRAWN_UNDER = "generator state", "draw", "draw under"
"""The state of a generator in front of a draw; a draw by its number; the draw that a state gives."""

_EQUAL_IF_ALIKE = frozenset({int, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types whose values, if equal, are printed alike: not so 0.0 and -0.0."""


def constant_key(value: Any) -> Key:
    """The key of an argument that is no value: a number, a dtype. 1, 1.0 and True differ, as do 0.0 and -0.0."""
    return (CONSTANT, type(value).__name__, repr(value))


class Terms:
    """A table of terms; with `rules`, of their normal forms: what a pattern matches is its replacement."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.rules = tuple(rules)
        self.keys: list[Key] = []
        self._terms: dict[Key, int] = {}
        self._constants: dict[tuple[type, Any], int] = {}
        self._by_head: dict[Any, list[Rule]] = {}
        for rule in self.rules:
            assert not isinstance(rule.left, Variable), "a rule's pattern is a call"
            self._by_head.setdefault(rule.left.head, []).append(rule)
        self._simplified = frozenset({ITEM, DRAWN_UNDER, *self._by_head})

    def make(self, key: Key) -> int:
        """The term of `key`, in its normal form."""
        if key[0] in self._simplified and (simpler := self._simpler(key)) is not None:
            return simpler
        return self._intern(key)

    def constant(self, value: Any) -> int:
        """The term of an argument that is no value: a number, a dtype, a device, the name of a group."""
        kind = type(value)
        if kind not in _EQUAL_IF_ALIKE:
            return self._intern(constant_key(value))
        term = self._constants.get((kind, value))
        if term is None:
            term = self._constants[kind, value] = self._intern(constant_key(value))
        return term

    def below(self, roots: Sequence[int]) -> list[int]:
        """The terms that `roots` are made of, themselves included, each behind those that it is made of."""
        seen, waiting = set(roots), list(roots)
        while waiting:
            for part in self.keys[waiting.pop()]:
                if type(part) is int and part not in seen:
                    seen.add(part)
                    waiting.append(part)
        return sorted(seen)  # a term is numbered when it is made, behind its parts

    def instances(self, body: Sequence[int], values: dict[int, int]) -> None:
        """Put into `values`, for each term of `body`, the one that has in place of its parts what `values` says."""
        keys, terms, simplified, given = self.keys, self._terms, self._simplified, values.get
        for term in body:
            key = keys[term]
            made = tuple([given(part, part) if type(part) is int else part for part in key])
            found = self.make(made) if key[0] in simplified else terms.get(made)
            values[term] = self._intern(made) if found is None else found

    def _intern(self, key: Key) -> int:
        term = self._terms.get(key)
        if term is None:
            term = self._terms[key] = len(self.keys)
            self.keys.append(key)
        return term

    def _simpler(self, key: Key) -> int | None:
        """The term that `key` comes to; None if it is one of its own."""
        head = key[0]
        if head == ITEM:
            pair, index = self.keys[key[1]], self.keys[key[2]]
            return int(pair[1 + int(index[2])]) if pair[0] == PAIR and index[0] == CONSTANT else None
        if head == DRAWN_UNDER:
            state = self.keys[key[1]]
            return int(state[1]) if state[0] == STATE else None
        for rule in self._by_head[head]:
            if (found := match(rule.left, key, self.keys)) is not None:
                return self._replaced(rule.right, found)
        return None

    def _replaced(self, pattern: Pattern, found: dict[str, Key]) -> int:
        if isinstance(pattern, Variable):
            return self.make(found[pattern.name])
        parts = (part if isinstance(part, str) else self._replaced(part, found) for part in pattern.parts)
        return self.make((pattern.head, *parts))


# -- rules ------------------------------------------------------------------------------------------------------------


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


# -- text -------------------------------------------------------------------------------------------------------------

DEPTH = 3
"""Operations within each other that are written out of a term."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Two terms of which one stands where the other should, within terms that agree so far."""

    found: int
    wanted: int
    around: tuple[int, int] | None
    """What the two are parts of; None if they are all."""


def parted(found: int, wanted: int, terms: Terms, traced: int) -> Parting:
    """Where two different terms part, looked for in the first of their parts that differ.

    What is the term of another value that was traced, of the first `traced` ones in the table, is not looked into:
    it has taken the place of what is wanted.
    """
    around = None
    while True:
        one, other = terms.keys[found], terms.keys[wanted]
        if found < traced:
            return Parting(found, wanted, around)
        differing = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
        pairs = [(a, b) for a, b in differing if type(a) is int and type(b) is int]
        if len(one) != len(other) or len(pairs) != len(differing):
            return Parting(found, wanted, around)
        around, (found, wanted) = (found, wanted), pairs[0]


def term_text(term: int, terms: Terms, names: dict[int, str], depth: int = DEPTH) -> str:
    """A term as a call, `mm(x, t(layers.0.weight))`, cut off with dots; `names` has those of inputs."""
    if term in names:
        return names[term]
    head, *parts = terms.keys[term]
    if head == CONSTANT:
        return str(parts[1])
    if all(isinstance(part, str) for part in parts):
        return _leaf_text(head, parts)
    if depth == 0:
        return "..."
    texts = (part if isinstance(part, str) else term_text(part, terms, names, depth - 1) for part in parts)
    listed = ", ".join(texts).replace("=, ", "=")
    if head == LIST:
        return f"[{listed}]"
    if head == ITEM:
        return f"{term_text(parts[0], terms, names, depth)}[{terms.keys[parts[1]][2]}]"
    return f"{_name(head)}({listed})"


def _leaf_text(kind: str, which: list[str]) -> str:
    if kind == "parameter":
        return which[0]
    if kind == "graph":  # of a higher-order operation, all of its text
        return f"graph {hashlib.sha256(which[0].encode()).hexdigest()[:8]}"
    return f"{which[0]} ({kind})" if kind in ("updated parameter", "no value") else " ".join([kind, *which])


def _name(head: object) -> str:
    if isinstance(head, tuple):
        return " ".join(map(_name, head))
    if isinstance(head, OpOverload):
        return str(head.overloadpacket.__name__)
    return head if isinstance(head, str) else function_text(head)
