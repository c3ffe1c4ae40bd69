"""Stream watch: says at which line a GPU waits in vain, before the end of its group's timeout ends the process.

The host does not wait in collectives of a GPU, so no error of theirs comes back to a line: NCCL's watchdog writes which
collective of the group it was, and ends the process. What this writes before stays.
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
"""Waits that are remembered: about as many kernels as CUDA lets the host launch ahead."""
LOOKS = 2.0
"""Seconds between two looks at the GPU."""
LAST = 0.9
"""Of the timeout: when it is said once more, beside what the watchdog will write."""


@dataclass(slots=True)
class _Wait:
    """A wait of the stream for a collective."""

    number: int
    end: torch.Event
    place: Place | None
    run: str


class StreamWatch:
    """Remembers the waits of one model's streams; a thread of its own looks for one that does not end.

    Args:
        waits: Of the model.
        device: The GPU.
        limit: Seconds after which the group's watchdog ends the process.
        backend: What that is of.
    """

    def __init__(self, waits: Waits, device: torch.device, limit: float, backend: str = "nccl") -> None:
        self._waits, self._device, self._limit, self._backend = waits, device, limit, backend.upper()
        self._passed = deque[_Wait](maxlen=KEPT)
        """Waits that the GPU has not been seen to come past, in their order."""
        self._spare = deque[torch.Event](maxlen=KEPT)
        self._count = 0
        self._first, self._since, self._due = -1, 0.0, WARNED
        ended = threading.Event()
        thread = threading.Thread(target=_look, args=(weakref.ref(self), device, ended), name=NAME, daemon=True)
        thread.start()
        weakref.finalize(self, ended.set)

    def passed(self) -> None:
        """The current stream has been told to wait for a collective; the host goes on."""
        event = event_here(self._device, self._spare.pop() if self._spare else None)
        if event is None:  # within a capture
            return
        self._passed.append(_Wait(self._count, event, Place.here(), self._waits.run))
        self._count += 1

    def look(self, now: float) -> None:
        """Say which line the device has not come past for long, if there is one; `now` is a time in seconds."""
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
            f"zcompile: the GPU of rank {self._waits.rank} has not come past {where}{run} for {waited:.0f} s: it waits"
            " there for the other ranks, or for a kernel before it."
            f" {self._limit:.0f} s after the launch the watchdog of {self._backend} ends the process"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


NAME = "zcompile watch"


def _look(reference: weakref.ref[StreamWatch], device: torch.device, ended: threading.Event) -> None:
    only_asks(device)
    while not ended.wait(LOOKS) and (watch := reference()) is not None:
        watch.look(time.perf_counter())
        del watch  # while it waits, the thread keeps nothing alive
