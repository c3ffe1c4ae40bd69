"""Async work: collectives in flight, and counters of bytes sent and time waited."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zcompile.runtime.waits import Waits


@dataclass
class AxisTraffic:
    """What this rank sent along one axis of `size` ranks."""

    size: int
    payload: int = 0
    """Bytes of the tensors moved; an all_reduce counts twice."""
    messages: int = 0
    to_one: int = 0
    """Bytes sent point-to-point."""

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return self.payload * (self.size - 1) // self.size + self.to_one


@dataclass
class TrafficMeter:
    """Bytes that this rank's collectives sent, and the time that it waited for them; all cumulative.

    `bytes` counts one direction: (N-1)/N of the payload of a gather or a scatter, twice that for an all_reduce.
    `seconds` is the time with at least one collective in flight, `exposed` the part of it in which the program waited;
    both are measured on the host, for groups whose wait blocks it, as gloo's does.
    """

    axes: dict[str, AxisTraffic] = field(default_factory=dict)
    """Traffic by axis name."""
    seconds: float = 0.0
    exposed: float = 0.0
    counted_until: float = 0.0
    """The time up to which `seconds` has counted."""

    def count(self, started: float, ended: float) -> None:
        """Add the time of one collective, except where it overlaps those already counted."""
        self.seconds += max(0.0, ended - max(started, self.counted_until))
        self.counted_until = max(self.counted_until, ended)

    @property
    def payload(self) -> int:
        """Bytes of the tensors moved; an all_reduce counts twice."""
        return sum(axis.payload for axis in self.axes.values())

    @property
    def messages(self) -> int:
        """Number of collectives."""
        return sum(axis.messages for axis in self.axes.values())

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(axis.bytes for axis in self.axes.values())

    def along(self, axis: str, size: int) -> AxisTraffic:
        """The counters of one axis of `size` ranks."""
        return self.axes.setdefault(axis, AxisTraffic(size))

    @property
    def hidden(self) -> float | None:
        """Share of communication time hidden behind compute, 0 to 1; None if it was not measured."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else None


class AsyncWork(ABC):
    """One collective in flight. It holds the tensors that must outlive it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ended: float | None = None
        """When it completed, in seconds of `time.perf_counter`; None until then, and if the host cannot tell."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the program may use the result.

        Raises:
            GroupError: another rank failed or stayed away.
            AgreementError: the ranks are out of step.
        """


class AllWork(AsyncWork):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[AsyncWork]) -> None:
        super().__init__()
        self.started, self._works = works[0].started, works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self.ended = self._works[-1].ended


class StreamWork(AsyncWork):
    """A collective that runs on its group's stream, as NCCL's do: `wait` blocks the current stream, not the host.

    The tensors were allocated on the current stream, and the group's stream waited for the current one at launch. After
    `wait`, every later kernel of the current stream runs after the collective, so the references can be dropped without
    `record_stream`: the memory can only be reused by later work of the current stream.
    """

    def __init__(
        self,
        land: Callable[[], object],
        alive: Sequence[object],
        finish: Callable[[], None] | None = None,
        waits: Waits | None = None,
    ) -> None:
        """`land` makes the current stream wait for it, then `finish` runs; `alive` is held until then.

        `waits`: explains its errors that concern other ranks.
        """
        super().__init__()
        self._land, self._alive, self._finish, self._waits = land, tuple(alive), finish, waits
        self._landed = False

    def order(self) -> None:
        """Make the current stream wait for it without ending it: `wait` may still be called on another stream."""
        if not self._landed:
            self._land()

    def wait(self) -> None:
        if self._landed:  # several messages that were launched together share one work
            return
        with self._waits.explained("a collective") if self._waits is not None else contextlib.nullcontext():
            self._land()
        if self._finish is not None:
            self._finish()
        self._landed, self._alive, self._finish = True, (), None


class HostWork(AsyncWork):
    """A collective whose `wait` blocks the calling thread, as gloo's do."""

    def __init__(self, arrive: Callable[[], None], traffic: TrafficMeter, waits: Waits, what: str) -> None:
        """`arrive` waits for the data and processes it. It holds the tensors.

        `what`: names what is waited for, outside of program lines.
        """
        super().__init__()
        self._arrive: Callable[[], None] | None = arrive
        self._traffic, self._waits, self._what = traffic, waits, what
        self._done = threading.Event()
        self._error: BaseException | None = None

    @torch.no_grad()
    def land(self) -> None:
        """Run `arrive`; called on the progress thread."""
        assert self._arrive is not None, "async work ends once"
        try:
            self._arrive()
        except BaseException as error:
            self._error = error.with_traceback(None)  # its frames hold the tensors
        self._arrive = None
        self.ended = time.perf_counter()
        self._done.set()

    @property
    def done(self) -> bool:
        """True once it has landed or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        before = time.perf_counter()
        self._waits.until(self._done.wait, self._what)
        assert self.ended is not None, "it has landed"
        self._traffic.exposed += max(0.0, self.ended - before)
        self._traffic.count(self.started, self.ended)
        if self._error is not None:
            with self._waits.explained(self._what):
                raise self._error
        self._waits.over()


class Progress:
    """A thread that completes async work in the order in which it was started.

    gloo moves bytes on its own threads, but its point-to-point works report completion only to a caller of `wait`. This
    thread waits without the GIL, so that compute goes on, and sums what has arrived in parallel with compute.
    """

    def __init__(self, hang_up: Callable[[], None]) -> None:
        """`hang_up`: aborts what the thread waits for, by closing this rank's connections."""
        self._works: queue.SimpleQueue[HostWork | None] = queue.SimpleQueue()
        # A daemon: a rank that fails must not stay alive until its last message times out.
        thread = threading.Thread(target=_land_all, args=(self._works,), name="zcompile progress", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._works, thread, hang_up)

    def follow(self, work: HostWork) -> HostWork:
        """Land `work` after all works queued before it; returns it."""
        self._works.put(work)
        return work


def _land_all(works: queue.SimpleQueue[HostWork | None]) -> None:
    while (work := works.get()) is not None:
        work.land()
        del work  # or its result would stay alive until the next work arrives


def _end(works: queue.SimpleQueue[HostWork | None], thread: threading.Thread, hang_up: Callable[[], None]) -> None:
    """End the thread, if need be by closing connections: returning from C++ into a finalized interpreter aborts."""
    works.put(None)
    if threading.current_thread() is thread:
        return
    exits = not threading.main_thread().is_alive()
    thread.join(_PATIENCE)
    if not exits and thread.is_alive():  # others may still use the group: retry at exit
        atexit.register(_end, works, thread, hang_up)
    elif thread.is_alive():
        hang_up()
        thread.join(_PATIENCE)


_PATIENCE = 2.0
"""Seconds. Messages of a rank that has failed fail at once; a rank that merely hangs is not waited for."""
