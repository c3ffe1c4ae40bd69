"""Lockstep: ranks number their runs, and compare them before any result is used.

If a rank runs one program more or less than the others, its messages are matched with theirs, unnoticed if the sizes
agree. So ranks tell each other the number and the kind of each run in a small message of its own. Nobody waits for it:
it is read once the run's other messages have arrived; in a training step, before gradients are delivered.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NoReturn

import torch
from torch.optim.optimizer import Optimizer

from zcompile.errors import AgreementError
from zcompile.runtime.collectives import Shared
from zcompile.runtime.groups import Communicator
from zcompile.runtime.optimizer_settings import OptimizerSettings, difference
from zcompile.runtime.waits import named, ranks_by
from zcompile.torch_internals.dispatch import outside_modes

NUMBERS = 8
"""Numbers of a message that hold a rank's `Position`."""
SETTINGS = 2
"""Numbers after them about its optimizers: a digest of which they are, and one of their settings."""
MARKS = 8
"""Numbers of a message that hold marks, and the bits in each."""
BITS = 62
MOST = MARKS * BITS
"""Marks are numbers below this."""


class RunKind(IntEnum):
    """Kinds of runs."""

    EVALUATION = 0
    FORWARD = 1
    BACKWARD = 2
    STEP = 3
    MODULE = 4
    GRADIENTS = 5
    OPTIMIZER = 6

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    RunKind.EVALUATION: "an evaluation",
    RunKind.FORWARD: "a training forward",
    RunKind.BACKWARD: "a backward",
    RunKind.STEP: "a train step",
    RunKind.MODULE: "a forward in plain Python",
    RunKind.GRADIENTS: "a backward in plain Python",
    RunKind.OPTIMIZER: "a step of an optimizer that is new or has new settings",
}


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's run, as reported to the others: its `number`, and what came before it."""

    model: int
    number: int
    kind: RunKind
    program: int
    """The first 48 bits of the digest of the program's communications."""
    steps: int
    """Optimizer steps so far."""
    idle: int
    """Optimizer steps that found no gradient, as on a rank that has dropped its gradients."""
    keeps: bool = False
    """True for a backward that adds to gradients of an earlier one."""
    is_new: bool = False
    """True if the ranks are about to compare the program's communications, line by line."""

    def meets(self, other: Position) -> bool:
        """True if both ranks are at the same run, or are about to compare its program line by line."""
        program = self.program if self.is_new and other.is_new else other.program
        return self == replace(other, program=program, is_new=self.is_new)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Position:
        """The inverse of `numbers`."""
        model, number, kind, program, steps, idle, keeps, is_new = numbers
        return cls(model, number, RunKind(kind), program, steps, idle, bool(keeps), bool(is_new))

    def __str__(self) -> str:
        steps = f"{self.steps} optimizer step{'s' if self.steps != 1 else ''}"
        model = f" of model {self.model}"
        of = f" of program {self.program:012x}" if self.program else ""
        adding = " that adds to gradients" if self.keeps else ""
        idle = f", {self.idle} of them without gradients" if self.idle else ""
        return f"run {self.number}{model}, {self.kind}{of}{adding}, after {steps}{idle}"

    def numbers(self) -> list[int]:
        flags = [int(self.keeps), int(self.is_new)]
        return [self.model, self.number, int(self.kind), self.program, self.steps, self.idle, *flags]


@dataclass
class RunExchange:
    """What all ranks send each other at the start of a run."""

    position: Position
    shared: Shared | None
    """Every rank's numbers, int64 [ranks, numbers]; None if this rank is alone."""
    marks: frozenset[int] = frozenset()
    """Marks that any rank has set; known once it was read."""
    variants: frozenset[int] = frozenset()
    """The ranks' variants of the program; known once it was read."""


