"""Collectives of the group's own backend: NCCL's on GPUs, which run on streams of their own, and those of any other."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcompile.runtime.async_work import AllWork, AsyncWork, StreamWork
from zcompile.runtime.collectives import Collectives, Member, Piece
from zcompile.runtime.device import (
    backend_of,
    current_stream,
    is_gpu,
    is_host,
    new_stream,
    on_stream,
)
from zcompile.runtime.low_precision import decode, encode, mean_of, padded_rows, parts_of
from zcompile.runtime.stream_watch import StreamWatch
from zcompile.torch_internals.distributed import (
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
    """The backend's own collectives. NCCL's messages have no tags, so those of different runs may be mixed up.

    Args:
        member: The group.
        averages: True if the backend can average, as NCCL can; otherwise it sums.
    """

    separates = False

    def __init__(self, member: Member, *, averages: bool) -> None:
        super().__init__(member, gloo_of(member.group) if is_host(member.device) and member.size > 1 else None)
        self._averages = averages
        self._staging: torch.Stream | None = None
        self._in_flight = weakref.WeakSet[StreamWork]()
        self._watch: StreamWatch | None = None
        if is_gpu(member.device) and member.size > 1:
            limit = group_timeout(member.group, member.device).total_seconds()
            self._watch = StreamWatch(member.waits, member.device, limit, backend_of(member.device.type))

    def stamp(self, run: int) -> None:
        """Does nothing: messages have no tags."""

    def _all_gather(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int) -> list[AsyncWork]:
        """One collective per part; on GPUs a single launch, with a single work."""
        wholes, mine = (_rows(some, parts) for some in (fulls, shards))
        if len(wholes) < 2 or not is_gpu(self.member.device):
            return _by_parts([self._gather(*pair) for pair in zip(wholes, mine, strict=True)], parts)
        with self.member.waits.explained("a collective"):
            work = gather_together(self._gathers, wholes, mine)
        return [self._started(work, (*fulls, *shards))] * len(fulls)

    def _gather(self, full: torch.Tensor, shard: torch.Tensor) -> AsyncWork:
        return self._started(self._launched(_all_gather, full, shard, gathers=True), (full, shard))

    def _reduce_scatter(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int
    ) -> list[AsyncWork]:
        """One collective per part; on GPUs a single launch. If the backend cannot average, the sum is divided."""
        mine, wholes = (_rows(some, parts) for some in (shards, fulls))
        if len(wholes) < 2 or not is_gpu(self.member.device):
            return _by_parts([self._scatter(*pair) for pair in zip(mine, wholes, strict=True)], parts)
        with self.member.waits.explained("a collective"):
            work = reduce_together(self.member.group, mine, wholes, self._op)

        def finish() -> None:
            for shard in shards:
                self._divide(shard)

        return [self._started(work, (*shards, *fulls), finish)] * len(fulls)

    def _scatter(self, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        work = self._launched(_reduce_scatter, shard, full, op=self._op)
        return self._started(work, (shard, full), lambda: self._divide(shard))

    def _reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """An all-to-all of parts; on GPUs on the staging stream, with the hazards of `_all_reduce_in`."""

        def scatter() -> None:
            sent = encode(padded_rows(full.view(self.size, -1)), wire)
            arrived = torch.empty_like(sent)
            self._launched(dist.all_to_all_single, arrived.view(-1), sent.view(-1)).wait()
            shard.copy_(mean_of(arrived, wire, full.dtype)[: shard.numel()])

        return self._staged(scatter, (shard, full), "a reduction")

    def rows_staged(self, *, packed: bool) -> int:
        """Only what is packed."""
        return packed * self.size

    def _by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        if is_gpu(self.member.device):
            return self._stream_pieces(shard, piece, width)
        return self._scatter(shard, piece(0, shard.numel()).reshape(-1))

    def _stream_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """Make and reduce pieces on the staging stream, at most two in flight.

        Hazards: the gradients are ready when the current stream gets here, which the staging stream waits for; `piece`
        holds them until the current stream has waited for the end. A piece's rows are allocated on the staging stream,
        and dropped only after it has waited for their reduction, so only its own later work can reuse their memory.
        """
        in_flight = deque[tuple[dist.Work, torch.Tensor]]()

        def launch() -> None:
            for begin in range(0, shard.numel(), width):
                if len(in_flight) == 2:
                    in_flight.popleft()[0].wait()
                part = shard[begin : begin + width]
                rows = piece(begin, begin + part.numel()).contiguous()
                work = self._launched(_reduce_scatter, part, rows.view(-1), op=self._op)
                in_flight.append((work, rows))
            while in_flight:
                in_flight.popleft()[0].wait()
            self._divide(shard)

        return self._on_staging(launch, (shard, piece))

    def _on_staging(self, launch: Callable[[], None], alive: Sequence[object]) -> AsyncWork:
        """Run `launch` on the staging stream, after the work launched on the current stream so far."""
        staging = self._staging = self._staging or new_stream(self.member.device)
        staging.wait_stream(current_stream(self.member.device))
        with on_stream(staging):
            launch()
            done = staging.record_event()
        return self._on_stream(lambda: current_stream(self.member.device).wait_event(done), alive)

    def _all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        work = self._launched(dist.all_reduce, tensor, op=self._op)
        return self._started(work, (tensor,), lambda: self._divide(tensor))

    def _all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork:
        """An all-to-all of parts, then an all-gather of their averages; for two ranks, one all-gather of everything.

        On GPUs on the staging stream. Hazards: `tensor` is ready when the current stream gets here, which the staging
        stream waits for; it is held until the current stream has waited for the end. Send and receive buffers are
        allocated on the staging stream, which waits for each collective before it reads or drops them.
        """

        def average() -> None:
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

        return self._staged(average, (tensor,), "an all_reduce")

    def _staged(self, act: Callable[[], None], alive: Sequence[object], what: str) -> AsyncWork:
        """Run `act`, which launches collectives and waits for them: on a GPU's staging stream, otherwise at once."""
        if is_gpu(self.member.device):
            return self._on_staging(act, alive)
        act()
        return self._follow(lambda: None, what)

    def _broadcast(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        return self._started(self._launched(dist.broadcast, tensor, group_src=owner, gathers=True), (tensor,))

    def _reduce(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        work = self._launched(dist.reduce, tensor, group_dst=owner, op=self._op)
        return self._started(work, (tensor,), lambda: self._divide(tensor))

    @functools.cached_property
    def _gathers(self) -> dist.ProcessGroup:
        """A second group, so that gathers do not queue behind reductions."""
        return gather_group(self.member.group, self.member.device)

    def _launched(
        self, collective: Callable[..., dist.Work], *args: Any, gathers: bool = False, **options: Any
    ) -> dist.Work:
        with self.member.waits.explained("a collective"):
            group = self._gathers if gathers else self.member.group
            return collective(*args, group=group, async_op=True, **options)

    def _started(
        self, work: dist.Work, tensors: Sequence[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> AsyncWork:
        """The work of a launched collective that uses `tensors`; `finish` runs once it is done."""
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
        """A work whose wait is watched: if the stream never gets past it, its line is reported."""

        def landed() -> None:
            land()
            if self._watch is not None:
                self._watch.passed()

        work = StreamWork(landed, alive, finish, self.member.waits)
        self._in_flight.add(work)
        return work

    def passed(self) -> None:
        if self._watch is not None:
            self._watch.passed()

    def order_all(self) -> None:
        """Uses stream waits. Errors of a broken group are dropped: the one that matters is already propagating."""
        for work in list(self._in_flight):
            with contextlib.suppress(Exception):
                work.order()

    def _divide(self, total: torch.Tensor) -> None:
        """Turn a sum into the average, in place."""
        if not self._averages:
            total.div_(self.size)

    @property
    def _op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM


def _rows(tensors: Sequence[torch.Tensor], parts: int) -> list[torch.Tensor]:
    """The parts of all tensors, in order."""
    return list(tensors) if parts == 1 else [row for one in tensors for row in one.view(parts, -1)]


def _by_parts(works: list[AsyncWork], parts: int) -> list[AsyncWork]:
    """One work per tensor, for all its parts."""
    return works if parts == 1 else [AllWork(works[at : at + parts]) for at in range(0, len(works), parts)]


def _ended(work: dist.Work) -> None:
    """Block this thread until `work` is done."""
    work.wait()
