"""Terms: expressions for how values are computed, hash-consed so that equal terms have the same number.

A term is a number that represents a key, an operation with its arguments:

    ("parameter", "a.weight", "torch.float32")      a leaf, identified by strings
    (aten.t.default, 3)                             an operation applied to term 3
    (aten.sum.dim_IntList, 4, 7, "keepdim=", 8)     keyword arguments follow their names

Constants are terms, too, and those that Python considers equal are distinct: 1, 1.0 and True, 0.0 and -0.0. So two
values have the same term exactly if the same operations compute them from the same leaves.

Rules describe how passes intentionally change values:

    Rule("casts to bf16", "aten._to_copy.default(x, dtype=torch.bfloat16)", "x")

makes a value cast to bf16 equal to the value. Patterns are calls as programs are printed; names without a dot are
variables. Both the traced step and the program are rewritten, so the proof is modulo the rules.
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
"""What a term represents: its head, followed by the numbers of terms; strings identify a leaf, or name the next
argument."""
CONSTANT, LIST = "constant", "list"
ITEM, PAIR = "item", "pair"
FACTOR, PER = "factor", "per"
"""A number in which a loop over rows is linear, and a result of the loop, in which it stands for 1."""
STATE, DRAW, DRAWN_UNDER = "generator state", "draw", "draw under"
"""The generator state before a draw; a draw by its number; the draw made under a state."""

_PRODUCT = torch.ops.aten.mul.Tensor
_EQUAL_IF_ALIKE = frozenset({int, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types whose equal values have equal reprs, unlike 0.0 and -0.0."""


def constant_key(value: Any) -> Key:
    """Return the key of a constant argument, such as a number or a dtype; it differs for 1, 1.0 and True."""
    return (CONSTANT, type(value).__name__, repr(value))


