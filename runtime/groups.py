"""Process groups: the data-parallel mesh, and collectives on it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile.errors import GroupError
from zcompile.ir.axis import DATA, Axis, AxisKind
from zcompile.ir.layout import Hybrid, Layout
from zcompile.runtime.async_work import TrafficMeter
from zcompile.runtime.backend_collectives import BackendCollectives
from zcompile.runtime.collectives import Collectives, Member
from zcompile.runtime.device import HOST, NCCL, backend_of, gpu_count, gpu_kind, is_host, own_device
from zcompile.runtime.gloo_collectives import GlooCollectives
from zcompile.runtime.recorder import Recorder
from zcompile.runtime.waits import Waits
from zcompile.torch_internals.distributed import backend_name, connect_hosts, gloo_of, group_timeout, is_fake
from zcompile.torch_internals.dtensor import flattened, forget_meshes, joint_mesh, root_mesh

SEQUENCE = "sp"
"""The mesh dimension over which tokens are divided."""


class AxisCommunicator:
    """The ranks along one dimension of a mesh, and their collectives.

    Args:
        mesh: One-dimensional.
        device: The device of the tensors.
        whole: The communicator of all ranks that train the same model, which include these.
    """

    collectives: Collectives

    def __init__(self, mesh: DeviceMesh, device: torch.device, whole: Communicator | None = None) -> None:
        self.device, self.group = device, mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        (self.axis,) = mesh.mesh_dim_names or (DATA,)
        self.is_fake = is_fake(self.group)
        self.waits: Waits = Waits(self.group, None if whole is None else whole.waits)
        self.traffic: TrafficMeter = TrafficMeter() if whole is None else whole.traffic
        self.recorder: Recorder = Recorder() if whole is None else whole.recorder
        backend, own = _backend(self.group, device), (self.group, device, self.rank, self.size)
        self._member = Member(*own, self.traffic, self.waits, self.recorder, self.axis)
        if backend == backend_of(HOST) and is_host(device):
            self.collectives = GlooCollectives(self._member, gloo_of(self.group))
        else:
            self.collectives = BackendCollectives(self._member, averages=backend == NCCL)


class Communicator(AxisCommunicator):
    """All ranks that train the same model on different data, and their groups along each axis.

    Args:
        mesh: One-dimensional, or two-dimensional with names that say along which dimension shards repeat or are divided
            further: see `data_axes`.
        device: The device of the tensors.
        hybrid: What the two dimensions divide.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, hybrid: Hybrid = Hybrid.HSDP) -> None:
        forget_meshes()
        super().__init__(as_one(mesh), device)
        self.mesh = mesh
        self.control: GlooCollectives | None = None
        """For messages between hosts that must not wait for streams of a GPU; None if this rank is alone."""
        if isinstance(self.collectives, GlooCollectives):
            self.control = self.collectives
        elif self.size > 1 and not self.is_fake:
            hosts = connected_hosts(self.waits.name("control"), self.group, device)
            self.control = GlooCollectives(replace(self._member, traffic=TrafficMeter()), hosts)
        layout = Layout((), axes=axes_of_mesh(mesh), hybrid=hybrid)
        axes = layout.averaged if mesh.ndim > 1 else ()
        self._parts: list[AxisCommunicator] = [AxisCommunicator(mesh[axis.name], device, self) for axis in axes]
        self.parts: int = layout.parts
        """Number of primary shards in a secondary one; 1 if there are none."""

    @cached_property
    def inside(self) -> AxisCommunicator:
        """The ranks among which parameters are gathered."""
        return self.axes[0]

    @cached_property
    def outside(self) -> list[AxisCommunicator]:
        """The ranks of the outer axes, the nearest first."""
        return self._parts[1:]

    def along(self, axis: str) -> AxisCommunicator:
        """Those of the outer axis of that name."""
        return next(part for part in self.outside if part.axis == axis)

    @cached_property
    def dividing(self) -> AxisCommunicator:
        """The ranks among which stored parameters are divided."""
        return self if self.parts > 1 else self.inside

    @property
    def dividing_mesh(self) -> DeviceMesh:
        """The mesh that parameters are placed on: flattened, if both axes divide them."""
        return as_one(self.mesh) if self.parts > 1 else self.mesh

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Broadcast from the mesh's rank `source`, in place; any device, strides and dtype."""
        if self.size > 1:
            what = f"a broadcast of the values of rank {self.waits.ranks[source]}"
            broadcast(tensor, self.device, self.group, source, self.waits, what)

    def any_rank(self, flags: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum of all ranks' integer `flags` on the host, in place.

        From host to host, so no stream is waited for. Not metered, since it belongs to no program.
        """
        if self.size > 1 and self.control is not None:
            with self.recorder.span("wait"), self.waits.explained("a comparison of the ranks"):
                self.control.largest(flags)
        return flags

    def stamp(self, run: int) -> None:
        """Mark messages from now on as belonging to the run with this number, if the backend has tags."""
        for part in (self, *self._parts):
            part.collectives.stamp(run)
        if self.control is not None:
            self.control.stamp(run)

    def order_all(self) -> None:
        """Make the current stream wait for every collective that was started and not waited for."""
        for part in (self, *self._parts):
            part.collectives.order_all()

    @cached_property
    def axes(self) -> list[AxisCommunicator]:
        """The groups along each axis: that which shards, then those outside."""
        return self._parts or [self]


def broadcast(
    tensor: torch.Tensor, device: torch.device, group: dist.ProcessGroup, source: int, waits: Waits, what: str
) -> None:
    """Broadcast from one rank of a group, in place; `device`: where its collectives run."""
    if tensor.numel() == 0:
        return
    sent = tensor.to(device).contiguous()
    with waits.explained(what):
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=source)  # gloo knows few dtypes
    if sent.data_ptr() != tensor.data_ptr() and not torch.equal(sent.to(tensor.device), tensor):
        tensor.copy_(sent)


def connected_hosts(name: str, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Connect the hosts of a GPU group over gloo, under a name of their own. Collective.

    Raises:
        GroupError: they cannot reach each other.
    """
    try:
        return connect_hosts(name, group.rank(), group.size(), group_timeout(group, device))
    except RuntimeError as error:
        fix = "let hosts reach each other by gloo: GLOO_SOCKET_IFNAME names the network interface"
        raise GroupError("process group", f"the hosts of its ranks cannot connect: {error}", fix) from error


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return backend_name(group, device)
    except RuntimeError as error:
        fix = f"initialize one for it, or move the model to the group's device before compiling ({error})"
        raise GroupError("process group", f"has no backend for the model's device {device}", fix) from error


def default_device(mesh: DeviceMesh | None) -> torch.device:
    """The device for a model on meta: where collectives of the mesh, or otherwise of the default group, run."""
    return own_device(mesh.device_type if mesh is not None else gpu_kind() if _reaches_gpus() else HOST)


def _reaches_gpus() -> bool:
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
        GroupError: there are several ranks without a process group; or the mesh has dimensions without the names that
            are needed, is for another device, or leaves out ranks, which would train separately.
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
            raise GroupError("process group", f"is not initialized, though WORLD_SIZE is {ranks}", fix)
        dist.init_process_group(backend_of(device.type), store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DATA,))


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    """The global ranks of a mesh; all ranks without one."""
    return list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()


