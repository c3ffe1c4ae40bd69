"""What the command and its workers say to each other over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.configurations import Configuration

Device = Literal["cuda", "cpu"]
Precision = Literal["bf16", "tf32", "fp32"]


@dataclass(frozen=True)
class Sizes:
    """The model and the batch; the defaults make 33.7 million parameters."""

    blocks: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    sequence: int = 256
    batch: int = 4
    """Sequences in a step on each rank."""


@dataclass(frozen=True)
class Start:
    """The first message to a worker: who it is and what it trains."""

    rank: int
    world: int
    configuration: Configuration
    sizes: Sizes
    seed: int
    store: Path
    """A file through which the ranks find each other, whatever namespaces they are in."""
    timeout: float
    """Seconds after which a rank gives up waiting for another."""
    warmup: int = 0
    """Steps before the first answer: they compile, and fill caches and optimizer state."""
    device: Device = "cpu"
    precision: Precision = "fp32"
    rate: float = 3e-4
    """What the optimizer learns at."""


@dataclass(frozen=True)
class Run:
    """Train this many steps, starting together."""

    steps: int


@dataclass(frozen=True)
class Trace:
    """Train one step under the profiler; rank 0 writes what it saw there."""

    path: Path


@dataclass(frozen=True)
class Weigh:
    """Train this many steps, and count the live bytes of the last (`benchmarks.live_bytes`)."""

    steps: int


@dataclass(frozen=True)
class Weighed:
    """Bytes of a rank: alive before the step, and at most in it; what was there before the model is left out."""

    state: int
    peak: int


@dataclass(frozen=True)
class Turn:
    """Steps that a rank trained."""

    seconds: list[float]
    """One figure a step, since the end of the one before."""
    losses: list[float]
    cpu: float
    """Seconds of processor time of all threads of the rank."""
    peak: int
    """Largest resident memory of the process in bytes, since it began or, after its first answer, since that."""


@dataclass(frozen=True)
class Ready:
    """The answer to Start: the steps of the warm-up, and what was trained."""

    warmup: Turn
    parameters: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """To the ends of a line: send this many bytes to the other end and receive as many, both at once."""

    nbytes: int


@dataclass(frozen=True)
class Failed:
    """The answer of a worker that cannot go on."""

    reason: str
