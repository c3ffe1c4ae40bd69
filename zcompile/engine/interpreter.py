"""What Python itself does while a model is compiled: it collects garbage, and finds room for frames.

The garbage collector looks through millions of objects that are all in use. Frames of functions are in chunks of 16 KiB
(CPython 3.11 and later): a call that does not fit in the last one maps another, which its return unmaps. So a small
function that a compiler calls a million times right there makes two system calls and some page faults each time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_SLOTS = 2**15 + 2**12
"""Pointers on the stack of a frame: somewhat over 256 KiB, so that its chunk has 512 and leaves the rest free."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection: the graphs of a deep model are millions of objects, all in use, scanned in vain at each one.

    Measured at 48 blocks: the passes take 2.2 s in place of 4.0 s.
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
    """Collections look only at objects that are made within, and not each time at all of torch's modules.

    What is made and becomes garbage within is freed as ever, so that memory does not grow; what was there before is
    freed after. Where objects are frozen already, by the user or around this, nothing is done: thawing is theirs. Nor
    where nothing is collected by itself: to ask whether objects are frozen is to count them all.

    Measured at 48 blocks: a start that finds its step in the cache takes 5.0 s in place of 5.5 s.
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
    """What `function` gives; what it calls finds over 200 KiB for frames, however deep the stack is.

    Measured on one rank that compiles a GPT of two blocks and trains it for two steps, beside DDP: 2.6 s of processor
    time in place of 4.2 s, and 9,000 page faults in place of 46,000.
    """
    return function(*args, **kwargs)


in_large_frame.__code__ = in_large_frame.__code__.replace(co_stacksize=_SLOTS)
