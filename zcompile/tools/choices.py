"""What commands choose from, by name. Imports no torch, so that `--help` is there at once."""

from __future__ import annotations

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
