"""Ranks as processes: started, listened to until each has ended or hangs, and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.faults.loop import BEFORE, Op
from benchmarks.faults.worker import Job, Raised, work

PATIENCE = 10.0
"""Seconds beyond the group's timeout that an error may take."""
START = 4
"""Times the group's timeout that starting and tracing may take."""
STOPPED = 4.0
"""Seconds until a stopped rank is continued."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.faults.warm"])


@dataclass
class Seen:
    """What a rank was seen to do."""

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, list[Any]] = field(default_factory=dict)
    steps: list[list[Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    raised: Raised | None = None
    died: int | None = None
    """The status of a process that ended by itself; negative: by a signal."""
    log: str = ""
    """The last that it has printed."""
    done: bool = False
    doing: Op = BEFORE
    since: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    """Seconds of the longest operation, but for the first of a kind, which is traced."""
    known: set[str] = field(default_factory=set)
    """The letters of operations that have come to their end."""

    def hear(self, what: str, *given: Any) -> None:
        """Take what its `worker.Pipe` tells."""
        if what in ("begun", "ended"):
            self.longest = max(self.longest, 0.0 if self._starts else time.monotonic() - self.since)
            if given[0] is None or what == "begun":
                self.known.add(self.doing.letter)
        match what, given:
            case "begun", (op,):
                self.doing, self.since = op, time.monotonic()
            case "loss", (place, value):
                self.losses[place] = value
            case "state", (place, values):
                self.states[place] = values
            case "stepped", (rows,):
                self.steps.append(rows)
            case "warned", (text,):
                self.warnings.append(text)
            case "ended", (error,):
                self.raised, self.done = error, error is None
            case _:
                raise AssertionError(f"an unknown message: {what!r}")

    @property
    def ended(self) -> bool:
        return self.done or self.raised is not None or self.died is not None

    def late(self, timeout: float) -> bool:
        """Whether it is in one operation for too long, or was until that raised."""
        seconds = self.raised.seconds if self.raised else 0.0 if self.ended else time.monotonic() - self.since
        return seconds > timeout + PATIENCE + (START * timeout if self._starts else 0)

    @property
    def _starts(self) -> bool:
        return self.doing.letter not in self.known


@dataclass
class _Process:
    process: Any
    connection: Connection
    seen: Seen
    continued: bool = False

    def settled(self, timeout: float) -> bool:
        return self.seen.ended or self.seen.late(timeout)


def run(
    scripts: Sequence[Sequence[Op]], stage: int, timeout: float, absent: Sequence[int], checkpoint: Path | None = None
) -> list[Seen]:
    """What each rank does with its own script, until each but the `absent` has ended or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        home, place = Path(folder), checkpoint or Path(folder) / "checkpoint"
        ranks = [_start(Job(r, len(scripts), stage, timeout, home, place, s)) for r, s in enumerate(scripts)]
        try:
            while any(not rank.settled(timeout) for number, rank in enumerate(ranks) if number not in absent):
                _hear(ranks)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.connection.close()
            for rank in ranks:
                rank.process.join()
        for number, rank in enumerate(ranks):
            log = home / f"{number}.log"
            rank.seen.log = log.read_text(errors="replace")[-400:].strip() if log.exists() else ""
        return [rank.seen for rank in ranks]


def _start(job: Job) -> _Process:
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(theirs, job), daemon=True)
    process.start()
    theirs.close()
    return _Process(process, mine, Seen())


def _hear(ranks: Sequence[_Process]) -> None:
    """Take what ranks say in a while, or that they have died; continue one that was stopped for a while."""
    speaking = {rank.connection: rank for rank in ranks if rank.seen.died is None}
    for connection in wait(list(speaking), timeout=0.2):
        rank = speaking[connection]  # type: ignore[index]
        try:
            rank.seen.hear(*rank.connection.recv())
        except (EOFError, OSError):
            rank.process.join()
            rank.seen.died = rank.process.exitcode
    for rank in ranks:
        if rank.seen.doing.letter == "p" and not rank.continued and time.monotonic() - rank.seen.since > STOPPED:
            rank.continued = True
            os.kill(rank.process.pid, signal.SIGCONT)
