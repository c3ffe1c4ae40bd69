"""The ranks of a mesh with a pipeline axis, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.errors import GroupError
from zcompile.ir.axis import DATA, Axis, AxisKind
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.groups import Communicator, as_one, default_device
from zcompile.runtime.stage_links import StageLinks

PIPELINE = "pp"
"""What the pipeline axis of a mesh is called."""
_KINDS = {PIPELINE: AxisKind.PIPELINE, DATA: AxisKind.SHARD}


def is_pipelined(mesh: DeviceMesh | None) -> bool:
    """True for a mesh with a pipeline axis."""
    return mesh is not None and PIPELINE in (mesh.mesh_dim_names or ())


@dataclass(frozen=True)
class PipelineRanks:
    """Groups of ranks, and the axes that they are along.

    Attributes:
        device: Where tensors are.
        everyone: All ranks that train the model.
        agreement: Of everyone.
        data: The ranks that have the same units.
        links: To the other ranks along the pipeline axis.
        axes: Of the mesh, the outermost first.
    """

    device: torch.device
    everyone: Communicator
    agreement: Agreement
    data: Communicator
    links: StageLinks
    axes: tuple[Axis, ...]

    @property
    def along(self) -> list[int]:
        """The places among everyone of the ranks along the pipeline axis, this one among them."""
        everyone = self.everyone.waits.ranks
        return [everyone.index(rank) for rank in self.links.waits.ranks]

    @classmethod
    def of(cls, mesh: DeviceMesh, device: torch.device) -> PipelineRanks:
        """Those of a mesh that `device_of` takes. Collective."""
        onward, back = _with_data(mesh), _with_data(mesh)
        everyone, data = Communicator(as_one(onward), device), Communicator(onward[DATA], device)
        links = StageLinks(onward[PIPELINE], back[PIPELINE], everyone.waits, data)
        return cls(device, everyone, Agreement(everyone), data, links, _axes(onward))


def device_of(model: nn.Module, mesh: DeviceMesh) -> torch.device:
    """Where a model is trained on a mesh whose dimensions are "pp" and, perhaps, "dp".

    Raises:
        GroupError: it has others, or is for another device than the model's.
    """
    if others := [name for name in mesh.mesh_dim_names or () if name not in _KINDS]:
        problem = f"is {mesh}: a pipeline is not combined with {', '.join(map(repr, others))} so far"
        fix = f"give init_device_mesh({mesh.device_type!r}, (stages, ranks), mesh_dim_names=('pp', 'dp'))"
        raise GroupError("mesh", problem, fix)
    first = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
    device = default_device(mesh) if first is None else first.device
    if device.type != mesh.device_type:
        fix = f"move the model to {mesh.device_type!r}, or make the mesh for {device.type!r}"
        raise GroupError("mesh", f"is for {mesh.device_type!r}, the model is on {device.type!r}", fix)
    return device


def _with_data(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks with groups of its own, and a dimension of data, be it of size 1."""
    names, ranks = tuple(mesh.mesh_dim_names or ()), mesh.mesh
    if DATA not in names:
        names, ranks = (*names, DATA), ranks.unsqueeze(-1)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


def _axes(mesh: DeviceMesh) -> tuple[Axis, ...]:
    axes, stride = list[Axis](), 1
    for name in reversed(mesh.mesh_dim_names or ()):
        size = mesh[name].size()
        axes.insert(0, Axis(name, _KINDS[name], size, stride))
        stride *= size
    return tuple(axes)
