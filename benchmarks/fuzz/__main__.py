"""Random models under random options, held against plain PyTorch: `python -m benchmarks.fuzz`, half an hour.

Each case is a small random model, options of zcompile, and a way to train it; loss, gradients, weights, buffers and
evaluations of each step are compared with those of eager PyTorch that averages the gradients of all ranks in one
process. A case is made from the seed and its number alone, so one that failed is run again with `--only`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

from rich.console import Console
from rich.table import Table

from benchmarks.common.ranks import Pool, TeamError
from benchmarks.fuzz.cases import Case, Verdict, draw_case, smaller, told

WORLD = 4
COMPILING = 4
"""How many times as long a case may take that Inductor compiles."""
FRESH = 50
"""Cases after which ranks are started anew: threads of gloo's groups live as long as anything refers to a group."""
KINDS = ("right", "wrong", "crash", "hang", "refused", "void")
ORDER = ("wrong", "crash", "hang", "refused", "void")
"""What a case is, whose ranks say different things: the first of these that one says."""


class Cases:
    """Runs one case after the other on the same ranks."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder, self.timeout = folder, timeout
        self.pool = Pool("benchmarks.fuzz.worker:Judge", WORLD, folder / "log", FRESH)

    def run(self, case: Case) -> Verdict:
        """What became of a case."""
        timeout = self.timeout * (COMPILING if case.options.get("backend") == "inductor" else 1)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            try:
                answers = self.pool.ask(timeout, "judge", case, Path(folder), timeout / 3)
            except TeamError as error:
                return Verdict(error.kind, str(error))
        return whole([answer for answer in answers if answer is not None])


def whole(answers: list[Verdict]) -> Verdict:
    """What the ranks say together."""
    for kind in ORDER:
        if found := [answer for answer in answers if answer.kind == kind]:
            return found[0]
    return Verdict("right", bits=all(answer.bits for answer in answers))


@contextmanager
def opened(timeout: float) -> Iterator[Cases]:
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder), timeout)
        try:
            yield cases
        finally:
            cases.pool.close()


def shrunk(cases: Cases, case: Case, verdict: Verdict) -> Case:
    """The least case that fails alike, by taking the first thing away without which it still does, and so on."""
    for less in smaller(case):
        found = cases.run(less)
        if (found.kind, found.what) == (verdict.kind, verdict.what):
            return shrunk(cases, less, verdict)
    return case


def report(verdicts: dict[int, Verdict], seed: int, say: Console) -> None:
    """Print what was found: a table of kinds, one of refusals and failures, and how to repeat each failure."""
    counts = Counter(verdict.kind for verdict in verdicts.values())
    table = Table("cases", *KINDS)
    table.add_row(str(len(verdicts)), *(str(counts[kind]) for kind in KINDS))
    say.print(table)
    promised = [n for n, verdict in verdicts.items() if verdict.kind == "right" and draw_case(seed, n).exact]
    others = [number for number in promised if not verdicts[number].bits]
    equal = len(promised) - len(others)
    say.print(f"bit for bit equal where only one order of sums is right: {equal} of {len(promised)}; not {others}")
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, verdict in verdicts.items():
        if verdict.kind != "right":
            kinds.setdefault((verdict.kind, verdict.what), []).append(number)
    details = Table("kind", "what", "cases", "repeat", title_justify="left")
    for (kind, what), numbers in sorted(kinds.items(), key=lambda item: (KINDS.index(item[0][0]), -len(item[1]))):
        command = f"python -m benchmarks.fuzz --seed {seed} --only {numbers[0]}"
        details.add_row(kind, what[:200], str(len(numbers)), command)
    say.print(details)


def campaign(options: argparse.Namespace, say: Console) -> dict[int, Verdict]:
    """Run all cases, several at a time: a rank that waits for another leaves its processor to the next case."""
    numbers = Queue[int]()
    for number in range(options.first, options.first + options.cases):
        numbers.put(number)
    deadline = time.monotonic() + 60 * options.minutes
    verdicts: dict[int, Verdict] = {}

    def work() -> None:
        with opened(options.timeout) as cases:
            while time.monotonic() < deadline:
                try:
                    number = numbers.get_nowait()
                except Empty:
                    return
                verdicts[number] = verdict = cases.run(draw_case(options.seed, number))
                if verdict.kind not in ("right", "void"):
                    say.print(f"{number}: {verdict.kind}: {verdict.said}", highlight=False, markup=False)

    with ThreadPoolExecutor(options.jobs) as threads:
        for done in [threads.submit(work) for _ in range(options.jobs)]:
            done.result()
    return verdicts


def one(options: argparse.Namespace, say: Console) -> dict[int, Verdict]:
    """Run one case and show it, and how it failed; perhaps look for the least that fails alike."""
    case = draw_case(options.seed, options.only)
    with opened(options.timeout) as cases:
        verdict = cases.run(case)
        say.print(told(case), verdict.text, sep="\n", highlight=False, markup=False)
        if options.shrink and verdict.kind != "right":
            say.print("the least:", told(shrunk(cases, case, verdict)), highlight=False, markup=False)
    return {options.only: verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="run this one case, and show it and the whole error")
    parser.add_argument("--shrink", action="store_true", help="with --only: look for the least case that fails alike")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no case after that")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a case is a hang")
    options = parser.parse_args()
    say, started = Console(width=140), time.monotonic()
    verdicts = campaign(options, say) if options.only is None else one(options, say)
    report(verdicts, options.seed, say)
    say.print(f"{time.monotonic() - started:.0f} s")
    return int(any(verdict.kind in ("wrong", "crash", "hang") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
