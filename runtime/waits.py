"""Waits: what a rank says, and learns of the others, when it waits for them for long or in vain.

A rank that has waited for a while writes into the store behind the process group for whom it waits, and where. So those
who wait for it know that it is not the one to blame, and an error names the rank at the end of the chain: the one that
stays away without waiting for anybody.
"""

from __future__ import annotations

import contextlib
import functools
import json
import linecache
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from zcompile.errors import AgreementError, GroupError, ZcompileError
from zcompile.torch_internals.distributed import default_store, is_fake

T = TypeVar("T")

POLL = 0.1
"""Seconds between two looks at what is waited for, by a rank that waits."""
TOLD = 4.0
"""Seconds after which a rank that waits says so in the store."""
ASKED = 2.0
"""Seconds between two looks at what the others have said, by a rank that waits for long."""
WARNED = 10.0
"""Seconds after which it says so to its user."""
EXCHANGED = 10.0
"""Seconds that ranks have to say what an error that all of them have found is about."""
GRACE = 1.0
"""Seconds that a rank which has closed its connections has to say why."""
ANSWERED = 3.0
"""Seconds within which the store answers; its host may be the rank that is gone."""


class RankLost(RuntimeError):
    """A message from or to a rank has failed; within the runtime, until it is known who is to blame."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank
        """Its number in the group."""


@dataclass(frozen=True)
class Report:
    """What a rank has written into the store."""

    awaited: Sequence[int] = ()
    """The ranks that it waits for, or waited for in vain."""
    where: str = ""
    """What it waits for."""
    run: str = ""
    """What it runs, by number and kind."""
    refusal: Sequence[str] = ()
    """The AgreementError that it has raised: subject, found, fix."""


@dataclass
class Reporting:
    """What a rank has in common in all groups that it waits in for one model."""

    ranks: Sequence[int]
    """Whose reports are read: all of the model's, by the numbers that they have in the whole world."""
    prefix: str
    """What names of reports in the store begin with."""
    run: str = ""
    """What this rank runs, by number and kind."""
    check: Callable[[], None] = lambda: None
    """Raises what is known by now to be wrong; called while this rank waits."""
    told: bool = False
    """True while a report of this rank is in the store."""
    stepping: bool = False
    """True while an optimizer steps parameters of the model."""


