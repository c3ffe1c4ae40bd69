"""Results of the matrix in a file, written cell by cell."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.families.cells import Outcome

FILE = Path(__file__).parent / "results.json"


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
        written = FILE.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(self.families, indent=1) + "\n")
        written.replace(FILE)
