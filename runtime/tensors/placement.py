"""Placing: how this rank's part of a parameter belongs to the whole tensor, over which meshes.

A parameter of a tensor-parallel model is a DTensor before it is sharded. The part that its mesh gives to this rank is
then divided further over the data-parallel mesh, as a whole parameter would be:

    weight [8, 6], Shard(0)      tensor-parallel rank 0: rows 0..3      1: rows 4..7
                                 data-parallel rank 0:   rows 0, 1         rows 4, 5
                                                    1:   rows 2, 3         rows 6, 7
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from zcompile.ir.axis import AxisKind
from zcompile.ir.layout import Param
from zcompile.runtime.groups import data_axes
from zcompile.runtime.tensors.explained import explain
from zcompile.runtime.tensors.owned import Placement, owner_of, placed, sent_by_owner, set_owner
from zcompile.torch_internals.dtensor import StridedShard, local_tensor, with_local


@dataclass(frozen=True)
class Placing:
    """How local tensors of one shape on the ranks of a mesh make up a tensor of `shape`."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    averaged: int = 1
    """The number of leading mesh dimensions over which gradients are averaged."""
    owner: int | None = None
    """The rank, along the dimension that shards, that owns all of it; None if its rows are divided."""

    @classmethod
    def of(cls, tensor: DTensor, shape: torch.Size | None = None) -> Placing:
        """The placing of a tensor, or of one of another shape that is divided alike."""
        return cls(tensor.device_mesh, tuple(tensor.placements), shape or tensor.shape, owner=owner_of(tensor))

    def place(self, local: torch.Tensor) -> DTensor:
        """`local`, this rank's part, as a DTensor that aliases it, on the device of the mesh or another."""
        made = placed(local, self.mesh, self.placements, self.shape)
        if self.owner is not None:
            set_owner(explain(made, None), self.owner)
        return made

    def unreduced(self) -> Placing:
        """The placing of a gradient before its average, when each rank has all of it."""
        partial = (Partial("avg"),) * self.averaged
        return replace(self, placements=(*partial, *self.placements[self.averaged :]), owner=None)


def along(param: Param, mesh: DeviceMesh) -> Placing:
    """The placing of shards over the data-parallel mesh only."""
    shards = {AxisKind.SHARD: Shard(0)} if param.shards else {}
    placements = tuple(shards.get(kind, Replicate()) for kind in data_axes(mesh).values())
    return Placing(mesh, placements, torch.Size(param.shape), averaged=mesh.ndim, owner=param.owner)


@dataclass(frozen=True)
class ModelParallel:
    """The mesh over which a model was divided before it was sharded; the local parts of its parameters are sharded.

    Args:
        mesh: One-dimensional.
        joint: The data-parallel dimensions, then that of `mesh`.
        ranks: All ranks of `joint` as one dimension.
        divided: Parameters and buffers with different parts or values on the ranks of `mesh`.
    """

    mesh: DeviceMesh
    joint: DeviceMesh
    ranks: DeviceMesh
    divided: frozenset[str]
    data: tuple[AxisKind, ...] = (AxisKind.SHARD,)
    """The kinds of the data-parallel dimensions."""

    def whole(self, parameter: torch.Tensor) -> Placing:
        """The placing of a parameter that data parallelism does not divide."""
        return Placing(self.mesh, self._placements(parameter), parameter.shape, averaged=0)

    def sharded(self, param: Param, parameter: torch.Tensor) -> Placing:
        """The placing of shards of the local part of `parameter`.

        If both meshes divide dim 0, the data-parallel one divides the local part of the other, so its placement is
        strided.
        """
        (outer,) = self._placements(parameter)
        shards: dict[AxisKind, Placement] = {}
        if param.shards:
            strided = outer == Shard(0)
            shards[AxisKind.SHARD] = StridedShard(0, split_factor=self.mesh.size()) if strided else Shard(0)
        data = tuple(shards.get(kind, Replicate()) for kind in self.data)
        return Placing(self.joint, (*data, outer), parameter.shape, averaged=len(data))

    def _placements(self, parameter: torch.Tensor) -> tuple[Placement, ...]:
        """Plain parameters of a tensor-parallel model are replicated over its mesh."""
        return tuple(parameter.placements) if isinstance(parameter, DTensor) else (Replicate(),)


def whole_of(tensor: DTensor, device: torch.device) -> torch.Tensor:
    """All of a tensor on every rank, gathered over the dimensions of its mesh in turn, on `device`. Collective.

    `device`: where the mesh's collectives run.
    """
    if owner_of(tensor) is not None:
        return sent_by_owner(tensor, device)
    tensor = with_local(tensor, local_tensor(tensor).to(device))
    for dim in range(tensor.device_mesh.ndim):
        tensor = tensor.redistribute(
            placements=[Replicate() if i <= dim else p for i, p in enumerate(tensor.placements)]
        )
    return tensor.to_local()
