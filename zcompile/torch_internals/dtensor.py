"""DTensors and device meshes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.placement_types import (  # shards of shards of a later mesh dimension
    _StridedShard as StridedShard,
)

__all__ = ["StridedShard"]
"""Names re-exported unchanged from torch."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without autograd: the local tensor itself of a DTensor, else a detached alias.

    The local tensor has its own version counter. `to_local()` would take 10 us.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def local_values(values: Sequence[Any]) -> list[Any]:
    """The values, with the local tensor itself in place of each DTensor: for thousands of them at once."""
    sharded = map(isinstance, values, itertools.repeat(DTensor))
    return [value._local_tensor if is_sharded else value for value, is_sharded in zip(values, sharded, strict=True)]


def gradients_laid_out_alike(parameters: Iterable[DTensor], kind: type[DTensor]) -> list[torch.Tensor | None]:
    """The local tensor of each parameter's gradient, if it is of `kind` and has the very layout of its parameter."""
    pairs = [(parameter, parameter.grad) for parameter in parameters]
    return [
        grad._local_tensor if grad.__class__ is kind and grad._spec is parameter._spec else None
        for parameter, grad in pairs
    ]


def mesh_size(tensor: torch.Tensor) -> int:
    """Number of ranks of a DTensor's mesh; 1 for a plain tensor."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def all_laid_out_like(
    tensors: Sequence[DTensor], locals_: Sequence[torch.Tensor], kind: type[DTensor]
) -> list[DTensor]:
    """DTensors of `kind`, laid out like `tensors`, over other local tensors of the same shapes and dtypes.

    Made by `__new__` alone, which is C++: around the `__init__` of DTensor, which does nothing, are ten calls.
    """
    make = functools.partial(DTensor.__new__, kind, requires_grad=False)
    return [*map(make, locals_, [tensor._spec for tensor in tensors])]


def give_up(parameter: torch.nn.Parameter) -> None:
    """Free the memory of a parameter, or of its local tensor if it is a DTensor."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = empty
    else:
        parameter.data = empty


def joint_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The 2-D mesh with the dimensions `first` and `second`. Raises RuntimeError if they have no common root mesh."""
    return DeviceMesh._concatenate([first, second])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced or flattened from, or `mesh` itself."""
    return mesh._get_root_mesh()


def with_joined_dims(mesh: DeviceMesh, joined: DeviceMesh, last: DeviceMesh) -> DeviceMesh:
    """`mesh` with all dimensions but the last joined into one, with the groups of `joined` and `last`."""
    names = (*(joined.mesh_dim_names or ("dp",)), *(last.mesh_dim_names or ("tp",)))
    groups = [joined.get_group(), last.get_group()]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh.flatten(0, -2), mesh_dim_names=names)


def flattened(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """All ranks of a mesh as one dimension, with a name. Collective over the mesh that it was sliced from.

    `_flatten` assumes that the root mesh has all ranks of the world. If several meshes are flattened at the same time,
    as by the stages of a pipeline, it gives their groups the same name, and they connect to each other.
    """
    if root_mesh(mesh).size() == dist.get_world_size():
        return mesh._flatten(name)
    group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=None if name is None else (name,))


def forget_meshes() -> None:
    """Clear DTensor's caches, whose meshes may have destroyed groups.

    Meshes compare equal by ranks and names, not by groups, so that operations on a new mesh would hit entries of an old
    one.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    others = [
        getattr(type(propagator), "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
        MeshTopoInfo.build_from_mesh,
    ]
    for function in others:
        getattr(function, "cache_clear", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the spec of `tensor` and another local tensor, which may be on another device than the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)


def copyable(tensor: DTensor) -> DTensor:
    """A DTensor over the same memory for copy.deepcopy and torch.distributed.checkpoint.

    These use the storage offset of the DTensor itself, and fail if its local tensor has an offset into its storage.
    """
    local = local_tensor(tensor)
    outside = with_local(tensor, local.as_strided(local.shape, local.stride(), 0))
    outside._local_tensor = local
    return outside
