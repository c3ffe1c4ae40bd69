"""Values, as the checker sees them: terms, which are equal if they have the same number, and memory.

A term is the operation that computes a value, applied to terms. There are also units and results of gathers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from zcompile.errors import ProofError
from zcompile.proof.checker_texts import FIX, Place, dotted, literal, location_text, param_of, refusal

_LITERAL = re.compile(r"(?:int|float|bool|str|NoneType|complex) ")
LISTS = ("list", "tuple")


def _pattern(node: ast.expr) -> Any:
    """Parse one side of a rule: a variable as its name, anything else as a tuple of a head and patterns."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Call(func=function, args=args, keywords=keywords):
            head = "|".join([dotted(function), *(str(keyword.arg) for keyword in keywords)])
            return (head, *map(_pattern, [*args, *(keyword.value for keyword in keywords)]))
        case ast.List(elts=elements):
            return ("list", *map(_pattern, elements))
    return (dotted(node) or literal(node),)


def _rule(said: Mapping[str, str]) -> tuple[str, Any, Any]:
    """Parse a rule of a manifest into its text, its pattern and its replacement."""
    try:
        pattern, replacement = (_pattern(ast.parse(said[key], mode="eval").body) for key in ("pattern", "replacement"))
        if isinstance(pattern, str) or len(said["replacement"]) >= len(said["pattern"]):
            raise ValueError("what is replaced is not a call, or no longer than what replaces it")
        if unbound := {part for part in _parts(replacement) if isinstance(part, str)}.difference(_parts(pattern)):
            raise ValueError(f"the pattern has no {min(unbound)}")
        return f"{said['name']}: {said['pattern']} counts as {said['replacement']}", pattern, replacement
    except (SyntaxError, LookupError, ValueError, TypeError) as error:
        fix = "write calls and variables, as in docs/proof.md"
        raise ProofError(f"rule {said}", f"cannot be read: {error}", fix) from error


def _parts(pattern: Any) -> Iterator[Any]:
    """Yield one side of a rule and all its parts: variables are names, other parts begin with a head."""
    yield pattern
    for part in () if isinstance(pattern, str) else pattern[1:]:
        yield from _parts(part)


