"""Process groups: the data-parallel mesh, and collectives on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile._torch import backend_name, connect_hosts, gloo_of, group_timeout, is_fake, root_mesh
from zcompile.errors import GroupError
from zcompile.runtime.async_work import AsyncWork, TrafficMeter
from zcompile.runtime.backend_collectives import BackendCollectives
from zcompile.runtime.collectives import Collectives, Member, Piece
from zcompile.runtime.device import HOST, NCCL, backend_of, gpu_count, gpu_kind, is_host, own_device
from zcompile.runtime.gloo_collectives import GlooCollectives
from zcompile.runtime.waits import Waits


class Communicator:
    """Collectives over one mesh, asynchronous, averaged where they reduce, metered."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.device, self.group = mesh, device, mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.traffic, self.waits = TrafficMeter(self.size), Waits(self.group)
        member = Member(self.group, device, self.rank, self.size, self.traffic, self.waits)
        self.recorder = member.recorder
        backend = _backend(self.group, device)
        self.is_fake = is_fake(self.group)
        self.collectives: Collectives
        """What is not metered here."""
        self.control: GlooCollectives | None = None
        """What the hosts tell each other, past the streams of any GPU; None where there are no others."""
        if backend == backend_of(HOST) and is_host(device):
            self.collectives = self.control = GlooCollectives(member, gloo_of(self.group))
        else:
            self.collectives = BackendCollectives(member, averages=backend == NCCL)
            if self.size > 1 and not self.is_fake:
                self.control = GlooCollectives(replace(member, traffic=TrafficMeter()), _hosts(member))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> AsyncWork:
        """Gather equal 1-D shards of every rank into `full`, [size * shard.numel()]; `shard` may be its place there."""
        self._count(full.nbytes)
        return self.collectives.all_gather(full, shard)

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> list[AsyncWork]:
        """`all_gather` of each of several, which may go as one."""
        for full in fulls:
            self._count(full.nbytes)
        return self.collectives.all_gather_many(fulls, shards)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> AsyncWork:
        """Average `full`, [size * shard.numel()], over the ranks; each gets its `shard`."""
        self._count(full.nbytes)
        return self.collectives.reduce_scatter(shard, full)

    def reduce_scatter_many(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> list[AsyncWork]:
        """`reduce_scatter` of each of several, which may go as one."""
        for full in fulls:
            self._count(full.nbytes)
        return self.collectives.reduce_scatter_many(shards, fulls)

    def reduce_scatter_by_pieces(self, shard: torch.Tensor, piece: Piece, width: int) -> AsyncWork:
        """`reduce_scatter` of what `piece` gives, at most `width` elements of each rank's shard at a time."""
        self._count(shard.nbytes * self.size)
        return self.collectives.reduce_scatter_by_pieces(shard, piece, width)

    def all_reduce(self, tensor: torch.Tensor) -> AsyncWork:
        """Average a contiguous `tensor` over the ranks in place."""
        self._count(2 * tensor.nbytes)
        return self.collectives.all_reduce(tensor)

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

    def any_rank(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' integer `flags` on the host, element by element, in place.

        From host to host: no stream is waited for. Not metered, it is no program's.
        """
        if self.size > 1 and self.control is not None:
            with self.recorder.span("wait"), self.waits.explained("a comparison of the ranks"):
                self.control.largest(flags)
        return flags

    def stamp(self, run: int) -> None:
        """What is sent from now on belongs to the run with this number, where messages can tell."""
        self.collectives.stamp(run)
        if self.control is not None:
            self.control.stamp(run)

    def _count(self, payload: int) -> None:
        self.traffic.payload += payload
        self.traffic.messages += 1


def _hosts(member: Member) -> Any:
    """Connections between the hosts of a group whose collectives are of GPUs."""
    try:
        timeout = group_timeout(member.group, member.device)
        return connect_hosts(member.waits.name("control"), member.rank, member.size, timeout)
    except RuntimeError as error:
        fix = "let hosts reach each other by gloo: GLOO_SOCKET_IFNAME names the network interface"
        raise GroupError("process group", f"the hosts of its ranks cannot connect: {error}", fix) from error


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return backend_name(group, device)
    except RuntimeError as error:
        fix = f"initialise one for it, or move the model to the group's device before compiling ({error})"
        raise GroupError("process group", f"has no backend for the model's device {device}", fix) from error


def default_device(mesh: DeviceMesh | None) -> torch.device:
    """Where a model without memory is to live: where the mesh's, or else the default group's, collectives run."""
    return own_device(mesh.device_type if mesh is not None else gpu_kind() if _reaches_gpus() else HOST)


def _reaches_gpus() -> bool:
    """Whether the default group has a backend for GPUs, alone or beside one for hosts."""
    group = dist.GroupMember.WORLD
    if group is None or not gpu_count():
        return False
    try:
        return backend_name(group, torch.device(gpu_kind())) == backend_of(gpu_kind())
    except RuntimeError:
        return False


def resolve_mesh(mesh: DeviceMesh | None, device: torch.device, tensor: DeviceMesh | None = None) -> DeviceMesh:
    """The data-parallel mesh: the one given, or all ranks; without torchrun, a world of one is made.

    `tensor`: the mesh over which tensor parallelism divides the model.

    Raises:
        GroupError: several ranks without a process group; a mesh of several dimensions, of another device, or one
            along which ranks would train apart.
    """
    if mesh is not None:
        check_mesh(mesh, tensor)
        if mesh.device_type != device.type:
            fix = f"move the model to {mesh.device_type!r}, or make the mesh for {device.type!r}"
            raise GroupError("mesh", f"is for {mesh.device_type!r}, the model is on {device.type!r}", fix)
        return mesh
    if not dist.is_initialized():
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            fix = "call torch.distributed.init_process_group() before zcompile.compile"
            raise GroupError("process group", f"not initialised, though WORLD_SIZE is {ranks}", fix)
        dist.init_process_group(backend_of(device.type), store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def check_mesh(mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> None:
    """Refuse a mesh whose ranks would not be all that train the same model; `tensor` as for `resolve_mesh`.

    Raises:
        GroupError: it has several dimensions, or is one of a mesh whose others are neither of size 1 nor `tensor`.
    """
    ranks = f"a mesh of one dimension over all data-parallel ranks, init_device_mesh({mesh.device_type!r}, (world,))"
    if mesh.ndim != 1:
        raise GroupError("mesh", f"is {mesh}, and data parallelism wants one dimension", f"give {ranks}, or none")
    root, covered = root_mesh(mesh), mesh.size() * (tensor.size() if tensor is not None else 1)
    if root.size() <= covered:
        return
    name = (mesh.mesh_dim_names or ("dp",))[0]
    group, own = f"mesh[{name!r}].get_group()", f"{mesh.device_type!r}"
    alone = f"DeviceMesh.from_group({group}, {own})"
    if tensor is not None:
        groups = f"[{group}, mesh[{(tensor.mesh_dim_names or ('tp',))[0]!r}].get_group()]"
        alone = f"of DeviceMesh.from_group({groups}, {own}, mesh=..., mesh_dim_names=...), before parallelize_module"
    problem = f"is {mesh}, a dimension of {root}: ranks that differ in another one would train apart, each on its own"
    fix = f"give {ranks}, or none; where they have other models, such as pipeline stages, a mesh without them: {alone}"
    raise GroupError("mesh", problem, fix)
