"""Interception: programs taken at the moment they would be compiled, by tools that only want to see them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from zcompile.ir.program import Program
from zcompile.schedule.decision import Request


class Traced(BaseException):
    """There is a program: nothing is to be compiled.

    No Exception: neither torch.compile, which traces, nor a script that trains is to catch it.
    """

    def __init__(self, program: Program, request: Request) -> None:
        super().__init__("a model was traced")
        self.program, self.request = program, request


_INTERCEPTING: ContextVar[bool] = ContextVar("zcompile_intercepting", default=False)


@contextlib.contextmanager
def intercepting() -> Iterator[None]:
    """Within this, the first compiled model that is called raises `Traced` in place of being compiled and run."""
    wanted = _INTERCEPTING.set(True)
    try:
        yield
    finally:
        _INTERCEPTING.reset(wanted)


def is_intercepting() -> bool:
    """True where programs are only to be seen."""
    return _INTERCEPTING.get()


def offer(program: Program, request: Callable[[], Request]) -> None:
    """A program is about to be compiled as `request` says.

    Raises:
        Traced: somebody only wants to see it.
    """
    if _INTERCEPTING.get():
        raise Traced(program, request())
