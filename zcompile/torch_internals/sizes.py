"""Sizes that vary, and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext  # a graph compiled again for other parameters
from torch._subclasses.fake_tensor import (  # values of traced and of parsed programs
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # an `if` on a size of the data's own

__all__ = ["FakeTensor", "FakeTensorMode", "GuardOnDataDependentSymNode"]
"""What is passed on from torch as it is."""


def untraced_sizes() -> contextlib.AbstractContextManager[Any]:
    """While a graph is traced: what is done with varying sizes inside is no operation of the graph."""
    outside: contextlib.AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return outside


def expression_of(size: torch.SymInt) -> Any:
    """A size that varies, as an expression of sizes of inputs."""
    return size.node.expr


def size_of_expression(expression: Any, *, mode: FakeTensorMode) -> Any:
    """The size of `expression_of` in another run of the tracer, that of `mode`; raise ValueError for unknown sizes."""
    known = mode.shape_env.backed_var_to_val if mode.shape_env is not None else {}
    if mode.shape_env is None or not expression.free_symbols <= known.keys():
        raise ValueError(f"{expression} is of sizes that do not vary here")
    return mode.shape_env.create_symintnode(expression, hint=int(expression.xreplace(known)))


def no_new_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Within, what is looked at of sizes that vary says nothing of which the traced code is for."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    suppressed: contextlib.AbstractContextManager[None] = mode.shape_env.suppress_guards()
    return suppressed


def empty_laid_out(
    shape: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor of this shape and strides, which begins `offset` elements into its memory."""
    if not is_symbolic(offset) and not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride, offset)


def of_fixed_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """While Dynamo compiles: a fake of a tensor that it has not seen. AOTAutograd's own would have sizes that vary."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return tensor
    fake: torch.Tensor = context.fake_mode.from_tensor(tensor, static_shapes=True)
    return fake


def is_symbolic(value: object) -> bool:
    """True for a size that varies between runs."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
