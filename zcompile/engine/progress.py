"""A line on stderr while a model is compiled: the current phase, and the time so far."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

AFTER, EVERY = 5.0, 30.0
"""Seconds until the first line, and between lines that cannot be overwritten, as in a log."""


class CompileProgress:
    """The progress of compiling a model. One rank prints it, and only if it takes long.

    On a terminal one line is overwritten and cleared in the end; elsewhere there is a line now and then, and a last
    one. `ZCOMPILE_PROGRESS=0` in the environment silences it.

    Args:
        what: What is compiled, in a few words.
        speaks: True on one rank.
    """

    def __init__(self, what: str, *, speaks: bool) -> None:
        self.what = what
        self._speaks = speaks and os.environ.get("ZCOMPILE_PROGRESS") != "0"
        self._doing, self._done = "", False

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Set the phase inside; within another phase, a part of that."""
        before, self._doing = self._doing, phase
        if before or not self._speaks:
            try:
                yield
            finally:
                self._doing = before
            return
        self._done = False
        started, ended = time.perf_counter(), threading.Event()
        given = (started, ended)
        reporter = threading.Thread(target=self._report_progress, args=given, daemon=True, name="zcompile progress")
        reporter.start()
        try:
            yield
            self._done = True
        finally:
            self._doing = ""
            ended.set()
            reporter.join()

    def at(self, phase: str) -> None:
        """Set the phase from now on, within `doing`."""
        if self._doing:
            self._doing = phase

    def _report_progress(self, started: float, ended: threading.Event) -> None:
        over = sys.stderr.isatty()
        wait, said = AFTER, False
        while not ended.wait(wait):
            said, wait = True, 1.0 if over else EVERY
            line = f"zcompile: compiling {self.what} for {time.perf_counter() - started:.0f} s: {self._doing}"
            print(f"\r\x1b[2K{line}" if over else line, end="" if over else "\n", file=sys.stderr, flush=True)
        if said and over:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        elif said and self._done:
            done = f"zcompile: compiled {self.what} in {time.perf_counter() - started:.0f} s"
            print(done, file=sys.stderr, flush=True)