class Terms:
    """A table of terms; with `rules`, of their normal forms, in which matches of patterns are replaced.

    `divides`: operations may divide values, and then have the terms of what they give of the whole.
    """

    def __init__(self, rules: Sequence[Rule] = (), *, divides: bool = True) -> None:
        self.rules, self.divides = tuple(rules), divides
        self.keys: list[Key] = []
        self._terms: dict[Key, int] = {}
        self._constants: dict[tuple[type, Any], int] = {}
        self._by_head: dict[Any, list[Rule]] = {}
        for rule in self.rules:
            assert not isinstance(rule.left, Variable), "a rule's pattern is a call"
            self._by_head.setdefault(rule.left.head, []).append(rule)
        self._simplified = frozenset({ITEM, DRAWN_UNDER, _PRODUCT, *self._by_head})

    def make(self, key: Key) -> int:
        """Return the term of `key`, in normal form."""
        if key[0] in self._simplified and (simpler := self._simpler(key)) is not None:
            return simpler
        return self._intern(key)

    def constant(self, value: Any) -> int:
        """Return the term of a constant argument: a number, a dtype, a device, the name of a group."""
        kind = type(value)
        if kind not in _EQUAL_IF_ALIKE:
            return self._intern(constant_key(value))
        term = self._constants.get((kind, value))
        if term is None:
            term = self._constants[kind, value] = self._intern(constant_key(value))
        return term

    def below(self, roots: Sequence[int]) -> list[int]:
        """Return `roots` and all terms that they are computed from, each after its arguments."""
        seen, waiting = set(roots), list(roots)
        while waiting:
            for part in self.keys[waiting.pop()]:
                if type(part) is int and part not in seen:
                    seen.add(part)
                    waiting.append(part)
        return sorted(seen)  # a term is numbered when it is created, after its parts

    def instances(self, body: Sequence[int], values: dict[int, int]) -> None:
        """Substitute `values` in each term of `body`, in order, and add the resulting terms to `values`."""
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
        """Return the term that `key` simplifies to; None if it does not."""
        head = key[0]
        if head == ITEM:
            pair, index = self.keys[key[1]], self.keys[key[2]]
            return int(pair[1 + int(index[2])]) if pair[0] in (PAIR, LIST) and index[0] == CONSTANT else None
        if head is _PRODUCT and len(key) == 3 and self.keys[key[1]][0] == PER:
            _, factor, term = self.keys[key[1]]
            return self._scaled(factor, term, key[2])
        if head == DRAWN_UNDER:
            state = self.keys[key[1]]
            return int(state[1]) if state[0] == STATE else None
        for rule in self._by_head.get(head, ()):
            if (found := match(rule.left, key, self.keys)) is not None:
                return self._replaced(rule.right, found)
        return None

    def _scaled(self, factor: int, term: int, number: int) -> int:
        """Return a term that is linear in a factor with a number in its place."""
        values = {factor: number}
        for part in self.below([term]):
            if part not in values and any(type(one) is int and one in values for one in self.keys[part]):
                self.instances([part], values)
        return values[term]

    def _replaced(self, pattern: Pattern, found: dict[str, Key]) -> int:
        if isinstance(pattern, Variable):
            return self.make(found[pattern.name])
        parts = (part if isinstance(part, str) else self._replaced(part, found) for part in pattern.parts)
        return self.make((pattern.head, *parts))


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a pattern: matches any term, and the same term at each occurrence."""

    name: str


@dataclass(frozen=True, slots=True)
class Applied:
    """An operation with its arguments, or a leaf; strings as in keys."""

    head: Any
    parts: tuple[Variable | Applied | str, ...]


Pattern = Variable | Applied


@dataclass(frozen=True)
class Rule:
    """`pattern` counts as equal to `replacement`, in the traced step and in the program.

    Attributes:
        name: The name of the rule in `explain()`.
        pattern: A call as programs are printed: `aten.mul.Tensor(x, 1.0)`.
        replacement: A variable of the pattern, or a call, with a shorter text than the pattern.

    Raises:
        PipelineError: a text is not such a call, or the replacement has a variable that the pattern lacks, or is no
            shorter than the pattern, so that rewriting might not terminate.
    """

    name: str
    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        subject, left, right = f"rule {self.name!r}", self.left, self.right
        if not isinstance(left, Applied):
            raise PipelineError(subject, f"{self.pattern!r} is not a call", "write it as `aten.mul.Tensor(x, 1.0)`")
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
    """Return the keys of the variables of `pattern` if it matches `key`, else None."""
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
                raise ValueError(f"{ast.unparse(function)} is not an operation")
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
"""Depth of nested operations to which a term is printed."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first position at which two terms differ: the term found there and the term wanted."""

    found: int
    wanted: int
    around: tuple[int, int] | None
    """The terms that the two are parts of; None if they are the whole terms."""


def parted(found: int, wanted: int, terms: Terms, traced: int) -> Parting:
    """Find where two different terms differ, descending into the first arguments that do.

    A term of the traced step, one of the first `traced` ones in the table, is not descended into: it is another traced
    value, used in place of the wanted one.
    """
    around = None
    while True:
        found_key, wanted_key = terms.keys[found], terms.keys[wanted]
        if found < traced:
            return Parting(found, wanted, around)
        differing = [(a, b) for a, b in zip(found_key, wanted_key, strict=False) if a != b]
        pairs = [(a, b) for a, b in differing if type(a) is int and type(b) is int]
        if len(found_key) != len(wanted_key) or len(pairs) != len(differing):
            return Parting(found, wanted, around)
        around, (found, wanted) = (found, wanted), pairs[0]


def term_text(term: int, terms: Terms, names: dict[int, str], depth: int = DEPTH) -> str:
    """Return a term as a call, `mm(x, t(layers.0.weight))`, cut off with dots; `names`: the names of inputs."""
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
    if kind == "graph":  # the whole text of a higher-order operation's graph
        return f"graph {hashlib.sha256(which[0].encode()).hexdigest()[:8]}"
    return f"{which[0]} ({kind})" if kind in ("updated parameter", "no value") else " ".join([kind, *which])


def _name(head: object) -> str:
    if isinstance(head, tuple):
        return " ".join(map(_name, head))
    if isinstance(head, OpOverload):
        return str(head.overloadpacket.__name__)
    return head if isinstance(head, str) else function_text(head)
