"""What a test leaves behind is gone before the next one: hooks of backends among it, which look through all objects."""

from __future__ import annotations

import gc
import itertools

MANY = 100_000
"""Objects that stay, as modules and caches do, of which looking through each time would take a while."""


class Collector:
    """Collects garbage in a few milliseconds: what stays is frozen, and looked through again when it is half as much
    more than the last time.
    """

    def __init__(self) -> None:
        self.kept = 0
        """The objects that stayed when all were looked through."""

    def collect(self) -> None:
        gc.collect()
        (many,) = map(len, itertools.starmap(gc.get_objects, [()]))  # no thread runs while all are referenced
        if many <= MANY:
            return
        if (gc.get_freeze_count() + many) * 2 > self.kept * 3:
            gc.unfreeze()  # what was in use then may be garbage now: a mesh, say, with the threads of its groups
            gc.collect()
            gc.freeze()
            self.kept = gc.get_freeze_count()
        gc.freeze()
