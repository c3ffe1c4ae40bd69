"""What has a name in a program, as the checker sees it: values, units, what is under way, and what is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zcompile.proof.checker_texts import Place, param_of


class Proof(NamedTuple):
    """Of how much it is one; `modulo`: the names of the rules that it needed."""

    lines: int
    terms: int
    parameters: int
    modulo: list[str]


@dataclass(eq=False, slots=True)
class Storage:
    """What several values may share; `owner` is empty if an operation of `phase` has made it."""

    owner: str
    phase: str = ""
    graph: bool = False  # memory of a CUDA graph, to which the next step writes
    gone: str = ""  # why it may not be read any more
    written: int = -1  # the term of the last write to it


class TermValue(NamedTuple):
    """A term, its memory, the last write to that which the term knows of, and the lines that it was passed on by."""

    term: int
    memory: Storage
    seen: int
    via: tuple[Place, ...] = ()

    def by(self, *via: Place) -> TermValue:
        """The same value, passed on by other lines."""
        return TermValue(self.term, self.memory, self.seen, via)


class UnitPart:
    """What a rank keeps of a unit; `version` is the term of its update, `full` the memory of what was gathered."""

    def __init__(self, unit: str, lines: Sequence[str]) -> None:
        self.unit, self.params = unit, [*map(param_of, lines)]
        self.memory, self.full = Storage(f"the parameters of {unit}"), list[Storage]()
        self.version: tuple[int, ...] = ()


class Gathered(NamedTuple):
    """What has been gathered of a unit, from shards of that version, by the line there."""

    shards: UnitPart
    dtype: str
    version: tuple[int, ...]
    keep: str
    memory: Storage
    place: Place


class WholeUnit(Gathered):
    """The full parameters of a unit."""


class SecondaryPart(Gathered):
    """What a rank has of a unit inside, where both of two axes divide it."""


class Averages(NamedTuple):
    """The averaged gradients of a unit, by parameter."""

    shards: UnitPart
    terms: dict[str, int]
    place: Place
    memory: Storage


class Moved(NamedTuple):
    """What stands for a value that was moved away."""

    value: TermValue
    to: Lease
    memory: Storage


class Lease(NamedTuple):
    """What a program is lent: an arena of so many bytes, or a place for activations."""

    kind: str
    size: int
