"""Functions to pass to torch.compile, and conversion of its errors to our own."""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zcompile.errors import CaptureError, ZcompileError
from zcompile.torch_internals.dynamo import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    Unsupported,
    UserError,
    patch_dynamo_config,
)
from zcompile.torch_internals.sizes import GuardOnDataDependentSymNode

BREAKS = (Unsupported, UserError, InternalTorchDynamoError, GuardOnDataDependentSymNode, FailOnRecompileLimitHit)
"""Errors of torch.compile, before anything has run, for code that cannot be traced into one graph, or not again."""


def traceable(module: nn.Module, forward: Callable[..., Any], about: Sequence[str]) -> Callable[..., Any]:
    """Return a function that calls `forward` of `module`, to pass to torch.compile; it refuses to run untraced.

    It has its own code object, with a name derived from `about`. torch.compile counts recompilations by code object,
    and remembers by name which sizes have varied: under a shared name, a second model would be traced with dynamic
    sizes although it has seen only one.

    Its first argument is a string; a different string causes a new trace, as torch.compile guards on the comparison.
    Integers in modules are dynamic, like sizes: otherwise torch.compile would trace again at each call with a counter.
    """

    def call(watched: str, /, *args: Any, **kwargs: Any) -> Any:
        assert watched != "nothing", "compared"
        # Parameters are placeholders here: run as plain Python, the model's code would read freed memory.
        if not torch.compiler.is_compiling():
            fix = "leave torch.compile enabled (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, disable)"
            raise CaptureError(type(module).__name__, "its forward was not compiled but called", fix)
        with patch_dynamo_config(allow_unspec_int_on_nn_module=True):  # while it is traced, not in a call
            return forward(*args, **kwargs)

    assert isinstance(call, types.FunctionType), "a plain function"
    digest = hashlib.sha256("\n".join(about).encode(errors="backslashreplace")).hexdigest()[:12]
    code = call.__code__.replace(co_name=f"zcompile_call_{digest}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def autocast(kind: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context for a model that computes in `dtype` on this type of device; none for float32."""
    return contextlib.nullcontext() if dtype in (None, torch.float32) else torch.autocast(kind, dtype=dtype)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Raise our own errors without torch.compile's wrapper around them."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(inner := error.inner_exception, ZcompileError):
            raise inner.with_traceback(None) from inner.__cause__  # drops a hundred lines of the compiler's traceback
        raise
