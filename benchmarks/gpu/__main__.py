"""Training steps on a GPU beside plain torch.compile, or on several beside DDP and FSDP2: `python -m benchmarks.gpu`.

Needs torch with CUDA and what zcompile itself needs. One configuration is on the device at a time: its processes have
ended before those of the next begin, so that none needs room for another. Writes table.txt, results.json, and for each
configuration a trace of torch's profiler, zcompile's timelines and what the processes printed, to the output folder.
Exits with status 1 if anything failed or found no time, which the tables name, and with 2 where no GPU is free;
`--device cpu --tiny` tries the way.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks.common.configurations import Configuration, Device, Precision, Sizes
from benchmarks.common.links import LOOPBACK
from benchmarks.common.protocol import Start
from benchmarks.common.ranks import RESULTS, Team, TeamError
from benchmarks.gpu.machine import machine, refusal
from benchmarks.gpu.protocol import (
    BY_NAME,
    LARGE,
    PRECISIONS,
    RATE,
    TINY,
    chosen,
    reference,
    usual,
)
from benchmarks.gpu.report import write
from benchmarks.gpu.results import Entry, Part, Result, fail_other_losses, name_gaps
from benchmarks.speed.__main__ import INTERRUPTED, describe_machine
from benchmarks.speed.rounds import Say, failures_of, shuffled

OUTPUT = RESULTS / "gpu"
NO_DEVICE = 2  # the exit status of a command that cannot be run here


class NoDeviceError(RuntimeError):
    """No CUDA device can be measured; the message says why."""


@dataclass(frozen=True)
class Plan:
    """How a run is measured."""

    output: Path
    device: Device
    world: int
    sizes: Sizes
    only: tuple[str, ...]
    precisions: tuple[Precision, ...] = PRECISIONS
    starts: int = 2
    rounds: int = 4
    steps: int = 10
    seconds: float = 2.0
    """A turn has fewer steps where they would take longer than this, but 2."""
    warmup: int = 6
    seed: int = 0
    timeout: float = 240.0
    minutes: float = 9.0
    """Nothing begins that they would not see the end of."""
    look: bool = True
    """Whether traces and timelines are made."""
    began: float = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.began + 60 * self.minutes - time.monotonic()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="what to train on (cuda)")
    add("--ranks", type=int, default=None, help="ranks, a device each (all CUDA devices; 1 on the CPU)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="one after the other (all)")
    add("--only", nargs="+", choices=BY_NAME, default=None, metavar="NAME", help=f"of {', '.join(BY_NAME)}")
    for size in fields(Sizes):
        add(f"--{size.name}", type=int, default=None, help=f"of the model and its batch ({getattr(LARGE, size.name)})")
    add("--tiny", action="store_true", help="a model of nearly nothing, to try the way")
    add("--starts", type=int, default=2, help="times that each configuration's processes are started (2)")
    add("--rounds", type=int, default=4, help="turns that a configuration has in each of them (4)")
    add("--steps", type=int, default=10, help="steps that are timed together in a turn (10)")
    add("--seconds", type=float, default=2.0, help="what they may take; a turn has fewer steps then, but 2 (2)")
    add("--warmup", type=int, default=6, help="steps before the first turn (6)")
    add("--seed", type=int, default=0, help="of weights, data and the order of configurations (0)")
    add("--timeout", type=float, default=240, help="seconds until one that does not answer has failed (240)")
    add("--minutes", type=float, default=9, help="nothing begins that would not end within them (9)")
    add("--no-look", dest="look", action="store_false", help="leave traces and timelines out")
    add("--output", type=Path, default=OUTPUT, help="folder of the results (benchmarks/results/gpu)")
    options = parser.parse_args(arguments)
    for name in ("starts", "rounds", "steps", "warmup", "ranks"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name} {given} is too small: give 1 or more")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What is to be measured.

    Raises:
        NoDeviceError: It was to be measured on CUDA devices, of which there are none or too few, or which are busy.
    """
    there = devices() if options.device == "cuda" else None
    world = options.ranks or there or 1
    if there is not None and world > there:
        raise NoDeviceError(f"{world} ranks want a CUDA device each, there are {there}: give --ranks {there}")
    given = {size.name: getattr(options, size.name) for size in fields(Sizes)}
    asked = {one.name: getattr(options, one.name) for one in fields(Plan) if hasattr(options, one.name)}
    asked |= {
        "output": options.output.resolve(),
        "world": world,
        "sizes": replace(TINY if options.tiny else LARGE, **{k: v for k, v in given.items() if v is not None}),
        "only": tuple(options.only or usual(world)),
        "precisions": tuple(options.precisions),
        "began": time.monotonic(),
    }
    return Plan(**asked)


