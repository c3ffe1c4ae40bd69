"""The ranks of a mesh with a pipeline axis, seen from this rank."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.engine.model_runtime import ModelRanks
from zcompile.engine.sharding_plan import data_ranks
from zcompile.errors import AgreementError, GroupError
from zcompile.ir.axis import DATA, Axis, AxisKind
from zcompile.ir.operation import op_of
from zcompile.ir.ops import Receive, Send
from zcompile.ir.program import Program
from zcompile.model.tensor_parallel import check_divided, model_parallel
from zcompile.proof.ranks import check_texts
from zcompile.runtime.agreement import ALIKE, Agreement, first_difference
from zcompile.runtime.groups import (
    SEQUENCE,
    Communicator,
    as_one,
    axes_of_mesh,
    check_inside,
    default_device,
    duplicate_group,
    names_replicas,
    sequence_axes,
    with_sequence,
)
from zcompile.runtime.stage_links import Route, StageLinks
from zcompile.schedule.option_checks import check_dimensions
from zcompile.schedule.options import Options

PIPELINE = "pp"
"""Name of the pipeline dimension of a mesh."""


def is_pipelined(mesh: DeviceMesh | None) -> bool:
    """True for a mesh with a pipeline axis."""
    return mesh is not None and PIPELINE in (mesh.mesh_dim_names or ())


@dataclass(frozen=True)
class PipelineRanks(ModelRanks):
    """The ranks of a mesh with a pipeline axis, which number their runs together.

    Attributes:
        links: Links to the other ranks along the pipeline axis.
        axes: Axes of the mesh, outermost first.
    """

    links: StageLinks
    axes: tuple[Axis, ...]

    @property
    def in_step(self) -> Agreement:
        """The agreement among the ranks that number their runs together: all ranks."""
        return self.everyone

    @property
    def along(self) -> list[int]:
        """The indices, in `everyone`, of the ranks along the pipeline axis, this rank included."""
        everyone = self.everyone.communicator.waits.ranks
        return [everyone.index(rank) for rank in self.links.waits.ranks]

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, device: torch.device, options: Options) -> PipelineRanks:
        """Make the ranks of a mesh that `checked_device` accepts. Collective."""
        tensor = check_divided(model)
        own = _with_data(mesh, tensor)
        shared, sequence = with_sequence(own[_data_names(own, tensor)], options.sequence)
        assert shared is not None, "it is a part of the mesh"
        everyone = Communicator(as_one(own), device)
        data = data_ranks(shared, device, options)
        links = StageLinks(own[PIPELINE], lambda: duplicate_group(own, PIPELINE, device), everyone.waits, data)
        parallel = None
        if tensor is not None:
            outer, _ = with_sequence(mesh[_data_names(mesh, tensor)], options.sequence)
            parallel = model_parallel(model, outer, flat=options.divides_outside)
        axes = (*_axes(own, data.mesh, tensor), *sequence_axes(sequence))
        return cls(data, Agreement(data), Agreement(everyone), parallel, links, axes, sequence=sequence)

    def compare(self, what: str, text: str) -> str:
        """Compare texts of all ranks, and return the first rank's. Collective.

        Texts may differ between the ranks of a tensor-parallel group.

        Raises:
            AgreementError: texts differ; on every rank, with the first different line and its ranks.
        """
        parts = 1
        if self.parallel is not None:  # graphs contain the name of their tensor-parallel group, which differs
            parts = self.parallel.mesh.size()
            text = text.replace(repr(self.parallel.mesh.get_group().group_name), repr(AxisKind.TENSOR.value))
        texts = self.everyone.share(what, text)
        for part in range(parts):
            alike = {rank: one.split("\n") for rank, one in enumerate(texts) if rank % parts == part}
            if difference := first_difference(alike):
                raise AgreementError(what, difference, ALIKE)
        return texts[0]

    def fitting_texts(self, what: str, program: Program) -> list[str]:
        """Check that the communications of all ranks' programs match; returns the programs' texts. Collective.

        Raises:
            AgreementError: communications do not match.
        """
        texts = self.everyone.share(what, program.text(regions=True))
        check_texts(dict(zip(self.everyone.communicator.waits.ranks, texts, strict=True)))
        return texts

    def connect(self, program: Program) -> None:
        """Connect the links by which the programs of all ranks send between stages. Collective."""
        if self.links.blocks:
            return
        own, place = list[Route](), self.links.rank
        own += (Route(place, op_of(node, Send).to) for node in program.nodes(Send))
        own += (Route(op_of(node, Receive).source, place) for node in program.nodes(Receive))
        texts = self.everyone.share("the links between stages", json.dumps(sorted(set(own))))
        self.links.connect(Route(*route) for text in texts for route in json.loads(text))

    def compare_along(self, what: str, text: str, fix: str) -> None:
        """Check that the ranks along each pipeline axis, and of each sequence, have the same text. Collective.

        Raises:
            AgreementError: some differ; raised on every rank.
        """
        texts, found = self.everyone.share(what, text), dict[tuple[int, int], list[int]]()
        columns, parts = len(texts) // self.links.size, 1 if self.parallel is None else self.parallel.mesh.size()
        same = 1 if self.sequence is None else self.sequence.size()
        for rank in range(len(texts)):
            found.setdefault((rank % columns // (parts * same), rank % parts), []).append(rank)
        for along in found.values():
            if len({texts[rank] for rank in along}) > 1:
                axes = "'pp'" if self.sequence is None else "'pp' and 'sp'"
                raise AgreementError(what, f"is not the same on ranks {', '.join(map(str, along))} along {axes}", fix)

    @property
    def first(self) -> bool:
        """True on the ranks whose parameter values the other ranks receive."""
        return self.links.rank == 0 and self.data.rank == 0


def checked_device(model: nn.Module, mesh: DeviceMesh, options: Options) -> torch.device:
    """The device to train on, after checking a mesh with a dimension "pp", and maybe data and tensor parallelism.

    Raises:
        GroupError: the mesh has other dimensions, another order, or another device type than the model.
        ModelError: pipelines do not support the model's tensor parallelism.
        OptionError: options do not fit the data-parallel dimensions.
    """
    tensor, names = check_divided(model), list(mesh.mesh_dim_names or ())
    divides = [SEQUENCE] if options.sequence is not None else []
    data = tuple(name for name in _data_names(mesh, tensor) if name not in divides)
    parts = [*divides, *([] if tensor is None else [_name_of(tensor)])]
    kind = repr(mesh.device_type)
    if data not in ((), (DATA,)) and not (len(data) == 2 and names_replicas(mesh[data])):
        others = [name for name in data if name != DATA]
        problem = f"is {mesh}: a pipeline is not combined with {', '.join(map(repr, others))}"
        fix = f"give init_device_mesh({kind}, (stages, ranks), mesh_dim_names=('pp', 'dp')), or for two levels"
        fix += " (stages, nodes, ranks) with ('pp', 'replicate', 'shard')"
        fix += "; for tensor parallelism call parallelize_module(model, mesh['tp'], ...) first"
        raise GroupError("mesh", problem, fix)
    if names != [PIPELINE, *data, *parts] or (parts and not data):
        known = (PIPELINE, *(data or (DATA,)), *parts)
        sizes = ("stages", *(("ranks",) if len(data) < 2 else ("nodes", "ranks")), *("parts" for _ in parts))
        fix = f"give init_device_mesh({kind}, ({', '.join(sizes)}), mesh_dim_names={known})"
        divided = "" if tensor is None else f" for a model that is parallelized on {tensor}"
        raise GroupError("mesh", f"is {mesh}, which lacks a dimension, or has another order{divided}", fix)
    first = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
    device = default_device(mesh) if first is None else first.device
    if device.type != mesh.device_type:
        fix = f"move the model to {mesh.device_type!r}, or make the mesh for {device.type!r}"
        raise GroupError("mesh", f"is for {mesh.device_type!r}, the model is on {device.type!r}", fix)
    levels = 1 if options.has_one_axis else max(len(data), 1)
    check_dimensions(options.shard, options.outer_dtype, levels)
    if levels > 1:
        check_inside(mesh[data], options.hybrid)
    return device


def _data_names(mesh: DeviceMesh, tensor: DeviceMesh | None) -> tuple[str, ...]:
    """The names of the data-parallel dimensions: all except the pipeline's and the tensor-parallel one."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (PIPELINE, _name_of(tensor)))


def _name_of(tensor: DeviceMesh | None) -> str:
    """The name of the tensor-parallel dimension; empty if there is none."""
    return "" if tensor is None else (tensor.mesh_dim_names or ("tp",))[0]


def _with_data(mesh: DeviceMesh, tensor: DeviceMesh | None) -> DeviceMesh:
    """A mesh of the same ranks with its own groups, and with a data dimension, which may have size 1."""
    names, ranks = tuple(mesh.mesh_dim_names or ()), mesh.mesh
    if not _data_names(mesh, tensor):
        names, ranks = (*names, DATA), ranks.unsqueeze(-1)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


def _axes(mesh: DeviceMesh, data: DeviceMesh, tensor: DeviceMesh | None) -> tuple[Axis, ...]:
    """The axes of a mesh with these data-parallel dimensions, outermost first."""
    stages = mesh[PIPELINE].size()
    return (Axis(PIPELINE, AxisKind.PIPELINE, stages, mesh.size() // stages), *axes_of_mesh(data, tensor))
