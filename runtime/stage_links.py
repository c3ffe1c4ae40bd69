"""Links between pipeline stages: ordered messages from one rank along an axis to another.

On NCCL a send occupies its communicator's stream until it is received. If a rank sent and received on one stream, a
message could be queued behind one that its peer never gets to, a deadlock. So messages use lanes, each with a group of
its own, in which no rank both sends and receives, or has more than one peer.

In the first run of a program, messages go from host to host instead. Kernels are loaded, and communicators created, at
first use, and both may wait for all work launched on the device (CUDA C++ Programming Guide, "Lazy Loading"): behind a
receive whose sender waits for what this rank has not launched yet, that would deadlock.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ir.tensor_type import TensorType
from zcompile.runtime.async_work import AsyncWork, HostWork, Progress, StreamWork
from zcompile.runtime.device import HOST, backend_of, is_host
from zcompile.runtime.gloo_collectives import of_rank
from zcompile.runtime.groups import Communicator, broadcast, connected_hosts
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.distributed import backend_name, close_connections, gloo_of, is_fake

_TAG = 1 << 28
"""Set in the tags of all messages between stages; those of collectives have higher bits
(`runtime.gloo_collectives`)."""
_RUNS = 1 << 28


class Route(NamedTuple):
    """From one index along the axis to another."""

    sender: int
    receiver: int

    @property
    def lane(self) -> tuple[bool, int, bool]:
        """Routes with the same lane share no rank."""
        distance = abs(self.receiver - self.sender)
        return self.receiver > self.sender, distance, bool(min(self) // distance % 2)


class StageLinks:
    """Messages between this rank and others along the pipeline axis.

    Args:
        mesh: The axis, for collectives of all its ranks.
        again: Creates another group of the same ranks. Collective.
        whole: The waits for all ranks that train the model.
        data: The ranks that have the same stages: traffic is counted and recorded with theirs.
    """

    def __init__(
        self, mesh: DeviceMesh, again: Callable[[], dist.ProcessGroup], whole: Waits, data: Communicator
    ) -> None:
        self.device, self.size, self.rank = data.device, mesh.size(), mesh.get_local_rank()
        (self.axis,) = mesh.mesh_dim_names or ("pp",)
        self.group, self._again = mesh.get_group(), again
        self.waits = Waits(self.group, whole)
        self.traffic, self.recorder = data.traffic, data.recorder
        self._tag = _TAG
        self.blocks = backend_name(self.group, self.device) == backend_of(HOST) and is_host(self.device)
        """True if the host waits for messages, which then share one group."""
        self._hosts: Any = gloo_of(self.group) if self.blocks else None
        self._over_hosts = self.blocks
        self._lanes: dict[tuple[bool, int, bool], dist.ProcessGroup] = {}
        self._connected: set[Route] = set()
        self._queues: dict[tuple[int, bool], Progress] = {}
        self._in_flight: weakref.WeakSet[StreamWork] = weakref.WeakSet()

    def begin(self, run: int, *, first: bool) -> None:
        """Mark messages from now on as belonging to the run with this number; `first`: its program's first run."""
        self._tag = _TAG + run % _RUNS
        self._over_hosts = self.blocks or (first and self._hosts is not None)

    def connect(self, routes: Iterable[Route]) -> None:
        """Set up the routes of all ranks, if that takes both ends. Collective.

        NCCL connects two ranks at their first message, and the host waits there for its peer: in program order, rank 0
        would wait for rank 1 to send, and rank 1 for rank 0. So all ranks connect in one order.
        """
        routes = sorted(set(routes) - self._connected)
        if routes and self._hosts is None and not is_host(self.device) and not is_fake(self.group):
            name = self.waits.name(f"links of {self.waits.ranks[0]}")
            self._hosts = connected_hosts(name, self.group, self.device)
        for lane in sorted({route.lane for route in routes} - set(self._lanes)):
            self._lanes[lane] = self._again()
        for route in routes:
            if self.rank in route:
                byte, group = torch.zeros(1, dtype=torch.uint8, device=self.device), self._lanes[route.lane]
                with self.waits.explained("a link to another stage"):
                    if self.rank == route.sender:
                        dist.send(byte, group=group, group_dst=route.receiver)
                    else:
                        dist.recv(byte, group=group, group_src=route.sender)
        self._connected.update(routes)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from the axis's first rank, in place; any device, strides and dtype."""
        if self.size > 1:
            what = "the values of the first pipeline stage's rank"
            broadcast(tensor, self.device, self.group, 0, self.waits, what)

    def order_all(self) -> None:
        """Make the current stream wait for every message that was started and not waited for.

        For a step that has failed: its memory may be lent again while a GPU still reads or writes it.
        """
        for work in list(self._in_flight):
            with contextlib.suppress(Exception):  # a broken group's error is already propagating
                work.order()

    def send(self, value: torch.Tensor, to: int) -> AsyncWork:
        """Start sending a 1-D tensor of bytes to the rank at index `to`."""
        self.traffic.along(self.axis, self.size).to_one += value.nbytes
        if self._over_hosts:
            value = value.to(HOST)
            return self._follow(to, True, value, lambda: self._hosts.send([value], to, self._tag))
        with self.waits.explained("a message to another stage"):
            work = dist.isend(value, group=self._lanes[Route(self.rank, to).lane], group_dst=to)
        return self._on_stream(work, value)

    def receive(self, buffer: torch.Tensor, source: int) -> AsyncWork:
        """Start receiving from the rank at index `source` into a 1-D tensor of bytes."""
        if self._over_hosts:
            arriving = buffer if self.blocks else torch.empty_like(buffer, device=HOST)
            received = self._follow(source, False, arriving, lambda: self._hosts.recv([arriving], source, self._tag))
            return received if self.blocks else _Landing(received, arriving, buffer)
        with self.waits.explained("a message from another stage"):
            work = dist.irecv(buffer, group=self._lanes[Route(source, self.rank).lane], group_src=source)
        return self._on_stream(work, buffer)

    def _on_stream(self, work: dist.Work | None, tensor: torch.Tensor) -> StreamWork:
        assert work is not None, "this rank is one of the group"
        started = StreamWork(work.wait, (tensor,), waits=self.waits)
        self._in_flight.add(started)
        return started

    def _follow(self, peer: int, sends: bool, tensor: torch.Tensor, start: Callable[[], dist.Work]) -> HostWork:
        """Start now, and wait on a thread for this peer and direction, so that no message waits for another one."""
        if (peer, sends) not in self._queues:
            hang_up = functools.partial(close_connections, self._hosts, self.rank, self.size)
            self._queues[peer, sends] = Progress(hang_up)
        alive = [tensor]
        with self.recorder.span("send"), self.waits.explained("a message between stages"), of_rank(peer):
            work = start()

        def arrive() -> None:
            self.waits.awaited = peer
            with of_rank(peer):
                work.wait()
            self.waits.awaited = None
            alive.clear()

        what = f"a message {'to' if sends else 'from'} another stage"
        return self._queues[peer, sends].follow(HostWork(arrive, self.traffic, self.waits, what))


