"""The front end: functions for torch.compile, and what it raises as errors of our own."""

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
"""What torch.compile raises, before anything has run, where code cannot be traced into one graph, or not once more."""


def traceable(module: nn.Module, forward: Callable[..., Any], about: Sequence[str]) -> Callable[..., Any]:
    """A function that calls `forward` of `module`, to be given to torch.compile; it refuses to run untraced.

    It has a code object of its own, and a name that follows from `about`. torch.compile counts recompilations by code
    object, and remembers by name which sizes have varied: under a name in common, a second model would be traced with
    sizes that vary, though it never saw but one.

    Its first argument is a text: with another one it is traced again, since torch.compile guards on what is compared.
    Integers that modules hold may vary, as sizes do: torch.compile would trace a counter again at each call.
    """

    def call(watched: str, /, *args: Any, **kwargs: Any) -> Any:
        assert watched != "nothing", "compared"
        # Parameters are placeholders here: run as plain Python, the model's code would read memory that is not there.
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
    """What a model is called under that computes in `dtype` on a device of this kind; nothing for float32."""
    return contextlib.nullcontext() if dtype in (None, torch.float32) else torch.autocast(kind, dtype=dtype)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Our own errors out of torch.compile's wrapping."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(inner := error.inner_exception, ZcompileError):
            raise inner.with_traceback(None) from inner.__cause__  # without a hundred lines of the compiler's
        raise
