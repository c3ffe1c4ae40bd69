"""Dispatch: modes, subclasses of tensors, and ways around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = ["TorchDispatchMode"]
"""What is passed on from torch as it is."""


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """No mode sees the operations inside: neither a tracer, whose tensors are not real, nor one of the user's."""
    outside: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return outside


_STATE = ["requires_grad", "is_leaf", "grad", "grad_fn", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"]
STATE = frozenset(getattr(torch.Tensor, name).__get__ for name in _STATE)
"""Functions that `__torch_function__` is called with for reads of what has nothing to do with a tensor's values."""
_GRADIENT: Any = torch.Tensor.grad
SET_GRADIENT = _GRADIENT.__set__
"""That for writes of `.grad`."""


no_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = DisableTorchFunctionSubclass
"""Inside, a tensor subclass's `__torch_function__` is not called."""


@contextlib.contextmanager
def subclasses_dispatched() -> Iterator[None]:
    """Inside, operations on DTensors are DTensor's, also where torch reads numbers for `torch.tensor([number])`.

    There it leaves the classes of tensors out, and would read memory that a DTensor does not have.
    """
    with torch._C._PreserveDispatchKeyGuard():
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


def modes_of_user() -> list[TorchDispatchMode]:
    """The dispatch modes that are active, the outermost first; none where torch's own tracing is among them."""
    found = _get_current_dispatch_mode_stack()
    return [] if any(mode.is_infra_mode() for mode in found) else found


@contextlib.contextmanager
def modes_aside(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Inside, these dispatch modes, all that are active, are not: under any of them torch.compile compiles nothing.

    They are left and entered again as their base class does: their own methods would begin their counts anew.
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
    """Inside `modes_aside`, they are active."""
    for mode in modes:
        TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            TorchDispatchMode.__exit__(mode, None, None, None)
