"""Small models of many families, each trained in many ways and held against DistributedDataParallel.

    python -m benchmarks.families                                    # every cell that has no result yet
    python -m benchmarks.families --models llama gan --cells stage3  # these, again
    python -m benchmarks.families --table                            # writes the table of docs/families.md

Two ranks over gloo train three steps. Results are kept as they come, so a run may be cut off. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.families import table
from benchmarks.families.cells import CELLS, WRONG, Cell, Outcome, Task, whole
from benchmarks.families.results import Results
from benchmarks.links import LOOPBACK
from benchmarks.team import Team, TeamError

FRESH = 60
"""Cells after which the ranks are started anew: what libraries keep of each would fill the memory."""
STARTING = 600.0
"""Seconds that ranks may take to start."""


class Pair:
    """Two rank processes that run one cell after the other; started anew when one has died or hangs."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.team: Team | None = None
        self._run = 0

    def run(self, family: str, cell: Cell) -> Outcome:
        """What became of a cell."""
        self._run += 1
        if self._run % FRESH == 0:
            self.close()
        if self.team is None:
            self.team = Team("benchmarks.families.worker", [LOOPBACK] * 2, self.folder / "log", STARTING)
            self.team.hear()  # imports are no part of a cell
        self.team.timeout = cell.limit * self.patience
        store = self.folder / f"store{self._run}"
        self.team.tell(*(Task(family, cell.name, rank, store, self.team.timeout / 3) for rank in range(2)))
        try:
            return whole(self.team.hear())
        except TeamError as error:
            self.team = None
            return Outcome("hang" if "no answer" in str(error) else "crash", str(error))

    def close(self) -> None:
        if self.team is not None:
            self.team.close(patience=0.5)
            self.team = None


def asked(options: argparse.Namespace, results: Results) -> Iterator[tuple[str, str, Cell]]:
    """The cells to run, each with its family and library, family by family: their references are then trained once."""
    from benchmarks.families.catalogue import families, find  # imports torch and libraries, which --table does not need

    cells = options.cells or list(CELLS)
    known = {name: find(name) for name in options.models or families()}
    if unknown := [name for name in (*known, *cells) if known.get(name) is None and name not in CELLS]:
        sys.exit(f"unknown: {', '.join(unknown)}; models: {', '.join(families())}; cells: {', '.join(CELLS)}")
    for name, family in known.items():
        assert family is not None, "the others are unknown"
        for cell in cells:
            done = results.has(name, cell) and not (options.again or (options.models and options.cells))
            if not done and (cell != "trainer" or family.trainer):
                yield name, family.library, CELLS[cell]


def run(options: argparse.Namespace, results: Results) -> int:
    """Run the cells that were asked for, and say each; 1 if one is wrong, crashed or hung."""
    deadline, bad = time.monotonic() + 60 * options.minutes, 0
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(Path(folder), options.patience)
        for name, library, cell in asked(options, results):
            if time.monotonic() > deadline:
                break
            outcome = pair.run(name, cell)
            results.put(name, library, cell.name, outcome)
            bad += outcome.kind in ("crash", "hang", "lost") or not outcome.distance <= WRONG
            print(
                f"{name:24} {cell.name:14} {outcome.kind:9} {outcome.distance:8.1e} {outcome.seconds:6.1f} s ", end=""
            )
            print(outcome.said[:300] if outcome.kind != "bits" else "", flush=True)
            if options.trace and outcome.trace:
                print(outcome.trace)
        pair.close()
    return int(bad > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="families, by name")
    parser.add_argument("--cells", nargs="+", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after that")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="how many times as long cells may take, on a busy machine"
    )
    parser.add_argument("--trace", action="store_true", help="show tracebacks of what failed")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/families.md")
    options = parser.parse_args()
    results = Results.read()
    if options.table:
        table.write(results)
        return 0
    return run(options, results)


if __name__ == "__main__":
    sys.exit(main())
