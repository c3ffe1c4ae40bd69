"""Collectives of host tensors on gloo: exchanges with every other rank (`isend`, `irecv`), summed in rank order.

gloo's own reduce_scatter sends as many bytes as an all_reduce, and its all_gather reaches 58% of the bandwidth that
exchanges do. A progress thread waits for what arrives and sums it, in parallel with compute.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcompile.runtime.async_work import AsyncWork
from zcompile.runtime.collectives import Collectives, Member, Piece, Shared
from zcompile.runtime.low_precision import decode, encode, mean_of, padded_rows, parts_of
from zcompile.runtime.waits import RankLost

_TAG = 1 << 30
"""Set in the tags of all messages between ranks, to tell them from the user's own on the same group."""
_RUNS = 1 << 20
"""Number of runs with tags of their own. The lower bits of a tag number the run's messages, equally on every rank:
messages of the progress thread must not match those that the program's thread sends meanwhile."""
_MESSAGES = 1 << 10
_CALLS = 1 << 29
"""The tag of messages about runs (`share`), which must match whatever the ranks run."""
_PIECE_BYTES = 2**22
"""Bytes of a rank's part of an all_reduce that are sent at a time; receiving takes twice as much memory for each
rank."""
_CACHED = 2**17
"""Elements that stay in a core's cache between the sum and the division."""
Rows = Sequence[torch.Tensor]
Works = list[tuple[int, dist.Work]]
"""Messages in flight, each with the group rank of its peer."""
_InFlight = tuple[Works, Callable[[], None]]
"""The messages of a piece, and a function to call once they have arrived."""