def data_axes(mesh: DeviceMesh) -> dict[str, AxisKind]:
    """The kinds of axis of a mesh's dimensions by name, in order.

    Raises:
        GroupError: of several dimensions, not exactly one shards and one repeats shards, by name.
    """
    names = mesh.mesh_dim_names or (DATA,)
    if mesh.ndim == 1:
        return {names[0]: AxisKind.SHARD}
    kinds = [_kind(name) for name in names]
    if sorted(kinds, key=str) != sorted(_DATA_KINDS) or len(names) != mesh.ndim:
        problem = (
            f"is {mesh}, and its dimension names do not say which one replicates the shards that the other one divides"
        )
        example = f"init_device_mesh({mesh.device_type!r}, (nodes, gpus), mesh_dim_names=('replicate', 'shard'))"
        fix = f"name them so, as in {example}, or *_replicate and *_shard; or give a one-dimensional mesh"
        raise GroupError("mesh", problem, fix)
    return {name: kind for name, kind in zip(names, kinds, strict=True) if kind is not None}


_DATA_KINDS = (AxisKind.REPLICATE, AxisKind.SHARD)


def repeats_outside(mesh: DeviceMesh) -> bool:
    """True if the outer one of two dimensions repeats shards: the ranks that shard are then adjacent."""
    return mesh.ndim == 1 or [*data_axes(mesh).values()] == [*_DATA_KINDS]


def check_inside(mesh: DeviceMesh, hybrid: Hybrid) -> None:
    """Raise GroupError if both dimensions are to divide parameters, and the one that shards is the outer one."""
    if hybrid is not Hybrid.HSDP and not repeats_outside(mesh):
        problem = f"is {mesh}, whose outer dimension shards, but shard={hybrid.value!r} needs the inner one to"
        raise GroupError("mesh", problem, "put the dimension that replicates first, or choose shard='hsdp' or 'flat'")


