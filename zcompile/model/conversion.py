"""Converting a sharded model, as by `model.to(torch.bfloat16)`, copying it, and modules that keep their dtype."""

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
    """Return the result of `convert_one` on an empty tensor of each dtype and device that `module` has."""
    kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers())}
    return {kind: convert_one(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}


def check_unhooked(sites: Iterable[Site]) -> None:
    """Raise ParameterError for a parameter with hooks, which a conversion would lose."""
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
    """Convert shards to the dtypes of `layout`, keeping the same parameter objects, and buffers by `convert_one`."""
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
    """Return a copy of `model`, its shards by unit, and its sites.

    `memo`: the memo of `copy.deepcopy`, to which the new shards are added, so that an optimizer that is copied together
    with the model steps them.
    """
    copies = {unit.name: shards[unit.name].copied(unit, communicator, memory) for unit in layout.units}
    new = {name: parameter for unit in copies.values() for name, parameter in unit.parameters.items()}
    memo |= {id(site.shard): new[site.name] for site in sites}
    copied = copy.deepcopy(model, memo)
    tied = {site.name: site.placeholder for site in sites}  # a tied parameter has one placeholder at all its sites
    made = {name: placeholder_of(old, old.dtype, communicator.device) for name, old in tied.items()}
    copied_sites = []
    for site in sites:
        placeholder, local = made[site.name]
        owner = memo[id(site.owner)]
        copied_sites.append(replace(site, owner=owner, shard=new[site.name], placeholder=placeholder, local=local))
    return copied, copies, copied_sites


# -- modules in their own dtype ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnDtype:
    """Wraps a method of a module, such as `forward`: calls it with autocast disabled, with arguments cast to `dtype`.

    It is an attribute of the module instance, as wrappers of `forward` commonly are, and holds a bound method, so that
    the wrapper in a copy of the module calls the copy.
    """

    method: Callable[..., Any]
    device: str
    dtype: torch.dtype
    __wrapped__: Callable[..., Any] = field(repr=False)
    """The method, for `inspect.signature`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Lists and dicts are copied only if a tensor is cast: a method may write to its arguments.
        if any(isinstance(leaf, torch.Tensor) and self._is_cast(leaf) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with torch.autocast(self.device, enabled=False):
            return self.method(*args, **kwargs)

    def _cast(self, argument: torch.Tensor) -> torch.Tensor:
        return argument.to(self.dtype) if self._is_cast(argument) else argument

    def _is_cast(self, argument: torch.Tensor) -> bool:
        return argument.dtype in AUTOCAST and argument.dtype != self.dtype


def compute_in_own_dtype(module: nn.Module, methods: Iterable[str], device: torch.device) -> None:
    """Let `methods` of a module compute in the dtype of its parameters, whatever autocast surrounds the calls.

    All parameters have the same dtype. Overrides of methods of nn.Module, which load and save, are left alone.
    """
    dtype = next(module.parameters()).dtype
    for name in methods:
        if name != "forward" and hasattr(nn.Module, name):
            continue
        method = getattr(module, name)
        vars(module)[name] = OwnDtype(method, device.type, dtype, method)
