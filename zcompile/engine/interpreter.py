"""Costs of the Python interpreter while a model is compiled: garbage collection, and memory for frames.

The garbage collector scans millions of objects that are all in use. Frames of functions are in chunks of 16 KiB
(CPython 3.11 and later): a call that does not fit into the last one maps another, and its return unmaps it. So a small
function that a compiler calls a million times at such a boundary makes two system calls and some page faults each time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_SLOTS = 2**15 + 2**12
"""Pointers on the stack of a frame: somewhat over 256 KiB, so that its chunk has 512 KiB and the rest is free."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection inside: the graphs of a deep model are millions of objects in use, scanned in vain each time.

    Measured at 48 blocks: the passes take 2.2 s instead of 4.0 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def old_objects_frozen() -> Iterator[None]:
    """Collections scan only objects created inside, and not all of torch's modules each time.

    Garbage created inside is freed as usual, so memory does not grow; older garbage is freed afterwards. Does nothing
    if objects are frozen already, because thawing is up to whoever froze them; nor if collection is off: asking whether
    objects are frozen counts them all.

    Measured at 48 blocks: a start that finds its step in the cache takes 5.0 s instead of 5.5 s.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def in_large_frame(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `function`; its callees find over 200 KiB for frames, however deep the stack is.

    Measured on one rank that compiles a GPT of two blocks and trains it for two steps, compared with DDP: 2.6 s of
    processor time instead of 4.2 s, and 9,000 page faults instead of 46,000.
    """
    return function(*args, **kwargs)


in_large_frame.__code__ = in_large_frame.__code__.replace(co_stacksize=_SLOTS)
