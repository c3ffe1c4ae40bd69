"""The tables of a run: the configurations over each link, what was left out, and the targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.common.configurations import BASELINE, CONFIGURATIONS, Configuration
from benchmarks.common.figures import ratio, spread
from benchmarks.speed.floor import FORMULA, floors, traffic
from benchmarks.speed.results import LinkResult, Result
from benchmarks.speed.targets import TARGETS, Outcome, outcome

MIB = 2**20
WIDTH = 130  # columns


def report(result: Result) -> RenderableType:
    """Everything that a reader wants to see."""
    parts: list[RenderableType] = [Text(headline(result))]
    for name, link in result.links.items():
        if link.left_out:
            parts.append(Text(f"\n{name} is left out: {link.left_out}", style="red"))
        else:
            parts.append(link_table(name, link, result))
            parts += [Text(f"{failed} FAILED: {why}", style="red") for failed, why in failures(link)]
            parts += [Text(f"{fewer} has fewer rounds: {why}", style="yellow") for fewer, why in gaps(link)]
    for name, nodes in result.nodes.items():
        left_out = Text(f"\n{name} is left out: {nodes.left_out}", style="red")
        parts.append(left_out if nodes.left_out else nodes.table(f"\n{name}"))
    targets = targets_table("link", outcomes(result))
    parts += [Text(f"\n{FORMULA}"), *([targets] if targets.row_count else [])]
    return Group(*parts)


def headline(result: Result) -> str:
    """One line on what was measured where."""
    millions, options = result.parameters / 1e6, result.options
    return (
        f"GPT of {millions:.1f} million parameters, fp32, AdamW, 2 ranks of one thread on {result.cores} cores\n"
        f"{options['starts']} starts, {options['rounds']} rounds each, {options['steps']} steps a round; "
        "medians, with the least and the largest"
    )


def link_table(name: str, link: LinkResult, result: Result) -> Table:
    """A row for each configuration, stage by stage, and one for the floor."""
    table = Table(title=f"\n{name}: {rate(link)}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("stage", justify="right")
    table.add_column("configuration", no_wrap=True)
    for column in ("seconds a step", f"times {BASELINE}", "times the floor", "peak MiB a rank"):
        table.add_column(column, justify="right", no_wrap=True)
    shown = [c for c in CONFIGURATIONS if c.name in link.entries]
    for stage in sorted({c.stage for c in shown}):
        for configuration in shown:
            if configuration.stage == stage:
                add_row(table, configuration, link, result)
        table.add_section()
    if lowest := spread(list(floors(link, result.parameters, result.cores).values())):
        sent = traffic(result.parameters) / MIB
        table.add_row("", f"floor ({sent:.0f} MiB sent)", str(lowest), "", "", style="dim")
    return table


def failures(link: LinkResult) -> list[tuple[str, str]]:
    """The configurations that failed, and why."""
    return [(name, entry.failure) for name, entry in link.entries.items() if entry.failure]


def gaps(link: LinkResult) -> list[tuple[str, str]]:
    """The configurations that failed in a part of the rounds, and why."""
    return [(name, why) for name, entry in link.entries.items() for why in entry.gaps]


def rate(link: LinkResult) -> str:
    """What the line carries, and what moving bytes costs."""
    speed, cost = spread(list(link.line.rate.values())), spread(list(link.line.moving.values()))
    if speed is None or cost is None:
        return f"the line was not measured ({link.line.failure or 'no round'})"
    return (
        f"{speed.median * 8 / 1e6:,.0f} Mbit/s in each direction, "
        f"{cost.median * 1e8:.3f} s of processor time for 100 MB each way"
    )


def add_row(table: Table, configuration: Configuration, link: LinkResult, result: Result) -> None:
    """The figures of one configuration, if they may be used."""
    entry = link.entries[configuration.name]
    start = (str(configuration.stage) if configuration.communicates else "-", configuration.name)
    if entry.failure:
        table.add_row(*start, Text("FAILED", style="red"))
        return
    baseline = link.healthy(BASELINE)
    floor = floors(link, result.parameters, result.cores)
    table.add_row(
        *start,
        str(spread(list(entry.seconds.values())) or "-"),
        str((baseline and ratio(entry.seconds, baseline.seconds)) or "-"),
        str((configuration.communicates and ratio(entry.seconds, floor)) or "-"),
        f"{entry.peak / MIB:.0f}",
        style="bold" if configuration.ours else None,
    )


def outcomes(result: Result) -> Iterator[tuple[str, Outcome, str]]:
    """The targets of the links and configurations that were asked for, by link, and their figures."""
    for target in TARGETS:
        link = result.links.get(target.where)
        if link is not None and (target.subject in link.entries or link.left_out):
            found = outcome(target, result)
            measured = (
                "-" if found.found is None else f"{found.found.median:.2f}" if target.memory else str(found.found)
            )
            yield target.where, found, measured


def targets_table(where: str, outcomes: Iterable[tuple[str, Outcome, str]]) -> Table:
    """Targets, each with where it was measured and its figure."""
    table = Table(title="\ntargets", title_justify="left", box=box.SIMPLE_HEAD)
    for column in (where, "what", "configuration", "at most", "of", "measured", ""):
        table.add_column(column, no_wrap=column != "of")
    for place, found, measured in outcomes:
        what, limit = "memory" if found.target.memory else "time", f"{found.target.limit:.2f}"
        table.add_row(place, what, found.target.subject, limit, found.against, measured, verdict_text(found.verdict))
    return table


def write(result: Result, file: TextIO) -> None:
    """Write the tables to a file, or to the screen."""
    print_wide(report(result), WIDTH, file)


def print_wide(report: RenderableType, width: int, file: TextIO) -> None:
    """At least `width` columns wide; a narrow screen wraps lines by itself."""
    console = Console(file=file)
    console.width = max(width, console.width)
    console.print(report, highlight=False, soft_wrap=False)


def verdict_text(verdict: str) -> Text:
    return Text(verdict, style={"met": "green", "NOT MET": "red"}.get(verdict.split(",")[0], "dim"))
