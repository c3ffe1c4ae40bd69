"""The interface of collectives: what the ranks of one group do together, asynchronous, averaged where they reduce.

On gloo and hosts they are exchanges (`gloo_collectives`), else the backend's own (`backend_collectives`): NCCL's.
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
"""Gives elements [start, stop) of every rank's padded shard, [size, stop - start]; its rows are contiguous."""


@dataclass
class Member:
    """This rank's place in a group, and what is noted of what it does there."""

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int
    traffic: TrafficMeter
    waits: Waits
    recorder: Recorder = field(default_factory=Recorder)
    axis: str = DATA
    """The dimension of the mesh that the group lies along."""


@dataclass(frozen=True)
class Shared:
    """What all ranks have sent, [ranks, n], on its way."""

    work: HostWork
    rows: Callable[[], torch.Tensor]

    @property
    def arrived(self) -> bool:
        return self.work.done

    def read(self) -> torch.Tensor:
        """Wait for it, and give it.

        Raises:
            GroupError: another rank failed or stayed away.
        """
        self.work.wait()
        return self.rows()


class Collectives(ABC):
    """Collectives of one group, asynchronous, averaged where they reduce; what they send is counted along its axis."""

    separates: bool
    """True if messages of different runs cannot meet."""

    def __init__(self, member: Member, hosts: Any = None) -> None:
        """`hosts`: gloo's backend, where the host waits for what arrives: on a thread of its own."""
        self.member, self.rank, self.size = member, member.rank, member.size
        self._progress: Progress | None = None
        if hosts is not None and member.size > 1:
            self._progress = Progress(functools.partial(close_connections, hosts, member.rank, member.size))

    @abstractmethod
    def stamp(self, run: int) -> None:
        """What is sent from now on belongs to the run with this number, where messages can tell."""

    @abstractmethod
    def order_all(self) -> None:
        """Whatever was begun and not waited for ends before what the current stream does from here on.

        For a program that has failed: its memory may be lent again, and a GPU would still read it.
        """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int = 1) -> AsyncWork:
        """Gather equal 1-D shards of every rank into `full`; `shard` may be its place there.

        `full`: [parts * size * n], the parts of all ranks' shards, [parts * n], behind each other part by part.
        """
        return self.all_gather_many([full], [shard], parts)[0]

    def all_gather_many(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`all_gather` of each of several, which may go as one."""
        for full in fulls:
            self._count(full.nbytes, parts)
        return self._all_gather(fulls, shards, parts)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, wire: torch.dtype | None = None) -> AsyncWork:
        """Average `full` over the ranks; each gets its `shard`. It travels as `wire`, if not as it is."""
        if wire is None:
            return self.reduce_scatter_many([shard], [full])[0]
        self._count(self.size * wire_bytes(padded_to_blocks(full.numel() // self.size), wire))
        return self._reduce_scatter_in(wire, shard, full)

    def reduce_scatter_many(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`reduce_scatter` of each of several, which may go as one; they lie as in an `all_gather`."""
        for full in fulls:
            self._count(full.nbytes, parts)
        return self._reduce_scatter(shards, fulls, parts)

    @abstractmethod
    def rows_staged(self, *, packed: bool) -> int:
        """How often a reduce_scatter takes the memory of a shard beside gradients: to pack them, for others' parts."""

    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """`reduce_scatter` of what `piece` gives, at most `width` elements of each rank's shard at a time.

        Two pieces are on their way at once, and no more memory is taken than theirs: beyond that, it does not depend on
        the size of the shard.
        """
        self._count(shard.nbytes * self.size)
        return self._by_pieces(shard, piece, width)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype | None = None) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place; it travels as `wire`, if not as it is."""
        if wire is None or wire is tensor.dtype:
            self._count(2 * tensor.nbytes)
            return self._all_reduce(tensor)
        self._count(average_payload(tensor.numel(), self.size, wire))
        return self._all_reduce_in(wire, tensor)

    def broadcast_from(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Give all ranks the contiguous `tensor` of rank `owner`, in place."""
        self._count(tensor.nbytes)
        return self._broadcast(owner, tensor)

    def reduce_to(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks, in place on rank `owner`; to the others it is lost.

        Summed as a reduce_scatter sums its shard there: an average does not depend on who has it.
        """
        self._count(tensor.nbytes)
        return self._reduce(owner, tensor)

    def _count(self, payload: int, messages: int = 1) -> None:
        axis = self.member.traffic.along(self.member.axis, self.size)
        axis.payload += payload
        axis.messages += messages

    def _follow(self, arrive: Callable[[], None], what: str, *, metered: bool = True) -> HostWork:
        """What `arrive` waits for, and does with it, on the progress thread."""
        assert self._progress is not None, "what blocks is waited for on a thread"
        traffic = self.member.traffic if metered else TrafficMeter()
        return self._progress.follow(HostWork(arrive, traffic, self.member.waits, what))

    # What a backend does, which is counted by then; `wire`: see `runtime.low_precision`.

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
