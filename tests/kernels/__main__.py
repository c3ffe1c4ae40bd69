"""Compiles the regions of three models for an H100 that is not there, and prints what each needs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.kernels import installed, regions
from tests.kernels.models import MODELS
from tests.kernels.regions import DTYPES, WORLD
from tests.kernels.report import Compiled, Row
from tests.ranks import Ranks

COLUMNS = ("region", "calls", "kernels", "variants", "registers", "shared", "spills", "library calls")
NOTE = """calls: of the region in a step. variants: of its kernels, from which Inductor chooses on a GPU.
registers and spills (of a thread), shared memory (of a block, in bytes): of the variant that needs most."""


def table(title: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=title, title_justify="left", box=None)
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("region", "library calls") else "right")
    for row in rows:
        shown.add_row(f"{row.phase} {row.region}", str(row.uses), *figures(row.compiled))
    return shown


def figures(region: Compiled) -> list[str]:
    """The columns behind the first two."""
    if region.problem:
        return ["FAILED", "", "", "", "", region.problem]
    needs = [(one.registers, one.shared, one.spills) for one in region.binaries] or [(0, 0, 0)]
    most = [max(column) for column in zip(*needs, strict=True)]
    calls = ", ".join(f"{count} {name}" for name, count in region.calls.items())
    return [*map(str, (len(region.kernels), len(region.binaries), *most)), calls]


def summary(rows: Sequence[Row]) -> str:
    found = [row.compiled for row in rows]
    failed = sum(bool(region.problem) for region in found)
    kernels, templates = sum(len(region.kernels) for region in found), sum(region.templates for region in found)
    binaries = [binary for region in found for binary in region.binaries]
    spilling = sum(binary.spills > 0 for binary in binaries)
    calls = sum(sum(region.calls.values()) for region in found)
    return (
        f"{len(found)} regions, {failed} failed: {kernels} kernels, {templates} of templates, "
        f"in {len(binaries)} variants for sm_90a, {spilling} of which spill; {calls} library calls."
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which (all)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="what they compute with (all)")
    add("--stage", type=int, choices=range(4), default=3, help="of ZeRO (3)")
    add("--timeout", type=float, default=1800, help="seconds that a model may take (1800)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exits with status 1 if a region does not become Triton that compiles, and with 2 where that cannot be tried."""
    options = parse(arguments)
    if reason := installed.unavailable():
        print(reason, file=sys.stderr)
        return 2
    installed.make_importable()
    gpu, console = Ranks(1, on="simulated"), Console(width=140)
    everything: list[Row] = []
    for model in options.models:
        for dtype in options.dtypes:
            began = time.monotonic()
            rows = gpu.run(WORLD, regions.check, model, dtype, options.stage, timeout=options.timeout)[0]
            seconds = time.monotonic() - began
            console.print(table(f"{model}, {dtype}, stage {options.stage}: {seconds:.0f} s", rows), "")
            everything += rows
    gpu.close()
    console.print(NOTE, summary(everything), sep="\n")
    return int(any(row.compiled.problem for row in everything))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
