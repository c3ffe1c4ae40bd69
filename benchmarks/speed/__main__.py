"""Training steps measured beside the peers: `make bench`, or `python -m benchmarks.speed --help` in its environment.

Writes table.txt, results.json, plot.png and plot.svg, and a Perfetto trace of each configuration, to the output folder.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.common.configurations import BY_NAME, Sizes, groups
from benchmarks.common.links import LINKS, Link, LinkError, opened
from benchmarks.common.ranks import LOCAL, TeamError
from benchmarks.speed.nodes import NodesResult
from benchmarks.speed.report import write
from benchmarks.speed.results import LinkResult, Result, fail_other_losses
from benchmarks.speed.rounds import Plan, Say, measure, placed

BETWEEN_NODES = {"nodes-1gbit": "1gbit", "nodes-250mbit": "250mbit"}
"""Links between two nodes of two ranks, which reach each other by the loopback."""
ROOM = 2.6 * 2**30  # bytes that the two ranks of a configuration need, paused ones included
INTERRUPTED = 130  # the exit status of a program stopped by Ctrl-C


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    links = [*LINKS, *BETWEEN_NODES]
    add("--links", nargs="+", choices=links, default=links, help="networks to measure over (all)")
    add("--only", nargs="+", choices=BY_NAME, default=list(BY_NAME), metavar="NAME", help="configurations (all)")
    add("--starts", type=int, default=2, help="times that each configuration is started anew (2)")
    add("--rounds", type=int, default=3, help="turns that each configuration gets in each of them (3)")
    add("--steps", type=int, default=2, help="steps in a turn (2)")
    add("--warmup", type=int, default=3, help="steps before the first turn (3)")
    add("--seed", type=int, default=0, help="of weights, data and the order of turns (0)")
    add(
        "--timeout", type=float, default=300, help="seconds until a configuration that does not answer has failed (300)"
    )
    add("--together", type=int, default=None, help="configurations in memory at once (what the free memory allows)")
    add("--no-traces", dest="traces", action="store_false", help="leave the traces out")
    add("--output", type=Path, default=LOCAL, help="folder of the results (benchmarks/results/local)")
    options = parser.parse_args(arguments)
    for name in ("starts", "rounds", "steps", "warmup", "timeout", "together"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is too small: give 1 or more")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
    except OSError as error:
        parser.error(f"--output {options.output} cannot be written to: {error.strerror}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, and write what was found, also when it is interrupted.

    Returns 0, 130 if it was interrupted, or 1 if zcompile failed: died, hung, or trained to other losses.
    """
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends processes and namespaces as Ctrl-C does
    console = Console(stderr=True)
    asked = {one.name: getattr(options, one.name) for one in fields(Plan) if hasattr(options, one.name)}
    plan = Plan(**asked | {"output": options.output.resolve()})
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    result = Result(describe_machine(), asdict(plan) | {"output": None}, cores=len(os.sched_getaffinity(0)))
    status = 0
    try:
        for name in options.links:
            if name in LINKS:
                measure_link(LINKS[name], options, plan, result, say)
            else:
                measure_nodes(name, plan, result, say)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured so far is written")
        status = INTERRUPTED
    finally:
        finish(result, plan.output, console)
    ours = [e for link in result.links.values() for name, e in link.entries.items() if BY_NAME[name].ours]
    return status or int(any(entry.failure for entry in ours))


def measure_link(link: Link, options: argparse.Namespace, plan: Plan, result: Result, say: Say) -> None:
    """Measure every configuration over one link, group by group; a link that cannot be had is left out."""
    found = result.links[link.name] = LinkResult()
    try:
        with opened(link) as ends:
            together = groups(options.only, options.together or affordable())
            for number, group in enumerate(together * plan.starts):
                with placed(link.name, number, ends) as place:
                    measure(place, group, plan, result, say=lambda line: say(f"{link.name}: {line}"))
                result.write(plan.output / "results.json")
    except LinkError as error:
        found.left_out = str(error)
        say(f"{link.name} is left out: {error}")


def measure_nodes(name: str, plan: Plan, result: Result, say: Say) -> None:
    """Measure every way to divide over two nodes of two ranks (`benchmarks.speed.hybrid`), over a link between them."""
    from benchmarks.speed import hybrid  # starts torch

    say(f"{name}: {', '.join(hybrid.WAYS)}")
    try:
        result.nodes[name] = hybrid.measure(BETWEEN_NODES[name], hybrid.WAYS, plan.rounds, plan.steps, plan.warmup)
    except (LinkError, TeamError) as error:
        result.nodes[name] = NodesResult(left_out=str(error))
        say(f"{name} is left out: {error}")
    result.write(plan.output / "results.json")


def finish(result: Result, output: Path, console: Console) -> None:
    """Judge the losses, print and write the tables, and draw the plot."""
    for link in result.links.values():
        fail_other_losses(link)
    result.write(output / "results.json")
    write(result, sys.stdout)
    with (output / "table.txt").open("w") as file:
        write(result, file)
    try:
        from benchmarks.speed.plot import plot
    except ImportError as error:
        console.print(f"no plot: {error}")
    else:
        plot(result, output)
    console.print(f"results lie in {output}/", highlight=False, soft_wrap=True)


def affordable() -> int:
    """How many configurations fit into the free memory at once."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return max(1, int(free // ROOM))


def describe_machine() -> dict[str, str | int | None]:
    """What the figures depend on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "parameters": str(Sizes()),
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
