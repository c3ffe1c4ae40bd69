"""Links between pipeline stages: messages from one rank along an axis to one other, in order.

On NCCL a send occupies its communicator's stream until it is received. Where a rank sent and received on one stream,
a message could stand behind another one for which the other end waits for good: so messages go in lanes, each with a
group of its own, in none of which a rank both sends and receives, or has more than one other end.

In the first run of a program messages go from host to host instead. Kernels are loaded, and communicators made, when
they are first used, and both may wait for all that the device has begun (CUDA C++ Programming Guide, "Lazy Loading"):
behind a receive whose sender waits for what this rank has not launched yet, that would be for good.
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
"""In the tags of all messages between stages; those of collectives have higher bits (`runtime.gloo_collectives`)."""
_RUNS = 1 << 28


class Route(NamedTuple):
    """From one place along the axis to another."""

    sender: int
    receiver: int

    @property
    def lane(self) -> tuple[bool, int, bool]:
        """Of all routes that share it each place begins one, or ends one, or neither."""
        distance = abs(self.receiver - self.sender)
        return self.receiver > self.sender, distance, bool(min(self) // distance % 2)


class StageLinks:
    """What a rank sends other ranks along the pipeline axis, and receives from them.

    Args:
        mesh: Of that axis, for what all its ranks do together.
        again: Makes another group of the same ranks. Collective.
        whole: The waits for all ranks that train the model.
        data: The ranks that have the same stages: what is sent is counted, and recorded, with what they send.
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
        """True where the host waits for messages, which go over one group then."""
        self._hosts: Any = gloo_of(self.group) if self.blocks else None
        self._over_hosts = self.blocks
        self._lanes: dict[tuple[bool, int, bool], dist.ProcessGroup] = {}
        self._connected: set[Route] = set()
        self._queues: dict[tuple[int, bool], Progress] = {}
        self._flying: weakref.WeakSet[StreamWork] = weakref.WeakSet()

    def begin(self, run: int, *, first: bool) -> None:
        """What is sent from now on belongs to the run with this number, the first one of its program or not."""
        self._tag = _TAG + run % _RUNS
        self._over_hosts = self.blocks or (first and self._hosts is not None)

    def connect(self, routes: Iterable[Route]) -> None:
        """Make ready the routes of all ranks, where that takes both ends. Collective.

        NCCL makes what two ranks send by at the first message, on the host, which waits there for the other one: in
        the order of a program rank 0 would wait for rank 1 to send, and rank 1 for rank 0. So all do it in one order.
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
        """Give every rank along the axis the values of the first, in place; any device, strides and dtype."""
        if self.size > 1:
            what = "the values of the first pipeline stage's rank"
            broadcast(tensor, self.device, self.group, 0, self.waits, what)

    def order_all(self) -> None:
        """Whatever was begun and not waited for ends before what the current stream does from here on.

        For a step that has failed: its memory may be lent again, and a GPU would still read it, or write to it.
        """
        for work in list(self._flying):
            with contextlib.suppress(Exception):  # of a group that is broken, the error is the one on its way
                work.order()

    def send(self, value: torch.Tensor, to: int) -> AsyncWork:
        """Start sending a 1-D tensor of bytes to the rank at this place."""
        self.traffic.along(self.axis, self.size).to_one += value.nbytes
        if self._over_hosts:
            value = value.to(HOST)
            return self._follow(to, True, value, lambda: self._hosts.send([value], to, self._tag))
        with self.waits.explained("a message to another stage"):
            work = dist.isend(value, group=self._lanes[Route(self.rank, to).lane], group_dst=to)
        return self._on_stream(work, value)

    def receive(self, buffer: torch.Tensor, source: int) -> AsyncWork:
        """Start receiving from the rank at this place into a 1-D tensor of bytes."""
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
        self._flying.add(started)
        return started

    def _follow(self, peer: int, sends: bool, tensor: torch.Tensor, start: Callable[[], dist.Work]) -> HostWork:
        """Started now, and waited for on a thread for this peer and direction: no message waits for another one's."""
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
    """A value that arrives on the host, and goes on to the device."""

    def __init__(self, work: HostWork, arriving: torch.Tensor, buffer: torch.Tensor) -> None:
        super().__init__()
        self._work, self._arriving, self._buffer = work, arriving, buffer

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._arriving)
        self.ended = self._work.ended


class _Message:
    """A value on its way between two stages."""

    def __init__(self, operation: str, work: AsyncWork, links: StageLinks) -> None:
        self._operation, self._work, self._links = operation, work, links

    def _end(self, sent: int) -> None:
        """Return when it has arrived; `sent` bytes are noted as those that this rank has sent."""
        self._links.recorder.land(self._work, self._operation, "", sent, self._links.axis)


class Sending(_Message):
    """A value on its way to another stage."""

    def __init__(self, work: AsyncWork, nbytes: int, links: StageLinks) -> None:
        super().__init__("send", work, links)
        self._nbytes = nbytes

    def wait(self) -> None:
        """Return when the value's memory may be used again."""
        self._end(self._nbytes)


class Receiving(_Message):
    """A value on its way from another stage."""

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
    """Start sending a value to the rank at place `to`, laid out as that one expects it: contiguous, or with `strides`.

    `message`: what it is, for who reads the line.
    """
    if strides is None:
        value = value.contiguous()
    elif value.stride() != strides:
        value = value.new_empty_strided(value.shape, strides).copy_(value)
    return Sending(links.send(_bytes(value), to), value.nbytes, links)


def receive(
    links: StageLinks, type_: str, *, source: int = -1, message: str = "", strides: tuple[int, ...] | None = None
) -> Receiving:
    """Start receiving a tensor of a type such as `f32[8, 64]` from the rank at place `source`."""
    found = TensorType.parse(type_)
    if strides is None:
        value = torch.empty(found.shape, dtype=found.dtype, device=links.device)
    else:
        value = torch.empty_strided(found.shape, strides, dtype=found.dtype, device=links.device)
    return Receiving(links.receive(_bytes(value), source), value, links)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as bytes: backends know few dtypes."""
    flat = value.as_strided((value.numel(),), (1,)) if value.numel() else value.reshape(-1)
    return flat.view(torch.uint8)
