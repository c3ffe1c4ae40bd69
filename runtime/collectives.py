"""The interface of collectives: what the ranks of one group do together, asynchronous, averaged where they reduce.

On gloo and hosts they are exchanges (`gloo_collectives`), else the backend's own (`backend_collectives`): NCCL's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zcompile.runtime.async_work import AsyncWork, HostWork, TrafficMeter
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.waits import Waits

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
    """Collectives of one group. Nothing of it is metered."""

    separates: bool
    """True if messages of different runs cannot meet."""

    def __init__(self, member: Member) -> None:
        self.member, self.rank, self.size = member, member.rank, member.size

    @abstractmethod
    def stamp(self, run: int) -> None:
        """What is sent from now on belongs to the run with this number, where messages can tell."""

    @abstractmethod
    def order_all(self) -> None:
        """Whatever was begun and not waited for ends before what the current stream does from here on.

        For a program that has failed: its memory may be lent again, and a GPU would still read it.
        """

    @abstractmethod
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int = 1) -> AsyncWork:
        """Gather equal 1-D shards of every rank into `full`; `shard` may be its place there.

        `full`: [parts * size * n], the parts of all ranks' shards, [parts * n], behind each other part by part.
        """

    @abstractmethod
    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, parts: int = 1) -> AsyncWork:
        """Average `full` over the ranks; each gets its `shard`. They lie as in an `all_gather`."""

    def all_gather_many(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`all_gather` of each of several, which may go as one."""
        return [self.all_gather(full, shard, parts) for full, shard in zip(fulls, shards, strict=True)]

    def reduce_scatter_many(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """`reduce_scatter` of each of several, which may go as one."""
        return [self.reduce_scatter(shard, full, parts) for shard, full in zip(shards, fulls, strict=True)]

    @abstractmethod
    def rows_staged(self, *, packed: bool) -> int:
        """How often a reduce_scatter takes the memory of a shard beside gradients: to pack them, for others' parts."""

    @abstractmethod
    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """`reduce_scatter` of what `piece` gives, at most `width` elements of each rank's shard at a time.

        Two pieces are on their way at once, and no more memory is taken than theirs: beyond that, it does not depend on
        the size of the shard.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place."""

    @abstractmethod
    def broadcast_from(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Give all ranks the contiguous `tensor` of rank `owner`, in place."""

    @abstractmethod
    def reduce_to(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks, in place on rank `owner`; to the others it is lost.

        Summed as a reduce_scatter sums its shard there: an average does not depend on who has it.
        """

    @abstractmethod
    def reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """`reduce_scatter` of what travels as `wire`: see `runtime.low_precision`."""

    @abstractmethod
    def all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place; it travels as `wire`: see `runtime.low_precision`."""
