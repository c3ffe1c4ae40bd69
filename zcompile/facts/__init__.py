"""Facts: named properties of a program, each with a generator of violations, and the verifier that checks them.

Passes require and ensure facts, which are checked after every pass. Facts are about structure and memory: what is
gathered, reduced and released, and where. That a program computes the traced step is proven in `zcompile.proof`.
"""

from zcompile.facts.fact import Fact, Violation, in_training, verify
from zcompile.facts.memory import (
    OWNED,
    PLACES_DISJOINT,
    RESULTS_OWNED,
    buffers_bounded,
    memory_bounded,
    units_bounded,
)
from zcompile.facts.messages import (
    GATHERED_AHEAD,
    GATHERED_BEFORE_USE,
    MESSAGES_PACKED,
    REDUCED_ONCE,
    RELEASED_ONCE,
    UPDATED_ONCE,
    VOLUME_RIGHT,
    WAITS_SUNK,
)
from zcompile.facts.structure import PHASES_SPLIT, REGIONS_OUTLINED, UNITS_ASSIGNED, WELL_FORMED

__all__ = [
    "GATHERED_AHEAD",
    "GATHERED_BEFORE_USE",
    "MESSAGES_PACKED",
    "OWNED",
    "PHASES_SPLIT",
    "PLACES_DISJOINT",
    "REDUCED_ONCE",
    "REGIONS_OUTLINED",
    "RELEASED_ONCE",
    "RESULTS_OWNED",
    "UNITS_ASSIGNED",
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
