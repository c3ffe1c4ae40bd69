"""Waits: what ranks report to each other when they wait for long or in vain.

A rank that has waited for a while writes into the process group's store for whom it waits, and where. So ranks that
wait for it know that it is not to blame, and an error names the rank at the end of the chain: the one that is missing
without waiting for anyone.
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
"""Seconds between two polls of a rank that waits."""
TOLD = 4.0
"""Seconds after which a rank that waits reports it in the store."""
ASKED = 2.0
"""Seconds between two reads of the others' reports, by a rank that waits for long."""
WARNED = 10.0
"""Seconds after which it warns its user."""
EXCHANGED = 10.0
"""Seconds for ranks to exchange details of an error that all of them have found."""
GRACE = 1.0
"""Seconds for a rank that has closed its connections to report why."""
ANSWERED = 3.0
"""Seconds within which the store must answer; its host may be the rank that is gone."""


class RankLost(RuntimeError):
    """A message from or to a rank has failed; internal, until it is known who is to blame."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank
        """Its rank in the group."""


@dataclass(frozen=True)
class Report:
    """A rank's report in the store."""

    awaited: Sequence[int] = ()
    """The ranks that it waits for, or waited for in vain."""
    where: str = ""
    """What it waits for."""
    run: str = ""
    """What it runs, by number and kind."""
    refusal: Sequence[str] = ()
    """The AgreementError that it has raised: subject, problem, fix."""


@dataclass
class Reporting:
    """State of a rank that all groups of one model share."""

    ranks: Sequence[int]
    """The model's global ranks, whose reports are read."""
    prefix: str
    """Prefix of the reports' keys in the store."""
    run: str = ""
    """What this rank runs, by number and kind."""
    check: Callable[[], None] = lambda: None
    """Raises errors that are known by now; called while this rank waits."""
    told: bool = False
    """True while a report of this rank is in the store."""
    stepping: bool = False
    """True while an optimizer steps parameters of the model."""


