"""Shards a model: replaces every parameter in the module tree by its shard, and frees the full one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zcompile.errors import ModelError, ParameterError
from zcompile.frontend.local_graphs import Local
from zcompile.ir.layout import Layout
from zcompile.model.materialise import Materialiser, trim
from zcompile.model.weights import Weights
from zcompile.runtime.device import is_host
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import ShardMemory, UnitShards
from zcompile.runtime.tensors.placement import ModelParallel, Placing
from zcompile.torch_internals.dtensor import give_up, local_tensor
from zcompile.torch_internals.modules import TensorPlace, parameters_of, tensor_places
from zcompile.torch_internals.pytree import tree_leaves

Retired = dict[int, tuple[nn.Parameter, str]]
"""Parameters from before `compile`, with their names, by `id`."""


@dataclass(frozen=True, slots=True)
class Site:
    """An attribute in the module tree that holds a parameter; a tied parameter has several sites."""

    owner: nn.Module
    key: str
    name: str
    shard: nn.Parameter
    placeholder: nn.Parameter = field(repr=False)
    """Held here while a call is traced or runs: a parameter of the full shape without memory."""
    local: Local | None = None
    """For a tensor-parallel parameter, what graphs receive for it."""


class _Refusing:
    zcompile_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise ParameterError for every use."""
        found = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
        name = getattr(found, "zcompile_name", "a parameter")
        fix = "take it from compiled.parameters(), in the model's code as an attribute of its module, not from a list"
        raise ParameterError(name, "is held from before zcompile.compile, and has neither values nor gradient", fix)


class RetiredParameter(_Refusing, nn.Parameter):
    """A parameter from before `compile`: every use of it raises an error."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredParameter({self.zcompile_name!r})"


class RetiredDTensor(_Refusing, DTensor):
    """A tensor-parallel parameter from before `compile`: every use of it raises an error."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredDTensor({self.zcompile_name!r})"


def retire(parameter: nn.Parameter, name: str) -> None:
    """Make every use of `parameter` raise an error that names it `name`."""
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

    Parameters without values get them unit by unit, or all are read from `weights`: see `zcompile.model.materialise`.
    `parallel`: how the model is divided already. `memory`: the memory for shards. `whole`: the layout of the whole
    model, if this rank keeps only the units of `layout`; initial values do not depend on that.

    Returns the shards by unit, the sites in the module tree, and the parameters that were replaced.

    Raises:
        ModelError: a parameter or buffer gets no values, or `weights` do not fit the model.
    """
    originals = dict(model.named_parameters())
    places = defaultdict[int, list[TensorPlace]](list)
    for place in tensor_places(model.named_modules()):
        places[id(place.held)].append(place)
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
                sites += [Site(at.module, at.key, param.name, shard, placeholder, local) for at in places[id(old)]]
                if shard is not old:
                    retired[id(old)] = (old, param.name)
                if not plain:
                    give_up(full)
            if is_host(communicator.device):
                trim()
        values.place_buffers()
        # Last, so that initialization code never sees a shard, and an error leaves a model on meta unchanged.
        for site in sites:
            parameters_of(site.owner)[site.key] = site.shard
        for old, name in retired.values():
            retire(old, name)
        for buffer in model.buffers():
            communicator.broadcast(buffer)
    return shards, sites, retired


def placeholder_of(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> tuple[nn.Parameter, Local | None]:
    """Return a contiguous parameter with the shape of `param` and freed memory, and None.

    For a DTensor, return a DTensor with the same placements, and the leaf that represents its local part in graphs.
    """
    empty = torch.empty(local_tensor(param).shape, dtype=dtype, device=device)
    empty.untyped_storage().resize_(0)
    leaf = nn.Parameter(empty, requires_grad=param.requires_grad)
    if not isinstance(param, DTensor):
        return leaf, None
    placing = Placing(param.device_mesh, tuple(param.placements), param.shape)
    placeholder = nn.Parameter(placing.place(leaf.detach()), requires_grad=leaf.requires_grad)
    return placeholder, Local(placeholder, leaf)


# -- tensors that can be sharded --------------------------------------------------------------------------------------


_OF_EVERY_CLASS = frozenset(vars(type("Empty", (), {})))
_HARMLESS = _OF_EVERY_CLASS | {"__init__", "__new__", "__repr__", "__annotations__", "__annotate_func__", "__slots__"}


def check_kinds(model: nn.Module) -> None:
    """Raise ModelError for tensor subclasses in `model` with behavior of their own, such as quantized weights.

    Sharding such a tensor would silently turn it into a plain tensor of its dequantized values.
    """
    for name, tensor in _tensors(model):
        check_kind(name, tensor)


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelError if `tensor`, called `name`, is lazy or a tensor subclass with behavior of its own."""
    if is_lazy(tensor):
        fix = "call the plain model with a batch before zcompile.compile, which gives it one"
        raise ModelError(name, "has no shape yet", fix)
    if not isinstance(tensor, DTensor) and (changed := _changed(type(tensor))):
        kind = type(tensor)
        problem = f"is a {kind.__module__}.{kind.__qualname__}, a subclass of Tensor with a {changed} of its own"
        fix = "keep what it consists of in plain buffers (of int8, say, and a scale), and compute with them in forward"
        raise ModelError(name, problem, fix)


def _changed(kind: type[torch.Tensor]) -> str:
    """Return the name of an attribute of Tensor that a class overrides; "" if there is none."""
    for base in kind.__mro__:
        if base in (nn.Parameter, torch.Tensor):
            return ""
        for name in vars(base):
            if name not in _HARMLESS and (hasattr(torch.Tensor, name) or name == "__tensor_flatten__"):
                return name
    return ""


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers and other tensor attributes, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}" if path else key, value
