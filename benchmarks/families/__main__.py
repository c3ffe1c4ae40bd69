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

from benchmarks.common.ranks import Pool, TeamError
from benchmarks.families import table
from benchmarks.families.cells import CELLS, WRONG, Cell, Outcome, whole
from benchmarks.families.table import Results

FRESH = 60
"""Cells after which the ranks are started anew: what libraries keep of each would fill the memory."""


def train(pool: Pool, folder: Path, family: str, cell: Cell, patience: float) -> Outcome:
    """What becomes of a cell."""
    timeout, store = cell.limit * patience, folder / f"store{pool.tasks}"
    try:
        return whole(pool.ask(timeout, "run", family, cell.name, store, timeout / 3))
    except TeamError as error:
        return Outcome(error.kind, str(error))


def asked(options: argparse.Namespace, results: Results) -> Iterator[tuple[str, str, Cell]]:
    """The cells to run, each with its family and library, family by family: their references are then trained once."""
    from benchmarks.families.family import families, find  # imports torch and libraries, which --table does not need

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
        pool = Pool("benchmarks.families.worker:Matrix", 2, Path(folder) / "log", FRESH)
        for name, library, cell in asked(options, results):
            if time.monotonic() > deadline:
                break
            outcome = train(pool, Path(folder), name, cell, options.patience)
            results.put(name, library, cell.name, outcome)
            bad += outcome.kind in ("crash", "hang", "lost") or not outcome.distance <= WRONG
            print(
                f"{name:24} {cell.name:14} {outcome.kind:9} {outcome.distance:8.1e} {outcome.seconds:6.1f} s ", end=""
            )
            print(outcome.said[:300] if outcome.kind != "bits" else "", flush=True)
            if options.trace and outcome.trace:
                print(outcome.trace)
        pool.close()
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
