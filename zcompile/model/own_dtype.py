"""Modules that compute in their parameters' own dtype within a model of mixed precision: the option `keep_dtype=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zcompile.model.units import AUTOCAST
from zcompile.torch_internals.pytree import tree_leaves, tree_map_only


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