class _Landing(AsyncWork):
    """A value that arrives on the host and is then copied to the device."""

    def __init__(self, work: HostWork, arriving: torch.Tensor, buffer: torch.Tensor) -> None:
        super().__init__()
        self._work, self._arriving, self._buffer = work, arriving, buffer

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._arriving)
        self.ended = self._work.ended


class _Message:
    """A value in flight between two stages."""

    def __init__(self, operation: str, work: AsyncWork, links: StageLinks) -> None:
        self._operation, self._work, self._links = operation, work, links

    def _end(self, sent: int) -> None:
        """Wait for it; `sent` bytes are recorded as sent by this rank."""
        self._links.recorder.land(self._work, self._operation, "", sent, self._links.axis)


class Sending(_Message):
    """A value in flight to another stage."""

    def __init__(self, work: AsyncWork, nbytes: int, links: StageLinks) -> None:
        super().__init__("send", work, links)
        self._nbytes = nbytes

    def wait(self) -> None:
        """Return once the value's memory may be reused."""
        self._end(self._nbytes)


class Receiving(_Message):
    """A value in flight from another stage."""

    def __init__(self, work: AsyncWork, value: torch.Tensor, links: StageLinks) -> None:
        super().__init__("recv", work, links)
        self._value = value

    def wait(self) -> torch.Tensor:
        """The value, once it has arrived."""
        self._end(0)
        return self._value


def send(
    value: torch.Tensor, links: StageLinks, *, to: int = -1, message: str = "", strides: tuple[int, ...] | None = None
) -> Sending:
    """Start sending a value to the rank at index `to`, in the layout that it expects: contiguous, or with `strides`.

    `message`: describes the value to a reader of the line.
    """
    if strides is None:
        value = value.contiguous()
    elif value.stride() != strides:
        value = value.new_empty_strided(value.shape, strides).copy_(value)
    return Sending(links.send(_bytes(value), to), value.nbytes, links)


def receive(
    links: StageLinks, type_: str, *, source: int = -1, message: str = "", strides: tuple[int, ...] | None = None
) -> Receiving:
    """Start receiving a tensor of a type such as `f32[8, 64]` from the rank at index `source`."""
    found = TensorType.parse(type_)
    if strides is None:
        value = torch.empty(found.shape, dtype=found.dtype, device=links.device)
    else:
        value = torch.empty_strided(found.shape, strides, dtype=found.dtype, device=links.device)
    return Receiving(links.receive(_bytes(value), source), value, links)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as 1-D uint8: backends support few dtypes."""
    flat = value.as_strided((value.numel(),), (1,)) if value.numel() else value.reshape(-1)
    return flat.view(torch.uint8)
