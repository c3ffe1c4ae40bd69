"""What a run on a device found: raw figures, what follows from them, and the targets. Written as JSON as it is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.configurations import Precision, Sizes, peers
from benchmarks.common.figures import Spread, ratio, spread, usable, write_json
from benchmarks.gpu.protocol import BY_NAME, CONFIGURATIONS, PRECISIONS, Built, Inspection, Turn, Warm, reference
from benchmarks.speed.targets import Outcome, Target, hardest

WINDOW = 5
"""Steps whose losses are compared by their mean: what rounding does to one step says little."""
TOLERANCES: dict[str, float] = {"bf16": 3e-2, "tf32": 1e-2, "fp32": 5e-3}
"""How far the mean of a window may be from the reference's, relatively; the first step's loss a tenth of it."""
WAITING = 0.05
"""Share of a step that the device still works once the host has launched all: below it, the host is the limit."""
MIB = 2**20

# Dense TFLOP/s by the makers' data sheets, for accumulation in fp32. The first name that fits counts.
PEAKS: dict[str, dict[Precision, float]] = {
    "H200": {"bf16": 989, "tf32": 494, "fp32": 67},
    "H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"bf16": 835, "tf32": 417, "fp32": 60},
    "H100": {"bf16": 989, "tf32": 494, "fp32": 67},
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"bf16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "tf32": 60, "fp32": 30.3},
}


@dataclass
class Entry:
    """One configuration in one precision."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of a step, by turn (start/number), on the slowest rank."""
    on_device: dict[str, float] = field(default_factory=dict)
    """The same by events in the stream; nothing on the CPU."""
    host: dict[str, float] = field(default_factory=dict)
    """Of the host in a step that begins with an idle device, by turn, on the slowest rank."""
    single: dict[str, float] = field(default_factory=dict)
    """Of such a step as a whole."""
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of each step from the first on, by start, by rank."""
    apart: float | None = None
    """How far the losses are from the reference's at most, relatively."""
    warmup: list[float] = field(default_factory=list)
    """Seconds of the first steps of the first start; the first one compiles."""
    allocated: int = 0
    """Peak of bytes in tensors on the rank that needs most, after the warm-up."""
    reserved: int = 0
    """Peak of bytes that the allocator held."""
    inspection: Inspection | None = None
    gap: str | None = None
    """Why there is no inspection."""
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    """Why its figures are not used."""

    def warmed(self, start: int, answers: Sequence[Warm]) -> None:
        """Take what the ranks said of the first steps of a start."""
        self.warmup = self.warmup or [max(seconds) for seconds in zip(*(a.seconds for a in answers), strict=True)]
        self.losses[str(start)] = [list(answer.losses) for answer in answers]

    def took(self, start: int, number: int, answers: Sequence[Turn]) -> None:
        """Take what the ranks said of one turn."""
        turn = f"{start}/{number}"
        self.seconds[turn] = max(answer.seconds for answer in answers)
        on_device = [answer.on_device for answer in answers if answer.on_device is not None]
        if on_device:
            self.on_device[turn] = max(on_device)
        self.host[turn] = max(answer.host for answer in answers)
        self.single[turn] = max(answer.single for answer in answers)
        self.allocated = max(self.allocated, *(answer.allocated for answer in answers))
        self.reserved = max(self.reserved, *(answer.reserved for answer in answers))
        for losses, answer in zip(self.losses[str(start)], answers, strict=True):
            losses += answer.losses

    @property
    def limit(self) -> str:
        """What a step waits for: the host, if the device is done as soon as all is launched."""
        if not self.single:
            return "-"
        host, whole = statistics.median(self.host.values()), statistics.median(self.single.values())
        return "host" if whole - host < WAITING * whole else "device"


@dataclass
class Part:
    """All configurations in one precision."""

    precision: Precision
    world: int
    left_out: str | None = None
    """Why nothing was measured."""
    steps: int = 0
    """Timed together in a turn."""
    entries: dict[str, Entry] = field(default_factory=dict)

    def healthy(self, name: str) -> Entry | None:
        """The entry whose figures may be used."""
        return usable(self.entries.get(name))

    @property
    def incomplete(self) -> bool:
        """Whether figures are missing, or may not be used."""
        return bool(self.left_out) or any(entry.failure for entry in self.entries.values())

    @property
    def reference(self) -> Entry | None:
        return self.healthy(reference(self.world))


