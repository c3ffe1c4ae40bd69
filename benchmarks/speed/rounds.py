"""Configurations take turns: all of a group are alive at once, and in each round each of them trains a few steps."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.common.configurations import Configuration, Sizes
from benchmarks.common.links import End
from benchmarks.common.protocol import Start
from benchmarks.common.ranks import Team, TeamError
from benchmarks.speed.floor import RANKS, traffic
from benchmarks.speed.results import Entry, Line, LinkResult, Result

T = TypeVar("T")
Say = Callable[[str], None]
LINE = "line"


class Failing(Protocol):
    """What is known of a configuration."""

    failure: str | None


@dataclass(frozen=True)
class Plan:
    """How a run is measured."""

    output: Path
    sizes: Sizes = field(default_factory=Sizes)
    starts: int = 2
    rounds: int = 3
    steps: int = 2
    warmup: int = 3
    seed: int = 0
    timeout: float = 300.0
    traces: bool = True


@dataclass(frozen=True)
class Place:
    """Where a group is measured: over which link, under which name, with which files."""

    link: str
    group: int
    ends: tuple[End, End]
    folder: Path
    """A folder of its own for the files through which ranks meet."""

    def logs(self, plan: Plan, name: str) -> Path:
        folder = plan.output / "logs" / self.link
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def measure(place: Place, group: Sequence[Configuration], plan: Plan, result: Result, say: Say) -> None:
    """Start the processes of `group`, let them take turns, and add what they find to `result`."""
    link = result.links[place.link]
    with ExitStack() as stack:
        line = stack.enter_context(line_between(place, plan))
        teams: dict[str, Team] = {}
        for configuration in shuffled(group, f"{plan.seed} start {place.group}"):
            entry = link.entries.setdefault(configuration.name, Entry())
            say(f"{configuration.name}: starting, compiling, {plan.warmup} steps to warm up")
            with failures_of(configuration.name, entry, teams, say):
                team = stack.enter_context(trained(place, configuration, plan))
                answers = team.hear()
                entry.began(place.group, answers)
                teams[configuration.name] = team
                result.parameters = answers[0].parameters
        for turn in turns(place, plan):
            say(f"round {turn}: {', '.join(teams)}")
            take_turns(turn, teams, line, link, plan, result.parameters, say)
        if plan.traces:
            trace(place, teams, link, plan, say)
    for configuration in group:
        link.entries[configuration.name].settle(place.group)


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """`items` in an order that `seed` decides."""
    return random.Random(seed).sample(items, len(items))


def turns(place: Place, plan: Plan) -> Iterator[str]:
    """The names of the rounds of a group."""
    return (f"{place.group}/{number}" for number in range(plan.rounds))


@contextmanager
def failures_of(name: str, entry: Failing, teams: dict[str, Team], say: Say) -> Iterator[None]:
    """Write down what ends a configuration, and go on without it."""
    try:
        yield
    except (TeamError, OSError) as error:  # an OSError: no memory for another process
        entry.failure = str(error)
        teams.pop(name, None)
        say(f"{name} FAILED: {error}")


def trained(place: Place, configuration: Configuration, plan: Plan) -> Team:
    """The two ranks of a configuration, told to start."""
    team = Team("benchmarks.common.worker:Worker", place.ends, place.logs(plan, configuration.name), plan.timeout)
    store = place.folder / configuration.name
    team.begin(Start(configuration, RANKS, plan.sizes, plan.seed, store, plan.timeout, plan.warmup))
    return team


@contextmanager
def line_between(place: Place, plan: Plan) -> Iterator[Team]:
    """Two processes that do nothing but exchange bytes, once they have found each other."""
    with Team("benchmarks.speed.line:Line", place.ends, place.logs(plan, LINE), plan.timeout) as team:
        team.begin(place.ends[0].address, place.folder / LINE)
        yield team


def take_turns(
    turn: str, teams: dict[str, Team], line: Team, link: LinkResult, plan: Plan, parameters: int, say: Say
) -> None:
    """One round: the line, then every configuration, in an order of its own that the seed decides."""
    exchange(turn, line, link.line, traffic(parameters), say)
    for name in shuffled(sorted(teams), f"{plan.seed} {turn}"):
        with failures_of(name, link.entries[name], teams, say):
            link.entries[name].took(turn, teams[name].ask("run", plan.steps))


def exchange(turn: str, team: Team, line: Line, nbytes: int, say: Say) -> None:
    """Measure the rate of the line and the processor time of moving bytes over it, unless it has failed before."""
    if line.failure:
        return
    busy = busy_seconds()
    try:
        seconds = max(team.ask("exchange", nbytes))
    except TeamError as error:
        line.failure = str(error)
        say(f"no floor, the line FAILED: {error}")
        return
    line.rate[turn] = nbytes / seconds
    line.moving[turn] = (busy_seconds() - busy) / nbytes


def busy_seconds() -> float:
    """Processor time that this machine has used since it started, in user code, the kernel and its interrupts."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def trace(place: Place, teams: dict[str, Team], link: LinkResult, plan: Plan, say: Say) -> None:
    """One more step of each configuration, under the profiler. What fails here does not count against its figures."""
    folder = plan.output / "traces" / place.link
    folder.mkdir(parents=True, exist_ok=True)
    for name, team in teams.items():
        try:
            team.ask("trace", folder / f"{name}.json")
        except TeamError as error:
            say(f"{name}: no trace ({error})")


@contextmanager
def placed(link: str, group: int, ends: tuple[End, End]) -> Iterator[Place]:
    """A place with a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        yield Place(link, group, ends, Path(folder))
