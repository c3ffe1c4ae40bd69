"""Process groups: the data-parallel mesh, and collectives on it."""

from __future__ import annotations

import os
from dataclasses import replace
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
from zcompile.torch_internals.dtensor import flattened, forget_meshes, root_mesh


class AxisCommunicator:
    """The ranks along one dimension of a mesh, and what they do together.

    Args:
        mesh: Of one dimension.
        device: Where the tensors are.
        whole: The communicator of all ranks that train the same model, of which these are some.
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
    """All ranks that train the same model on other data, and of these the groups along each axis.

    Args:
        mesh: Of one dimension, or of two, whose names say along which shards repeat, or are divided further: see
            `data_axes`.
        device: Where the tensors are.
        hybrid: What the two dimensions divide.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, hybrid: Hybrid = Hybrid.HSDP) -> None:
        forget_meshes()
        super().__init__(as_one(mesh), device)
        self.mesh = mesh
        self.control: GlooCollectives | None = None
        """What the hosts tell each other, past the streams of any GPU; None where there are no others."""
        if isinstance(self.collectives, GlooCollectives):
            self.control = self.collectives
        elif self.size > 1 and not self.is_fake:
            hosts = connected_hosts(self.waits.name("control"), self.group, device)
            self.control = GlooCollectives(replace(self._member, traffic=TrafficMeter()), hosts)
        layout = Layout((), axes=axes_of_mesh(mesh), hybrid=hybrid)
        axes = layout.averaged if mesh.ndim > 1 else ()
        self._parts: list[AxisCommunicator] = [AxisCommunicator(mesh[axis.name], device, self) for axis in axes]
        self.parts: int = layout.parts
        """How many primary shards a secondary one has; 1 where there are none."""

    @property
    def inside(self) -> AxisCommunicator:
        """The ranks among which parameters are gathered."""
        return self.axes[0]

    @property
    def outside(self) -> list[AxisCommunicator]:
        """The ranks of the outer axes, the nearest first."""
        return self._parts[1:]

    def along(self, axis: str) -> AxisCommunicator:
        """Those of the outer axis of that name."""
        return next(part for part in self.outside if part.axis == axis)

    @property
    def dividing(self) -> AxisCommunicator:
        """The ranks among which what a rank keeps is divided."""
        return self if self.parts > 1 else self.inside

    @property
    def dividing_mesh(self) -> DeviceMesh:
        """The mesh that parameters are placed on: of one dimension, where both axes divide them."""
        return as_one(self.mesh) if self.parts > 1 else self.mesh

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Give every rank the values of the mesh's rank `source`, in place; any device, strides and dtype."""
        if self.size > 1:
            what = f"a broadcast of the values of rank {self.waits.ranks[source]}"
            broadcast(tensor, self.device, self.group, source, self.waits, what)

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
        for part in (self, *self._parts):
            part.collectives.stamp(run)
        if self.control is not None:
            self.control.stamp(run)

    def order_all(self) -> None:
        """Whatever was begun and not waited for ends before what the current stream does from here on."""
        for part in (self, *self._parts):
            part.collectives.order_all()

    @property
    def axes(self) -> list[AxisCommunicator]:
        """The groups along each axis: that which shards, then those outside."""
        return self._parts or [self]


def broadcast(
    tensor: torch.Tensor, device: torch.device, group: dist.ProcessGroup, source: int, waits: Waits, what: str
) -> None:
    """Give every rank of a group the values of one, in place; `device`: where its collectives run."""
    if tensor.numel() == 0:
        return
    sent = tensor.to(device).contiguous()
    with waits.explained(what):
        dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=source)  # gloo knows few dtypes
    if sent.data_ptr() != tensor.data_ptr() and not torch.equal(sent.to(tensor.device), tensor):
        tensor.copy_(sent)