@dataclass
class Result:
    """One run of the benchmark."""

    machine: dict[str, Any]
    options: dict[str, Any]
    sizes: Sizes
    world: int
    device: str = ""
    """Its name."""
    memory: int = 0
    parameters: int = 0
    parts: dict[str, Part] = field(default_factory=dict)

    def built(self, answers: Sequence[Built]) -> None:
        self.device, self.memory, self.parameters = answers[0].device, answers[0].memory, answers[0].parameters

    @property
    def tokens(self) -> int:
        """In a step, on all ranks."""
        return self.sizes.batch * self.sizes.sequence * self.world

    def write(self, path: Path) -> None:
        targets = [{"precision": precision, **asdict(one), "verdict": one.verdict} for precision, one in outcomes(self)]
        write_json(asdict(self) | {"targets": targets}, path)


def flops(sizes: Sizes) -> int:
    """Of the model for one token, forward and backward: products of matrices, causal attention counted by half."""
    blocks = sizes.blocks * (12 * sizes.width**2 + sizes.sequence * sizes.width)
    return 6 * (blocks + sizes.width * sizes.vocabulary)


def utilisation(result: Result, precision: Precision, seconds: float) -> float | None:
    """The share of the device's peak that the model's own operations use; None for a device that is not known."""
    peaks = next((found for name, found in PEAKS.items() if name in result.device), None)
    if peaks is None:
        return None
    return flops(result.sizes) * result.tokens / result.world / seconds / (peaks[precision] * 1e12)


def name_gaps(part: Part) -> None:
    """Say of configurations that nothing is known of why that is so."""
    for entry in part.entries.values():
        if not entry.seconds and not entry.failure:
            entry.failure = "it had no turn before the end"


def fail_other_losses(part: Part) -> None:
    """Mark configurations whose losses are not those of the reference, or of the first one there is without it.

    All starts train from the same values on the same data. Ranks that do not communicate train other models than those
    that do, so beyond a world of one they share the first step only.
    """
    order = [reference(part.world), *(c.name for c in CONFIGURATIONS if part.world == 1 or c.communicates)]
    losses = next((part.entries[name].losses for name in order if part.healthy(name)), None)
    if not losses:
        return
    right = next(iter(losses.values()))
    tolerance = TOLERANCES[part.precision]
    for name, entry in part.entries.items():
        if entry.failure or not entry.losses:
            continue
        whole = part.world == 1 or BY_NAME[name].communicates
        mine, theirs = [rank for start in entry.losses.values() for rank in start], right * len(entry.losses)
        first = apart(mine, theirs, steps=1)
        entry.apart = apart(mine, theirs) if whole else first
        for found, allowed, where in ((first, tolerance / 10, "in the first step"), (entry.apart, tolerance, "later")):
            if not found <= allowed:  # so that a nan fails
                entry.failure = f"other losses {where}: {found:.2%} apart, allowed are {allowed:.2%}"
                break


def apart(losses: Sequence[list[float]], right: Sequence[list[float]], steps: int | None = None) -> float:
    """The largest relative distance of two means of `WINDOW` steps, or of the first `steps`; nan if one is nan.

    Only steps that both have trained count.
    """
    pairs = [list(zip(ours, others, strict=False))[:steps] for ours, others in zip(losses, right, strict=True)]
    found = [
        abs(mine - theirs) / abs(theirs)
        for pair in pairs
        for mine, theirs in zip(*(means(side) for side in zip(*pair, strict=True)), strict=True)
    ]
    return float("nan") if any(one != one for one in found) else max(found, default=0.0)


def means(losses: Sequence[float]) -> list[float]:
    """Of `WINDOW` losses each; the last may be of fewer."""
    return [statistics.fmean(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


OURS = tuple(c for c in CONFIGURATIONS if c.ours)
TARGETS = (
    *(Target("one", c.name, ("compile",), 1.02) for c in OURS),
    *(Target("one", c.name, ("compile",), 1.0, memory=True) for c in OURS),
    *(Target("several", c.name, peers(c.stage, CONFIGURATIONS), 1.0) for c in OURS),
    *(Target("several", c.name, peers(c.stage, CONFIGURATIONS), 1.0, memory=True) for c in OURS),
)


def outcomes(result: Result) -> list[tuple[str, Outcome]]:
    """Of all targets whose subject was asked for, by precision."""
    world = "one" if result.world == 1 else "several"
    wanted = [target for target in TARGETS if target.where == world]
    parts = [result.parts[precision] for precision in PRECISIONS if precision in result.parts]
    return [(part.precision, outcome(target, part)) for part in parts for target in wanted
            if target.subject in part.entries]  # fmt: skip


def outcome(target: Target, part: Part) -> Outcome:
    """In one precision."""
    return hardest(target, partial(quotient, target, part))


def quotient(target: Target, part: Part, against: str) -> Spread | None:
    subject, other = part.healthy(target.subject), part.healthy(against)
    if subject is None or other is None:
        return None
    if target.memory:
        return spread([round(subject.allocated / MIB) / max(1, round(other.allocated / MIB))])
    return ratio(subject.seconds, other.seconds)
