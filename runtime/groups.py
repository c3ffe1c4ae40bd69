"""Process groups: the data-parallel mesh, and collectives on it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile._torch import backend_name, close_connections, group_timeout, root_mesh
from zcompile.errors import GroupError
from zcompile.runtime.async_work import AsyncWork, EventWork, HostWork, Progress, StreamWork, Traffic
from zcompile.runtime.device import (
    BACKENDS,
    GPU,
    HOST,
    current_stream,
    gpu_count,
    is_gpu,
    is_host,
    new_stream,
    on_stream,
    own_device,
)
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.waits import RankLost, Waits

_TAG = 1 << 30
"""In the tags of all messages between ranks, to tell them from the user's own on the same group."""
_RUNS = 1 << 20
"""How many runs have tags of their own. The lower bits of a tag are those of its message, which every rank counts
alike: messages of the progress thread must not meet those that the program's thread sends meanwhile."""
_MESSAGES = 1 << 10
_CALLS = 1 << 29
"""The tag of what ranks tell each other of their runs, which must meet whatever they run."""
_PIECE_BYTES = 2**22
"""Bytes of a rank's part of an all_reduce that are sent at a time: so much memory it takes from each rank, twice."""
Piece = Callable[[int, int], torch.Tensor]
"""Gives elements [start, stop) of every rank's padded shard, [size, stop - start]; its rows are contiguous."""
Works = list[tuple[int, dist.Work]]
"""Messages on their way, each with the rank of the group that it comes from or goes to."""


@dataclass(frozen=True)
class Shared:
    """What all ranks have sent, [ranks, n], on its way."""

    work: HostWork | EventWork
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


