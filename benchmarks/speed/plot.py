"""The plot of a run: seconds a step over each link, with the floor, and peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.common.configurations import CONFIGURATIONS, Configuration
from benchmarks.common.figures import spread
from benchmarks.speed.floor import floors
from benchmarks.speed.results import LinkResult, Result

COLOURS = {
    "alone": "#b8b8b8",
    "ddp": "#7f9fb8",
    "zero1": "#7f9fb8",
    "fsdp2": "#5b7fa3",
    "deepspeed": "#a58fb8",
    "zcompile": "#d9822b",
}
FORMATS = ("png", "svg")


def plot(result: Result, folder: Path) -> list[Path]:
    """Draw `result` into `folder`, and say where."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = {name: link for name, link in result.links.items() if not link.left_out}
    if not links:
        return []
    shown = [c for c in CONFIGURATIONS if any(link.healthy(c.name) for link in links.values())]
    height = 1.6 + 0.3 * len(shown)
    figure, axes = pyplot.subplots(1, len(links) + 1, figsize=(4 * len(links) + 4, height), sharey=True, squeeze=False)
    for axis, (name, link) in zip(axes[0], links.items(), strict=False):
        draw_times(axis, name, link, shown, result)
    draw_memory(axes[0][-1], list(links.values()), shown)
    axes[0][0].set_yticks(range(len(shown)), [c.name for c in shown])
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    paths = [folder / f"plot.{kind}" for kind in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return paths


def draw_times(axis: Any, name: str, link: LinkResult, shown: list[Configuration], result: Result) -> None:
    """Medians as bars, least to largest as whiskers, the floor of each stage as a tick."""
    for row, configuration in enumerate(shown):
        entry = link.healthy(configuration.name)
        found = spread(list(entry.seconds.values())) if entry else None
        if found is None:
            axis.text(0, row, " failed" if configuration.name in link.entries else " not measured", va="center", size=8)
            continue
        whiskers = [[found.median - found.low], [found.high - found.median]]
        axis.barh(row, found.median, color=COLOURS[configuration.family], xerr=whiskers, error_kw={"lw": 0.8})
        floor = spread(list(floors(link, result.parameters, result.cores).values()))
        if floor and configuration.communicates:
            axis.plot([floor.median] * 2, [row - 0.4, row + 0.4], color="black", lw=1.5)
    axis.set_title(f"{name}: seconds a step\n(black: the floor)", size=10)


def draw_memory(axis: Any, links: list[LinkResult], shown: list[Configuration]) -> None:
    """The largest peak of all links."""
    for row, configuration in enumerate(shown):
        peaks = [entry.peak for link in links if (entry := link.healthy(configuration.name))]
        axis.barh(row, max(peaks, default=0) / 2**20, color=COLOURS[configuration.family])
    axis.set_title("peak resident memory\nof a rank, MiB", size=10)
