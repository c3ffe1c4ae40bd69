"""Links between pipeline stages: messages from one rank along an axis to one other, in order, each direction apart.

Where both directions shared a queue, as the messages of a pair do on one NCCL communicator, two ranks that send each
other something, and receive behind that, would wait for each other for good. So each direction has a group of its own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile._torch import backend_name, close_connections, gloo_of
from zcompile.ir.tensor_type import TensorType
from zcompile.runtime.async_work import AsyncWork, HostWork, Progress, StreamWork
from zcompile.runtime.device import HOST, backend_of, is_host
from zcompile.runtime.gloo_collectives import of_rank
from zcompile.runtime.groups import Communicator
from zcompile.runtime.recorder import Message, Span
from zcompile.runtime.waits import Waits

_TAG = 1 << 28
"""In the tags of all messages between stages; those of collectives have higher bits (`runtime.gloo_collectives`)."""
_RUNS = 1 << 28


class StageLinks:
    """What a rank sends other ranks along the pipeline axis, and receives from them.

    Args:
        onward: The mesh of that axis, of whose groups one carries what goes to later places, ...
        back: ... and another one, over the same ranks, what goes to earlier ones.
        whole: The waits for all ranks that train the model.
        data: The ranks that have the same stages: what is sent is counted, and recorded, with what they send.
    """

    def __init__(self, onward: DeviceMesh, back: DeviceMesh, whole: Waits, data: Communicator) -> None:
        self.device, self.size, self.rank = data.device, onward.size(), onward.get_local_rank()
        (self.axis,) = onward.mesh_dim_names or ("pp",)
        self.groups = (onward.get_group(), back.get_group())
        self.waits = Waits(self.groups[0], whole)
        self.traffic, self.recorder = data.traffic, data.recorder
        self._tag = _TAG
        self._blocks = backend_name(self.groups[0], self.device) == backend_of(HOST) and is_host(self.device)
        self._queues: dict[tuple[int, bool], Progress] = {}
        self._flying: weakref.WeakSet[StreamWork] = weakref.WeakSet()

    def stamp(self, run: int) -> None:
        """What is sent from now on belongs to the run with this number, where messages can tell."""
        self._tag = _TAG + run % _RUNS

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank along the axis the values of the first, in place; any device, strides and dtype."""
        if self.size == 1 or tensor.numel() == 0:
            return
        sent = tensor.to(self.device).contiguous()
        with self.waits.explained("the values of the first pipeline stage's rank"):
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self.groups[0], group_src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)

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
        group = self.groups[0 if to > self.rank else 1]
        if self._blocks:
            gloo = gloo_of(group)
            return self._follow(to, True, gloo, value, lambda: gloo.send([value], to, self._tag))
        with self.waits.explained("a message to another stage"):
            work = dist.isend(value, group=group, group_dst=to)
        return self._on_stream(work, value)

    def receive(self, buffer: torch.Tensor, source: int) -> AsyncWork:
        """Start receiving from the rank at this place into a 1-D tensor of bytes."""
        group = self.groups[0 if source < self.rank else 1]
        if self._blocks:
            gloo = gloo_of(group)
            return self._follow(source, False, gloo, buffer, lambda: gloo.recv([buffer], source, self._tag))
        with self.waits.explained("a message from another stage"):
            work = dist.irecv(buffer, group=group, group_src=source)
        return self._on_stream(work, buffer)

    def _on_stream(self, work: dist.Work | None, tensor: torch.Tensor) -> StreamWork:
        assert work is not None, "this rank is one of the group"
        started = StreamWork(work.wait, (tensor,), waits=self.waits)
        self._flying.add(started)
        return started

    def _follow(
        self, peer: int, sends: bool, gloo: Any, tensor: torch.Tensor, start: Callable[[], dist.Work]
    ) -> HostWork:
        """Started now, and waited for on a thread for this peer and direction: no message waits for another one's."""
        if (peer, sends) not in self._queues:
            hang_up = functools.partial(close_connections, gloo, self.rank, self.size)
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


class _Message:
    """A value on its way between two stages."""

    def __init__(self, operation: str, work: AsyncWork, links: StageLinks) -> None:
        self._operation, self._work, self._links = operation, work, links

    def _end(self, sent: int) -> None:
        """Return when it has arrived; `sent` bytes are noted as those that this rank has sent."""
        recorder = self._links.recorder
        start = recorder.now()
        self._work.wait()
        span = Span("wait", start, recorder.now())
        started, ended = self._work.started, self._work.ended
        recorder.add_message(Message(self._operation, "", sent, started, ended, span, self._links.axis))


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
