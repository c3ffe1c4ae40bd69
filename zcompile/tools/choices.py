"""What commands choose from, by name. Imports no torch, so that `--help` is there at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

STAGES = (0, 1, 2, 3)
PREFETCHES = (0, 1, 2, 4)
"""Depths that a plan compares."""
CHECKPOINTS = (None, "unit")
"""Settings of `checkpoint=` that a plan compares."""
FLAT = "flat"
SHARDS = (FLAT, "hsdp", "hfsdp", "hpz")
"""What `shard=` says of a mesh of two levels; a test compares these, stages and schedules with the options' own."""
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
OWN = "own"
"""What a dtype is called that is the model's own."""
PIPED = 200
"""Columns where the output is no terminal: no table is wider."""
_FACTORS = {"m": 1e6, "b": 1e9, "t": 1e12}


def nearest_size(name: str, sizes: Iterable[str]) -> str:
    """The advice for a size of a model that there is not, such as "1.3b": the size nearest to it, and all of them."""
    known = {size: _parameters(size) for size in sizes}
    wanted = _parameters(name)
    near = min(known, key=lambda size: abs(math.log(known[size] / wanted))) if wanted else ""
    return (f"did you mean {near!r}? " if near else "") + f"choose from {', '.join(map(repr, known))}"


def _parameters(size: str) -> float:
    """Parameters of a size such as "7.5b"; 0 for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mbt])", size.lower())
    return float(match[1]) * _FACTORS[match[2]] if match else 0.0
