"""What proofs of values cost: `python -m benchmarks.speed.proof_cost gpt:8x256 gpt:96x256` prints a line for each.

A model is named as for `zcompile plan`, and made and traced on meta. It goes through the passes of stage 3 for two
ranks; then what was proven on the way is proven once more, alone, and what that takes is compared with what the passes
and their other checks take. Seconds are of the processor; of several rounds the median, and behind it the spread.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

import zcompile
from benchmarks.common.figures import Spread
from zcompile import Program
from zcompile.ir.layout import STAGES
from zcompile.model.units import axes_over, make_layout
from zcompile.proof.values import TracedValues
from zcompile.schedule.pipeline import Journal
from zcompile.tools.named_models import subject_of
from zcompile.tools.tracing import trace


def laid_out(name: str, sequence: int) -> Program:
    """What is traced of the model `name`, laid out for stage 3 and two ranks."""
    subject = subject_of(name, batch=1, sequence=sequence)
    traced = trace(subject.model, subject.args, subject.kwargs)
    return replace(traced, layout=make_layout(subject.model, STAGES[3], axes_over(subject.model, 2)))


def measure(traced: Program) -> tuple[float, float, int]:
    """Seconds of the passes without proofs, of the proofs, and how many terms there are."""
    journal = Journal()
    started = time.process_time()
    zcompile.pipeline(stage=3).run(traced, journal)
    passed = time.process_time()
    values = TracedValues.of(traced)
    for entry in journal.entries:
        assert not list(values.violations(entry.after)), "it has been proven before"
    proofs = time.process_time() - passed
    return passed - started - proofs, proofs, len(values.terms.step.terms.keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each model, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="as for `zcompile plan`: gpt:96x256, or the folder of a config")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=128)
    options = parser.parse_args(arguments)
    table = Table("model", "operations", "terms", "passes s", "proofs s", "share")
    gc.disable()  # as it is while a model is compiled
    for name in options.models:
        traced = laid_out(name, options.sequence)
        rows = [measure(traced) for _ in range(options.rounds + 1)][1:]
        passes, proofs, terms = (statistics.median(column) for column in zip(*rows, strict=True))
        share = f"{Spread.of([proof / rest for rest, proof, _ in rows]):.1%}"
        count = sum(node.op == "call_function" for node in traced.graph.nodes)
        table.add_row(name, str(count), str(int(terms)), f"{passes:.3g}", f"{proofs:.3g}", share)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
