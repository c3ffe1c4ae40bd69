"""Terms: what a value is computed from, as expressions of which equal ones are one.

A term is a number. It stands for a key, which is what is applied, and what to:

    ("parameter", "a.weight", "torch.float32")      a leaf: strings say which one
    (aten.t.default, 3)                             an operation of what term 3 stands for
    (aten.sum.dim_IntList, 4, 7, "keepdim=", 8)     arguments by name stand behind their names

Constants are terms, too, and what Python takes for equal is told apart: 1, 1.0 and True, 0.0 and -0.0. So two values
have one term exactly if the same operations compute them from the same leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.ir.printer import function_text
from zcompile.proof.rules import CONSTANT, LIST, Key, Pattern, Rule, Variable, constant_key, match
from zcompile.torch_internals.operators import OpOverload

ITEM, PAIR = "item", "pair"
STATE, DRAW, DRAWN_UNDER = "generator state", "draw", "draw under"
"""The state of a generator in front of a draw; a draw by its number; the draw that a state gives."""

_EQUAL_IF_ALIKE = frozenset({int, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types whose values, if equal, are printed alike: not so 0.0 and -0.0."""


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