def devices() -> int:
    """How many CUDA devices there are.

    Raises:
        NoDeviceError: None, or other processes hold their memory.
    """
    found = machine()
    if reason := refusal(found):
        raise NoDeviceError(f"{reason}; `--device cpu --tiny` tries the way without")
    return len(found.cards)


def main(arguments: Sequence[str]) -> int:
    """Measure, and write what was found, also when it is interrupted.

    Returns 0, 1 if something failed or was left out, 2 without a device, or 130 if it was interrupted.
    """
    console = Console(stderr=True)
    say: Say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        plan = plan_of(parse(arguments))
    except NoDeviceError as error:
        say(str(error))
        return NO_DEVICE
    plan.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends processes in order, as Ctrl-C does
    options = {name: value for name, value in asdict(plan).items() if name not in ("output", "began")}
    found = describe_machine() | {"torch": version("torch"), "parameters": str(plan.sizes)}
    result = Result(found, options, plan.sizes, plan.world)
    status = 0
    try:
        for precision in plan.precisions:
            measure(precision, plan, result, partial(saying, say, precision))
    except KeyboardInterrupt:
        say("interrupted: what was measured so far is written")
        status = INTERRUPTED
    finish(result, plan.output)
    say(f"results lie in {plan.output}/")
    return status or int(any(part.incomplete for part in result.parts.values()))


def saying(say: Say, precision: Precision, line: str) -> None:
    say(f"{precision}: {line}")


def measure(precision: Precision, plan: Plan, result: Result, say: Say) -> None:
    """Measure all configurations in one precision, one after the other, as often as there are starts."""
    part = result.parts[precision] = Part(precision, plan.world)
    if plan.left <= 0:
        part.left_out = f"{plan.minutes:g} minutes were over: run it with --precisions {precision}"
        say(f"left out: {part.left_out}")
        return
    configurations = chosen(list(plan.only), precision)
    part.entries = {configuration.name: Entry() for configuration in configurations}
    series = Series(part, plan, result, say)
    for start in range(plan.starts):
        with tempfile.TemporaryDirectory(prefix="bench") as folder:
            series.run(start, ordered(configurations, plan.seed, start), Path(folder))


def ordered(configurations: Sequence[Configuration], seed: int, start: int) -> list[Configuration]:
    """The reference begins the first start, as its pace decides on the length of turns; later orders are `seed`'s."""
    return list(configurations) if start == 0 else shuffled(configurations, f"{seed} {start}")


