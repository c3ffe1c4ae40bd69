"""Dynamic sizes, and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext  # Dynamo's context of the graph being compiled
from torch._subclasses.fake_tensor import (  # values of traced and parsed programs
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # an `if` on a data-dependent size

__all__ = ["FakeTensor", "FakeTensorMode", "GuardOnDataDependentSymNode"]
"""Names re-exported unchanged from torch."""


def untraced_sizes() -> contextlib.AbstractContextManager[Any]:
    """While a graph is traced: keep arithmetic on dynamic sizes out of the graph."""
    outside: contextlib.AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return outside


def expression_of(size: torch.SymInt) -> Any:
    """A dynamic size as an expression of the sizes of inputs."""
    return size.node.expr


def size_of_expression(expression: Any, *, mode: FakeTensorMode) -> Any:
    """The inverse of `expression_of` in another trace, that of `mode`. Raises ValueError for unknown symbols."""
    known = mode.shape_env.backed_var_to_val if mode.shape_env is not None else {}
    if mode.shape_env is None or not expression.free_symbols <= known.keys():
        raise ValueError(f"{expression} has sizes that are not dynamic here")
    return mode.shape_env.create_symintnode(expression, hint=int(expression.xreplace(known)))


def no_new_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Do not add guards when dynamic sizes are inspected."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    suppressed: contextlib.AbstractContextManager[None] = mode.shape_env.suppress_guards()
    return suppressed


def empty_laid_out(
    shape: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor of this shape and strides, with a storage offset of `offset` elements."""
    if not is_symbolic(offset) and not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride, offset)


def of_fixed_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """While Dynamo compiles: a fake of a tensor new to it, with static sizes; AOTAutograd would make them dynamic."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return tensor
    fake: torch.Tensor = context.fake_mode.from_tensor(tensor, static_shapes=True)
    return fake


def is_symbolic(value: object) -> bool:
    """True for a symbolic (dynamic) size or number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
