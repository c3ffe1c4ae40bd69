"""Process groups: the data-parallel mesh, and collectives on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile._torch import backend_name
from zcompile.errors import GroupError
from zcompile.runtime.flights import Flight, HostFlight, Progress, StreamFlight, Traffic, typed, wait_all
from zcompile.runtime.recorder import Recorder


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
        self._averages = backend == "nccl"
        self._exchanges = backend == "gloo" and device.type == "cpu"
        self._progress = Progress() if device.type == "cpu" and self.size > 1 else None
        self.recorder = Recorder()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Flight:
        """Gather equal 1-D shards of every rank into `full`, [size * shard.numel()]."""
        self._count(full.nbytes)
        if not self._exchanges:
            work = _all_gather(full, shard, group=self.group, async_op=True)
            return self._fly(work, (full, shard))
        rows = list(full.view(self.size, -1))
        works = self._exchange([shard] * self.size, rows)

        def arrive() -> None:
            rows[self.rank].copy_(shard)
            wait_all(works)

        return self._follow(arrive)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Flight:
        """Average `full`, [size * shard.numel()], over the ranks; each gets its `shard`.

        On gloo each rank gets the others' parts of its shard and sums them in the order of ranks: the result does not
        depend on how gradients are packed into messages, and what is sent is half of what gloo's own would send.
        """
        self._count(full.nbytes)
        if not self._exchanges:
            work = _reduce_scatter(shard, full, op=self._op, group=self.group, async_op=True)
            return self._fly(work, (shard, full), lambda: self._divide(shard))
        rows = list(full.view(self.size, -1))
        mine = rows[self.rank]
        # The first of the others arrives where the sum is to be.
        others = [*shard.view(1, -1), *torch.empty(self.size - 2, shard.numel(), dtype=full.dtype)]
        arriving = [*others[: self.rank], mine, *others[self.rank :]]
        works = self._exchange(rows, arriving)

        def arrive() -> None:
            wait_all(works)
            _average(shard, arriving)

        return self._follow(arrive)

    def all_reduce(self, tensor: torch.Tensor) -> Flight:
        """Average `tensor` over the ranks in place."""
        self._count(2 * tensor.nbytes)
        work = dist.all_reduce(tensor, op=self._op, group=self.group, async_op=True)
        return self._fly(work, (tensor,), lambda: self._divide(tensor))

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Send `sent[i]` to rank i and receive from it into `received[i]`, for every rank but this one.

        All that is to be received is announced first: a sender waits for the announcement, which would else stand
        behind what this rank itself sends (measured on a slow line: half the rate).

        gloo writes what the socket takes within `isend`, on this thread: time of the line, not of the executor.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        with self.recorder.span("send"), typed():
            receives = [dist.irecv(received[i], group=self.group, group_src=i, tag=_TAG) for i in reversed(others)]
            sends = [dist.isend(sent[i], group=self.group, group_dst=i, tag=_TAG) for i in others]
        return [work for work in (*receives, *sends) if work is not None]

    def _fly(
        self, work: dist.Work, tensors: Sequence[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> Flight:
        """The flight of one collective that reads or writes `tensors`; `finish` runs once it is done."""
        if self._progress is None:
            return StreamFlight(work, tensors, finish)
        alive = list(tensors)

        def arrive() -> None:
            wait_all([work])
            alive.clear()
            if finish is not None:
                finish()

        return self._follow(arrive)

    def _follow(self, arrive: Callable[[], None]) -> Flight:
        assert self._progress is not None, "messages are exchanged on the host only"
        return self._progress.follow(HostFlight(arrive, self.traffic))

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
        dist.broadcast(sent.view(-1).view(torch.uint8), group=self.group, group_src=0)  # gloo knows few dtypes
        if sent.data_ptr() != tensor.data_ptr() and not torch.equal(sent.to(tensor.device), tensor):
            tensor.copy_(sent)

    def any_rank(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' integer `flags`, element by element; not metered, it is no program's."""
        with self.recorder.span("wait"), typed():
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


_CACHED = 2**17
"""Elements that stay in a core's cache between the sum and the division."""
_TAG = 0x7A63
"""Of messages between ranks, to tell them from the user's own on the same group."""

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
    kind = mesh.device_type if mesh is not None else "cuda" if _reaches_gpus() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _reaches_gpus() -> bool:
    """Whether the default group has a backend for GPUs, alone ("nccl") or beside another ("cpu:gloo,cuda:nccl")."""
    group = dist.GroupMember.WORLD
    if group is None or not torch.cuda.is_available():
        return False
    try:
        return backend_name(group, torch.device("cuda")) == "nccl"
    except RuntimeError:
        return False


def resolve_mesh(mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """The data-parallel mesh: the one given, or all ranks; without torchrun, a world of one is made.

    Raises:
        GroupError: several ranks without a process group; a mesh of several dimensions or of another device.
    """
    if mesh is not None:
        if mesh.ndim != 1:
            fix = f"give one dimension of it, such as mesh[{(mesh.mesh_dim_names or ('dp',))[0]!r}]"
            raise GroupError("mesh", f"has {mesh.ndim} dimensions, data parallelism wants one", fix)
        if mesh.device_type != device.type:
            fix = f"move the model to {mesh.device_type!r}, or make the mesh for {device.type!r}"
            raise GroupError("mesh", f"is for {mesh.device_type!r}, the model is on {device.type!r}", fix)
        return mesh
    if not dist.is_initialized():
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            fix = "call torch.distributed.init_process_group() before zcompile.compile"
            raise GroupError("process group", f"not initialised, though WORLD_SIZE is {ranks}", fix)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
