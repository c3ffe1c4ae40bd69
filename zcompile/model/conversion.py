"""Conversions of a sharded model, as by `model.to(torch.bfloat16)`, its copies, and modules that keep their dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zcompile.errors import ParameterError
from zcompile.ir.layout import Layout
from zcompile.model.sharding import Site, placeholder_of
from zcompile.model.units import AUTOCAST
from zcompile.runtime.groups import Communicator
from zcompile.runtime.shards import ShardMemory, UnitShards
from zcompile.torch_internals.autograd import post_accumulate_hooks
from zcompile.torch_internals.modules import with_gradient_hooks
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only


def kinds_made(
    module: nn.Module, convert_one: Callable[[torch.Tensor], torch.Tensor]
) -> dict[tuple[torch.dtype, torch.device], torch.Tensor]:
    """What `convert_one` gives for an empty tensor of each kind that `module` has."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    return {kind: convert_one(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}


def check_unhooked(sites: Iterable[Site]) -> None:
    """Raise ParameterError for a parameter with hooks, which its conversion would lose."""
    for site in sites:
        if with_gradient_hooks([site.shard]) or post_accumulate_hooks(site.shard):
            problem = "has hooks on its gradient, which a conversion would lose"
            raise ParameterError(site.name, problem, "convert the model first, and register them then")


def convert(
    model: nn.Module,
    layout: Layout,
    shards: Mapping[str, UnitShards],
    sites: Iterable[Site],
    convert_one: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, UnitShards]:
    """Shards in the dtypes of `layout`, under the same parameters, and buffers as `convert_one` gives them."""
    made = {}
    for unit in layout.units:
        old = shards[unit.name]
        made[unit.name] = new = old.copied(unit, old.communicator, old.memory)
        new.take_place_of(old)
    for site in sites:
        empty, _ = placeholder_of(site.placeholder, layout.param(site.name).full_dtype, site.placeholder.device)
        site.placeholder.data = empty.data
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, convert_one(buffer))
    return made


def copy_model(
    model: nn.Module,
    layout: Layout,
    shards: Mapping[str, UnitShards],
    sites: Sequence[Site],
    communicator: Communicator,
    memory: ShardMemory,
    memo: dict[int, Any],
) -> tuple[nn.Module, dict[str, UnitShards], list[Site]]:
    """A copy of `model`, its shards by unit, and the places that hold them.

    `memo` is that of `copy.deepcopy`, which is to know of the new shards, too: an optimizer that is copied with the
    model steps these.
    """
    copies = {unit.name: shards[unit.name].copied(unit, communicator, memory) for unit in layout.units}
    new = {name: parameter for unit in copies.values() for name, parameter in unit.parameters.items()}
    memo |= {id(site.shard): new[site.name] for site in sites}
    copied = copy.deepcopy(model, memo)
    tied = {site.name: site.placeholder for site in sites}  # one for all places of a parameter
    made = {name: placeholder_of(one, one.dtype, communicator.device) for name, one in tied.items()}
    places = []
    for site in sites:
        placeholder, local = made[site.name]
        owner = memo[id(site.owner)]
        places.append(replace(site, owner=owner, shard=new[site.name], placeholder=placeholder, local=local))
    return copied, copies, places


# -- modules in their own dtype ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnDtype:
    """Stands in a module for a method, `forward` too: calls it outside of autocast, with arguments cast to `dtype`.

    An attribute of the instance, as wrappers of forward commonly are. It holds a bound method, so that a copy of the
    module has one that calls the copy.
    """

    method: Callable[..., Any]
    device: str
    dtype: torch.dtype
    __wrapped__: Callable[..., Any] = field(repr=False)
    """For inspect.signature."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Lists and dicts among them are copied only where a tensor is cast: a method may write to what it is given.
        if any(isinstance(one, torch.Tensor) and self._is_cast(one) for one in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with torch.autocast(self.device, enabled=False):
            return self.method(*args, **kwargs)

    def _cast(self, argument: torch.Tensor) -> torch.Tensor:
        return argument.to(self.dtype) if self._is_cast(argument) else argument

    def _is_cast(self, argument: torch.Tensor) -> bool:
        return argument.dtype in AUTOCAST and argument.dtype != self.dtype


def compute_in_own_dtype(module: nn.Module, methods: Iterable[str], device: torch.device) -> None:
    """Let `methods` of a module, whose parameters have one dtype, compute in it, whatever autocast is around them.

    Those in the place of nn.Module's own, which load and save, compute nothing.
    """
    dtype = next(module.parameters()).dtype
    for name in methods:
        if name != "forward" and hasattr(nn.Module, name):
            continue
        method = getattr(module, name)
        vars(module)[name] = OwnDtype(method, device.type, dtype, method)
