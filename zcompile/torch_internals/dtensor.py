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
from torch.distributed.tensor.placement_types import (  # rows of what another dimension gave
    _StridedShard as StridedShard,
)

__all__ = ["StridedShard"]
"""What is passed on from torch as it is."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, without autograd: all of it or, of a DTensor, the local tensor itself.

    That has a version counter of its own, and `to_local()` costs 10 us.
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
    """Ranks of the mesh that a DTensor lies on; 1 for a plain tensor."""
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
    """Let go of a parameter's memory: of a DTensor that of the local tensor."""
    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = empty
    else:
        parameter.data = empty


def joint_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh of two dimensions that `first` and `second` are dimensions of; a RuntimeError if there is none."""
    return DeviceMesh._concatenate([first, second])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced or flattened from; itself if from none."""
    return mesh._get_root_mesh()


def with_joined_dims(mesh: DeviceMesh, joined: DeviceMesh, last: DeviceMesh) -> DeviceMesh:
    """`mesh` with all dimensions but the last as one, by the groups of `joined`, which they are, and of `last`."""
    names = (*(joined.mesh_dim_names or ("dp",)), *(last.mesh_dim_names or ("tp",)))
    groups = [joined.get_group(), last.get_group()]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh.flatten(0, -2), mesh_dim_names=names)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks of a mesh as one dimension. Collective over the mesh that it was sliced from.

    `_flatten` takes it that this is all ranks there are: where others do the same with theirs at once, as the stages of
    a pipeline do, it calls both groups alike, and they meet in each other's connections.
    """
    if root_mesh(mesh).size() == dist.get_world_size():
        return mesh._flatten()
    group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type)


def forget_meshes() -> None:
    """Let what DTensor remembers of operations go: the meshes in it may have groups that are destroyed.

    A mesh equals another of the same ranks and names, whatever its groups, so an operation on a new one would give what
    was remembered of the old one.
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
    """A DTensor laid out like `tensor` over another local tensor, which may be on another device than the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)


def copyable(tensor: DTensor) -> DTensor:
    """The same DTensor, over the same memory, for torch's own copies: copy.deepcopy, torch.distributed.checkpoint.

    They read the storage of the DTensor itself, which has none, where its local tensor begins inside its own storage.
    """
    local = local_tensor(tensor)
    outside = with_local(tensor, local.as_strided(local.shape, local.stride(), 0))
    outside._local_tensor = local
    return outside
