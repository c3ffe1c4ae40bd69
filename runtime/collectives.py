"""The interface of one group's collectives: asynchronous, and reductions average.

On gloo, host tensors are exchanged (`gloo_collectives`); all others use the backend, such as NCCL
(`backend_collectives`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zcompile.ir.axis import DATA
from zcompile.ir.layout import average_payload, padded_to_blocks, wire_bytes
from zcompile.runtime.async_work import AsyncWork, HostWork, Progress, TrafficMeter
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.distributed import close_connections

Piece = Callable[[int, int], torch.Tensor]
"""Returns elements [start, stop) of every rank's padded shard, [size, stop - start]; its rows are contiguous."""


@dataclass
class Member:
    """This rank as a member of a group, and the meters of what it does there."""

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int
    traffic: TrafficMeter
    waits: Waits
    recorder: Recorder = field(default_factory=Recorder)
    axis: str = DATA
    """The mesh dimension of the group."""


@dataclass(frozen=True)
class Shared:
    """What all ranks have sent, [ranks, n], in flight."""

    work: HostWork
    rows: Callable[[], torch.Tensor]

    @property
    def arrived(self) -> bool:
        return self.work.done

    def read(self) -> torch.Tensor:
        """Wait for it and return it.

        Raises:
            GroupError: another rank failed or stayed away.
        """
        self.work.wait()
        return self.rows()


class Collectives(ABC):
    """Asynchronous collectives of one group; reductions average. Bytes sent are counted along its axis."""

    separates: bool
    """True if messages of different runs cannot be mixed up."""

    def __init__(self, member: Member, hosts: Any = None) -> None:
        """`hosts`: gloo's backend, if the host waits for messages, which it does on a progress thread."""
        self.member, self.rank, self.size = member, member.rank, member.size
        self._progress: Progress | None = None
        if hosts is not None and member.size > 1:
            self._progress = Progress(functools.partial(close_connections, hosts, member.rank, member.size))

    @abstractmethod
    def stamp(self, run: int) -> None:
        """Mark messages from now on as belonging to the run with this number, if the backend has tags."""

    def passed(self) -> None:  # noqa: B027
        """Note that the current stream was given collectives in a graph; a GPU's are watched."""

    @abstractmethod
    def order_all(self) -> None:
        """Make the current stream wait for every collective that was started and not waited for.

        For a program that has failed: its memory may be lent again while a GPU still reads it.
        """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int = 1) -> AsyncWork:
        """Gather equal 1-D shards of every rank into `full`; `shard` may be its slot in `full`.

        `shard` is [parts * n] and `full` [parts * size * n]: part by part, that part of every rank's shard in rank
        order.
        """
        return self.all_gather_many([full], [shard], parts)[0]

    def all_gather_many(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`all_gather` several shards, possibly in one launch."""
        for full in fulls:
            self._count(full.nbytes, parts)
        return self._all_gather(fulls, shards, parts)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, wire: torch.dtype | None = None) -> AsyncWork:
        """Average `full` over the ranks; each gets its `shard`. `wire`: the dtype that is sent, by default its own."""
        if wire is None:
            return self.reduce_scatter_many([shard], [full])[0]
        self._count(self.size * wire_bytes(padded_to_blocks(full.numel() // self.size), wire))
        return self._reduce_scatter_in(wire, shard, full)

    def reduce_scatter_many(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`reduce_scatter` several tensors, laid out as in `all_gather`, possibly in one launch."""
        for full in fulls:
            self._count(full.nbytes, parts)
        return self._reduce_scatter(shards, fulls, parts)

    @abstractmethod
    def rows_staged(self, *, packed: bool) -> int:
        """Staging memory of a reduce_scatter, in shards: to pack gradients, and to receive other ranks' parts."""

    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """`reduce_scatter` what `piece` returns, at most `width` elements of each rank's shard at a time.

        Two pieces are in flight at once and take all the memory that is needed, whatever the size of the shard.
        """
        self._count(shard.nbytes * self.size)
        return self._by_pieces(shard, piece, width)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place. `wire`: the dtype that is sent, by default its own."""
        if wire is None or wire is tensor.dtype:
            self._count(2 * tensor.nbytes)
            return self._all_reduce(tensor)
        self._count(average_payload(tensor.numel(), self.size, wire))
        return self._all_reduce_in(wire, tensor)

    def broadcast_from(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Broadcast the contiguous `tensor` of rank `owner` to all ranks, in place."""
        self._count(tensor.nbytes)
        return self._broadcast(owner, tensor)

    def reduce_to(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks, in place on rank `owner`; on other ranks its values are lost.

        Summed in the order of a reduce_scatter, so that an average does not depend on which rank owns it.
        """
        self._count(tensor.nbytes)
        return self._reduce(owner, tensor)

    def _count(self, payload: int, messages: int = 1) -> None:
        axis = self.member.traffic.along(self.member.axis, self.size)
        axis.payload += payload
        axis.messages += messages

    def _follow(self, arrive: Callable[[], None], what: str, *, metered: bool = True) -> HostWork:
        """Run `arrive`, which waits for data and processes it, on the progress thread."""
        assert self._progress is not None, "waits that block need a progress thread"
        traffic = self.member.traffic if metered else TrafficMeter()
        return self._progress.follow(HostWork(arrive, traffic, self.member.waits, what))

    # Implementations, called once the traffic is counted; `wire`: see `runtime.low_precision`.

    @abstractmethod
    def _all_gather(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int
    ) -> list[AsyncWork]: ...

    @abstractmethod
    def _reduce_scatter(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int
    ) -> list[AsyncWork]: ...

    @abstractmethod
    def _reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork: ...

    @abstractmethod
    def _by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork: ...

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor) -> AsyncWork: ...

    @abstractmethod
    def _all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork: ...

    @abstractmethod
    def _broadcast(self, owner: int, tensor: torch.Tensor) -> AsyncWork: ...

    @abstractmethod
    def _reduce(self, owner: int, tensor: torch.Tensor) -> AsyncWork: ...