class Waits:
    """The waits of one rank for the others of a group, and what these have reported of theirs.

    `whole`: the waits for all ranks, of which the group has some. Who waits in one group may do so for a rank that
    waits in another one, so reports are read across groups.
    """

    def __init__(self, group: dist.ProcessGroup, whole: Waits | None = None) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        """The group's ranks, by the numbers that they have in the whole world: errors name these."""
        self.rank = dist.get_rank()
        self.awaited: int | None = None
        """Whose message is waited for on the progress thread, by its number in the group."""
        self.reporting: Reporting = self._reporting(group) if whole is None else whole.reporting

    def _reporting(self, group: dist.ProcessGroup) -> Reporting:
        prefix = f"zcompile/{group.group_name}/waits"
        if len(self.ranks) > 1 and not is_fake(group):
            # Reports of an earlier model on the group say nothing of this one's ranks.
            prefix += f" {default_store().add(f'{prefix} of {self.rank}', 1)}"
        return Reporting(self.ranks, prefix)

    @property
    def run(self) -> str:
        """What this rank runs, by number and kind."""
        return self.reporting.run

    @run.setter
    def run(self, run: str) -> None:
        self.reporting.run, self.reporting.stepping = run, False

    def name(self, what: str) -> str:
        """A name in the store for something that the ranks of this model's group have together."""
        return f"{self.reporting.prefix}/{what}"

    def until(
        self, done: Callable[[float], bool], what: str, awaited: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Return once `done`, which waits for as many seconds as it is given, says so; call `over` behind it.

        `what`: what is waited for, where no line of a program is. `awaited`: for which ranks of the world; by default
        for the one whose message the progress thread waits for.

        Raises:
            AgreementError: the ranks are out of step.
        """
        if done(POLL):
            return
        started, warned, asked = time.perf_counter() - POLL, False, 0.0
        while not done(POLL):
            self.reporting.check()
            waited = time.perf_counter() - started
            if waited > TOLD and not self.reporting.told:
                self._send_report(Report(self._missing(awaited), where_of(what), self.run))
            if waited > max(TOLD, asked + ASKED):
                self._raise_refusal(self._reports(()))
                asked = waited
            if waited > WARNED and not warned:
                self._warn(waited, where_of(what), self._missing(awaited))
                warned = True

    def over(self) -> None:
        """What was waited for has come: take the report back, if there was one."""
        if self.reporting.told:
            self._send_report(None)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """A typed error, in place of what torch raises when another rank fails or stays away.

        Raises:
            GroupError: naming the rank that is gone or has not come, and the line or unit.
            AgreementError: another rank has found the ranks out of step.
        """
        try:
            yield
        except (GroupError, AgreementError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            if not isinstance(error, RankLost) and "allocate memory" in str(error):
                raise
            raise self.explanation(error, what) from error

    @contextlib.contextmanager
    def watched(self, what: str, others: Sequence[int]) -> Iterator[None]:
        """Around a collective of torch's that blocks this thread: one of its own tells of long waits, as `until` does.

        An error that is no collective's is left as it is. `others`: the ranks of the world that take part, too.

        Raises:
            GroupError, AgreementError: as in `explained`.
        """
        if not others:
            yield
            return
        ended, thread = threading.Event(), threading.get_ident()
        watch = threading.Thread(target=self._watch, args=(ended, thread, what, others), daemon=True)
        watch.start()
        try:
            yield
        except RuntimeError as error:
            ended.set()
            if not is_of_collective(error):
                raise
            raise self.explanation(error, what, others) from error
        finally:
            ended.set()
        if watch.is_alive():
            watch.join()
        self.over()

    def _watch(self, ended: threading.Event, thread: int, what: str, others: Sequence[int]) -> None:
        """Tell of a wait of `thread` once it has lasted for long."""
        if ended.wait(TOLD) or (frame := sys._current_frames().get(thread)) is None:
            return
        where = where_of(what, frame)
        self._send_report(Report(others, where, self.run))
        if not ended.wait(WARNED - TOLD):
            self._warn(WARNED, where, others)

    def explanation(self, error: RuntimeError, what: str, others: Sequence[int] | None = None) -> GroupError:
        """Who is to blame for a message that has failed; the others are told.

        `others`: who was waited for, where neither the error nor the progress thread knows.

        Raises:
            AgreementError: another rank has found the ranks out of step.
        """
        self.reporting.check()  # a rank that is out of step says more than a broken connection
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        awaited = [self.ranks[error.rank]] if isinstance(error, RankLost) else others or self._missing(None)
        self._send_report(Report(awaited, where_of(what), self.run))
        reports = self._reports(() if timed_out else awaited)
        self._raise_refusal(reports)
        culprits = to_blame(awaited, reports, self.rank)
        self._send_report(Report(culprits, where_of(what), self.run))
        return GroupError(where_of(what), self._found(culprits, reports, timed_out=timed_out), _fix(culprits, reports))

    @staticmethod
    def _raise_refusal(reports: Mapping[int, Report]) -> None:
        """Raise the AgreementError that another rank has raised, for it is this one's too."""
        if refusal := next((report.refusal for report in reports.values() if report.refusal), None):
            raise AgreementError(*refusal)

    def culprits(self, awaited: Sequence[int]) -> list[int]:
        """Who is to blame, as far as the others have reported, if these did not come."""
        return to_blame(awaited, self._reports(()), self.rank)

    def refuse(self, error: AgreementError) -> None:
        """Tell the others of an error that is theirs too, should the message that shows it not reach them."""
        self._send_report(Report(run=self.run, refusal=(error.subject, error.problem, error.fix)))

    def report_failure(self, what: str, error: ZcompileError) -> None:
        """Tell the others of an error that this rank may have raised alone: they would wait for it."""
        if len(self.ranks) > 1 and not isinstance(error, AgreementError | GroupError):
            problem = f"rank {self.rank} failed there: {type(error).__name__}: {error.subject}: {error.problem}"
            self.refuse(AgreementError(what, problem, f"on rank {self.rank}: {error.fix}"))

    def _missing(self, awaited: Callable[[], Sequence[int]] | None) -> Sequence[int]:
        """The ranks of the world that are waited for; all others where that is not known."""
        if awaited is not None:
            return awaited()
        index = self.awaited
        return [self.ranks[index]] if index is not None else [rank for rank in self.ranks if rank != self.rank]

    def _found(self, culprits: Sequence[int], reports: Mapping[int, Report], *, timed_out: bool) -> str:
        names = named(culprits)
        here = f" ({self.run})" if self.run else ""
        if waiting := sorted(rank for rank in culprits if rank in reports):
            problem = "; ".join(self._places(waiting, reports))
            return f"rank {self.rank} waits there{here}, and {problem}: the ranks have come out of step"
        if timed_out:
            return f"rank {self.rank} waited there{here} until the group's timeout, and {names} never came"
        return f"rank {self.rank} waited there{here}, and {names} {'is' if len(culprits) == 1 else 'are'} gone"

    @staticmethod
    def _places(waiting: Sequence[int], reports: Mapping[int, Report]) -> Iterator[str]:
        """Where ranks wait, those at one place together."""
        for (where, run), ranks in ranks_by(
            {rank: (reports[rank].where, reports[rank].run) for rank in waiting}
        ).items():
            yield f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {where}" + (f" ({run})" if run else "")

    def _warn(self, seconds: float, where: str, awaited: Sequence[int]) -> None:
        culprits = self.culprits(awaited)
        problem = f"zcompile: rank {self.rank} has waited {seconds:.0f} s for {named(culprits)}, at {where}"
        if self.run:
            problem += f" ({self.run})"
        advice = "it is slow, or does not make the same calls: every rank must, evaluation and checkpoints included"
        warnings.warn(f"{problem}; {advice}", RuntimeWarning, stacklevel=2)

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """What the group's ranks have to say of an error that all of them know of, as far as they do within seconds."""
        prefix = self.name(what)
        _within(ANSWERED, lambda store: store.set(f"{prefix}/{self.rank}", text))
        others = [rank for rank in self.ranks if rank != self.rank]
        return {self.rank: text, **_texts(prefix, others, others, EXCHANGED)}

    # -- the store ------------------------------------------------------------------------------------------------

    def _send_report(self, report: Report | None) -> None:
        text = json.dumps(asdict(report)) if report is not None else ""
        _within(ANSWERED, lambda store: store.set(f"{self.reporting.prefix}/{self.rank}", text))
        self.reporting.told = report is not None

    def _reports(self, expected: Sequence[int]) -> dict[int, Report]:
        """What the others have reported, by rank; those `expected` have a moment to do so."""
        others = [rank for rank in self.reporting.ranks if rank != self.rank]
        found = _texts(self.reporting.prefix, others, expected, GRACE)
        return {rank: Report(**json.loads(text)) for rank, text in found.items()}


def to_blame(awaited: Sequence[int], reports: Mapping[int, Report], me: int) -> list[int]:
    """Who is at the end of the chain: those of `awaited` who wait for nobody, else of whom these wait for, and so on.

    Ranks that wait for each other are to blame all together, but for `me`.
    """
    seen: set[int] = set()
    suspects = set(awaited)
    while suspects - seen:
        if silent := {rank for rank in suspects if rank not in reports and rank != me}:
            return sorted(silent)
        seen |= suspects
        suspects = {rank for suspect in suspects if suspect in reports for rank in reports[suspect].awaited}
    return sorted(seen - {me}) or sorted(awaited)


def named(ranks: Sequence[int]) -> str:
    """`rank 1` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def ranks_by(said: Mapping[int, T]) -> dict[T, list[int]]:
    """The ranks that say a thing, for each thing that is said."""
    result: dict[T, list[int]] = {}
    for rank, thing in said.items():
        result.setdefault(thing, []).append(rank)
    return result


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"line {self.number} of {self.file[len(_PROGRAM) : -1]}, `{_text_of(self.file, self.number)}`"

    @classmethod
    def here(cls, frame: types.FrameType | None = None) -> Place | None:
        """The line that runs now, or in `frame`; None outside of programs."""
        frame = frame or sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(_PROGRAM):
            frame = frame.f_back
        return None if frame is None else cls(frame.f_code.co_filename, frame.f_lineno)


_PROGRAM = "<zcompile "
"""What names of programs as files begin with."""


def where_of(what: str, frame: types.FrameType | None = None) -> str:
    """The line of a program that waits now, with what is in its margin; else `what`, and the user's line that asked.

    `frame`: of the thread that waits; by default this one's.
    """
    frame = frame or sys._getframe()
    if (place := Place.here(frame)) is not None:
        return str(place)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return what if frame is None else f"{what}, at {_line_of(frame)}"


def _line_of(frame: types.FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"line {number} of {file}, `{_text_of(file, number)}`"


_NOT_THE_USERS = ("zcompile", "torch", "contextlib", "threading", "functools")
"""Packages that stand between a wait and the user's line."""


def _is_users(frame: types.FrameType) -> bool:
    """Whether the code is neither of these packages' nor generated; what torch generates names no module of its own."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    generated = frame.f_code.co_filename.startswith((_TORCH, "<"))
    return package not in _NOT_THE_USERS and not generated


_TORCH = os.path.dirname(torch.__file__)


def _text_of(file: str, number: int) -> str:
    return " ".join(linecache.getline(file, number).split())


def is_of_collective(error: RuntimeError) -> bool:
    """Whether torch raises it of a collective; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _fix(culprits: Sequence[int], reports: Mapping[int, Report]) -> str:
    if any(rank in reports for rank in culprits):
        return "let every rank make the same calls in the same order"
    return f"look for the first error of {named(culprits)}; every rank must make the same calls in the same order"


def _texts(prefix: str, ranks: Sequence[int], expected: Sequence[int], seconds: float) -> dict[int, str]:
    """What `ranks` have in the store, each under `prefix` and its number; those `expected` have some time for it."""
    deadline, result = time.perf_counter() + seconds, dict[int, str]()
    while True:
        for rank in (rank for rank in ranks if rank not in result):
            text = _within(ANSWERED, functools.partial(_read, key=f"{prefix}/{rank}"))
            if text is None:
                return result
            if text:
                result[rank] = text
        if all(rank in result for rank in expected) or time.perf_counter() > deadline:
            return result
        time.sleep(POLL)


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _within(seconds: float, ask: Callable[[dist.Store], T]) -> T | None:
    """What `ask` reads or writes in the store; None if it fails, or has not answered in time.

    The store may be with a rank that is gone.
    """
    try:
        store = default_store()
    except ValueError:  # the default group has been destroyed
        return None
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask(store))

    thread = threading.Thread(target=run, name="zcompile store", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