def as_one(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel mesh, flattened to one dimension. Collective."""
    return mesh if mesh.ndim == 1 else flattened(mesh)


def duplicate_group(mesh: DeviceMesh, name: str, device: torch.device) -> dist.ProcessGroup:
    """A new group of the ranks along one of several dimensions. Collective over all ranks.

    Another mesh would not do: a dimension of all ranks always uses the default group.
    """
    ranks = mesh.mesh.movedim((mesh.mesh_dim_names or ()).index(name), -1).flatten(0, -2).tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=group_timeout(mesh.get_group(name), device))
    return group


def with_sequence(mesh: DeviceMesh | None, sequence: str | None) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel mesh, which has all ranks, and the dimension over which they divide tokens. Collective.

    Those ranks divide shards, too, with those of the dimension before; one that replicates shards may come first.

    Raises:
        GroupError: tokens are to be divided, and the mesh has no such dimension, or others.
    """
    if sequence is None:
        return mesh, None
    *outer, last = ("",) if mesh is None else mesh.mesh_dim_names or ("",)
    replicated = [name for name in outer[:1] if _kind(name) is AxisKind.REPLICATE]
    if mesh is None or last != SEQUENCE or not 1 <= len(outer) <= 1 + len(replicated):
        kind = HOST if mesh is None else mesh.device_type
        problem = f"is {mesh}, whose dimensions do not say over which ranks sequence={sequence!r} divides tokens"
        example = f"init_device_mesh({kind!r}, (data, ranks), mesh_dim_names=('dp', {SEQUENCE!r}))"
        raise GroupError("mesh", problem, f"give {example}, or one with 'replicate', 'shard' and {SEQUENCE!r}")
    if not replicated:
        return flattened(mesh), mesh[SEQUENCE]
    sharding = flattened(mesh[(*outer[1:], SEQUENCE)], f"{SEQUENCE}_{AxisKind.SHARD}")
    return joint_mesh(mesh[replicated[0]], sharding), mesh[SEQUENCE]


def _kind(name: str) -> AxisKind | None:
    """The kind of axis that the name of one of several dimensions says."""
    return next((kind for kind in _DATA_KINDS if name.rpartition("_")[2] == kind), None)


def sequence_axes(sequence: DeviceMesh | None) -> list[Axis]:
    """The axis over which tokens are divided, if there is one."""
    return [] if sequence is None else [Axis(SEQUENCE, AxisKind.SEQUENCE, sequence.size())]


def axes_of_mesh(mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> tuple[Axis, ...]:
    """The axes of the data-parallel mesh, then that of the mesh over which tensor parallelism divides the model."""
    parts = 1 if tensor is None else tensor.size()
    found, stride = list[Axis](), parts
    for name, kind in reversed(data_axes(mesh).items()):
        size = mesh.size() if mesh.ndim == 1 else mesh[name].size()
        found.insert(0, Axis(name, kind, size, stride))
        stride *= size
    if tensor is not None and parts > 1:
        (name,) = tensor.mesh_dim_names or ("tp",)
        found.append(Axis(name, AxisKind.TENSOR, parts))
    return tuple(found)


def check_mesh(mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> None:
    """Refuse a mesh that leaves out ranks that train the same model; `tensor` as for `resolve_mesh`.

    Raises:
        GroupError: its dimensions lack the names that are needed, or it is part of a mesh whose other dimensions are
            neither of size 1 nor `tensor`.
    """
    data_axes(mesh)
    ranks = f"a mesh of one dimension over all data-parallel ranks, init_device_mesh({mesh.device_type!r}, (world,))"
    root, covered = root_mesh(mesh), mesh.size() * (tensor.size() if tensor is not None else 1)
    if root.size() <= covered:
        return
    names = [*(mesh.mesh_dim_names or (DATA,)), *((tensor.mesh_dim_names or ("tp",)) if tensor is not None else ())]
    own, groups = f"{mesh.device_type!r}", [f"mesh[{name!r}].get_group()" for name in names]
    alone = f"DeviceMesh.from_group({groups[0]}, {own})"
    if len(groups) > 1:
        alone = f"of DeviceMesh.from_group([{', '.join(groups)}], {own}, mesh=..., mesh_dim_names=...)"
        alone += ", before parallelize_module" if tensor is not None else ""
    problem = f"is {mesh}, a dimension of {root}: ranks that differ in another dimension would train separately"
    ranks = f"that mesh itself, {ranks}" if names_replicas(root) else ranks
    fix = f"give {ranks}, or none; if others have other models, such as pipeline stages, a mesh without them: {alone}"
    raise GroupError("mesh", problem, fix)


def names_replicas(mesh: DeviceMesh) -> bool:
    """True for a two-dimensional mesh with a dimension that repeats shards."""
    try:
        return mesh.ndim > 1 and bool(data_axes(mesh))
    except GroupError:
        return False