@dataclass
class Lockstep:
    """The runs of one model on one rank."""

    communicator: Communicator
    model: int
    steps: Callable[[], tuple[int, int]]
    """Returns the number of optimizer steps, and how many of them found no gradient."""
    settings: OptimizerSettings
    tensor: Lockstep | None = None
    """That of the tensor-parallel group: its ranks communicate within every run, even if nothing else is sent."""
    number: int = 0
    place: int | None = None
    """This rank's index along a pipeline axis: ranks at other indices have other parameters, and may have other
    settings."""
    _sent_settings: dict[int, int] = field(default_factory=dict)
    """Digests of optimizer settings that were sent with the last run."""
    _open: deque[RunExchange] = field(default_factory=deque)
    """Exchanges that have not been read yet."""
    _error: AgreementError | None = None

    def __post_init__(self) -> None:
        self.alone = self.communicator.size == 1 or self.communicator.is_fake
        self.communicator.waits.reporting.check = self._look

    def enter(
        self,
        kind: RunKind,
        program: str,
        marks: Sequence[int] = (),
        variant: int = 0,
        *,
        keeps: bool = False,
        is_new: bool = False,
    ) -> RunExchange:
        """Begin a run of the program with this digest, and report it to the others.

        `marks`, numbers below `MOST`, and a `variant` of 62 bits are sent along; ranks may differ in them. `keeps`: the
        run adds to gradients. `is_new`: no program with this digest has run before, and ranks compare it next.

        Raises:
            AgreementError: an earlier run is known to be out of step.
        """
        self.number += 1
        position = Position(self.model, self.number, kind, int(program[:12], 16), *self.steps(), keeps, is_new)
        if self.alone:
            return RunExchange(position, None, frozenset(marks), frozenset({variant}))
        self._look()
        self.communicator.waits.run = str(position)
        assert self.communicator.control is not None, "a rank that is not alone has one"
        self._sent_settings = self.settings.digests()
        settings = [_hashed(self.place or 0, *self._sent_settings), _hashed(*self._sent_settings.values())]
        row = [*position.numbers(), *settings, variant, *_packed(marks)]
        shared = self.communicator.control.share(torch.tensor(row, dtype=torch.int64))
        self._open.append(call := RunExchange(position, shared))
        self.communicator.stamp(hash(tuple(position.numbers()[:-1])))
        return call

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """Inside, runs are not reported: they are parts of one that was reported as a whole."""
        inner = [lockstep for lockstep in (self, self.tensor) if lockstep is not None]
        before = [(lockstep.alone, lockstep.number) for lockstep in inner]
        try:
            for lockstep in inner:
                lockstep.alone = True
            yield
        finally:
            for lockstep, (alone, number) in zip(inner, before, strict=True):
                lockstep.alone, lockstep.number = alone, number

    def enter_step(self, optimizer: Optimizer) -> None:
        """Begin a step of `optimizer`; settings that were not sent with the last run are compared now.

        So hosts wait for each other only at its first step, and after its settings have changed. Along a pipeline axis
        optimizers step on some ranks only, and train steps report their settings.

        Raises:
            AgreementError: on every rank: another one has other settings, or does not step.
        """
        for lockstep in (self.tensor, self) if self.place is None else ():
            if lockstep is not None and lockstep._is_unreported(optimizer):
                lockstep.enter(RunKind.OPTIMIZER, "0")
                self.check()

    def _is_unreported(self, optimizer: Optimizer) -> bool:
        if self.alone:
            return False
        number = self.settings.know(optimizer)
        return self.settings.digests()[number] != self._sent_settings.get(number)

    def check(self) -> None:
        """Return once all ranks are known to have made the same runs.

        Raises:
            AgreementError: on every rank: they have not.
        """
        self._look()
        while self._open:
            self._read(self._open.popleft())
        if self.tensor is not None:
            self._check(self.tensor)

    def enter_tensor_parallel(self, kind: RunKind) -> None:
        """Begin a run in which tensor-parallel ranks communicate. Their programs may differ.

        On gloo it waits for them, as the run's first collective would: torch's own have no tags, and abort the process
        if sizes differ. On CUDA the host does not wait; it is read with the runs of this mesh.

        Raises:
            AgreementError: they are out of step.
        """
        if self.tensor is not None:
            self.tensor.enter(kind, "0")
            if self.tensor.communicator.collectives.separates:
                self._check(self.tensor)

    def _check(self, other: Lockstep) -> None:
        """Check the runs of the other mesh; report its error to the ranks of this one, which would wait."""
        try:
            other.check()
        except AgreementError as error:
            self.communicator.waits.refuse(error)
            raise

    def _look(self) -> None:
        """Read what has arrived."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        while self._open and (shared := self._open[0].shared) is not None and shared.arrived:
            self._read(self._open.popleft())

    def _read(self, call: RunExchange) -> None:
        assert call.shared is not None, "a rank that is alone has nothing to read"
        with outside_modes():  # also called while a rank compiles, under modes of its tracing
            rows = call.shared.read().tolist()
        said = [Position.of(row[:NUMBERS]) for row in rows]
        if unlike := self._differently_set([row[NUMBERS : NUMBERS + SETTINGS] for row in rows]):
            self._refuse(self._other_settings(call.position.number, unlike))
        if any(not position.meets(call.position) for position in said):
            self._refuse(_out_of_step(dict(zip(self.communicator.waits.ranks, said, strict=True))))
        call.variants = frozenset(row[NUMBERS + SETTINGS] for row in rows)
        call.marks = frozenset(itertools.chain.from_iterable(_unpacked(row[NUMBERS + SETTINGS + 1 :]) for row in rows))

    def _refuse(self, error: AgreementError) -> NoReturn:
        self._error = error
        self.communicator.waits.refuse(error)
        raise error

    def _differently_set(self, said: Sequence[Sequence[int]]) -> list[int]:
        """The first ranks with the same optimizers but different settings, given both of each rank.

        A dropped optimizer counts until it is garbage-collected; until then its rank has other optimizers.
        """
        for which in dict.fromkeys(which for which, _ in said):
            ranks = [rank for rank, (one, _) in zip(self.communicator.waits.ranks, said, strict=True) if one == which]
            if len({set_to for one, set_to in said if one == which}) > 1:
                return ranks
        return []

    def _other_settings(self, run: int, ranks: Sequence[int]) -> AgreementError:
        """The error for ranks whose optimizer settings differ; every rank calls this and reports its own."""
        self._open.clear()  # nothing more is read: the ranks are at this run together
        texts = self.communicator.waits.exchange(f"settings of run {run}", "\n".join(self.settings.lines()))
        subject, problem = difference({rank: texts[rank].split("\n") for rank in ranks if rank in texts})
        fix = (
            "set optimizers alike on every rank: give a scheduler that follows the loss, such as ReduceLROnPlateau, the"
            " mean of all ranks' losses"
        )
        return AgreementError(subject, problem, fix)


def _hashed(*numbers: int) -> int:
    return hash(numbers) & (1 << BITS) - 1


def _packed(marks: Sequence[int]) -> list[int]:
    words = [0] * MARKS
    for mark in marks:
        assert mark < MOST, f"a mark of {mark}; the message has {MOST}"
        words[mark // BITS] |= 1 << (mark % BITS)
    return words


def _unpacked(words: Sequence[int]) -> set[int]:
    return {index * BITS + bit for index, word in enumerate(words) if word for bit in range(BITS) if word >> bit & 1}


def _out_of_step(said: dict[int, Position]) -> AgreementError:
    """The error for ranks that are at different runs; the smallest group is named first."""
    parts = sorted(ranks_by(said).items(), key=lambda item: (len(item[1]), item[1]))
    problem = "; ".join(f"{named(ranks)}: {position}" for position, ranks in parts)
    fix = (
        "call the model, its backward and the optimizer equally often and in the same order on every rank: evaluate on"
        " all ranks or on none, and give each the same number of batches. No gradient of this run was delivered"
    )
    return AgreementError("the ranks are out of step", problem, fix)
