"""Configurations take turns: all of a group are alive at once, and in each round each of them trains a few steps."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.configurations import Configuration
from benchmarks.floor import RANKS, traffic
from benchmarks.links import End
from benchmarks.pair import Pair, PairError
from benchmarks.protocol import Exchange, Run, Sizes, Start, Trace
from benchmarks.results import Entry, Line, LinkResult, Result

Say = Callable[[str], None]
LINE = "line"


@dataclass(frozen=True)
class Plan:
    """How a run is measured."""

    output: Path
    sizes: Sizes = field(default_factory=Sizes)
    rounds: int = 5
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
        pairs: dict[str, Pair] = {}
        for configuration in group:
            entry = link.entries.setdefault(configuration.name, Entry())
            say(f"{configuration.name}: starting, compiling, {plan.warmup} steps to warm up")
            with failures_of(configuration.name, entry, pairs, say):
                pair = stack.enter_context(trained(place, configuration, plan))
                answers = pair.hear()
                entry.began(answers)
                pairs[configuration.name] = pair
                result.parameters = answers[0].parameters
        for turn in turns(place, plan):
            say(f"round {turn}: {', '.join(pairs)}")
            take_turns(turn, pairs, line, link, plan, result.parameters, say)
        if plan.traces:
            trace(place, pairs, link, plan, say)


def turns(place: Place, plan: Plan) -> Iterator[str]:
    """The names of the rounds of a group."""
    return (f"{place.group}/{number}" for number in range(plan.rounds))


@contextmanager
def failures_of(name: str, entry: Entry, pairs: dict[str, Pair], say: Say) -> Iterator[None]:
    """Write down what ends a configuration, and go on without it."""
    try:
        yield
    except PairError as error:
        entry.failure = str(error)
        pairs.pop(name, None)
        say(f"{name} FAILED: {error}")


def trained(place: Place, configuration: Configuration, plan: Plan) -> Pair:
    """The two ranks of a configuration, told to start."""
    pair = Pair("benchmarks.worker", place.ends, place.logs(plan, configuration.name), plan.timeout)
    store = place.folder / configuration.name
    pair.tell(
        *(
            Start(rank, RANKS, configuration, plan.sizes, plan.seed, plan.warmup, store, plan.timeout)
            for rank in range(RANKS)
        )
    )
    return pair


@contextmanager
def line_between(place: Place, plan: Plan) -> Iterator[Pair]:
    """Two processes that do nothing but exchange bytes, once they have found each other."""
    store = str(place.folder / LINE)
    arguments = [[str(rank), place.ends[0].address, store] for rank in range(RANKS)]
    with Pair("benchmarks.line", place.ends, place.logs(plan, LINE), plan.timeout, arguments) as pair:
        yield pair


def take_turns(
    turn: str, pairs: dict[str, Pair], line: Pair, link: LinkResult, plan: Plan, parameters: int, say: Say
) -> None:
    """One round: the line, then every configuration, in an order of its own that the seed decides."""
    exchange(turn, line, link.line, traffic(0, parameters), say)
    names = sorted(pairs)
    random.Random(f"{plan.seed} {turn}").shuffle(names)
    for name in names:
        with failures_of(name, link.entries[name], pairs, say):
            pairs[name].tell(*[Run(plan.steps)] * RANKS)
            link.entries[name].took(turn, pairs[name].hear())


def exchange(turn: str, pair: Pair, line: Line, nbytes: int, say: Say) -> None:
    """Measure the rate of the line and the processor time of moving bytes over it, unless it has failed before."""
    if line.failure:
        return
    busy = busy_seconds()
    try:
        pair.tell(*[Exchange(nbytes)] * RANKS)
        seconds = max(pair.hear())
    except PairError as error:
        line.failure = str(error)
        say(f"no floor, the line FAILED: {error}")
        return
    line.rate[turn] = nbytes / seconds
    line.moving[turn] = (busy_seconds() - busy) / nbytes


def busy_seconds() -> float:
    """Processor time that this machine has used since it started, in user code, the kernel and its interrupts."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def trace(place: Place, pairs: dict[str, Pair], link: LinkResult, plan: Plan, say: Say) -> None:
    """One more step of each configuration, under the profiler. What fails here does not count against its figures."""
    folder = plan.output / "traces" / place.link
    folder.mkdir(parents=True, exist_ok=True)
    for name, pair in pairs.items():
        try:
            pair.tell(*[Trace(folder / f"{name}.json")] * RANKS)
            pair.hear()
        except PairError as error:
            say(f"{name}: no trace ({error})")


@contextmanager
def placed(link: str, group: int, ends: tuple[End, End]) -> Iterator[Place]:
    """A place with a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        yield Place(link, group, ends, Path(folder))
