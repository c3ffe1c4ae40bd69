"""Collectives of the group's own backend: NCCL's on GPUs, on streams of their own, and those of any other."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcompile.runtime.async_work import AllWork, AsyncWork, HostWork, Progress, StreamWork
from zcompile.runtime.collectives import Collectives, Member, Piece
from zcompile.runtime.device import backend_of, current_stream, is_gpu, is_host, new_stream, on_stream
from zcompile.runtime.low_precision import decode, encode, mean_of, padded_rows, parts_of
from zcompile.runtime.stream_watch import StreamWatch
from zcompile.torch_internals.distributed import (
    close_connections,
    gather_group,
    gather_together,
    gloo_of,
    group_timeout,
    reduce_together,
)

# torch 2.13 renamed both; the old names warn there, and 2.11 lacks the new ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class BackendCollectives(Collectives):
    """What the backend itself has. On NCCL messages have no tags: those of different runs may meet.

    Args:
        member: The group.
        averages: True if the backend averages on the wire, as NCCL does; else it sums.
    """

    separates = False

    def __init__(self, member: Member, *, averages: bool) -> None:
        super().__init__(member)
        self._averages = averages
        self._progress = None
        if is_host(member.device) and member.size > 1:
            hang_up = functools.partial(close_connections, gloo_of(member.group), member.rank, member.size)
            self._progress = Progress(hang_up)
        self._staging: torch.Stream | None = None
        self._flying = weakref.WeakSet[StreamWork]()
        self._watch: StreamWatch | None = None
        if is_gpu(member.device) and member.size > 1:
            limit = group_timeout(member.group, member.device).total_seconds()
            self._watch = StreamWatch(member.waits, member.device, limit, backend_of(member.device.type))

    def stamp(self, run: int) -> None:
        """Messages cannot tell."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int = 1) -> AsyncWork:
        """One collective a part; on GPUs by one launch."""
        if parts > 1:
            return self.all_gather_many([full], [shard], parts)[0]
        work = self._launched(_all_gather, full, shard, gathers=True)
        return self._fly(work, (full, shard))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, parts: int = 1) -> AsyncWork:
        """One collective a part; where the backend has no average, it sums, and the sum is divided."""
        if parts > 1:
            return self.reduce_scatter_many([shard], [full], parts)[0]
        work = self._launched(_reduce_scatter, shard, full, op=self._op)
        return self._fly(work, (shard, full), lambda: self._divide(shard))

    def all_gather_many(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """On GPUs one launch, whose works are one."""
        if len(fulls) * parts < 2:
            return super().all_gather_many(fulls, shards)
        wholes, mine = ([row for one in some for row in one.view(parts, -1)] for some in (fulls, shards))
        if not is_gpu(self.member.device):
            return _by_parts([self.all_gather(*pair) for pair in zip(wholes, mine, strict=True)], parts)
        with self.member.waits.explained("a collective"):
            work = gather_together(self._gathers, wholes, mine)
        return [self._fly(work, (*fulls, *shards))] * len(fulls)

    def reduce_scatter_many(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int = 1
    ) -> list[AsyncWork]:
        """On GPUs one launch, whose works are one."""
        if len(fulls) * parts < 2:
            return super().reduce_scatter_many(shards, fulls)
        mine, wholes = ([row for one in some for row in one.view(parts, -1)] for some in (shards, fulls))
        if not is_gpu(self.member.device):
            return _by_parts([self.reduce_scatter(*pair) for pair in zip(mine, wholes, strict=True)], parts)
        with self.member.waits.explained("a collective"):
            work = reduce_together(self.member.group, mine, wholes, self._op)

        def finish() -> None:
            for shard in shards:
                self._divide(shard)

        return [self._fly(work, (*shards, *fulls), finish)] * len(fulls)

    def reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """An exchange of parts; on GPUs on a stream of its own, whose hazards are those of an `all_reduce_in`."""

        def scatter() -> None:
            sent = encode(padded_rows(full.view(self.size, -1)), wire)
            arrived = torch.empty_like(sent)
            self._launched(dist.all_to_all_single, arrived.view(-1), sent.view(-1)).wait()
            shard.copy_(mean_of(arrived, wire, full.dtype)[: shard.numel()])

        if is_gpu(self.member.device):
            return self._on_staging(scatter, (shard, full))
        scatter()
        return self._follow(lambda: None, "a reduction")

    def rows_staged(self, *, packed: bool) -> int:
        """What is packed."""
        return packed * self.size

    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """On GPUs piece by piece, else as a whole."""
        if is_gpu(self.member.device):
            return self._stream_pieces(shard, piece, width)
        sent = piece(0, shard.numel()).reshape(-1)
        work = self._launched(_reduce_scatter, shard, sent, op=self._op)
        return self._fly(work, (shard, sent), lambda: self._divide(shard))

    def _stream_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """Pieces are made on a stream of their own, which waits for the one before the last to be reduced.

        Hazards: the gradients are ready when the current stream gets here, which the staging stream waits for; `piece`
        holds them until the current stream has waited for the end. A piece's rows are allocated on the staging stream,
        and dropped once that has waited for their reduction, so only its own later work can get their memory.
        """
        on_their_way = deque[tuple[dist.Work, torch.Tensor]]()

        def launch() -> None:
            for begin in range(0, shard.numel(), width):
                if len(on_their_way) == 2:
                    on_their_way.popleft()[0].wait()
                part = shard[begin : begin + width]
                rows = piece(begin, begin + part.numel()).contiguous()
                work = self._launched(_reduce_scatter, part, rows.view(-1), op=self._op)
                on_their_way.append((work, rows))
            while on_their_way:
                on_their_way.popleft()[0].wait()
            self._divide(shard)

        return self._on_staging(launch, (shard, piece))

    def _on_staging(self, launch: Callable[[], None], alive: Sequence[object]) -> AsyncWork:
        """What `launch` does on a stream of its own, behind what the current stream has done so far."""
        staging = self._staging = self._staging or new_stream(self.member.device)
        staging.wait_stream(current_stream(self.member.device))
        with on_stream(staging):
            launch()
            done = staging.record_event()
        return self._on_stream(lambda: current_stream(self.member.device).wait_event(done), alive)

    def all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        """One collective."""
        work = self._launched(dist.all_reduce, tensor, op=self._op)
        return self._fly(work, (tensor,), lambda: self._divide(tensor))

    def all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork:
        """An exchange of parts, and a gather of their averages; of two ranks a gather of all.

        On GPUs on a stream of its own. Hazards: `tensor` is ready when the current stream gets here, which that stream
        waits for; it is held until the current stream has waited for the end. What is sent, and what arrives, is
        allocated on that stream, which waits for each collective before it reads or drops what that has used.
        """
        if not is_gpu(self.member.device):
            self._average_in(wire, tensor)
            return self._follow(lambda: None, "an all_reduce")
        return self._on_staging(lambda: self._average_in(wire, tensor), (tensor,))

    def _average_in(self, wire: torch.dtype, tensor: torch.Tensor) -> None:
        """On the current stream, which waits for what it launches."""
        flat = tensor.view(-1)
        sent = encode(parts_of(flat, self.size), wire)
        arrived = sent.new_empty(self.size, sent.shape[1])
        exchange = _all_gather if len(sent) == 1 else dist.all_to_all_single
        self._launched(exchange, arrived.view(-1), sent.view(-1)).wait()
        mean = mean_of(arrived, wire, flat.dtype)
        if len(sent) > 1:
            self._launched(_all_gather, arrived.view(-1), encode(mean[None], wire).view(-1)).wait()
            mean = decode(arrived, wire, flat.dtype).view(-1)
        flat.copy_(mean[: flat.numel()])

    def broadcast_from(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """One collective."""
        return self._fly(self._launched(dist.broadcast, tensor, group_src=owner, gathers=True), (tensor,))

    def reduce_to(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """One collective."""
        work = self._launched(dist.reduce, tensor, group_dst=owner, op=self._op)
        return self._fly(work, (tensor,), lambda: self._divide(tensor))

    @functools.cached_property
    def _gathers(self) -> dist.ProcessGroup:
        """A group whose messages do not wait for those of the other."""
        return gather_group(self.member.group, self.member.device)

    def _launched(
        self, collective: Callable[..., dist.Work], *args: Any, gathers: bool = False, **options: Any
    ) -> dist.Work:
        with self.member.waits.explained("a collective"):
            group = self._gathers if gathers else self.member.group
            return collective(*args, group=group, async_op=True, **options)

    def _fly(
        self, work: dist.Work, tensors: Sequence[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> AsyncWork:
        """The end of one collective that reads or writes `tensors`; `finish` runs once it is done."""
        if self._progress is None:
            return self._on_stream(work.wait, tensors, finish)
        alive = list(tensors)

        def arrive() -> None:
            _ended(work)
            alive.clear()
            if finish is not None:
                finish()

        return self._follow(arrive, "a collective")

    def _on_stream(
        self, land: Callable[[], object], alive: Sequence[object], finish: Callable[[], None] | None = None
    ) -> StreamWork:
        """A work whose wait is noted: should the stream never come past it, its line is told."""

        def landed() -> None:
            land()
            if self._watch is not None:
                self._watch.passed()

        work = StreamWork(landed, alive, finish, self.member.waits)
        self._flying.add(work)
        return work

    def order_all(self) -> None:
        """By waits of the stream; of a group that is broken, the error is the one on its way."""
        for work in list(self._flying):
            with contextlib.suppress(Exception):
                work.order()

    def _follow(self, arrive: Callable[[], None], what: str) -> HostWork:
        assert self._progress is not None, "what blocks is waited for on a thread"
        return self._progress.follow(HostWork(arrive, self.member.traffic, self.member.waits, what))

    def _divide(self, total: torch.Tensor) -> None:
        """Turn a sum into the average, in place."""
        if not self._averages:
            total.div_(self.size)

    @property
    def _op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM


def _by_parts(works: Sequence[AsyncWork], parts: int) -> list[AsyncWork]:
    """One work for the parts of each tensor."""
    return [AllWork(works[start : start + parts]) for start in range(0, len(works), parts)]


def _ended(work: dist.Work) -> None:
    """Block this thread until it is done."""
    work.wait()
