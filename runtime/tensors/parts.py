"""Parts of tensors: which rows of the whole a rank has, and DTensors that are made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zcompile.runtime.tensors.owned import is_here, owner_of
from zcompile.torch_internals.dtensor import StridedShard, with_local

Placement = Any
"""A `Shard`, `Replicate` or `Partial` of torch.distributed.tensor, or a `StridedShard`; their base class is private."""


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """`local`, this rank's part, as a DTensor over the same memory, be it on the device of the mesh or not."""
    stride = contiguous_stride(shape)
    away = local.device.type != mesh.device_type  # what `from_local` would copy
    like = torch.empty_like(local, device="meta") if away else local
    made = DTensor.from_local(like, mesh, placements, run_check=False, shape=shape, stride=stride)
    return with_local(made, local) if away else made


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a plain tensor, divided as `like` is; a view of it."""
    mesh, placements = like.device_mesh, like.placements
    if owner_of(like) is not None:
        return whole if is_here(like) else whole[:0]
    for dim in reversed(range(mesh.ndim)):  # the last mesh dimension divides first, see `ModelParallel.sharded`
        if isinstance(placement := placements[dim], (Shard, StridedShard)):
            size, at = mesh.size(dim), placement.dim
            each, rank = -(-whole.shape[at] // size), mesh.get_local_rank(dim)
            start, stop = (min(index * each, whole.shape[at]) for index in (rank, rank + 1))
            whole = whole.narrow(at, start, stop - start)
    return whole


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
