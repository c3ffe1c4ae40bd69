"""What the benchmark is to show: ratios that are met, not met, or could not be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.common.configurations import BASELINE, peers
from benchmarks.common.figures import Spread, ratio
from benchmarks.speed.floor import floors
from benchmarks.speed.results import Result

FLOOR = "floor"


@dataclass(frozen=True)
class Target:
    """`subject` takes at most `limit` times what each of `against` takes."""

    where: str
    """The link; on devices `one` or `several` ranks."""
    subject: str
    against: tuple[str, ...]
    """Configurations, or the floor."""
    limit: float
    memory: bool = False
    """Whether peaks of memory are compared, not time."""


@dataclass(frozen=True)
class Outcome:
    """How a target came out: against the strongest of those it is measured against."""

    target: Target
    against: str
    found: Spread | None
    gaps: tuple[str, ...] = ()
    """Of `against`, those without figures."""

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        met = "met" if self.found.median <= self.target.limit else "NOT MET"
        return f"{met}, without {', '.join(self.gaps)}" if self.gaps else met


def stage_name(stage: int) -> str:
    return f"zcompile-{stage}"


FSDP_RESHARDING = ("fsdp2-3", "fsdp2-3-compiled")
FSDP_KEEPING = ("fsdp2-2", "fsdp2-2-compiled")
TARGETS = (
    Target("loopback", "zcompile-3", FSDP_RESHARDING, 0.80),
    Target("loopback", "zcompile-3", ("deepspeed-3",), 0.72),
    *(Target("loopback", stage_name(stage), (BASELINE,), 1.0) for stage in (0, 1, 2)),
    Target("1gbit", "zcompile-3", FSDP_RESHARDING, 0.55),
    Target("1gbit", "zcompile-3", ("deepspeed-3",), 0.60),
    Target("1gbit", "zcompile-2", FSDP_KEEPING, 0.60),
    *(Target("1gbit", stage_name(stage), (FLOOR,), 1.08) for stage in range(4)),
    Target("250mbit", "zcompile-3", ("deepspeed-3",), 0.65),
    Target("250mbit", "zcompile-3", FSDP_RESHARDING, 0.52),
    *(Target("250mbit", stage_name(stage), (BASELINE,), 1.0) for stage in (0, 1, 2)),
    *(
        Target(link, stage_name(stage), peers(stage), 1.0, memory=True)
        for link in ("loopback", "1gbit", "250mbit")
        for stage in range(4)
    ),
)


def outcome(target: Target, result: Result) -> Outcome:
    """Compare in every round of one run."""
    return hardest(target, partial(compared, target, result))


def hardest(target: Target, compared: Callable[[str], Spread | None]) -> Outcome:
    """How it came out against the one of `target.against` that is hardest to beat, by the ratio to each."""
    found = {name: compared(name) for name in target.against}
    measured = {name: figures for name, figures in found.items() if figures}
    gaps = tuple(name for name in found if name not in measured)
    if not measured:
        return Outcome(target, " / ".join(target.against), None, gaps)
    best = max(measured, key=lambda name: measured[name].median)
    return Outcome(target, best, measured[best], gaps)


def compared(target: Target, result: Result, against: str) -> Spread | None:
    """The ratio of the target's subject to one other; None where one of them has no figures."""
    link = result.links.get(target.where)
    subject = link.healthy(target.subject) if link else None
    if link is None or subject is None:
        return None
    if against == FLOOR:
        return ratio(subject.seconds, floors(link, result.parameters, result.cores))
    other = link.healthy(against)
    if other is None:
        return None
    if target.memory:
        quotient = subject.peak / other.peak
        return Spread(quotient, quotient, quotient)
    return ratio(subject.seconds, other.seconds)