class Waits:
    """The waits of one rank for the others of a group, and the others' reports.

    `whole`: the waits for all ranks of the model. A rank may wait in one group for a rank that waits in another one, so
    reports are read across groups.
    """

    def __init__(self, group: dist.ProcessGroup, whole: Waits | None = None) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        """The group's global ranks: errors name these."""
        self.rank = dist.get_rank()
        self.awaited: int | None = None
        """The rank in the group whose message the progress thread waits for."""
        self.reporting: Reporting = self._reporting(group) if whole is None else whole.reporting

    def _reporting(self, group: dist.ProcessGroup) -> Reporting:
        prefix = f"zcompile/{group.group_name}/waits"
        if len(self.ranks) > 1 and not is_fake(group):
            # A prefix of its own: reports of an earlier model on the group must not be read.
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
        """A key in the store that the ranks of this model's group share."""
        return f"{self.reporting.prefix}/{what}"

    def until(
        self, done: Callable[[float], bool], what: str, awaited: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Return once `done`, which waits for as many seconds as it is given, returns True; call `over` afterwards.

        `what`: names what is waited for, outside of program lines. `awaited`: returns the global ranks that are waited
        for; by default the one whose message the progress thread waits for.

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
        """The wait is over: withdraw the report, if there is one."""
        if self.reporting.told:
            self._send_report(None)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Replace the errors that torch raises when another rank fails or stays away by typed ones.

        Raises:
            GroupError: names the rank that is gone or has not come, and the line or unit.
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
        """Around a collective of torch that blocks this thread: another thread reports long waits, as `until` does.

        Errors of anything else pass unchanged. `others`: the other global ranks that take part.

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
        """Report a wait of `thread` that lasts for long."""
        if ended.wait(TOLD) or (frame := sys._current_frames().get(thread)) is None:
            return
        where = where_of(what, frame)
        self._send_report(Report(others, where, self.run))
        if not ended.wait(WARNED - TOLD):
            self._warn(WARNED, where, others)

    def explanation(self, error: RuntimeError, what: str, others: Sequence[int] | None = None) -> GroupError:
        """The error for a message that has failed, which names who is to blame; also reports it to the others.

        `others`: the ranks waited for, if neither the error nor the progress thread knows.

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
        """Raise the AgreementError that another rank has raised: it concerns this one, too."""
        if refusal := next((report.refusal for report in reports.values() if report.refusal), None):
            raise AgreementError(*refusal)

    def culprits(self, awaited: Sequence[int]) -> list[int]:
        """The ranks to blame if `awaited` did not come, according to the reports."""
        return to_blame(awaited, self._reports(()), self.rank)

    def refuse(self, error: AgreementError) -> None:
        """Report an error that the others share, in case the message that shows it does not reach them."""
        self._send_report(Report(run=self.run, refusal=(error.subject, error.problem, error.fix)))

    def report_failure(self, what: str, error: ZcompileError) -> None:
        """Report an error that this rank may have raised alone, while the others wait for it."""
        if len(self.ranks) > 1 and not isinstance(error, AgreementError | GroupError):
            problem = f"rank {self.rank} failed there: {type(error).__name__}: {error.subject}: {error.problem}"
            self.refuse(AgreementError(what, problem, f"on rank {self.rank}: {error.fix}"))

    def _missing(self, awaited: Callable[[], Sequence[int]] | None) -> Sequence[int]:
        """The global ranks that are waited for; all others if that is not known."""
        if awaited is not None:
            return awaited()
        index = self.awaited
        return [self.ranks[index]] if index is not None else [rank for rank in self.ranks if rank != self.rank]

    def _found(self, culprits: Sequence[int], reports: Mapping[int, Report], *, timed_out: bool) -> str:
        names = named(culprits)
        here = f" ({self.run})" if self.run else ""
        if waiting := sorted(rank for rank in culprits if rank in reports):
            problem = "; ".join(self._places(waiting, reports))
            return f"rank {self.rank} waits there{here}, and {problem}: the ranks are out of step"
        if timed_out:
            return f"rank {self.rank} waited there{here} until the group's timeout, and {names} never came"
        return f"rank {self.rank} waited there{here}, and {names} {'is' if len(culprits) == 1 else 'are'} gone"

    @staticmethod
    def _places(waiting: Sequence[int], reports: Mapping[int, Report]) -> Iterator[str]:
        """Where ranks wait, grouped by place."""
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
        """Texts of the group's ranks about an error that all of them have found, by rank, if they arrive in time."""
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
        """The others' reports by rank; those `expected` have a moment to arrive."""
        others = [rank for rank in self.reporting.ranks if rank != self.rank]
        found = _texts(self.reporting.prefix, others, expected, GRACE)
        return {rank: Report(**json.loads(text)) for rank, text in found.items()}


def to_blame(awaited: Sequence[int], reports: Mapping[int, Report], me: int) -> list[int]:
    """The end of the chain: those of `awaited` that wait for nobody, else those that these wait for, and so on.

    Ranks that wait for each other are all to blame, except `me`.
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
    """The ranks that have a value, by value."""
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
"""Prefix of programs' file names."""


def where_of(what: str, frame: types.FrameType | None = None) -> str:
    """The program line that waits now, with its margin; otherwise `what` and the line of the user's code.

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
"""Packages whose frames may be between a wait and the user's line."""


def _is_users(frame: types.FrameType) -> bool:
    """True for code neither of these packages nor generated; what torch generates has no module name of its own."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    generated = frame.f_code.co_filename.startswith((_TORCH, "<"))
    return package not in _NOT_THE_USERS and not generated


_TORCH = os.path.dirname(torch.__file__)


def _text_of(file: str, number: int) -> str:
    return " ".join(linecache.getline(file, number).split())


def is_of_collective(error: RuntimeError) -> bool:
    """True if it is an error of a torch collective; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _fix(culprits: Sequence[int], reports: Mapping[int, Report]) -> str:
    if any(rank in reports for rank in culprits):
        return "let every rank make the same calls in the same order"
    return f"look for the first error of {named(culprits)}; every rank must make the same calls in the same order"


def _texts(prefix: str, ranks: Sequence[int], expected: Sequence[int], seconds: float) -> dict[int, str]:
    """The texts of `ranks` in the store, each under `prefix` and its rank; those `expected` have time to arrive."""
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
    """The result of `ask` on the store; None if it fails, or does not answer in time.

    The store may be on a rank that is gone.
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