@dataclass
class Series:
    """Configurations one after the other; one that fails is not started again, and its entry says why."""

    part: Part
    plan: Plan
    result: Result
    say: Say
    teams: dict[str, Team] = field(default_factory=dict)
    """Of this start, those that have not ended."""
    took: dict[str, float] = field(default_factory=dict)
    """Seconds from the first message to the end of the processes, by configuration, in its latest start that worked."""

    def run(self, start: int, configurations: Sequence[Configuration], folder: Path) -> None:
        """Start the processes of all, which import and touch no device, and let one after the other train and end."""
        alive = [c for c in configurations if not self.part.entries[c.name].failure]
        with ExitStack() as stack:
            for configuration in alive:
                self.teams[configuration.name] = stack.enter_context(self.team(configuration))
            stack.callback(self.dismiss)  # first of all that is undone, before any team is waited for
            for configuration in alive:
                self.measure(start, configuration, folder)
                self.result.write(self.plan.output / "results.json")

    def measure(self, start: int, configuration: Configuration, folder: Path) -> None:
        """Train one configuration; its processes have ended when this returns."""
        name, began = configuration.name, time.monotonic()
        entry, team = self.part.entries[name], self.teams[name]
        if not self.fits(name):
            self.say(f"{name}: no time for start {start}")
            entry.failure = entry.failure or (None if entry.seconds else self.over)
            return
        self.say(f"{name}: start {start}")
        with failures_of(name, entry, self.teams, self.say):
            self.build(team, configuration, entry, folder)
            self.warm_up(start, team, entry)
            self.take_turns(start, team, entry)
            if self.plan.look and not entry.inspection and not entry.gap:
                self.look(name, team, entry)
        team.close()
        self.teams.pop(name, None)
        if not entry.failure:  # one that gave no answer says nothing of the others' pace
            self.took[name] = time.monotonic() - began

    def fits(self, name: str) -> bool:
        """Whether another start would end in time, if it took what its last one did, or the slowest of the others."""
        return self.plan.left > self.took.get(name, max(self.took.values(), default=0.0))

    @property
    def over(self) -> str:
        return f"left out: {self.plan.minutes:g} minutes were nearly over"

    def team(self, configuration: Configuration) -> Team:
        """The ranks of a configuration, which wait to be told what they are."""
        plan = self.plan
        logs = plan.output / "logs" / self.part.precision
        logs.mkdir(parents=True, exist_ok=True)
        ends = [LOOPBACK] * plan.world
        return Team("benchmarks.gpu.worker:Worker", ends, logs / configuration.name, plan.timeout, device=plan.device)

    def build(self, team: Team, configuration: Configuration, entry: Entry, folder: Path) -> None:
        """Let the ranks find each other through a file in `folder`, and build the model."""
        plan = self.plan
        store = folder / configuration.name
        start = Start(configuration, plan.world, plan.sizes, plan.seed, store, plan.timeout)
        team.begin(replace(start, device=plan.device, precision=self.part.precision, rate=RATE))
        answers = team.hear()
        entry.versions = answers[0].versions
        self.result.built(answers)

    def warm_up(self, start: int, team: Team, entry: Entry) -> None:
        entry.warmed(start, team.ask("warm_up", self.plan.warmup))
        self.part.steps = self.part.steps or steps_of_a_turn(self.part, self.plan)

    def take_turns(self, start: int, team: Team, entry: Entry) -> None:
        for number in range(self.plan.rounds):
            if number and self.plan.left <= 0:
                return
            entry.took(start, number, team.ask("run", self.part.steps))

    def look(self, name: str, team: Team, entry: Entry) -> None:
        """Look into a step. What fails here does not count against the figures."""
        folder = self.plan.output / "steps" / self.part.precision
        folder.mkdir(parents=True, exist_ok=True)
        try:
            entry.inspection = team.ask("inspect", folder / name)[0]
        except TeamError as error:
            entry.gap = str(error)
            self.say(f"{name}: {error}")

    def dismiss(self) -> None:
        """Let all processes that are left end at the same time."""
        for team in self.teams.values():
            team.dismiss()
        self.teams.clear()


def steps_of_a_turn(part: Part, plan: Plan) -> int:
    """As many as were asked for, and not more than fit into the seconds of a turn at the reference's pace."""
    entries = [part.entries.get(reference(plan.world)), *part.entries.values()]
    pace = next((entry.warmup[-1] for entry in entries if entry and entry.warmup), 0.0)
    return plan.steps if pace == 0 else max(min(2, plan.steps), min(plan.steps, int(plan.seconds / pace)))


def finish(result: Result, output: Path) -> None:
    """Judge the losses, print and write the tables."""
    for part in result.parts.values():
        name_gaps(part)
        fail_other_losses(part)
    result.write(output / "results.json")
    with (output / "table.txt").open("w") as file:
        write(result, file)
    with suppress(BrokenPipeError):
        write(result, sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
