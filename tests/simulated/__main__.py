"""Prints what the checker finds in each way to train, and a step beside FSDP2's: `python -m tests.simulated`."""

from __future__ import annotations

import sys
import warnings

from rich.console import Console
from rich.table import Table

from tests.ranks import Ranks
from tests.simulated import library, scenarios
from tests.simulated.scenarios import SCENARIOS, Report

WORLDS = (8, 64, 256)


def row(name: str, report: Report) -> list[str]:
    figures = (len(report.findings), sum(report.waits.values()), sum(report.launches.values()))
    return [name, *map(str, (*figures, report.messages, report.packing))]


def table(title: str) -> Table:
    found = Table(title=title, title_justify="left", box=None)
    for column in ("", "findings", "host waits", "launches", "messages", "packing"):
        found.add_column(column, justify="left" if not column else "right")
    return found


def main() -> None:
    if reason := library.unavailable():
        sys.exit(reason)
    warnings.simplefilter("ignore")
    gpus, console = Ranks(2, on="simulated"), Console(width=100)
    ways = table("A step of a GPT of three blocks on the first of four ranks, of pipelines of two, regions eager")
    for name, scenario in SCENARIOS.items():
        ways.add_row(*row(name, gpus.run(scenario.world or 4, scenarios.run, name)[0]))
    console.print(ways)
    beside = table("Stage 3 beside FSDP2")
    for world in WORLDS:
        beside.add_row(*row(f"{world} ranks, zcompile", *gpus.run(world, scenarios.run, "stage 3")))
        beside.add_row(
            *row(f"{world} ranks, zcompile, CUDA graphs", *gpus.run(world, scenarios.run, "stage 3, graphs"))
        )
        beside.add_row(*row(f"{world} ranks, FSDP2", *gpus.run(world, scenarios.run_fsdp2)))
    console.print(beside)
    gpus.close()


if __name__ == "__main__":
    main()