class GlooCollectives(Collectives):
    """Exchanges between the ranks of a gloo group."""

    separates = True

    def __init__(self, member: Member, gloo: Any) -> None:
        """`gloo`: the backend of the member's group, or of a group of its hosts alone."""
        super().__init__(member, gloo)
        self._gloo = gloo
        self._tag = _TAG
        self._tags = itertools.cycle(range(1, _MESSAGES))

    def order_all(self) -> None:
        """Does nothing: exchanges hold their memory until the progress thread is done with it."""

    def stamp(self, run: int) -> None:
        """Put the number into the tags of messages, so that those of different runs do not match."""
        self._tag = _TAG + (run % _RUNS) * _MESSAGES
        self._tags = itertools.cycle(range(1, _MESSAGES))

    def _all_gather(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], parts: int) -> list[AsyncWork]:
        return [self._gather(full, shard, parts) for full, shard in zip(fulls, shards, strict=True)]

    def _gather(self, full: torch.Tensor, shard: torch.Tensor, parts: int) -> AsyncWork:
        works, own = Works(), list[tuple[torch.Tensor, torch.Tensor]]()
        for rows, part in zip(full.view(parts, self.size, -1), shard.view(parts, -1), strict=True):
            works += self._exchange([part] * self.size, list(rows))
            if rows[self.rank].data_ptr() != part.data_ptr():
                own.append((rows[self.rank], part))

        def arrive() -> None:
            for place, part in own:
                place.copy_(part)
            self._wait_all(works)

        return self._follow(arrive, "a gather")

    def _reduce_scatter(
        self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], parts: int
    ) -> list[AsyncWork]:
        """Each rank receives its shard's part of every other rank's gradients, and sums in rank order.

        The result does not depend on how gradients are packed into messages, and half as much is sent as by gloo's own.
        """
        return [self._scatter(shard, full, parts) for shard, full in zip(shards, fulls, strict=True)]

    def _scatter(self, shard: torch.Tensor, full: torch.Tensor, parts: int) -> AsyncWork:
        works, arriving = Works(), list[tuple[torch.Tensor, list[torch.Tensor]]]()
        for rows, part in zip(full.view(parts, self.size, -1), shard.view(parts, -1), strict=True):
            arriving.append((part, self._arriving(part, rows)))
            works += self._exchange(list(rows), arriving[-1][1])

        def arrive() -> None:
            self._wait_all(works)
            for part, rows in arriving:
                _average(part, rows)

        return self._follow(arrive, "a reduction")

    def _reduce_scatter_in(self, wire: torch.dtype, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """One exchange of all parts."""
        sent = encode(padded_rows(full.view(self.size, -1)), wire)
        arriving = torch.empty_like(sent)
        works = self._exchange(list(sent), list(arriving))
        arriving[self.rank].copy_(sent[self.rank])

        def arrive() -> None:
            self._wait_all(works)
            shard.copy_(mean_of(arriving, wire, full.dtype)[: shard.numel()])

        return self._follow(arrive, "a reduction")

    def rows_staged(self, *, packed: bool) -> int:
        """The parts of all other ranks but one need memory to arrive in."""
        return packed * self.size + self.size - 2

    def _by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        tag = self._own_tag()

        def start(begin: int) -> _InFlight:
            part = shard[begin : begin + width]
            rows = piece(begin, begin + part.numel())
            arriving = self._arriving(part, rows)
            works = self._exchange(list(rows), arriving, tag, recorded=False)
            return works, lambda: _average(part, arriving)

        return self._in_pieces(map(start, range(0, shard.numel(), width)), "a reduction")

    def _in_pieces(
        self, pieces: Iterator[_InFlight], what: str, *, begins: bool = False, last: Callable[[], None] = lambda: None
    ) -> AsyncWork:
        """Exchange pieces on the progress thread, at most two in flight; `last` runs after the last one.

        That thread's messages have a tag of their own, so that they do not match those that this thread sends
        meanwhile.

        `begins`: send the first piece before returning, so that a slow link has no gap between messages.
        """
        in_flight = deque[_InFlight](itertools.islice(pieces, 1 if begins else 0))

        def arrive() -> None:
            in_flight.extend(itertools.islice(pieces, 2 - len(in_flight)))
            while in_flight:
                works, finish = in_flight.popleft()
                self._wait_all(works)
                finish()
                del works, finish  # free this piece before the next one is made
                in_flight.extend(itertools.islice(pieces, 1))
            last()

        return self._follow(arrive, what)

    def _arriving(self, shard: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Buffers for every rank's part of `shard`, in rank order; one of them is `shard`, where the sum will be."""
        others = [shard, *torch.empty(self.size - 2, shard.numel(), dtype=shard.dtype)]
        return [*others[: self.rank], rows[self.rank], *others[self.rank :]]

    def _all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        """By exchanges: gloo's own has no tags, so that messages of different runs could match.

        It also aborts the process if their sizes differ. Summed in rank order, as in a reduce_scatter.
        """
        flat = tensor.view(-1)
        if flat.numel() < self.size:
            return self._exchange_small(flat, _average)
        return self._exchange_pair(flat) if self.size == 2 else self._exchange_whole(flat)

    def _exchange_small(self, flat: torch.Tensor, combine: Callable[[torch.Tensor, Rows], None]) -> AsyncWork:
        """Every rank receives the 1-D tensors of all ranks, and combines them in rank order, in place."""
        sent, rows = flat.clone(), list(torch.empty(self.size, flat.numel(), dtype=flat.dtype))
        rows[self.rank] = sent
        works = self._exchange([sent] * self.size, rows)

        def arrive() -> None:
            self._wait_all(works)
            combine(flat, rows)

        return self._follow(arrive, "an all_reduce")

    def _exchange_pair(self, flat: torch.Tensor) -> AsyncWork:
        """Two ranks exchange all of a 1-D tensor: as many bytes as in parts, without a second exchange of averages."""
        tag, first = self._own_tag(), flat.data_ptr()

        def start(piece: torch.Tensor) -> _InFlight:
            rows = [piece, torch.empty_like(piece)][:: 1 if self.rank == 0 else -1]
            works = self._exchange([piece, piece], rows, tag, recorded=piece.data_ptr() == first)
            return works, lambda: _average(piece, rows)

        return self._in_pieces(map(start, _split(flat)), "an all_reduce", begins=True)

    def _exchange_whole(self, flat: torch.Tensor) -> AsyncWork:
        """Each rank averages its part of a 1-D tensor, piece by piece, and sends it to all others.

        A part that was sent is overwritten with its average only after it has left.
        """
        scatter, gather = self._own_tag(), self._own_tag()
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        width = max(_PIECE_BYTES // flat.itemsize, 1)
        returning: Works = []

        def start(begin: int) -> _InFlight:
            rows = [part[begin : begin + width] for part in parts]
            arriving = [torch.empty_like(rows[self.rank]) for _ in rows]

            def finish() -> None:
                mean, arriving[self.rank] = arriving[self.rank], rows[self.rank]
                _average(mean, arriving)
                rows[self.rank].copy_(mean)
                returning.extend(self._exchange([rows[self.rank]] * self.size, rows, gather, recorded=False))

            return self._exchange(rows, arriving, scatter, recorded=False), finish

        starts = range(0, max(part.numel() for part in parts), width)
        return self._in_pieces(map(start, starts), "an all_reduce", last=lambda: self._wait_all(returning))

    def _all_reduce_in(self, wire: torch.dtype, tensor: torch.Tensor) -> AsyncWork:
        """Exchange parts, then their averages; two ranks exchange everything once."""
        flat, back = tensor.view(-1), self._own_tag()
        sent = encode(parts_of(flat, self.size), wire)
        arriving = torch.empty(self.size, sent.shape[1], dtype=torch.uint8)
        works = self._exchange([sent[rank % len(sent)] for rank in range(self.size)], list(arriving))
        arriving[self.rank].copy_(sent[self.rank % len(sent)])

        def arrive() -> None:
            self._wait_all(works)
            mean = mean_of(arriving, wire, flat.dtype)
            if len(sent) > 1:
                means = arriving  # reused: what arrived has been read
                means[self.rank].copy_(encode(mean[None], wire)[0])
                rows = list(means)
                self._wait_all(self._exchange([rows[self.rank]] * self.size, rows, back, recorded=False))
                mean = decode(means, wire, flat.dtype).view(-1)
            flat.copy_(mean[: flat.numel()])

        return self._follow(arrive, "an all_reduce")

    def _broadcast(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        flat = tensor.view(-1)
        mine, none = owner == self.rank, flat[:0]
        sent = [flat if mine else none] * self.size
        works = self._exchange(sent, [flat if rank == owner and not mine else none for rank in range(self.size)])
        return self._follow(lambda: self._wait_all(works), "a gather")

    def _reduce(self, owner: int, tensor: torch.Tensor) -> AsyncWork:
        """Every rank sends to `owner`, piece by piece with two in flight, which bounds the memory of `owner`."""
        flat, mine, tag = tensor.view(-1), owner == self.rank, self._own_tag()
        first = flat.data_ptr()

        def start(piece: torch.Tensor) -> _InFlight:
            arriving = [torch.empty_like(piece) if mine else piece[:0] for _ in range(self.size)]
            sent = [piece if rank == owner else piece[:0] for rank in range(self.size)]

            def finish() -> None:
                if mine:
                    mean, arriving[owner] = arriving[owner], piece
                    _average(mean, arriving)
                    piece.copy_(mean)

            return self._exchange(sent, arriving, tag, recorded=piece.data_ptr() == first), finish

        return self._in_pieces(map(start, _split(flat)), "a reduction", begins=True)

    def _own_tag(self) -> int:
        """A tag for the messages that the progress thread sends for one collective."""
        return self._tag + next(self._tags)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        tag: int | None = None,
        *,
        recorded: bool = True,
    ) -> Works:
        """Send `sent[i]` to rank i and receive from it into `received[i]`, for every rank but this one, if not empty.

        All receives are posted first: a sender waits for its receiver's announcement, which would otherwise queue
        behind what this rank itself sends (measured on a slow link: half the bandwidth).

        Within `isend`, gloo writes what the socket takes on this thread, which is recorded as time of the link and not
        of the executor. Sends of the progress thread are not `recorded`: the program's thread does not wait for them.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        tag = self._tag if tag is None else tag
        works: Works = []
        with self._sending() if recorded else contextlib.nullcontext():
            for i in (i for i in reversed(others) if received[i].numel()):
                with of_rank(i):
                    works.append((i, self._gloo.recv([received[i]], i, tag)))
            for i in (i for i in others if sent[i].numel()):
                with of_rank(i):
                    works.append((i, self._gloo.send([sent[i]], i, tag)))
        return works

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        with self.member.recorder.span("send"), self.member.waits.explained("a message"):
            yield

    def _wait_all(self, works: Works) -> None:
        """Block this thread until all works are done.

        Raises:
            RankLost: another rank failed or stayed away.
        """
        for rank, work in works:
            self.member.waits.awaited = rank
            with of_rank(rank):
                work.wait()
        self.member.waits.awaited = None

    def share(self, numbers: torch.Tensor) -> Shared:
        """Exchange int64 [n] with all other ranks, without waiting, whatever they run."""
        rows = list(torch.empty(self.size, numbers.numel(), dtype=torch.int64))
        rows[self.rank] = numbers
        with self.member.waits.explained("what the others run"):
            works = self._exchange([numbers] * self.size, rows, _CALLS, recorded=False)
        return Shared(
            self._follow(lambda: self._wait_all(works), "what the others run", metered=False), lambda: torch.stack(rows)
        )

    def largest(self, flags: torch.Tensor) -> None:
        """Take the elementwise maximum of all ranks' integer `flags`, in place."""
        self._exchange_small(flags.view(-1), _largest).wait()


def _split(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = flat.split(max(_PIECE_BYTES // flat.itemsize, 1))
    return pieces


def _average(average: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Average equal 1-D `rows`, summed in order. `average` may alias the first or the second row, but no later one."""
    for piece, *parts in zip(*(row.split(_CACHED) for row in (average, *rows)), strict=True):
        torch.add(parts[0], parts[1], out=piece)
        for part in parts[2:]:
            piece.add_(part)
        piece.div_(len(rows))


def _largest(most: torch.Tensor, rows: Rows) -> None:
    torch.amax(torch.stack(list(rows)), dim=0, out=most)


@contextlib.contextmanager
def of_rank(rank: int) -> Iterator[None]:
    """Turn errors of torch into `RankLost`: they concern a message from or to this rank of the group."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(rank, str(error)) from error
