"""Results of the matrix in a file, written cell by cell, and the tables of docs/families.md."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.figures import write_json
from benchmarks.families.cells import CELLS, WRONG, Outcome

FILE = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- families: python -m benchmarks.families --table -->\n", "<!-- end of families -->\n"
BITS, ROUNDING, FARTHER = "bits", "rounding", "farther"
KINDS = (BITS, ROUNDING, FARTHER, "refused", "void")


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
        far = None if outcome.distance != outcome.distance else float(f"{outcome.distance:.2g}")  # NaN is no JSON
        kept = {"kind": outcome.kind, "said": outcome.said, "distance": far, "seconds": round(outcome.seconds, 1)}
        self.families.setdefault(family, {"library": library, "cells": {}})["cells"][cell] = kept
        write_json(self.families, FILE)


def write(results: Results) -> None:
    """Put the table into its page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables(results) + "\n" + END + rest.split(END)[1])


def tables(results: Results) -> str:
    """Counts of each cell, the families that are equal in all cells, a table of the others, and what errors say."""
    counts: dict[str, Counter[str]] = {cell: Counter() for cell in CELLS}
    equal: dict[str, list[str]] = {}
    others = [["family", "library", "cells that are not equal"]]
    said: dict[tuple[str, str], dict[str, None]] = {}
    for name, family in sorted(results.families.items(), key=lambda item: (item[1]["library"], item[0])):
        where: dict[str, list[str]] = {}
        for cell in filter(family["cells"].__contains__, CELLS):
            found = family["cells"][cell]
            kind, shown = _kind(found)
            counts[cell][kind] += 1
            if kind != BITS and not (kind == ROUNDING and "inductor" in cell):
                where.setdefault(shown, []).append(cell)
            if kind == found["kind"] != BITS:
                said.setdefault((kind, found["said"]), {})[name] = None
        if where:
            others.append([name, family["library"], "; ".join(f"{far}: {', '.join(at)}" for far, at in where.items())])
        else:
            equal.setdefault(family["library"], []).append(name)
    counts["all"] = sum(counts.values(), Counter())
    rows = [[cell, *(str(counted[kind]) for kind in KINDS)] for cell, counted in counts.items()]
    parts = [
        f"{len(results.families)} families, {counts['all'].total()} cells:",
        _markdown([["cell", *KINDS], *rows]),
        "Equal in every cell, except for rounding by Inductor:",
        "\n".join(f"- {library}: {', '.join(names)}" for library, names in equal.items()),
        _markdown(others),
        "\n".join(f"- {kind}: {', '.join(names)}:\n  `{text}`" for (kind, text), names in sorted(said.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _kind(cell: dict[str, Any]) -> tuple[str, str]:
    """Its kind, and how it is shown: a distance as a number."""
    if cell["kind"] != "distance":
        return cell["kind"], cell["kind"]
    far = cell["distance"]
    return (FARTHER, "NaN") if far is None else (ROUNDING if far <= WRONG else FARTHER, f"{far:.0e}")


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