def connected_hosts(name: str, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Connections, under a name of their own, between the hosts of a group whose collectives are of GPUs. Collective.

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
        fix = f"initialise one for it, or move the model to the group's device before compiling ({error})"
        raise GroupError("process group", f"has no backend for the model's device {device}", fix) from error


def default_device(mesh: DeviceMesh | None) -> torch.device:
    """Where a model without memory is to live: where the mesh's, or else the default group's, collectives run."""
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
        GroupError: several ranks without a process group; a mesh of several dimensions that do not say what they are
            for, of another device, or one along which ranks would train apart.
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
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DATA,))


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    """The ranks of a mesh as it was given; without one, all."""
    return list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()


def data_axes(mesh: DeviceMesh) -> dict[str, AxisKind]:
    """What a mesh's dimensions are for, by their names, in their order.

    Raises:
        GroupError: of several dimensions, none or more than one shards, or repeats shards, by its name.
    """
    names = mesh.mesh_dim_names or (DATA,)
    if mesh.ndim == 1:
        return {names[0]: AxisKind.SHARD}
    kinds = [next((kind for kind in _DATA_KINDS if name.rpartition("_")[2] == kind), None) for name in names]
    if sorted(kinds, key=str) != sorted(_DATA_KINDS) or len(names) != mesh.ndim:
        problem = (
            f"is {mesh}, and its dimensions do not say which of them repeats the shards that the other one divides"
        )
        example = f"init_device_mesh({mesh.device_type!r}, (nodes, gpus), mesh_dim_names=('replicate', 'shard'))"
        fix = f"call them so, as in {example}, or name_replicate and name_shard; or give a mesh of one dimension"
        raise GroupError("mesh", problem, fix)
    return {name: kind for name, kind in zip(names, kinds, strict=True) if kind is not None}


_DATA_KINDS = (AxisKind.REPLICATE, AxisKind.SHARD)


def repeats_outside(mesh: DeviceMesh) -> bool:
    """True if, of two dimensions, the first one repeats shards: those of a secondary shard then follow each other."""
    return mesh.ndim == 1 or [*data_axes(mesh).values()] == [*_DATA_KINDS]


def check_inside(mesh: DeviceMesh, hybrid: Hybrid) -> None:
    """Raise GroupError if both dimensions are to divide parameters, and the one that shards is the outer one."""
    if hybrid is not Hybrid.HSDP and not repeats_outside(mesh):
        problem = f"is {mesh}, whose shards are not inside of its replicas, as shard={hybrid.value!r} wants them"
        raise GroupError("mesh", problem, "give the dimension that repeats first, or choose shard='hsdp' or 'flat'")


def as_one(mesh: DeviceMesh) -> DeviceMesh:
    """The data-parallel mesh as one dimension of all its ranks. Collective."""
    return mesh if mesh.ndim == 1 else flattened(mesh)


def duplicate_group(mesh: DeviceMesh, name: str, device: torch.device) -> dist.ProcessGroup:
    """Another group of the ranks along one of several dimensions. Collective over all ranks there are.

    Another mesh does not do: along a dimension of all ranks it would have the default group each time.
    """
    ranks = mesh.mesh.movedim((mesh.mesh_dim_names or ()).index(name), -1).flatten(0, -2).tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=group_timeout(mesh.get_group(name), device))
    return group


def axes_of_mesh(mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> tuple[Axis, ...]:
    """The axes of the data-parallel mesh, and of the one over which tensor parallelism divides the model behind it."""
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
    """Refuse a mesh whose ranks would not be all that train the same model; `tensor` as for `resolve_mesh`.

    Raises:
        GroupError: its dimensions do not say what they are for, or it is one of a mesh whose others are neither of size
            1 nor `tensor`.
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
    problem = f"is {mesh}, a dimension of {root}: ranks that differ in another one would train apart, each on its own"
    ranks = f"that mesh itself, {ranks}" if names_replicas(root) else ranks
    fix = f"give {ranks}, or none; where they have other models, such as pipeline stages, a mesh without them: {alone}"
    raise GroupError("mesh", problem, fix)


def names_replicas(mesh: DeviceMesh) -> bool:
    """True for a mesh of two dimensions that shards can repeat along."""
    try:
        return mesh.ndim > 1 and bool(data_axes(mesh))
    except GroupError:
        return False
