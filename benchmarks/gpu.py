"""Training steps on a GPU beside plain torch.compile, or on several beside DDP and FSDP2: `python -m benchmarks.gpu`.

Needs torch with CUDA and what zcompile itself needs. Writes table.txt, results.json, and for each configuration a trace
of torch's profiler, zcompile's timelines and what the processes printed, to the output folder. Whatever fails or finds
no time any more is a named gap. Without a CUDA device it exits with status 2; `--device cpu --tiny` tries the way.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks.bench import INTERRUPTED, describe_machine
from benchmarks.configurations import Configuration
from benchmarks.gpu_protocol import (
    BY_NAME,
    LARGE,
    PRECISIONS,
    RATE,
    TINY,
    Inspect,
    Run,
    WarmUp,
    chosen,
    reference,
    usual,
)
from benchmarks.gpu_report import write
from benchmarks.gpu_results import Entry, Part, Result, fail_other_losses, name_gaps
from benchmarks.links import LOOPBACK, End
from benchmarks.protocol import Device, Precision, Sizes, Start
from benchmarks.rounds import Say, failures_of
from benchmarks.team import Team, TeamError

OUTPUT = Path(__file__).resolve().parent / "results" / "gpu"
NO_DEVICE = 2  # the exit status of a command that cannot be run here
COMPILERS = "8"  # processes that compile for each configuration, unless the environment says otherwise


class NoDeviceError(RuntimeError):
    """There is no CUDA device; the message says what there is instead."""


@dataclass(frozen=True)
class Plan:
    """How a run is measured."""

    output: Path
    device: Device
    world: int
    sizes: Sizes
    only: tuple[str, ...]
    precisions: tuple[Precision, ...] = PRECISIONS
    rounds: int = 8
    steps: int = 10
    seconds: float = 2.0
    """A turn has fewer steps where they would take longer than this, but 2."""
    warmup: int = 6
    seed: int = 0
    timeout: float = 240.0
    minutes: float = 9.0
    """When they are over, nothing new begins."""
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
    add("--rounds", type=int, default=8, help="turns that each configuration gets (8)")
    add("--steps", type=int, default=10, help="steps that are timed together in a turn (10)")
    add("--seconds", type=float, default=2.0, help="what they may take; a turn has fewer steps then, but 2 (2)")
    add("--warmup", type=int, default=6, help="steps before the first turn (6)")
    add("--seed", type=int, default=0, help="of weights, data and the order of turns (0)")
    add("--timeout", type=float, default=240, help="seconds until one that does not answer has failed (240)")
    add("--minutes", type=float, default=9, help="when they are over nothing new begins (9)")
    add("--no-look", dest="look", action="store_false", help="leave traces and timelines out")
    add("--output", type=Path, default=OUTPUT, help="folder of the results (benchmarks/results/gpu)")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps", "warmup", "ranks"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name} {given} is too small: give 1 or more")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What is to be measured.

    Raises:
        NoDeviceError: It was to be measured on CUDA devices, of which there are none or too few.
    """
    there = devices() if options.device == "cuda" else None
    world = options.ranks or there or 1
    if there is not None and world > there:
        raise NoDeviceError(f"{world} ranks want a CUDA device each, there are {there}: give --ranks {there}")
    given = {size.name: getattr(options, size.name) for size in fields(Sizes)}
    return Plan(
        output=options.output.resolve(),
        device=options.device,
        world=world,
        sizes=replace(TINY if options.tiny else LARGE, **{k: v for k, v in given.items() if v is not None}),
        only=tuple(options.only or usual(world)),
        precisions=tuple(options.precisions),
        rounds=options.rounds,
        steps=options.steps,
        seconds=options.seconds,
        warmup=options.warmup,
        seed=options.seed,
        timeout=options.timeout,
        minutes=options.minutes,
        look=options.look,
        began=time.monotonic(),
    )


def devices() -> int:
    """How many CUDA devices there are.

    Raises:
        NoDeviceError: None.
    """
    import torch  # the command itself wants nothing else of it

    if not torch.cuda.is_available():
        kind = "is built without CUDA" if torch.version.cuda is None else "finds no device that it can use"
        raise NoDeviceError(f"no GPU: torch {torch.__version__} {kind}; `--device cpu --tiny` tries the way without")
    return torch.cuda.device_count()


def main(arguments: Sequence[str]) -> int:
    """Measure, and write what was found, also when it is interrupted."""
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
    return status


def saying(say: Say, precision: Precision, line: str) -> None:
    say(f"{precision}: {line}")


def measure(precision: Precision, plan: Plan, result: Result, say: Say) -> None:
    """Measure all configurations in one precision: they start, warm up, take turns, and are looked into."""
    part = result.parts[precision] = Part(precision, plan.world)
    if plan.left <= 0:
        part.left_out = f"{plan.minutes:g} minutes were over: run it with --precisions {precision}"
        say(f"left out: {part.left_out}")
        return
    with ExitStack() as stack:
        group = Group(part, plan, result, say)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench")))
        group.start(chosen(list(plan.only), precision), folder, stack)
        stack.callback(group.dismiss)  # first of all that is undone, before any team is waited for
        group.warm_up()
        group.take_turns()
        if plan.look:
            group.look()


