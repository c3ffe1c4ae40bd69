"""The happens-before checker: whether what streams and the host do to memory is ordered, whatever a GPU's timing.

Vector clocks (Fidge 1988, Mattern 1989) over the streams and the host. A kernel runs behind what its stream was given
before, and behind what the host had done by its launch; an event carries the clock of its stream to whoever waits for
it. Two accesses of the same bytes, one of them a write, must be ordered, and torch's caching allocator adds its own:

- freed memory goes to a later owner on the stream that it was allocated for, at once, whatever other streams still do
  there, unless they were announced with `record_stream`: those are waited for. So what is allocated for a stream may be
  anything that was freed there before.
- its own stream may still be busy with the owner before: another one that uses it must have waited for the allocation.

One host is assumed: its threads are taken to wait for each other, as autograd's do.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

HOST = -1
"""What stands for the host where streams have their numbers."""
Clock = dict[int, int]
"""Of each stream, the last of its kernels that has ended."""


class Access(NamedTuple):
    """Bytes [begin, end) that a kernel or the host touches."""

    begin: int
    end: int
    writes: bool

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"


@dataclass(frozen=True)
class Touch:
    """An access that has been: by which stream, when on its clock, by which operation, on which line."""

    stream: int
    tick: int
    access: Access
    operation: str
    line: str
    freed: str = ""
    """The line that gave the memory back, of an access by an owner before."""

    def __str__(self) -> str:
        freed = f", which is freed at {self.freed}" if self.freed else ""
        return f"{_name(self.stream)} {self.access.verb} it by {self.operation} at {self.line}{freed}"


@dataclass(eq=False)
class Block:
    """Memory that has an owner; `stream`: that it was allocated for, HOST if it is pinned."""

    begin: int
    end: int
    stream: int
    line: str
    touches: list[Touch] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    """Streams of which the allocator was told."""


@dataclass(frozen=True)
class Finding:
    """What is not ordered: two accesses, or an access and the end of the memory."""

    kind: str
    first: str
    second: str
    allocated: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.first}; {self.second}; it was allocated at {self.allocated}"


class Checker:
    """What has been launched so far, and what was wrong about it.

    Args:
        line: Gives the line of the program that runs now, for what is reported.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, Block] = {}
        self._begins: list[int] = []
        self._freed: dict[int, dict[tuple[int, bool], Touch]] = {}
        """By stream: what each other one may still do to memory that went back to it, the last read and the last write:
        what is behind these is behind those before."""
        self._tick = 0
        self.findings: dict[tuple[str, str, str], Finding] = {}
        """By kind and the two lines: one of each."""
        self.waits: Counter[str] = Counter()
        """How often the host has waited for the device, by reason and line."""
        self.stream_waits = 0
        """Those for a stream, which torch's own debug mode sees, since the beginning."""
        self.launches: Counter[str] = Counter()
        """Kernels by operation."""

    def begin_step(self) -> None:
        """Count anew."""
        self.waits.clear()
        self.launches.clear()

    # -- streams and events -------------------------------------------------------------------------------------------

    def launch(self, stream: int, operation: str, accesses: Sequence[Access]) -> None:
        """A kernel on `stream`."""
        self.launches[operation] += 1
        _join(self._clock(stream), self._clock(HOST))
        self._run(stream, operation, accesses)

    def host(self, operation: str, accesses: Sequence[Access]) -> None:
        """The host itself reads or writes pinned memory."""
        self._run(HOST, operation, accesses)

    def record(self, event: int, stream: int) -> None:
        """The event stands behind what `stream` was given so far, and what the host has done."""
        self._events[event] = dict(self._clock(stream))
        _join(self._events[event], self._clock(HOST))

    def block(self, stream: int, event: int) -> None:
        """Later kernels of `stream` run behind the event."""
        _join(self._clock(stream), self._events.get(event, {}))

    def sync_stream(self, stream: int, why: str) -> None:
        """The host waits for all that `stream` was given."""
        self.stream_waits += 1
        self._wait(why, self._clock(stream))

    def sync_event(self, event: int, why: str) -> None:
        """The host waits for the event."""
        self._wait(why, self._events.get(event, {}))

    def sync_device(self, why: str) -> None:
        """The host waits for all streams."""
        for clock in list(self._clocks.values()):
            _join(self._clock(HOST), clock)
        self._wait(why, {})

    def seen(self, event: int) -> None:
        """The host has found the event behind it, without waiting."""
        _join(self._clock(HOST), self._events.get(event, {}))

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, begin: int, nbytes: int, stream: int) -> None:
        """Memory for `stream`: owners before may still be busy with it."""
        block, clock = self._add(begin, nbytes, stream), self._clock(stream)
        whole = Access(block.begin, block.end, writes=True)
        if tick := clock.get(stream, 0):
            block.touches.append(Touch(stream, tick, whole, "the owner before", block.line))
        for touch in self._freed.get(stream, {}).values():
            if clock.get(touch.stream, 0) < touch.tick:
                block.touches.append(replace(touch, access=whole._replace(writes=touch.access.writes)))

    def pin(self, begin: int, nbytes: int) -> None:
        """Pinned memory of the host. Torch gives it to nobody else before copies from and to it have ended."""
        self._add(begin, nbytes, HOST)

    def keep(self, pointer: int, stream: int) -> None:
        """The allocator is told that `stream` uses this memory."""
        if (block := self._at(pointer)) is not None:
            block.kept.add(stream)

    def free(self, begin: int) -> None:
        """Memory goes back to the allocator, for the next owner on its stream."""
        block = self._blocks.pop(begin, None)
        if block is None:
            return
        self._begins.pop(bisect.bisect_left(self._begins, begin))
        if block.stream == HOST:
            return
        known, line = Clock(), self._line()
        for stream in (block.stream, HOST, *block.kept):
            _join(known, self._clock(stream))
        pending = self._freed.setdefault(block.stream, {})
        for touch in block.touches:
            if not touch.freed and known.get(touch.stream, 0) < touch.tick and touch.stream != block.stream:
                pending[touch.stream, touch.access.writes] = replace(touch, freed=line)

    # -- what they have in common -------------------------------------------------------------------------------------

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _wait(self, why: str, clock: Mapping[int, int]) -> None:
        _join(self._clock(HOST), clock)
        self.waits[f"{why} at {self._line()}"] += 1

    def _run(self, stream: int, operation: str, accesses: Sequence[Access]) -> None:
        self._tick += 1
        self._clock(stream)[stream] = self._tick
        if accesses:
            line = self._line()
            touches = [Touch(stream, self._tick, access, operation, line) for access in accesses]
            for touch in touches:
                if (block := self._at(touch.access.begin)) is not None:
                    self._touch(block, touch)

    def _touch(self, block: Block, touch: Touch) -> None:
        mine, access = self._clock(touch.stream), touch.access
        for other in block.touches:
            unordered = other.stream != touch.stream and mine.get(other.stream, 0) < other.tick
            if unordered and (access.writes or other.access.writes) and _overlap(access, other.access):
                self._report("freed too early" if other.freed else "not ordered", other, str(touch), touch.line, block)
        block.touches = [other for other in block.touches if not self._covers(touch, other)]
        block.touches.append(touch)

    def _covers(self, touch: Touch, other: Touch) -> bool:
        """True if whoever is ordered behind `touch` is so behind `other`, which it leaves nothing of."""
        ordered = other.stream == touch.stream or self._clock(touch.stream).get(other.stream, 0) >= other.tick
        inside = touch.access.begin <= other.access.begin and other.access.end <= touch.access.end
        return ordered and inside and (touch.access.writes or not other.access.writes)

    def _report(self, kind: str, first: Touch, second: str, line: str, block: Block) -> None:
        key = kind, first.line, line
        self.findings.setdefault(key, Finding(kind, str(first), second, block.line))

    def _add(self, begin: int, nbytes: int, stream: int) -> Block:
        block = self._blocks[begin] = Block(begin, begin + nbytes, stream, self._line())
        bisect.insort(self._begins, begin)
        return block

    def _at(self, pointer: int) -> Block | None:
        index = bisect.bisect_right(self._begins, pointer) - 1
        block = self._blocks[self._begins[index]] if index >= 0 else None
        return block if block is not None and pointer < block.end else None


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _overlap(one: Access, other: Access) -> bool:
    return one.begin < other.end and other.begin < one.end


def _name(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}" if stream else "the default stream"
