"""Facts: named properties of a program, each a generator of violations. The verifier is the loop over them.

A fact is what passes require and ensure, and it is checked after every pass. Facts are about structure: what is
gathered, reduced and released, and where. That a program computes the values that were traced is not checked by them.
"""

from zcompile.facts.fact import Fact, Violation, in_training, verify
from zcompile.facts.memory import (
    FETCHED_BEFORE_USE,
    PLACES_DISJOINT,
    RESULTS_OWNED,
    SHARDS_REPLICATED,
    buffers_bounded,
    memory_bounded,
    units_bounded,
)
from zcompile.facts.messages import (
    ACCUMULATED_ONCE,
    GATHERED_AHEAD,
    GATHERED_BEFORE_USE,
    MESSAGES_PACKED,
    REDUCED_ONCE,
    RELEASED_ONCE,
    UNUSED_AFTER_RELEASE,
    UPDATED_ONCE,
    VOLUME_RIGHT,
    WAITS_SUNK,
)
from zcompile.facts.structure import PHASES_SPLIT, REGIONS_OUTLINED, UNITS_ASSIGNED, WELL_FORMED

__all__ = [
    "ACCUMULATED_ONCE",
    "FETCHED_BEFORE_USE",
    "GATHERED_AHEAD",
    "GATHERED_BEFORE_USE",
    "MESSAGES_PACKED",
    "PHASES_SPLIT",
    "PLACES_DISJOINT",
    "REDUCED_ONCE",
    "REGIONS_OUTLINED",
    "RELEASED_ONCE",
    "RESULTS_OWNED",
    "SHARDS_REPLICATED",
    "UNITS_ASSIGNED",
    "UNUSED_AFTER_RELEASE",
    "UPDATED_ONCE",
    "VOLUME_RIGHT",
    "WAITS_SUNK",
    "WELL_FORMED",
    "Fact",
    "Violation",
    "buffers_bounded",
    "in_training",
    "memory_bounded",
    "units_bounded",
    "verify",
]
