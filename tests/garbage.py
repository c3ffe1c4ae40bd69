"""What a test leaves behind is gone before the next one: hooks of backends among it, which look through all objects."""

from __future__ import annotations

import gc
import sys
import time

LONG = 0.02
"""Processor seconds of a collection that has looked through a lot that stays, such as a cache."""


class Collector:
    """Collects garbage in a few milliseconds: what modules and caches hold is looked through once."""

    def __init__(self) -> None:
        self.loaded = 0

    def collect(self) -> None:
        started = time.process_time()
        gc.collect()
        if len(sys.modules) != self.loaded or time.process_time() - started > LONG:
            self.loaded = len(sys.modules)
            gc.unfreeze()  # what was in use then may be garbage now: a mesh, say, with the threads of its groups
            gc.collect()
            gc.freeze()
