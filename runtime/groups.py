"""Process groups: the data-parallel mesh, collectives on it, and a meter of what they send."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile._torch import backend_name
from zcompile.errors import GroupError
from zcompile.runtime.recorder import Recorder


@dataclass
class Traffic:
    """What this rank's collectives sent, and how long it stood waiting for them; all cumulative.

    `bytes` counts one direction: (N-1)/N of the payload of a gather or a scatter, twice that for an all_reduce.
    `seconds` is the time in which at least one collective was in flight and `exposed` the part of it in which the
    program waited, measured on the host for groups whose wait blocks it, as gloo's does. What ends while a region
    computes is taken to end in its middle.
    """

    world: int = 1
    payload: int = 0
    """Bytes of the tensors moved; those of an all_reduce count twice."""
    messages: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    counted_until: float = 0.0
    """The moment up to which `seconds` has counted."""

    def count(self, started: float, ended: float) -> None:
        """Count the time of one collective, what it shares with one counted before left out."""
        self.seconds += max(0.0, ended - max(started, self.counted_until))
        self.counted_until = max(self.counted_until, ended)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent."""
        return self.payload * (self.world - 1) // self.world

    @property
    def hidden(self) -> float | None:
        """Share of communication time hidden behind compute, 0 to 1; None where it was not measured."""
        return max(0.0, 1 - self.exposed / self.seconds) if self.seconds else None


@dataclass
class Flight:
    """One collective in flight, with the tensors that must outlive it."""

    work: dist.Work | None
    tensors: tuple[torch.Tensor, ...]
    traffic: Traffic
    finish: Callable[[], None] | None = None
    """Runs on the waiting side once the bytes are there."""
    started: float = field(default_factory=time.perf_counter)
    seen: float = field(init=False)
    """When it was last seen in flight."""
    ended: float | None = None
    waited: tuple[float, float] | None = None
    """From when until when the host stood waiting; None where it does not."""

    def __post_init__(self) -> None:
        self.seen = self.started

    def look(self) -> None:
        """Note whether it is done by now; called between the lines of a program.

        A callback of the group's thread would know the moment, but it needs Python's lock, and a thread that waits for
        it while a region computes moves no bytes.
        """
        if self.tensors and self.tensors[0].device.type != "cpu":
            return  # the host does not wait for these, so there is nothing to measure on it
        now = time.perf_counter()
        if self.ended is None and self.work is not None:
            if self.work.is_completed():
                self.ended = (self.seen + now) / 2
            else:
                self.seen = now

    def wait(self) -> None:
        """Block the host (gloo) or make the current stream wait (NCCL) until the collective is done.

        On CUDA the tensors were allocated on the current stream and the collective runs on the group's own stream,
        which waited for the current one at launch; after this call every later kernel of the current stream runs after
        the collective. So dropping the references here is safe: their memory can only be reused by later work of the
        current stream.
        """
        assert self.work is not None, "a collective is waited for once"
        self.look()
        before = time.perf_counter()
        with _typed():
            self.work.wait()
        after = time.perf_counter()
        if self.tensors[0].device.type == "cpu":
            exposed = 0.0 if self.ended is not None else after - before
            self.traffic.exposed += exposed
            self.ended = after if self.ended is None else self.ended
            self.traffic.count(self.started, self.ended)
            self.waited = (before, after)
        if self.finish is not None:
            self.finish()
        self.work, self.tensors, self.finish = None, (), None


class Communicator:
    """Collectives over one mesh, asynchronous, averaged where they reduce, metered."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.traffic = Traffic(self.size)
        self.recorder = Recorder()
        # gloo has no average: it sums, and the shard is divided afterwards. NCCL averages on the wire.
        self.averages = _backend(self.group, device) == "nccl"
        self._flights: list[Flight] = []

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Flight:
        """Gather equal 1-D shards of every rank into `full`, [size * shard.numel()]."""
        self._count(full.nbytes)
        work = _all_gather(full, shard, group=self.group, async_op=True)
        return self._fly(Flight(work, (full, shard), self.traffic))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Flight:
        """Sum (or average) `full`, [size * shard.numel()], over the ranks; each gets its `shard`."""
        self._count(full.nbytes)
        if self.averages:
            work = _reduce_scatter(shard, full, op=self._op, group=self.group, async_op=True)
            return self._fly(Flight(work, (shard, full), self.traffic))
        # gloo's reduce_scatter sends as many bytes as its all_reduce. An exchange sends half of them, and summing in
        # the order of ranks makes the result independent of how gradients are packed into messages.
        received = torch.empty_like(full).view(self.size, -1)
        work = dist.all_to_all_single(received, full.view(self.size, -1), group=self.group, async_op=True)
        return self._fly(Flight(work, (received, full), self.traffic, lambda: _sum_rows(shard, received)))

    def all_reduce(self, tensor: torch.Tensor) -> Flight:
        """Sum (or average) `tensor` over the ranks in place."""
        self._count(2 * tensor.nbytes)
        work = dist.all_reduce(tensor, op=self._op, group=self.group, async_op=True)
        return self._fly(Flight(work, (tensor,), self.traffic))

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
        with self.recorder.span("wait"), _typed():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return flags

    def averaged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn a received sum into the average, in place."""
        return tensor if self.averages or self.size == 1 else tensor.div_(self.size)

    def look(self) -> None:
        """Note which collectives are done by now."""
        self._flights = [flight for flight in self._flights if flight.work is not None and flight.ended is None]
        for flight in self._flights:
            flight.look()

    def _fly(self, flight: Flight) -> Flight:
        self.look()
        self._flights.append(flight)
        return flight

    @property
    def _op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM

    def _count(self, payload: int) -> None:
        self.traffic.payload += payload
        self.traffic.messages += 1


def _sum_rows(total: torch.Tensor, rows: torch.Tensor) -> None:
    torch.add(rows[0], rows[1], out=total)
    for row in rows[2:]:
        total.add_(row)


# torch 2.13 renamed both; the old names warn there, and 2.11 lacks the new ones.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """A GroupError in place of what torch raises when another rank fails or stays away."""
    try:
        yield
    except RuntimeError as error:
        fix = "look for the first error on the other ranks; all must make the same calls in the same order"
        raise GroupError("a collective", f"failed: {error}", fix) from error


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return backend_name(group, device)
    except RuntimeError as error:
        fix = f"initialise one for it, or move the model to the group's device before compiling ({error})"
        raise GroupError("process group", f"has no backend for the model's device {device}", fix) from error


def default_device(mesh: DeviceMesh | None) -> torch.device:
    """Where a model without memory is to live: where the mesh's, or else the default group's, collectives run."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    kind = mesh.device_type if mesh is not None else "cuda" if nccl else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


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
