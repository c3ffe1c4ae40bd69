"""Sharding a model: every parameter replaced by its shard in the module tree, and the full one freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.errors import ParameterError
from zcompile.frontend.local_graphs import Local
from zcompile.ir.layout import Layout
from zcompile.model.materialise import Materialiser, trim
from zcompile.model.weights import Weights
from zcompile.runtime.device import is_host
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import ShardMemory, UnitShards
from zcompile.runtime.tensors.placement import ModelParallel, Placing
from zcompile.torch_internals.dtensor import give_up, local_tensor
from zcompile.torch_internals.modules import parameters_of
from zcompile.torch_internals.pytree import tree_leaves

Retired = dict[int, tuple[nn.Parameter, str]]
"""Parameters from before `compile`, with their names, by identity."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the module tree that holds a parameter; a tied parameter has several."""

    owner: nn.Module
    key: str
    name: str
    shard: nn.Parameter
    placeholder: nn.Parameter = field(repr=False)
    """What stands here while a call runs: the full parameter's shape without memory, for the tracer to see."""
    local: Local | None = None
    """What graphs are given for it, of a tensor-parallel parameter."""


class _Refusing:
    zcompile_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse every use.

        Raises:
            ParameterError: always.
        """
        found = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
        name = getattr(found, "zcompile_name", "a parameter")
        fix = "take it from compiled.parameters(), in the model's code as an attribute of its module, not from a list"
        raise ParameterError(name, "is held from before zcompile.compile, and has neither values nor gradient", fix)


class RetiredParameter(_Refusing, nn.Parameter):
    """A parameter from before `compile`: whoever still holds it is told, whatever he does with it."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredParameter({self.zcompile_name!r})"


class RetiredDTensor(_Refusing, DTensor):
    """The same of a tensor-parallel parameter."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredDTensor({self.zcompile_name!r})"


def retire(parameter: nn.Parameter, name: str) -> None:
    """Let every use of `parameter` be an error that says `name`."""
    kinds: dict[type[Any], type[Any]] = {nn.Parameter: RetiredParameter, DTensor: RetiredDTensor}
    if (kind := kinds.get(type(parameter))) is not None:
        parameter.zcompile_name = name  # type: ignore[attr-defined]
        parameter.__class__ = kind


def shard_model(
    model: nn.Module,
    layout: Layout,
    communicator: Communicator,
    weights: Weights | None = None,
    parallel: ModelParallel | None = None,
    memory: ShardMemory | None = None,
    whole: Layout | None = None,
) -> tuple[dict[str, UnitShards], list[Site], Retired]:
    """Replace every parameter of `model` by its shard, with rank 0's values, and free the full one. Collective.

    What has no values yet gets them unit by unit, or all is read from `weights`: see `zcompile.model.materialise`.
    `parallel`: over what the model is divided already. `memory`: where shards are to be. `whole`: the layout of all of
    the model, if this rank is to have the units of `layout` alone; the values that it starts from are the same then.

    Returns the shards by unit, the places in the module tree, and the parameters that were replaced.

    Raises:
        ModelError: a parameter or buffer gets no values, or `weights` do not fit the model.
    """
    originals = dict(model.named_parameters())
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, registered in parameters_of(module).items():
            if registered is not None:
                places.setdefault(id(registered), []).append((module, key))
    shards: dict[str, UnitShards] = {}
    sites: list[Site] = []
    retired: Retired = {}
    with torch.no_grad():
        values = Materialiser(model, whole or layout, communicator, weights)
        for unit in (whole or layout).units:
            if not layout.has_unit(unit.name):
                values.skip(unit)
                continue
            unit = layout.unit(unit.name)
            shards[unit.name] = held = UnitShards(unit, communicator, memory)
            for param, full in values.full(unit):
                old = originals[param.name]
                plain = not layout.stage.optimizer_sharded
                shard = (held.adopt_plain if plain else held.adopt)(param, full, parallel)
                placeholder, local = placeholder_of(full, param.full_dtype, full.device)
                sites += [Site(owner, key, param.name, shard, placeholder, local) for owner, key in places[id(old)]]
                if shard is not old:
                    retired[id(old)] = (old, param.name)
                if not plain:
                    give_up(full)
            if is_host(communicator.device):
                trim()
        values.place_buffers()
        # Last: the model's code, while it gives values, never meets a shard, and an error leaves meta as it was.
        for site in sites:
            parameters_of(site.owner)[site.key] = site.shard
        for old, name in retired.values():
            retire(old, name)
        for buffer in model.buffers():
            communicator.broadcast(buffer)
    return shards, sites, retired


def placeholder_of(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> tuple[nn.Parameter, Local | None]:
    """A parameter shaped like `param`, contiguous as gathered ones are, whose memory is freed at once.

    Of a DTensor it is one, laid out alike, and comes with the leaf that its local part is.
    """
    empty = torch.empty(local_tensor(param).shape, dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    leaf = nn.Parameter(empty, requires_grad=param.requires_grad)
    if not isinstance(param, DTensor):
        return leaf, None
    placing = Placing(param.device_mesh, tuple(param.placements), param.shape)
    placeholder = nn.Parameter(placing.place(leaf.detach()), requires_grad=leaf.requires_grad)
    return placeholder, Local(placeholder, leaf)
