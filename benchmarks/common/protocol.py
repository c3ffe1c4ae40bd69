"""What commands say to the workers that train configurations, and what these answer; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.configurations import Configuration, Device, Precision, Sizes


@dataclass(frozen=True)
class Start:
    """What a worker trains, and with whom."""

    configuration: Configuration
    world: int
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
    rank: int = 0
    """Which each knows by itself."""


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
    """The first answer: the steps of the warm-up, and what was trained."""

    warmup: Turn
    parameters: int
    versions: dict[str, str] = field(default_factory=dict)
