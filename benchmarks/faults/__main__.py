"""Nothing goes wrong silently: `python -m benchmarks.faults`, about half an hour on two cores that do nothing else.

Ranks are brought out of step, killed, stopped and delayed: they must do what a loop of plain PyTorch does, or say who
and where (`of_ranks`). Checkpoints are cut off while they are written, damaged and put on full disks: they must load as
they were saved, or say which file (`of_checkpoints`). What users see is judged.

Each case has a name and is the same in every run: `--only NAME` repeats one, or all whose names hold a text.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.faults import of_checkpoints, of_ranks
from benchmarks.faults.verdicts import GOOD, MISSED, SKIPPED, Found

Run = tuple[str, Callable[[], Found]]
WIDTH = 150  # columns
INTERRUPTED = 130  # the exit status of a program stopped by Ctrl-C


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", choices=("ranks", "checkpoints"), help="one part (both)")
    add("--cases", type=int, default=320, help="cases of each part (320)")
    add("--seed", type=int, default=0, help="of the choice of cases (0)")
    add("--only", default="", metavar="NAME", help="one case, or the chosen ones that have this in their name")
    add("--timeout", type=float, default=6, help="seconds of the ranks' groups; give more on a busy machine (6)")
    add("--together", type=int, default=3, help="cases at once: most of them wait (3)")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Run]:
    """The cases that were asked for."""
    ranks = of_ranks.cases(options.cases, options.seed)
    trials = of_checkpoints.trials(options.cases, options.seed)
    if options.only:
        ranks = [c for c in of_ranks.all_cases() if c.name == options.only] or ranks
        trials = [t for t in of_checkpoints.all_trials() if t.name == options.only] or trials
    runs: list[Run] = []
    if options.part != "checkpoints":
        runs += [(case.name, partial(of_ranks.judge, case, options.timeout)) for case in ranks]
    if options.part != "ranks":
        runs += [(trial.name, partial(of_checkpoints.try_out, trial, options.timeout)) for trial in trials]
    return [run for run in runs if options.only in run[0]]


def found_by(name: str, act: Callable[[], Found]) -> Found:
    """What came of a case; a mistake of the campaign costs this one alone."""
    try:
        return act()
    except Exception:
        return Found(name, "broken", "broken", traceback.format_exc())


def table_of(found: Sequence[Found]) -> Table:
    """How often each kind of fault came to each verdict that there was."""
    verdicts = [v for v in (*GOOD, SKIPPED, *MISSED) if any(one.verdict == v for one in found)]
    table = Table("fault", *verdicts)
    for kind in sorted({one.kind for one in found}):
        add_row(table, kind, verdicts, [one for one in found if one.kind == kind])
    table.add_section()
    add_row(table, f"{len(found)} cases", verdicts, found)
    return table


def add_row(table: Table, name: str, verdicts: Sequence[str], found: Sequence[Found]) -> None:
    counts = Counter(one.verdict for one in found)
    table.add_row(name, *(str(counts[verdict] or "") for verdict in verdicts))


def main(arguments: Sequence[str]) -> int:
    """Run the cases and print what came of them, also when interrupted: then those under way are waited for.

    Returns 0; 1 if any case has missed the target; 2 if there were none; 130 if it was interrupted.
    """
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends processes as Ctrl-C does
    console = Console()
    console.width = max(WIDTH, console.width)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    found: list[Found] = []
    pool = ThreadPoolExecutor(options.together)
    interrupted = False
    try:
        for ended in as_completed([pool.submit(found_by, *run) for run in chosen(options)]):
            found.append(one := ended.result())
            if one.verdict in MISSED or options.only:
                say(f"{one.verdict}  {one.name}\n    {one.why}")
    except KeyboardInterrupt:
        interrupted = True
    pool.shutdown(cancel_futures=True)
    console.print(table_of(found))
    for verdict in {one.verdict: None for one in found if one.verdict in MISSED}:
        say(f"{verdict}: {MISSED[verdict]}")
    if interrupted:
        return INTERRUPTED
    return int(any(one.verdict in MISSED for one in found)) if found else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
