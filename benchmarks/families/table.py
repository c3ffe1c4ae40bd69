"""Results of the matrix in a file, written cell by cell, and the tables of docs/families.md that are made of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.figures import write_json
from benchmarks.families.cells import CELLS, ORDER, WRONG, Outcome

FILE = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families: python -m benchmarks.families --table -->\n", "<!-- end of families -->\n"
BAD = ("crash", "hang", "lost")


@dataclass
class Results:
    """By family, its library and its cells."""

    families: dict[str, dict[str, Any]]

    @classmethod
    def read(cls) -> Results:
        return cls(json.loads(FILE.read_text()) if FILE.exists() else {})

    def has(self, family: str, cell: str) -> bool:
        return cell in self.families.get(family, {}).get("cells", {})

    def put(self, family: str, library: str, cell: str, outcome: Outcome) -> None:
        """Keep what became of a cell, on disk at once, beside what another command has put there."""
        self.families = self.read().families
        kept = {"kind": outcome.kind, "said": outcome.said, "distance": outcome.distance}
        # NaN is no JSON
        kept["distance"] = None if outcome.distance != outcome.distance else float(f"{outcome.distance:.2g}")
        kept["seconds"] = round(outcome.seconds, 1)
        self.families.setdefault(family, {"library": library, "cells": {}})["cells"][cell] = kept
        write_json(self.families, FILE)


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
