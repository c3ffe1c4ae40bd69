"""The sharding plan of a model: the result of options, a mesh and named parts, before the model is touched."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.engine.calibration import measure
from zcompile.engine.model_runtime import ModelRanks
from zcompile.errors import ModelError, OptionError
from zcompile.ir.axis import Axis
from zcompile.ir.layout import STAGES, Hybrid, Layout
from zcompile.model.sharding import check_kinds
from zcompile.model.tensor_parallel import model_parallel
from zcompile.model.units import UnitChoice, make_layout, match_called
from zcompile.runtime.agreement import Agreement
from zcompile.runtime.device import free_bytes
from zcompile.runtime.groups import (
    Communicator,
    as_one,
    axes_of_mesh,
    check_inside,
    default_device,
    repeats_outside,
    resolve_mesh,
    sequence_axes,
    with_sequence,
)
from zcompile.runtime.tensors.placement import ModelParallel
from zcompile.schedule.option_checks import AUTO, FLAT, check_dimensions, check_gathered
from zcompile.schedule.options import Options
from zcompile.schedule.shard_choice import as_message, choose, estimate, room_in
from zcompile.torch_internals.dtensor import local_tensor


class Parts(NamedTuple):
    """Parts of a model with special treatment: the options of these names."""

    units: UnitChoice | None
    whole: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    keep_dtype: Sequence[str] | None = None


class ShardingPlan:
    """How a model is to be divided, as far as one rank can tell.

    Attributes:
        model: The model.
        options: The options that it is compiled with: those given, with shard="auto" replaced by a choice.
        remarks: Remarks on that choice.
        parallel: How tensor parallelism divides the model; None if it does not.
        sequence: The ranks that divide the tokens of a batch; None if none do.
        data: The data-parallel ranks.
        layout: The units.

    Raises:
        OptionError, ModelError, GroupError: the options do not fit the model or the mesh.
    """

    def __init__(self, model: nn.Module, asked: Options, mesh: DeviceMesh | None, parts: Parts) -> None:
        check_kinds(model)
        mesh, self.sequence = with_sequence(mesh, asked.sequence)
        self.model, self._mesh, self._parts = model, mesh, parts
        self.options, self.remarks = self._settled(asked) if asked.shard == AUTO else (asked, list[str]())
        self.parallel = model_parallel(model, mesh, flat=self.options.divides_outside)
        self.data = self._data_ranks(self.options, self.parallel)
        options = self.options
        check_dimensions(options.shard, options.outer_dtype, self.data.mesh.ndim, whole=bool(parts.whole))
        self.layout = self._layout_over(self.data.mesh, self.options, self.parallel)
        for name in ignored_names(model, self.layout):
            if model.get_parameter(name).is_meta:
                fix = "initialise it before zcompile.compile, or do not ignore it"
                raise OptionError("ignore", f"leaves {name} to you, which is on the meta device", fix)

    def agreed(self) -> tuple[ModelRanks, list[nn.Module]]:
        """The ranks, once they have the same plan; and the modules that compute in their own dtype. Collective.

        Raises:
            AgreementError: on every rank: they have other options, or other models.
            OptionError, GroupError: the options do not support the layout.
        """
        kept = match_called(self.model, self._parts.keep_dtype or ())
        lines = [str(self.options), f"keep_dtype={[*kept]}", *model_lines(self.model, self.layout)]
        ranks = replace(ModelRanks.agreed(self.data, self.parallel, lines), sequence=self.sequence)
        check_inside(self.data.mesh, self.options.hybrid)
        check_gathered(self.layout, self.options.outer_gather_dtype)
        return ranks, [*kept.values()]

    def _data_ranks(self, options: Options, parallel: ModelParallel | None) -> Communicator:
        device = _device(self.model, self._mesh)
        mesh = resolve_mesh(self._mesh, device, None if parallel is None else parallel.mesh)
        return data_ranks(mesh, device, options)

    def _layout_over(self, mesh: DeviceMesh, options: Options, parallel: ModelParallel | None) -> Layout:
        axes = axes_of_mesh(mesh, None if parallel is None else parallel.mesh)
        return layout_of(self.model, (*axes, *sequence_axes(self.sequence)), options, self._parts)

    def _settled(self, asked: Options) -> tuple[Options, list[str]]:
        """See `choose_shard`."""
        parallel = model_parallel(self.model, self._mesh)
        data, held = self._data_ranks(asked, parallel), bytes_of_model(self.model)
        over = partial(self._layout_over, parallel=parallel)
        return choose_shard(asked, data, over, parallel, whole=bool(self._parts.whole), held=held)


def layout_of(model: nn.Module, axes: tuple[Axis, ...], options: Options, parts: Parts) -> Layout:
    """The units of a model over axes."""
    stage, (units, whole, ignore, keep) = STAGES[options.stage], parts
    return make_layout(model, stage, axes, units, options.precision, whole, options.hybrid, ignore, keep)


def data_ranks(mesh: DeviceMesh, device: torch.device, options: Options) -> Communicator:
    """The data-parallel ranks, along the axes that the options distinguish. Collective."""
    return Communicator(as_one(mesh) if options.has_one_axis else mesh, device, options.hybrid)


def bytes_of_model(model: nn.Module) -> int:
    """Bytes of its parameters that have memory here."""
    return sum(local_tensor(param).nbytes for param in model.parameters() if not param.is_meta)


def ignored_names(model: nn.Module, layout: Layout) -> list[str]:
    """The parameters that are in no unit."""
    known = {param.name for param in layout.params}
    return [name for name, _ in model.named_parameters() if name not in known]


def model_lines(model: nn.Module, layout: Layout) -> list[str]:
    """Properties of a model that must be the same on all ranks: units, and buffers."""
    return [*layout.lines, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


def choose_shard(
    asked: Options,
    data: Communicator,
    over: Callable[[DeviceMesh, Options], Layout],
    parallel: ModelParallel | None = None,
    *,
    whole: bool = False,
    held: int = 0,
) -> tuple[Options, list[str]]:
    """Options without shard="auto", and remarks on the choice. Collective if there is a choice.

    The links along both dimensions of the mesh are measured, and all ranks choose together what the two divide.

    Args:
        asked: Options with shard="auto".
        data: The data-parallel ranks, along both dimensions.
        over: Returns the layout over a mesh for other options.
        parallel: How tensor parallelism divides the model; None if it does not.
        whole: True if some parameters have owners.
        held: Bytes of device memory that the model takes now, but not once it is sharded.

    Raises:
        OptionError: no layout goes with the other options.
        AgreementError: ranks have other options, or another mesh or model.
    """
    if not data.outside:
        return replace(asked, shard=None), []
    others = () if parallel is None else (parallel.mesh, parallel.ranks)
    tensor, everyone = (Communicator(one, data.device) for one in others) if others else (None, None)
    candidates = _candidates(asked, divides=not whole and repeats_outside(data.mesh))

    def laid_out(shard: str) -> Layout:
        options = replace(asked, shard=shard)
        return over(as_one(data.mesh) if options.has_one_axis else data.mesh, options)

    lines = [str(asked), *laid_out(candidates[-1]).lines]  # may raise: do it before others wait for this rank
    agreement = Agreement(data)
    agreement.reach("the model", lines)  # ranks without a choice fail here: they would not measure
    hardware = measure(data, asked.dtype or torch.float32, tensor)
    away = asked.offload_parameters is not None
    estimates = [estimate(shard, replace(laid_out(shard), away=away), hardware) for shard in candidates]
    own = json.dumps(as_message(estimates, room_in(free_bytes(data.device) + held, asked.limit)))
    shared = (agreement if everyone is None else Agreement(everyone)).share('the choice of shard="auto"', own)
    choice = choose([json.loads(text) for text in shared])
    return replace(asked, shard=choice.chosen.shard), [str(choice)]


def _candidates(asked: Options, *, divides: bool) -> Sequence[str]:
    """The values of `shard=` that the other options allow. `divides`: both dimensions may divide a parameter.

    Raises:
        OptionError: there are none.
    """
    if asked.outer_gather_dtype is not None and not divides:
        problem = 'is for what "hfsdp" and "hpz" gather, between which shard="auto" cannot choose here'
        fix = 'leave it out; or give no whole=, and a mesh whose first dimension is "replicate"'
        raise OptionError("outer_gather_dtype", problem, fix)
    flat = [FLAT] if asked.outer_dtype is None and asked.outer_gather_dtype is None else []
    repeated = [Hybrid.HSDP] if asked.outer_gather_dtype is None else []
    return [*flat, *repeated, *([Hybrid.HFSDP, Hybrid.HPZ] if divides else [])]


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """The device of the model's parameters, or buffers if it has none; for a model on meta the one it is for."""
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ModelError(name, "has a gradient, which would be lost", "step or zero_grad() before zcompile.compile")
        if not param.is_meta:
            devices.setdefault(param.device, name)
    if next(model.parameters(), None) is None:
        devices = {buffer.device: name for name, buffer in reversed([*model.named_buffers()]) if not buffer.is_meta}
    _refuse_shared_storage(model)
    if len(devices) > 1:
        problem = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise ModelError("the model", f"is on several devices: {problem}", "move it to one: model.to(device)")
    return next(iter(devices)) if devices else default_device(mesh)


def _refuse_shared_storage(model: nn.Module) -> None:
    """Two parameters that share memory are one to an optimizer, and would be two once sharded."""
    places = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, n)
        for n, p in ((name, local_tensor(param)) for name, param in model.named_parameters())
        if p.numel() and not p.is_meta
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            fix = "tie them by one Parameter: b.weight = a.weight"
            raise ModelError(other, f"shares its memory with {name}, but is another Parameter", fix)
