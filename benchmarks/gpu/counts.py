"""What a trace of torch's profiler says of one step: launches, kernels, and how long the device was busy."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.protocol import Counts

Event = Mapping[str, Any]
CALLS = ("cuda_runtime", "cuda_driver")
KERNELS, COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchCooperativeKernel")
GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cuStreamSynchronize", "cudaEventSynchronize", "cuEventSynchronize")
LONGEST = 15


def read(path: Path) -> list[Event]:
    """The events of a trace."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def counts(events: Iterable[Event]) -> Counts | None:
    """What the host called and what the device ran; None where the device was not seen."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            found[event.get("cat", "")].append(event)
    calls = [event for kind in CALLS for event in found[kind]]
    kernels = [event for kind in KERNELS for event in found[kind]]
    copies = [event for kind in COPIES for event in found[kind]]
    if not kernels:
        return None
    return Counts(
        launches=number(calls, LAUNCHES),
        graphs=number(calls, GRAPHS),
        kernels=len(kernels),
        copies=len(copies),
        waits=number(calls, WAITS),
        busy=covered((event["ts"], event["ts"] + event["dur"]) for event in kernels + copies) / 1e6,
        longest=longest(kernels),
    )


def number(calls: Iterable[Event], names: tuple[str, ...]) -> int:
    """How many calls have names that begin so; one call that the runtime and the driver both report counts once."""
    hits = [event for event in calls if event["name"].startswith(names)]
    correlated = {event.get("args", {}).get("correlation", id(event)) for event in hits}
    return len(correlated)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what `spans` cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def longest(kernels: Iterable[Event]) -> list[tuple[str, int, float]]:
    """Kernels by name, those that took most seconds together first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        found[event["name"]].append(event["dur"] / 1e6)
    listed = [(name, len(seconds), sum(seconds)) for name, seconds in found.items()]
    return sorted(listed, key=lambda one: -one[2])[:LONGEST]