@dataclass
class Group:
    """The configurations that are alive together; one that fails leaves `teams`, and its entry says why."""

    part: Part
    plan: Plan
    result: Result
    say: Say
    teams: dict[str, Team] = field(default_factory=dict)

    def surviving(self, name: str) -> AbstractContextManager[None]:
        """Write down what ends a configuration, and go on without it."""
        return failures_of(name, self.part.entries[name], self.teams, self.say)

    def start(self, configurations: Sequence[Configuration], folder: Path, stack: ExitStack) -> None:
        """Start all processes at once: they import, and build the model."""
        self.say(f"starting {', '.join(configuration.name for configuration in configurations)}")
        for configuration in configurations:
            self.part.entries[configuration.name] = Entry()
            self.teams[configuration.name] = stack.enter_context(self.team(configuration, folder))
        for name, team in list(self.teams.items()):
            with self.surviving(name):
                answers = team.hear()
                self.part.entries[name].versions = answers[0].versions
                self.result.built(answers)

    def team(self, configuration: Configuration, folder: Path) -> Team:
        """The ranks of a configuration, told to build; they find each other through a file in `folder`."""
        plan, name = self.plan, configuration.name
        logs = plan.output / "logs" / self.part.precision
        logs.mkdir(parents=True, exist_ok=True)
        environment = partial(surroundings, device=plan.device, world=plan.world)
        ends = [LOOPBACK] * plan.world
        team = Team("benchmarks.gpu_worker", ends, logs / name, plan.timeout, environment=environment)
        first = Start(
            0, plan.world, configuration, plan.sizes, plan.seed, folder / name, plan.timeout,
            device=plan.device, precision=self.part.precision, rate=RATE,
        )  # fmt: skip
        team.tell(*(replace(first, rank=rank) for rank in range(plan.world)))
        return team

    def warm_up(self) -> None:
        """Compile one after the other: what Inductor tries out on the device is tried on one that is free."""
        for name, team in list(self.teams.items()):
            with self.surviving(name):
                if self.plan.left <= 0:
                    team.close()
                    raise TeamError(f"left out: {self.plan.minutes:g} minutes were over")
                team.tell(*[WarmUp(self.plan.warmup)] * self.plan.world)
                self.part.entries[name].warmed(team.hear())
                self.say(f"{name}: {self.part.entries[name].warmup[0]:.1f} s for the first step")

    def take_turns(self) -> None:
        """In each round every configuration has a turn, in an order of its own that the seed decides."""
        plan, part = self.plan, self.part
        part.steps = steps_of_a_turn(part, plan)
        for number in range(plan.rounds):
            if not self.teams or (number and plan.left <= 0):
                why = "the minutes are over" if self.teams else "nothing is left"
                self.say(f"{number} rounds of {plan.rounds}: {why}")
                return
            self.say(f"round {number} of {part.steps} steps: {', '.join(self.teams)}")
            names = sorted(self.teams)
            random.Random(f"{plan.seed} {number}").shuffle(names)
            for name in names:
                with self.surviving(name):
                    self.teams[name].tell(*[Run(part.steps)] * plan.world)
                    part.entries[name].took(str(number), self.teams[name].hear())
            self.result.write(plan.output / "results.json")

    def look(self) -> None:
        """Look into a step of each configuration. What fails here does not count against its figures."""
        folder = self.plan.output / "steps" / self.part.precision
        folder.mkdir(parents=True, exist_ok=True)
        for name, team in self.teams.items():
            entry = self.part.entries[name]
            try:
                if self.plan.left <= 0:
                    raise TeamError(f"{self.plan.minutes:g} minutes were over")
                self.say(f"{name}: looking into a step")
                team.tell(*[Inspect(folder / name)] * self.plan.world)
                entry.inspection = team.hear()[0]
            except TeamError as error:
                entry.gap = str(error)
                self.say(f"{name}: {error}")

    def dismiss(self) -> None:
        """Let all processes end at the same time."""
        for team in self.teams.values():
            team.dismiss()


def steps_of_a_turn(part: Part, plan: Plan) -> int:
    """As many as were asked for, and not more than fit into the seconds of a turn at the reference's pace."""
    entries = [part.entries.get(reference(plan.world)), *part.entries.values()]
    pace = next((entry.warmup[-1] for entry in entries if entry and entry.warmup), 0.0)
    return plan.steps if pace == 0 else max(min(2, plan.steps), min(plan.steps, int(plan.seconds / pace)))


def surroundings(given: Mapping[str, str], rank: int, _: End, *, device: Device, world: int) -> dict[str, str]:
    """What a rank sees: its place among the ranks, and a few compilers of its own."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    compilers = given.get("TORCHINDUCTOR_COMPILE_THREADS", COMPILERS if device == "cuda" else "1")
    on_cpu = {} if device == "cuda" else {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    places = {name: str(value) for name, value in ranks.items()}
    return {**given, **places, "TORCHINDUCTOR_COMPILE_THREADS": compilers, **on_cpu}


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