class TermTable:
    """Numbers terms by head and arguments, so that equal terms have the same number; rules are applied to new terms."""

    def __init__(self, rules: Sequence[Mapping[str, str]]) -> None:
        self.heads: list[str] = []
        self.args: list[tuple[int, ...]] = []
        self.places: list[Place] = []  # the first line that computes it
        self.names: dict[int, str] = {}
        self.routes: dict[int, dict[int, tuple[Place, ...]]] = {}
        """For each term and argument, the lines that passed the argument on."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """The shapes of the traced step's values, where a loop over rows has to know them."""
        self.kinds: dict[int, str] = {}
        """Their dtypes, as margins say them."""
        self.scaled: dict[int, tuple[Any, int]] = {}
        """Results of loops but for a factor: the loop, and the number of the result."""
        self.here: Place = ()
        self.applied: dict[str, None] = {}
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        self._rules = [*map(_rule, rules)]
        calls = (part for _, *sides in self._rules for side in sides for part in _parts(side) if type(part) is tuple)
        self.operations = {head.partition("|")[0] for head, *_ in calls}
        """The operations of the traced step and of rules; any other operation may have unknown effects."""

    def make(self, head: str, *args: int) -> int:
        """Return the term with that head and these arguments."""
        number = self._known.get((head, args))
        if number is None:
            number = self._known[head, args] = len(self.heads)
            self.heads.append(head)
            self.args.append(args)
            self.places.append(self.here)
            for name, pattern, replacement in self._rules:
                found: dict[str, int] = {}
                if self._matches(pattern, number, found):
                    self.applied[name] = None
                    number = self._known[head, args] = self._replaced(replacement, found)
                    break
        return number

    def _matches(self, pattern: Any, term: int, found: dict[str, int]) -> bool:
        if isinstance(pattern, str):
            return found.setdefault(pattern, term) == term
        args = self.args[term]
        same = pattern[0] == self.heads[term] and len(pattern) == 1 + len(args)
        return same and all(self._matches(part, arg, found) for part, arg in zip(pattern[1:], args, strict=True))

    def _replaced(self, pattern: Any, found: Mapping[str, int]) -> int:
        if isinstance(pattern, str):
            return found[pattern]
        return self.make(pattern[0], *(self._replaced(part, found) for part in pattern[1:]))

    def is_constant(self, term: int) -> bool:
        """Return True for a constant such as a number or a dtype."""
        return bool(_LITERAL.match(self.heads[term])) or self.heads[term].startswith("torch.")

    def text(self, term: int, depth: int) -> str:
        """Return a term as readable text: `mm(x, t(full(layers.0.weight)))`."""
        (head, *batch), args = self.heads[term].partition(" of micro-batch "), self.args[term]
        if not args:
            return (self.names.get(term) or _LITERAL.sub("", head)) + "".join(batch)
        name, *keywords = head.split("|")
        parts = [self.text(arg, depth - 1) for arg in args] if depth else ["..."]
        if depth and keywords:
            parts[-len(keywords) :] = map("=".join, zip(keywords, parts[-len(keywords) :], strict=True))
        name = name.removeprefix("aten.").removeprefix("ops.").removesuffix(".default")
        return f"[{', '.join(parts)}]" if name in LISTS else f"{name}({', '.join(parts)})"

    def difference(self, known: int, what: str, wanted: int, found: int, place: Place) -> ProofError:
        """Return the error for a result whose term is not the wanted one; it names the first line that differs.

        `known`: the number of terms of the traced step.
        """
        if -1 in (wanted, found):
            return refusal(place, f"{what} is {'missing' if found == -1 else 'nothing that the traced step has'}")
        if found >= known and self.args[found]:
            path = self._path(found, known)
            if "." in self.heads[path[-1]]:  # an operation
                wanted, found = self._counterpart(path, wanted, known), path[-1]
                place = self.places[found]
        where, lines = location_text(place)
        given, same = self.routes.get(found, {}), zip_longest(self.args[found], self.args[wanted])
        differing = [mine for mine, traced in same if mine != traced] if "." in self.heads[found] else given
        if passed := dict.fromkeys(location_text(line)[0] for term in differing for line in given.get(term, ())):
            lines += f"\n  given what came by {', '.join(passed)}"
        origin = "".join(location_text(self.places[wanted])) if wanted < known else ""
        while self.args[found] and self.text(found, 8) == self.text(wanted, 8):  # they differ deeper
            parts = zip(self.args[found], self.args[wanted], strict=False)
            found, wanted = next((pair for pair in parts if pair[0] != pair[1]), (0, 0))
        texts = [(self.text(found, depth), self.text(wanted, depth)) for depth in (2, 3, 5, 8)]
        have, want = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
        problem = f"{what} is not what was traced{lines}\n  It has\n    {have}\n  where the traced step has\n    {want}"
        return ProofError(where, f"{problem}\n  of {origin}" if origin else problem, FIX)

    def _path(self, term: int, known: int) -> list[int]:
        """Return the path from a result down to the first term computed for it that the traced step does not have."""
        above, left = {term: term}, [term]
        while left:
            new_term = left.pop()
            new = [arg for arg in self.args[new_term] if arg >= known and arg not in above]
            above |= dict.fromkeys(new, new_term)
            left += new
        path = [min(new_term for new_term in above if self.args[new_term])]
        while path[-1] != term:
            path.append(above[path[-1]])
        return path[::-1]

    def _counterpart(self, path: list[int], wanted: int, known: int) -> int:
        """Return the traced term that corresponds to the end of a path: at the same position, or the most similar."""
        term, there = path[-1], wanted
        head, args = self.heads[term], self.args[term]

        def common(other: int) -> float:
            same = sum(a == b for a, b in zip(self.args[other], args, strict=False))
            return (same + len({*args} & {*self.args[other]}) / 2) * (1 + (self.heads[other] == head))

        for above, below in pairwise(path):
            if self.heads[above] != self.heads[there] or len(self.args[above]) != len(self.args[there]):
                break
            there = self.args[there][self.args[above].index(below)]
        else:
            if there < known and common(there) >= len(args) / 2:
                return there
        nearest = max(range(known), key=common)
        return nearest if common(nearest) > 0 else wanted


# -- memory and units -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Storage:
    """Memory, which several values may share; `owner` is "" if an operation of `phase` allocated it."""

    owner: str
    phase: str = ""
    graph: bool = False  # memory of a CUDA graph, to which the next step writes
    gone: str = ""  # why it may no longer be read
    written: int = -1  # the term of the last write to it


class TermValue(NamedTuple):
    """A term, its memory, the last write to the memory that the term includes, and the lines that passed it on."""

    term: int
    memory: Storage
    seen: int
    via: tuple[Place, ...] = ()

    def by(self, *via: Place) -> TermValue:
        """Return the same value, passed on by other lines."""
        return TermValue(self.term, self.memory, self.seen, via)


class UnitPart:
    """A rank's shards of a unit; `version`: the term of the last update; `full`: memory of gathered parameters."""

    def __init__(self, unit: str, lines: Sequence[str]) -> None:
        self.unit, self.params = unit, [*map(param_of, lines)]
        self.memory, self.full = Storage(f"the parameters of {unit}"), list[Storage]()
        self.version: tuple[int, ...] = ()


class Gathered(NamedTuple):
    """Parameters of a unit gathered from shards of `version` by the line at `place`."""

    shards: UnitPart
    dtype: str
    version: tuple[int, ...]
    keep: str
    memory: Storage
    place: Place


class WholeUnit(Gathered):
    """The full parameters of a unit."""


class SecondaryPart(Gathered):
    """The secondary shards of a unit, which two axes divide."""


class Averages(NamedTuple):
    """The averaged gradients of a unit, by parameter."""

    shards: UnitPart
    terms: dict[str, int]
    place: Place
    memory: Storage
