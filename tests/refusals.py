"""What is said of what is refused."""

from __future__ import annotations

from collections.abc import Callable

import zcompile

Kinds = type[Exception] | tuple[type[Exception], ...]


def error_of(act: Callable[[], object], kind: Kinds = zcompile.ZcompileError) -> str:
    """The message of the error of `kind` that `act` ends in, or "" where it ends in none."""
    return typed_error_of(act, kind).partition(": ")[2]


def typed_error_of(act: Callable[[], object], kind: Kinds = zcompile.ZcompileError) -> str:
    """With the error's type before its message."""
    try:
        act()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""
