"""Stream watch: reports the line at which a GPU is stuck, before its group's timeout ends the process.

The host does not wait in collectives of a GPU, so their errors cannot be raised at a line: NCCL's watchdog logs the
collective and ends the process. The warning of this watch comes before that.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass

import torch

from zcompile.runtime.device import event_here, only_asks
from zcompile.runtime.waits import WARNED, Place, Waits

KEPT = 1024
"""Number of waits that are remembered: about as many kernels as CUDA lets the host launch ahead."""
LOOKS = 2.0
"""Seconds between two queries of the GPU."""
LAST = 0.9
"""Fraction of the timeout after which the warning is repeated, for reading next to the watchdog's log."""


@dataclass(slots=True)
class _Wait:
    """A wait of the stream for a collective."""

    number: int
    end: torch.Event
    place: Place | None
    run: str


class StreamWatch:
    """Remembers the waits of one model's streams; a thread looks for one that does not end.

    Args:
        waits: Those of the model.
        device: The GPU.
        limit: Seconds after which the group's watchdog ends the process.
        backend: The group's backend.
    """

    def __init__(self, waits: Waits, device: torch.device, limit: float, backend: str = "nccl") -> None:
        self._waits, self._device, self._limit, self._backend = waits, device, limit, backend.upper()
        self._passed = deque[_Wait](maxlen=KEPT)
        """Waits that the GPU is not known to have passed yet, in order."""
        self._spare = deque[torch.Event](maxlen=KEPT)
        self._count = 0
        self._first, self._since, self._due = -1, 0.0, WARNED
        ended = threading.Event()
        thread = threading.Thread(target=_look, args=(weakref.ref(self), device, ended), name=NAME, daemon=True)
        thread.start()
        weakref.finalize(self, ended.set)

    def passed(self) -> None:
        """Note that the current stream waits for a collective; the host does not."""
        event = event_here(self._device, self._spare.pop() if self._spare else None)
        if event is None:  # within a capture
            return
        self._passed.append(_Wait(self._count, event, Place.here(), self._waits.run))
        self._count += 1

    def look(self, now: float) -> None:
        """Warn about a line that the device has been stuck at for long, if there is one; `now` is a time in seconds."""
        while self._passed and self._passed[0].end.query():
            self._spare.append(self._passed.popleft().end)
        first = self._passed[0] if self._passed else None
        if first is None or first.number != self._first:
            self._first, self._since = (-1 if first is None else first.number), now
            self._due = min(WARNED, LAST * self._limit)
            return
        if (waited := now - self._since) >= self._due:
            self._due = LAST * self._limit if self._due < LAST * self._limit else float("inf")
            self._report(first, waited)

    def _report(self, wait: _Wait, waited: float) -> None:
        where = str(wait.place) if wait.place is not None else "a collective"
        run = f" ({wait.run})" if wait.run else ""
        text = (
            f"zcompile: the GPU of rank {self._waits.rank} has been stuck at {where}{run} for {waited:.0f} s: it waits"
            " there for the other ranks, or for an earlier kernel."
            f" {self._limit:.0f} s after the launch the watchdog of {self._backend} ends the process"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


NAME = "zcompile watch"


def _look(reference: weakref.ref[StreamWatch], device: torch.device, ended: threading.Event) -> None:
    only_asks(device)
    while not ended.wait(LOOKS) and (watch := reference()) is not None:
        watch.look(time.perf_counter())
        del watch  # the thread must not keep the watch alive while it waits
