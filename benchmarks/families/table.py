"""The table of docs/families.md, written from results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.families.cells import CELLS, ORDER, WRONG
from benchmarks.families.results import Results

PAGE = Path(__file__).parent.parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- families: python -m benchmarks.families --table -->\n", "<!-- end of families -->\n"
BAD = ("crash", "hang", "lost")


def write(results: Results) -> None:
    """Put the table into its page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables(results) + "\n" + END + rest.split(END)[1])


def tables(results: Results) -> str:
    """How many cells there are of each kind, all of them, and what is said of those that are refused or fail."""
    return "\n\n".join([_counts(results), _matrix(results), "\n".join(_sentences(results))]) + "\n"


def _counts(results: Results) -> str:
    cells = [cell for family in results.families.values() for cell in family["cells"].values()]
    counts = Counter(cell["kind"] for cell in cells)
    near = sum(
        cell["kind"] == "distance" and cell["distance"] is not None and cell["distance"] <= WRONG for cell in cells
    )
    counts["distance"] -= near
    said = {"bits": "bit for bit equal", "distance": f"farther off than {WRONG:g}", "void": "void"}
    parts = [f"{counts[kind]} {said.get(kind, kind)}" for kind in reversed(ORDER) if counts[kind] or kind in said]
    equal, others = parts[0], ", ".join(parts[1:])
    return f"{len(results.families)} families, {len(cells)} cells: {equal}, {near} within rounding, {others}."


def _matrix(results: Results) -> str:
    rows = [["family", "of", *CELLS], ["---"] * (2 + len(CELLS))]
    for name, family in sorted(results.families.items(), key=lambda item: (item[1]["library"], item[0])):
        rows.append([name, family["library"], *(_shown(family["cells"].get(cell)) for cell in CELLS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _shown(cell: dict[str, Any] | None) -> str:
    """What a cell is, and the seconds to its first step."""
    if cell is None:
        return ""
    if cell["kind"] not in ("bits", "distance"):
        return f"**{cell['kind']}**" if cell["kind"] in BAD else str(cell["kind"])
    far = "bits" if cell["kind"] == "bits" else "NaN" if cell["distance"] is None else f"{cell['distance']:.0e}"
    return f"{far}, {cell['seconds']:.1f} s"


def _sentences(results: Results) -> list[str]:
    """Each sentence once, with the cells that say it."""
    where: dict[tuple[str, str], list[str]] = {}
    for name, family in results.families.items():
        for cell, found in family["cells"].items():
            if found["kind"] not in ("bits", "distance"):
                where.setdefault((found["kind"], found["said"]), []).append(f"{name} ({cell})")
    return [f"- {kind}: {', '.join(cells)}:\n  `{said}`" for (kind, said), cells in sorted(where.items())]
