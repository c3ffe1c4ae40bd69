"""Async work: collectives on their way, and the account of what was sent and waited for."""

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
    """What went over one axis, of so many ranks."""

    size: int
    payload: int = 0
    """Bytes of the tensors moved; those of an all_reduce count twice."""
    messages: int = 0
    to_one: int = 0
    """Bytes that went to one other rank alone."""

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return self.payload * (self.size - 1) // self.size + self.to_one


@dataclass
class TrafficMeter:
    """What this rank's collectives sent, and how long it stood waiting for them; all cumulative.

    `bytes` counts one direction: (N-1)/N of the payload of a gather or a scatter, twice that for an all_reduce.
    `seconds` is the time in which at least one collective was in flight and `exposed` the part of it in which the
    program waited, measured on the host for groups whose wait blocks it, as gloo's does.
    """

    axes: dict[str, AxisTraffic] = field(default_factory=dict)
    """By the axis that it went over."""
    seconds: float = 0.0
    exposed: float = 0.0
    counted_until: float = 0.0
    """The moment up to which `seconds` has counted."""

    def count(self, started: float, ended: float) -> None:
        """Count the time of one collective, what it shares with one counted before left out."""
        self.seconds += max(0.0, ended - max(started, self.counted_until))
        self.counted_until = max(self.counted_until, ended)

    @property
    def payload(self) -> int:
        """Bytes of the tensors moved; those of an all_reduce count twice."""
        return sum(axis.payload for axis in self.axes.values())

    @property
    def messages(self) -> int:
        """How many collectives that was."""
        return sum(axis.messages for axis in self.axes.values())

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(axis.bytes for axis in self.axes.values())

    def along(self, axis: str, size: int) -> AxisTraffic:
        """What goes over one axis, to be counted."""
        return self.axes.setdefault(axis, AxisTraffic(size))

    @property
    def hidden(self) -> float | None:
        """Share of communication time hidden behind compute, 0 to 1; None where it was not measured."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else None


class AsyncWork(ABC):
    """One collective in flight. It holds the tensors that must outlive it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ended: float | None = None
        """The moment in which it was done; None until then, and where the host cannot tell."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the program may use the result.

        Raises:
            GroupError: another rank failed or stayed away.
            AgreementError: the ranks are out of step.
        """


class AllWork(AsyncWork):
    """Several that are waited for as one."""

    def __init__(self, works: Sequence[AsyncWork]) -> None:
        super().__init__()
        self.started, self._works = works[0].started, works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self.ended = self._works[-1].ended


class StreamWork(AsyncWork):
    """A collective on a stream of its group, as NCCL's are: the current stream waits for it, the host does not.

    The tensors were allocated on the current stream and the collective runs on the group's own, which waited for the
    current one at launch; after `wait` every later kernel of the current stream runs after the collective. So dropping
    the references then is safe: their memory can only be reused by later work of the current stream.
    """

    def __init__(
        self,
        land: Callable[[], object],
        alive: Sequence[object],
        finish: Callable[[], None] | None = None,
        waits: Waits | None = None,
    ) -> None:
        """`land` lets the current stream wait for it, then `finish` runs; `alive` is held until then.

        `waits`: what explains its error, if it has to do with other ranks.
        """
        super().__init__()
        self._land, self._alive, self._finish, self._waits = land, tuple(alive), finish, waits
        self._landed = False

    def order(self) -> None:
        """Let the current stream come behind it, without an end: who waits for it may do so on another stream."""
        if not self._landed:
            self._land()

    def wait(self) -> None:
        if self._landed:  # one work stands for several messages that went together
            return
        with self._waits.explained("a collective") if self._waits is not None else contextlib.nullcontext():
            self._land()
        if self._finish is not None:
            self._finish()
        self._landed, self._alive, self._finish = True, (), None


class HostWork(AsyncWork):
    """A collective whose wait blocks the thread that waits, as gloo's do."""

    def __init__(self, arrive: Callable[[], None], traffic: TrafficMeter, waits: Waits, what: str) -> None:
        """`arrive` waits for the bytes and does what is to be done with them. It holds the tensors.

        `what`: what is waited for, where no line of a program says it.
        """
        super().__init__()
        self._arrive: Callable[[], None] | None = arrive
        self._traffic, self._waits, self._what = traffic, waits, what
        self._done = threading.Event()
        self._error: BaseException | None = None

    @torch.no_grad()
    def land(self) -> None:
        """Let it arrive; called on the progress thread."""
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
        """True once it has landed, or failed."""
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
    """A thread that ends async work in the order of its start.

    gloo moves bytes on threads of its own, but its point-to-point works tell nobody when they are done except who waits
    for them. The thread waits without Python's lock, so compute goes on; and what arrives is summed on it, beside a
    compute thread that may be waiting for something else.
    """

    def __init__(self, hang_up: Callable[[], None]) -> None:
        """`hang_up`: ends what the thread waits for, by closing this rank's connections."""
        self._works: queue.SimpleQueue[HostWork | None] = queue.SimpleQueue()
        # A daemon: a rank that fails must not stay until its last message's timeout.
        thread = threading.Thread(target=_land_all, args=(self._works,), name="zcompile progress", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._works, thread, hang_up)

    def follow(self, work: HostWork) -> HostWork:
        """Land `work` after those that were given before; returns it."""
        self._works.put(work)
        return work


def _land_all(works: queue.SimpleQueue[HostWork | None]) -> None:
    while (work := works.get()) is not None:
        work.land()
        del work  # while the thread waits for the next one, nothing keeps this one's result alive


def _end(works: queue.SimpleQueue[HostWork | None], thread: threading.Thread, hang_up: Callable[[], None]) -> None:
    """End the thread, if need be with the connections: returning from C++ into an interpreter that has ended aborts."""
    works.put(None)
    if threading.current_thread() is thread:
        return
    exits = not threading.main_thread().is_alive()
    thread.join(_PATIENCE)
    if not exits and thread.is_alive():  # others may use the group: until then it waits
        atexit.register(_end, works, thread, hang_up)
    elif thread.is_alive():
        hang_up()
        thread.join(_PATIENCE)


_PATIENCE = 2.0
"""Seconds. What is expected of a rank that fails, fails at once; a rank that merely hangs is not waited for."""
