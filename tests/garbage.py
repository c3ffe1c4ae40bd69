"""What a test leaves behind is gone before the next one: hooks of backends among it, which look through all objects."""

from __future__ import annotations

import gc
import sys


class Collector:
    """Collects garbage in a few milliseconds: what modules hold, once they are loaded, is not looked through again."""

    def __init__(self) -> None:
        self.loaded = 0

    def collect(self) -> None:
        gc.collect()
        if len(sys.modules) != self.loaded:
            self.loaded = len(sys.modules)
            gc.freeze()
