"""Where two terms first part, and how a term is written for people."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zcompile._torch import OpOverload
from zcompile.ir.printer import function_text
from zcompile.proof.rules import CONSTANT, LIST
from zcompile.proof.terms import ITEM, Terms

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
