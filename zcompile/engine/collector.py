"""Python's garbage collector while a model is compiled: it looks through millions of objects that are all in use."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
    freed after. Where objects are frozen already, by the user or around this, nothing is done: thawing is theirs.

    Measured at 48 blocks: a start that finds its step in the cache takes 5.0 s in place of 5.5 s.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