class Communicator:
    """Collectives over one mesh, asynchronous, averaged where they reduce, metered."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.traffic = Traffic(self.size)
        backend = _backend(self.group, device)
        # gloo has no average: it sums, and the sum is divided afterwards. NCCL averages on the wire.
        self._averages = backend == BACKENDS[GPU]
        self.is_fake = backend == "fake"
        self._exchanges = backend == BACKENDS[HOST] and is_host(device)
        self.separates = self._exchanges
        """True if messages of different runs cannot meet."""
        self._progress = None
        if is_host(device) and self.size > 1:
            self._progress = Progress(functools.partial(close_connections, self.group, self.rank, self.size))
        self._tag = _TAG
        self._tags = itertools.cycle(range(1, _MESSAGES))
        self._staging: torch.Stream | None = None
        self._sharing: torch.Stream | None = None
        self.recorder = Recorder()
        self.waits = Waits(self.group)

    def stamp(self, run: int) -> None:
        """What is sent from now on belongs to the run with this number, and meets nothing of another run.

        On gloo it is in the tags of messages. On NCCL messages have no tags: those of different runs may meet.
        """
        self._tag = _TAG + (run % _RUNS) * _MESSAGES
        self._tags = itertools.cycle(range(1, _MESSAGES))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> AsyncWork:
        """Gather equal 1-D shards of every rank into `full`, [size * shard.numel()]; `shard` may be its place there."""
        self._count(full.nbytes)
        if not self._exchanges:
            work = self._launched(_all_gather, full, shard)
            return self._fly(work, (full, shard))
        rows = list(full.view(self.size, -1))
        works = self._exchange([shard] * self.size, rows)

        def arrive() -> None:
            if rows[self.rank].data_ptr() != shard.data_ptr():
                rows[self.rank].copy_(shard)
            self._wait_all(works)

        return self._follow(arrive, "a gather")

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """Average `full`, [size * shard.numel()], over the ranks; each gets its `shard`.

        On gloo each rank gets the others' parts of its shard and sums them in the order of ranks: the result does not
        depend on how gradients are packed into messages, and what is sent is half of what gloo's own would send.
        """
        self._count(full.nbytes)
        if not self._exchanges:
            work = self._launched(_reduce_scatter, shard, full, op=self._op)
            return self._fly(work, (shard, full), lambda: self._divide(shard))
        rows = full.view(self.size, -1)
        arriving = self._arriving(shard, rows)
        works = self._exchange(list(rows), arriving)

        def arrive() -> None:
            self._wait_all(works)
            _average(shard, arriving)

        return self._follow(arrive, "a reduction")

    def rows_staged(self, *, packed: bool) -> int:
        """How often a reduce_scatter takes the memory of a shard beside gradients: to pack them, for others' parts."""
        return packed * self.size + self._exchanges * (self.size - 2)

    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """`reduce_scatter` of what `piece` gives, at most `width` elements of each rank's shard at a time.

        Two pieces are on their way at once, and no more memory is taken than theirs: beyond that, it does not depend on
        the size of the shard.
        """
        self._count(shard.nbytes * self.size)
        if self._exchanges:
            return self._exchange_pieces(shard, piece, width)
        if is_gpu(self.device):
            return self._stream_pieces(shard, piece, width)
        sent = piece(0, shard.numel()).reshape(-1)
        work = self._launched(_reduce_scatter, shard, sent, op=self._op)
        return self._fly(work, (shard, sent), lambda: self._divide(shard))

    def _exchange_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """On gloo: all on the progress thread, each when the one before the last has arrived, message after message.

        That thread's messages have a tag of their own, so that they do not meet those that this thread sends meanwhile.
        """
        tag, on_their_way = self._own_tag(), deque[tuple[Works, torch.Tensor, list[torch.Tensor]]]()
        starts = iter(range(0, shard.numel(), width))

        def start() -> None:
            if (begin := next(starts, None)) is not None:
                part = shard[begin : begin + width]
                rows = piece(begin, begin + part.numel())
                arriving = self._arriving(part, rows)
                works = self._exchange(list(rows), arriving, tag, recorded=False)
                on_their_way.append((works, part, arriving))

        def arrive() -> None:
            start()
            start()
            while on_their_way:
                works, part, arriving = on_their_way.popleft()
                self._wait_all(works)
                _average(part, arriving)
                del works, part, arriving  # this piece is gone before the next one is made
                start()

        return self._follow(arrive, "a reduction")

    def _stream_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """On NCCL: pieces are made on a stream of their own, which waits for the one before the last to be reduced.

        Hazards: the gradients are ready when the current stream gets here, which the staging stream waits for; `piece`
        holds them until the current stream has waited for the end. A piece's rows are allocated on the staging stream,
        and dropped once that has waited for their reduction, so only its own later work can get their memory.
        """
        staging = self._staging = self._staging or new_stream(self.device)
        staging.wait_stream(current_stream(self.device))
        on_their_way = deque[tuple[dist.Work, torch.Tensor]]()
        with on_stream(staging):
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
            done = staging.record_event()
        land = lambda: current_stream(self.device).wait_event(done)  # noqa: E731
        return StreamWork(land, (shard, piece), waits=self.waits)

    def _arriving(self, shard: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Where each rank's part of `shard` is or arrives, in the order of ranks; one of them where the sum will be."""
        others = [shard, *torch.empty(self.size - 2, shard.numel(), dtype=shard.dtype)]
        return [*others[: self.rank], rows[self.rank], *others[self.rank :]]

    def all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place.

        On gloo by exchanges too: its own all_reduce has no tags, so that those of different runs could meet, and ends
        the process if their sizes differ. Summed in the order of ranks, as a reduce_scatter is.
        """
        self._count(2 * tensor.nbytes)
        if self._exchanges:
            flat = tensor.view(-1)
            return self._exchange_small(flat, _average) if flat.numel() < self.size else self._exchange_whole(flat)
        work = self._launched(dist.all_reduce, tensor, op=self._op)
        return self._fly(work, (tensor,), lambda: self._divide(tensor))

    def _exchange_small(self, flat: torch.Tensor, combine: Callable[[torch.Tensor, Rows], None]) -> AsyncWork:
        """On gloo: every rank gets the 1-D tensors of all, and combines them in their order, in place."""
        sent, rows = flat.clone(), list(torch.empty(self.size, flat.numel(), dtype=flat.dtype))
        rows[self.rank] = sent
        works = self._exchange([sent] * self.size, rows)

        def arrive() -> None:
            self._wait_all(works)
            combine(flat, rows)

        return self._follow(arrive, "an all_reduce")

    def _exchange_whole(self, flat: torch.Tensor) -> AsyncWork:
        """On gloo: each rank averages its part of a 1-D tensor, piece by piece, and sends it to all others.

        On the progress thread, as `_exchange_pieces`. What has been sent of a part is written to with its average only
        when it has left.
        """
        scatter, gather = self._own_tag(), self._own_tag()
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        width = max(_PIECE_BYTES // flat.itemsize, 1)
        starts = iter(range(0, max(part.numel() for part in parts), width))
        on_their_way = deque[tuple[Works, list[torch.Tensor], list[torch.Tensor]]]()

        def start() -> None:
            if (begin := next(starts, None)) is not None:
                rows = [part[begin : begin + width] for part in parts]
                arriving = [torch.empty_like(rows[self.rank]) for _ in rows]
                works = self._exchange(rows, arriving, scatter, recorded=False)
                on_their_way.append((works, rows, arriving))

        def arrive() -> None:
            start()
            start()
            returning: Works = []
            while on_their_way:
                works, rows, arriving = on_their_way.popleft()
                self._wait_all(works)
                mean = arriving[self.rank]
                arriving[self.rank] = rows[self.rank]
                _average(mean, arriving)
                rows[self.rank].copy_(mean)
                returning += self._exchange([rows[self.rank]] * self.size, rows, gather, recorded=False)
                del works, rows, arriving, mean
                start()
            self._wait_all(returning)

        return self._follow(arrive, "an all_reduce")

    def _own_tag(self) -> int:
        """A tag for what the progress thread sends of one message."""
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

        All that is to be received is announced first: a sender waits for the announcement, which would else stand
        behind what this rank itself sends (measured on a slow line: half the rate).

        gloo writes what the socket takes within `isend`, on this thread: time of the line, not of the executor. What
        the progress thread sends is not `recorded`: the program's thread does not wait for it.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        tag, group = self._tag if tag is None else tag, self.group
        works: list[tuple[int, dist.Work | None]] = []
        with self._sending() if recorded else contextlib.nullcontext():
            for i in (i for i in reversed(others) if received[i].numel()):
                with _of_rank(i):
                    works.append((i, dist.irecv(received[i], group=group, group_src=i, tag=tag)))
            for i in (i for i in others if sent[i].numel()):
                with _of_rank(i):
                    works.append((i, dist.isend(sent[i], group=group, group_dst=i, tag=tag)))
        return [(i, work) for i, work in works if work is not None]

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Messages that the program's thread sends."""
        with self.recorder.span("send"), self.waits.explained("a message"):
            yield

    def _wait_all(self, works: Works) -> None:
        """Block this thread until all of them are done.

        Raises:
            RankLost: another rank failed or stayed away.
        """
        for rank, work in works:
            self.waits.awaited = rank
            with _of_rank(rank):
                work.wait()
        self.waits.awaited = None

    def _launched(self, collective: Callable[..., dist.Work], *args: Any, **options: Any) -> dist.Work:
        with self.waits.explained("a collective"):
            return collective(*args, group=self.group, async_op=True, **options)

    def _fly(
        self, work: dist.Work, tensors: Sequence[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> AsyncWork:
        """The end of one collective that reads or writes `tensors`; `finish` runs once it is done."""
        if self._progress is None:
            return StreamWork(work.wait, tensors, finish, self.waits)
        alive = list(tensors)

        def arrive() -> None:
            _ended(work)
            alive.clear()
            if finish is not None:
                finish()

        return self._follow(arrive, "a collective")

    def _follow(self, arrive: Callable[[], None], what: str) -> HostWork:
        assert self._progress is not None, "messages are exchanged on the host only"
        return self._progress.follow(HostWork(arrive, self.traffic, self.waits, what))

    def _divide(self, total: torch.Tensor) -> None:
        """Turn a sum into the average, in place."""
        if not self._averages:
            total.div_(self.size)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the values of the mesh's first rank, in place; any device, strides and dtype."""
        if self.size == 1 or tensor.numel() == 0:
            return
        sent = tensor.to(self.device).contiguous()
        with self.waits.explained("a broadcast of the first rank's values"):
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self.group, group_src=0)  # gloo knows few dtypes
        if sent.data_ptr() != tensor.data_ptr() and not torch.equal(sent.to(tensor.device), tensor):
            tensor.copy_(sent)

    def share(self, numbers: torch.Tensor) -> Shared:
        """Send this rank's int64 [n] on the host to all others, and get theirs, without waiting; not metered.

        On CUDA by a stream of its own. Hazards: all tensors are allocated, filled and read there, behind each other;
        the host reads the result, in pinned memory, behind the event that its copy has left.
        """
        if self._exchanges:
            rows = list(torch.empty(self.size, numbers.numel(), dtype=torch.int64))
            rows[self.rank] = numbers
            with self.waits.explained("what the others run"):
                works = self._exchange([numbers] * self.size, rows, _CALLS, recorded=False)
            landing = HostWork(lambda: self._wait_all(works), Traffic(), self.waits, "what the others run")
            assert self._progress is not None, "messages are exchanged on the host only"
            return Shared(self._progress.follow(landing), lambda: torch.stack(rows))
        if is_host(self.device):
            gathered = torch.empty(self.size * numbers.numel(), dtype=torch.int64)
            sending = self._launched(_all_gather, gathered, numbers)
            work = self._follow(lambda: _ended(sending), "what the others run")
            return Shared(work, lambda: gathered.view(self.size, -1))
        stream = self._sharing = self._sharing or new_stream(self.device)
        with on_stream(stream):
            mine = numbers.pin_memory().to(self.device, non_blocking=True)
            all_ = mine.new_empty(self.size * mine.numel())
            self._launched(_all_gather, all_, mine).wait()
            host = torch.empty(all_.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(all_, non_blocking=True)
            arrived = stream.record_event()
        limit = group_timeout(self.group, self.device)
        return Shared(EventWork(arrived, self.waits, "what the others run", limit), lambda: host.view(self.size, -1))

    def any_rank(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' integer `flags`, element by element; not metered, it is no program's."""
        with self.recorder.span("wait"), self.waits.explained("a comparison of the ranks"):
            if self._exchanges and self.size > 1:
                self._exchange_small(flags.view(-1), _largest).wait()
            else:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return flags

    @property
    def _op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM

    def _count(self, payload: int) -> None:
        self.traffic.payload += payload
        self.traffic.messages += 1


def _average(average: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Average equal 1-D `rows`, summed in their order; `average` may be the first or, behind one row, the second."""
    for piece, *parts in zip(*(row.split(_CACHED) for row in (average, *rows)), strict=True):
        torch.add(parts[0], parts[1], out=piece)
        for part in parts[2:]:
            piece.add_(part)
        piece.div_(len(rows))


def _largest(most: torch.Tensor, rows: Rows) -> None:
    """The largest of equal 1-D `rows`, element by element."""
    torch.amax(torch.stack(list(rows)), dim=0, out=most)


def _ended(work: dist.Work) -> None:
    """Block this thread until it is done."""
    work.wait()


@contextlib.contextmanager
def _of_rank(rank: int) -> Iterator[None]:
    """Note of what torch raises that it is about a message from or to this rank of the group."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(rank, str(error)) from error


Rows = Sequence[torch.Tensor]
_CACHED = 2**17
"""Elements that stay in a core's cache between the sum and the division."""
# torch 2.13 renamed both; the old names warn there, and 2.11 lacks the new ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return backend_name(group, device)
    except RuntimeError as error:
        fix = f"initialise one for it, or move the model to the group's device before compiling ({error})"
        raise GroupError("process group", f"has no backend for the model's device {device}", fix) from error


def default_device(mesh: DeviceMesh | None) -> torch.device:
    """Where a model without memory is to live: where the mesh's, or else the default group's, collectives run."""
    return own_device(mesh.device_type if mesh is not None else GPU if _reaches_gpus() else HOST)


def _reaches_gpus() -> bool:
    """Whether the default group has a backend for GPUs, alone or beside one for hosts."""
    group = dist.GroupMember.WORLD
    if group is None or not gpu_count():
        return False
    try:
        return backend_name(group, torch.device(GPU)) == BACKENDS[GPU]
    except RuntimeError:
        return False


def resolve_mesh(mesh: DeviceMesh | None, device: torch.device, beside: DeviceMesh | None = None) -> DeviceMesh:
    """The data-parallel mesh: the one given, or all ranks; without torchrun, a world of one is made.

    `beside`: the mesh over which tensor parallelism divides the model.

    Raises:
        GroupError: several ranks without a process group; a mesh of several dimensions, of another device, or one
            beside which ranks would train apart.
    """
    if mesh is not None:
        check_mesh(mesh, beside)
        if mesh.device_type != device.type:
            fix = f"move the model to {mesh.device_type!r}, or make the mesh for {device.type!r}"
            raise GroupError("mesh", f"is for {mesh.device_type!r}, the model is on {device.type!r}", fix)
        return mesh
    if not dist.is_initialized():
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            fix = "call torch.distributed.init_process_group() before zcompile.compile"
            raise GroupError("process group", f"not initialised, though WORLD_SIZE is {ranks}", fix)
        dist.init_process_group(BACKENDS.get(device.type, BACKENDS[HOST]), store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def check_mesh(mesh: DeviceMesh, beside: DeviceMesh | None = None) -> None:
    """Refuse a mesh whose ranks would not be all that train the same model; `beside` as for `resolve_mesh`.

    Raises:
        GroupError: it has several dimensions, or is one of a mesh whose others are neither of size 1 nor `beside`.
    """
    ranks = f"a mesh of one dimension over all data-parallel ranks, init_device_mesh({mesh.device_type!r}, (world,))"
    if mesh.ndim != 1:
        raise GroupError("mesh", f"is {mesh}, and data parallelism wants one dimension", f"give {ranks}, or none")
    root, covered = root_mesh(mesh), mesh.size() * (beside.size() if beside is not None else 1)
    if root.size() <= covered:
        return
    name = (mesh.mesh_dim_names or ("dp",))[0]
    group, own = f"mesh[{name!r}].get_group()", f"{mesh.device_type!r}"
    alone = f"DeviceMesh.from_group({group}, {own})"
    if beside is not None:
        groups = f"[{group}, mesh[{(beside.mesh_dim_names or ('tp',))[0]!r}].get_group()]"
        alone = f"of DeviceMesh.from_group({groups}, {own}, mesh=..., mesh_dim_names=...), before parallelize_module"
    found = f"is {mesh}, a dimension of {root}: ranks that differ in another one would train apart, each on its own"
    fix = f"give {ranks}, or none; where they have other models, such as pipeline stages, a mesh without them: {alone}"
    raise GroupError("mesh", found, fix)
