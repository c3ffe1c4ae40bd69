"""What has a name in a program, as the checker sees it: values, units, what is under way, and what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zcompile.proof.checker_texts import Place, param_of


class Proof(NamedTuple):
    """Of how much it is one; `modulo`: the names of the rules that it needed."""

    lines: int
    terms: int
    parameters: int
    modulo: list[str]


class NamedMessage(NamedTuple):
    """A message of a pipeline: to or from which place along its axis, what it names, how that lies in memory."""

    peer: int
    name: str
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SharedParam:
    """A parameter that several stages read: the value that is lent, by whom to whom, and whose sum its gradient is."""

    param: str
    value: str
    home: int
    readers: tuple[int, ...]
    parts: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class RankPart:
    """What of a step that was traced of one micro-batch is a rank's. Pairs are numbers there, and a micro-batch."""

    microbatches: int
    units: tuple[str, ...]
    bound: tuple[str, ...]  # the arguments that are given by name, in order: `unit blocks.0`, `group pp`, `constant c`
    inputs: tuple[tuple[str, int, int | None], ...]  # of each argument its kind, number and micro-batch
    held: frozenset[int]  # the inputs that are the same in all micro-batches
    results: tuple[tuple[int, int], ...]
    draws: tuple[tuple[int, int], ...]  # a micro-batch, and the number of the draw
    written: tuple[tuple[int, int], ...]  # the number of each result that a buffer gets, and of that input
    writes: tuple[tuple[int, int], ...]
    shared: tuple[SharedParam, ...]
    sent: tuple[NamedMessage, ...]
    received: tuple[NamedMessage, ...]


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


class BeingSent(NamedTuple):
    """What is being sent, by the line there."""

    value: TermValue
    place: Place


class Moved(NamedTuple):
    """What stands for a value that was moved away."""

    value: TermValue
    to: Lease
    memory: Storage


class Lease(NamedTuple):
    """What a program is lent: an arena of so many bytes, or a place for activations."""

    kind: str
    size: int
