"""Modules that compute in their parameters' own dtype within a model of mixed precision: the option `keep_dtype=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zcompile._torch import tree_map_only
from zcompile.model.units import AUTOCAST


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
        args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with torch.autocast(self.device, enabled=False):
            return self.method(*args, **kwargs)

    def _cast(self, argument: torch.Tensor) -> torch.Tensor:
        return argument.to(self.dtype) if argument.dtype in AUTOCAST else argument


def compute_in_own_dtype(module: nn.Module, methods: Iterable[str], device: torch.device) -> None:
    """Let `methods` of a module, whose parameters have one dtype, compute in it, whatever autocast is around them."""
    dtype = next(module.parameters()).dtype
    for name in methods:
        method = getattr(module, name)
        vars(module)[name] = OwnDtype(method, device.type, dtype, method)
