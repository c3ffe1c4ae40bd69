"""What a run found: raw figures, and what follows from them. Written as JSON as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.configurations import BASELINE, BY_NAME, CONFIGURATIONS
from benchmarks.common.figures import usable, write_json
from benchmarks.common.protocol import Ready, Turn
from benchmarks.speed.nodes import NodesResult

TOLERANCE = 1e-3
"""How far a loss may be from the baseline's, relatively: rounding differs between eager and compiled kernels."""


@dataclass
class Entry:
    """One configuration over one link."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of a step, by turn (group/round): the mean over the turn's steps on the slower rank."""
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of each step, by turn, of each rank."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time of a step, both ranks together, by turn."""
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    """Of each step from the first on, by group, by rank."""
    peak: int = 0
    """Largest resident memory of a rank in bytes while it trained after the warm-up."""
    peak_start: int = 0
    """The same since its process began: importing, building, compiling."""
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    """Why its figures are not used."""
    gaps: list[str] = field(default_factory=list)
    """Why it has fewer turns than others."""

    def began(self, group: int, answers: list[Ready]) -> None:
        """Take what the ranks said of their warm-up in a group."""
        self.losses[str(group)] = [list(answer.warmup.losses) for answer in answers]
        self.peak_start = max(self.peak_start, *(answer.warmup.peak for answer in answers))
        self.versions = answers[0].versions
        self._go_on()

    def took(self, turn: str, answers: list[Turn]) -> None:
        """Take what the ranks said of one turn."""
        count = len(answers[0].seconds)
        self.seconds[turn] = max(sum(answer.seconds) for answer in answers) / count
        self.steps[turn] = [answer.seconds for answer in answers]
        self.cpu[turn] = sum(answer.cpu for answer in answers) / count
        self.peak = max(self.peak, *(answer.peak for answer in answers))
        for losses, answer in zip(self.losses[group_of(turn)], answers, strict=True):
            losses += answer.losses

    def settle(self, group: int) -> None:
        """Let a failure cost what was measured in this group only, for one that is in several."""
        if self.failure:
            self.seconds = {turn: seconds for turn, seconds in self.seconds.items() if group_of(turn) != str(group)}
            self.losses.pop(str(group), None)
            if self.seconds:
                self._go_on()

    def _go_on(self) -> None:
        """There are figures from other starts: what failed is a gap, no failure."""
        self.gaps += [self.failure] if self.failure else []
        self.failure = None


def group_of(turn: str) -> str:
    """The group that a turn (group/round) belongs to."""
    return turn.partition("/")[0]


@dataclass
class Line:
    """The link itself, measured in each round: bytes per second in each direction, both directions at once."""

    rate: dict[str, float] = field(default_factory=dict)
    moving: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time, of the whole machine, for each byte that both ends send and receive."""
    failure: str | None = None
    """Why it is not measured any further; without it there is no floor."""


@dataclass
class LinkResult:
    """All configurations over one link."""

    left_out: str | None = None
    """Why this link was not measured."""
    entries: dict[str, Entry] = field(default_factory=dict)
    line: Line = field(default_factory=Line)

    def healthy(self, name: str) -> Entry | None:
        """The entry whose figures may be used."""
        return usable(self.entries.get(name))


@dataclass
class Result:
    """One run of the benchmark."""

    machine: dict[str, Any]
    options: dict[str, Any]
    cores: int
    parameters: int = 0
    links: dict[str, LinkResult] = field(default_factory=dict)
    nodes: dict[str, NodesResult] = field(default_factory=dict)
    """Two nodes of two ranks, by the link between them."""

    def write(self, path: Path) -> None:
        write_json(self, path)


def fail_other_losses(result: LinkResult, tolerance: float = TOLERANCE) -> None:
    """Mark configurations whose losses are not those of the baseline, or of the first one there is without it.

    All groups train from the same values on the same data. Ranks that do not communicate are held against it in their
    first step only: after that they train other models.
    """
    order = [BASELINE, *(c.name for c in CONFIGURATIONS if c.communicates), *result.entries]
    reference = next((result.entries[name] for name in order if result.healthy(name)), None)
    if reference is None:
        return
    right = next(iter(reference.losses.values()))
    for name, entry in result.entries.items():
        steps = None if BY_NAME[name].communicates else 1
        if not entry.failure and (found := first_difference(entry, right, steps, tolerance)):
            entry.failure = found


def first_difference(entry: Entry, right: list[list[float]], steps: int | None, tolerance: float) -> str | None:
    """Where the losses of the first `steps` steps, in any group, part from the right ones of each rank, in words."""
    for losses in entry.losses.values():
        for rank, (mine, theirs) in enumerate(zip(losses, right, strict=True)):
            for step, (loss, other) in enumerate(zip(mine[:steps], theirs, strict=False)):
                if not abs(loss - other) <= tolerance * abs(other):  # so that a nan differs
                    return f"other losses: {loss:.5g} where {other:.5g} is right, step {step}, rank {rank}"
    return None
