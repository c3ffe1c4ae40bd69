"""Dispatch: modes, tensor subclasses, and ways to bypass them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["TorchDispatchMode"]
"""Names re-exported unchanged from torch."""


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide operations from all dispatch modes: from tracers, which use fake tensors, and from the user's modes."""
    outside: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return outside


_STATE = ["requires_grad", "is_leaf", "grad_fn", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"]
STATE = frozenset(getattr(torch.Tensor, name).__get__ for name in _STATE)
"""Functions passed to `__torch_function__` for reads that do not depend on a tensor's values."""
_GRADIENT: Any = torch.Tensor.grad
GET_GRADIENT, SET_GRADIENT = _GRADIENT.__get__, _GRADIENT.__set__
"""The functions passed to it for reads and writes of `.grad`."""


no_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = DisableTorchFunctionSubclass
"""Within this context, `__torch_function__` of tensor subclasses is not called."""


@contextlib.contextmanager
def subclasses_dispatched() -> Iterator[None]:
    """Dispatch operations on DTensors to DTensor, even while torch reads the elements of `torch.tensor([dtensor])`.

    There torch excludes the Python dispatch keys, and would read memory that a DTensor does not have.
    """
    with torch._C._PreserveDispatchKeyGuard():
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def modes_of_user() -> list[TorchDispatchMode]:
    """The active dispatch modes, outermost first; none while torch itself is tracing."""
    found = _get_current_dispatch_mode_stack()
    return [] if any(mode.is_infra_mode() for mode in found) else found


@contextlib.contextmanager
def modes_aside(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Deactivate `modes`, which are all active ones: under any dispatch mode torch.compile compiles nothing.

    Exits and enters them by the base class's methods, since a mode's own methods may reset its state.
    """
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


@contextlib.contextmanager
def modes_back(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Within `modes_aside`, activate the modes again."""
    for mode in modes:
        TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            TorchDispatchMode.__exit__(mode, None, None, None)
