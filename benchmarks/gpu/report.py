"""The tables of a run on a device: configurations by precision, what failed or was left out, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.common.figures import Spread, ratio, spread
from benchmarks.gpu.protocol import CONFIGURATIONS, reference
from benchmarks.gpu.results import MIB, TOLERANCES, WINDOW, Entry, Part, Result, outcomes, utilisation
from benchmarks.speed.report import print_wide, targets_table
from benchmarks.speed.targets import Outcome

WIDTH = 220  # columns
WHAT = {
    "bf16": "autocast over parameters in fp32 (-cast: zcompile's own dtype=)",
    "tf32": "parameters in fp32, products in TF32 allowed",
    "fp32": "no TF32",
}
COLUMNS = ("ms a step", "times {reference}", "events ms", "tokens/s", "MFU", "host ms", "limit", "launches")
MORE = ("graphs", "kernels", "waits", "busy ms", "peak MiB", "reserved", "first s", "apart", "turns")
ALLOWED = ", ".join(f"{precision} {tolerance:.1%}" for precision, tolerance in TOLERANCES.items())
NOTES = f"""
ms a step: synchronised at both ends of a turn; medians over turns with the least and the largest, ratios by turn
host ms: until the last launch of a step that begins with an idle device has returned; limit: who is waited for
launches, graphs, kernels, waits, busy: of one step under torch's profiler; waits: of the host for the device
events: the same between two events in the stream; first: seconds of the first step, compilation included
peak: bytes in tensors (what CUDA graphs own shows in reserved only); reserved: by the allocator; after the warm-up
apart: losses from the reference's, relatively, means of {WINDOW} steps; allowed: {ALLOWED}"""


def report(result: Result) -> RenderableType:
    """Everything that a reader wants to see."""
    parts: list[RenderableType] = [Text(headline(result))]
    for part in result.parts.values():
        title = f"{part.precision}: {WHAT[part.precision]}"
        if part.left_out:
            parts.append(Text(f"\n{title}: left out: {part.left_out}", style="red"))
            continue
        parts.append(part_table(title, part, result))
        for name, entry in part.entries.items():
            if entry.failure:
                parts.append(Text(f"{name} FAILED: {entry.failure}", style="red"))
            elif entry.gap:
                parts.append(Text(f"{name}: no look into a step: {entry.gap}", style="red"))
    if result.options.get("device") == "cpu":
        on_cpu = "\non the CPU: a trial of the way; peak is resident memory, there are no CUDA graphs, and no targets"
        return Group(*parts, Text(NOTES), Text(on_cpu))
    targets = ((precision, found, measured(found)) for precision, found in outcomes(result))
    return Group(*parts, Text(NOTES), targets_table("precision", targets))


def headline(result: Result) -> str:
    sizes, options = result.sizes, result.options
    return (
        f"GPT of {result.parameters / 1e6:.1f} million parameters ({sizes.blocks} blocks, width {sizes.width}, "
        f"sequence {sizes.sequence}, vocabulary {sizes.vocabulary}), batch {sizes.batch} a rank, fused AdamW\n"
        f"{result.world} x {result.device or 'no device answered'}, {result.memory / 2**30:.0f} GiB; "
        f"torch {result.machine.get('torch')}; {options['starts']} starts of {options['rounds']} turns"
    )


def part_table(title: str, part: Part, result: Result) -> Table:
    """A row for each configuration."""
    table = Table(title=f"\n{title}; {part.steps} steps a turn", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("configuration", no_wrap=True)
    for column in (*COLUMNS, *MORE):
        table.add_column(column.format(reference=reference(part.world)), justify="right", no_wrap=True)
    for configuration in CONFIGURATIONS:
        entry = part.entries.get(configuration.name)
        if entry is not None:
            style = "bold" if configuration.ours else None
            table.add_row(configuration.name, *cells(entry, part, result), style=style)
    return table


def cells(entry: Entry, part: Part, result: Result) -> list[str | Text]:
    """The figures of one configuration, if they may be used."""
    if entry.failure or not entry.seconds:
        return [Text("FAILED", style="red")]
    right = part.reference
    seconds = Spread.of(list(entry.seconds.values()))
    used = utilisation(result, part.precision, seconds.median)
    seen = entry.inspection.counts if entry.inspection else None
    counted = [seen.launches, seen.graphs, seen.kernels, seen.waits] if seen else []
    return [
        f"{seconds.times(1e3):.2f}",
        shown(ratio(entry.seconds, right.seconds) if right else None),
        middle(entry.on_device),
        f"{result.tokens / seconds.median:,.0f}",
        "-" if used is None else f"{used:.1%}",
        middle(entry.host),
        entry.limit,
        *([str(count) for count in counted] or ["-"] * 4),
        f"{seen.busy * 1e3:.2f}" if seen else "-",
        f"{entry.allocated / MIB:.0f}",
        f"{entry.reserved / MIB:.0f}" if entry.reserved else "-",
        f"{entry.warmup[0]:.1f}" if entry.warmup else "-",
        "-" if entry.apart is None else f"{entry.apart:.3%}",
        str(len(entry.seconds)),
    ]


def middle(seconds: Mapping[str, float]) -> str:
    found = spread(list(seconds.values()))
    return f"{found.median * 1e3:.2f}" if found else "-"


def shown(found: Spread | None) -> str:
    return f"{found:.3f}" if found else "-"


def measured(found: Outcome) -> str:
    """The figure of a target."""
    return f"{found.found.median:.3f}" if found.found and found.target.memory else shown(found.found)


def write(result: Result, file: TextIO) -> None:
    """Write the tables to a file, or to the screen."""
    print_wide(report(result), WIDTH, file)
