"""All that is to be known of a machine with GPUs, in ten minutes: `make gpu`, or `python -m benchmarks.gpu.check`.

Runs the tests that want a GPU, steps in which any wait of the host for the device is an error, memory of one rank of
large worlds, and the benchmark, each in processes of its own and within a limit: what outlives it is stopped and named,
and the others still run. Writes report.md, and what each part printed under logs/, to the output folder. Exits with
status 0 if every part passed or had to be skipped, 1 if not, 2 where no GPU is free, and 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.common.ranks import ROOT
from benchmarks.gpu.__main__ import NO_DEVICE, OUTPUT
from benchmarks.gpu.machine import GIB, Machine, machine, refusal
from benchmarks.speed.__main__ import INTERRUPTED, describe_machine

MINUTES = 10.0
GRACE = 15.0  # seconds in which a part that is stopped writes what it has
LEAST = 10.0  # seconds below which no part begins
SHOWN = 100  # lines of what a part printed that the report shows
TESTS = ROOT / "tests"
PYTEST = (sys.executable, "-m", "pytest", "-q", "--disable-warnings", "-m", "gpu")
WAITS = "tests/test_gpu.py::test_no_step_makes_the_host_wait"
RANKS = "tests/test_nccl.py"
ALONE = (
    "compile",
    "compile-graphs",
    "fsdp2-3-compiled",
    "zcompile-0",
    "zcompile-0-step",
    "zcompile-3",
    "zcompile-3-step",
)
TOGETHER = ("ddp-compiled", "fsdp2-3-compiled", "zcompile-0", "zcompile-3", "zcompile-3-step")
SMALL = ("compile", "fsdp2-3-compiled", "zcompile-3", "zcompile-3-step")
SMALL_SIZES = ("--blocks", "12", "--width", "640", "--heads", "10")  # 124 million parameters; else 406 million
HOST = ("processor", "cores", "kernel", "python", "measured")
STOPPED = "interrupted"
Outcome = Literal["passed", "FAILED", "skipped", "GAP"]


@dataclass(frozen=True)
class Part:
    """One command."""

    name: str
    """Of its files."""
    title: str
    command: Callable[[float], list[str]]
    """Given the seconds that it may take."""
    share: float
    """Of the seconds that are left when it begins."""
    skipped: str = ""
    """Why it cannot be run here."""


@dataclass(frozen=True)
class Ended:
    """What became of a part."""

    part: Part
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    shown: str = ""
    """The end of what it printed; where it did not pass, of its errors too."""


def parts_of(found: Machine, output: Path) -> tuple[Part, ...]:
    """All parts, in the order in which they matter."""
    world = len(found.cards)
    one = "there is one GPU: several ranks over NCCL want one each" if world == 1 else ""
    smaller = partial(bench, 1, SMALL, Path(f"{output}-small"), sizes=SMALL_SIZES)
    return (
        Part("tests", "Tests marked gpu", tests, 0.35),
        Part("waits", "Steps in which the host may not wait", waits, 0.15),
        Part("ranks", "Several ranks on one GPU", ranks, 0.4),
        Part("memory", "Memory of one rank of large worlds", memory, 0.25),
        Part("chunks", "A large vocabulary in chunks", chunks, 0.25),
        Part("bench", "Benchmark, one rank", partial(bench, 1, ALONE, output), 0.65 if one else 0.4),
        Part("bench-small", "Benchmark, one rank, a smaller model", smaller, 1.0 if one else 0.4),
        Part("bench-ranks", "Benchmark, all GPUs", partial(bench, world, TOGETHER, Path(f"{output}-ranks")), 1.0, one),
    )


def tests(_: float) -> list[str]:
    """Several at a time: most of their time goes into compiling, on the host."""
    found = (str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py") if is_marked(path))
    files = sorted(path for path in found if path != RANKS)
    workers = str(max(1, min(4, (os.cpu_count() or 1) // 2)))
    options = ["--numprocesses", workers, "--dist", "worksteal", "--deselect", WAITS]
    return [*PYTEST, *options, *files]


def is_marked(path: Path) -> bool:
    """Whether a file has tests that want a GPU."""
    lines = path.read_text().splitlines()
    return any(line.strip() in ("@pytest.mark.gpu", "pytestmark = pytest.mark.gpu") for line in lines)


def waits(_: float) -> list[str]:
    return [*PYTEST, WAITS]


def ranks(seconds: float) -> list[str]:
    """Over NCCL; what is left when time runs out is skipped."""
    workers = str(max(2, min(4, (os.cpu_count() or 1) // 4)))  # a test has up to four ranks
    options = ["--numprocesses", workers, "--dist", "worksteal", "--within", f"{max(0.0, seconds - 60):.0f}"]
    return [*PYTEST, *options, RANKS]


def memory(_: float) -> list[str]:
    """Of the two that fit on a card of 40 GB."""
    return [sys.executable, "-m", "benchmarks.gpu.memory", "--models", "7.5B", "128B"]


def chunks(_: float) -> list[str]:
    """16,384 tokens of 128,256 words."""
    options = ["--device", "cuda", "--backend", "inductor", "--rows", "2048", "--rounds", "3"]
    return [sys.executable, "-m", "benchmarks.memory.chunks", *options]


def bench(ranks: int, names: Sequence[str], output: Path, seconds: float, sizes: Sequence[str] = ()) -> list[str]:
    """In the one precision for which there is time."""
    options = ["--ranks", str(ranks), *sizes, "--precisions", "bf16", "--only", *names, "--output", str(output)]
    minutes = f"{max(0.1, seconds / 60 - 0.25):.2f}"
    return [sys.executable, "-m", "benchmarks.gpu", *options, "--minutes", minutes, "--timeout", "120"]


def run_all(parts: Sequence[Part], deadline: float, folder: Path, say: Callable[[str], None]) -> list[Ended]:
    """Run one after the other until `deadline`, a time of the monotonic clock; an interrupt leaves the rest out."""
    found: list[Ended] = []
    interrupted = False
    for part in parts:
        seconds = part.share * (deadline - time.monotonic() - GRACE)
        if part.skipped:
            found.append(Ended(part, "skipped", part.skipped))
        elif interrupted:
            found.append(Ended(part, "GAP", "the run was interrupted before it"))
        elif seconds < LEAST:
            found.append(Ended(part, "GAP", "no time was left for it"))
        else:
            say(f"{part.title}: at most {seconds:.0f} s; it prints to {folder}/{part.name}.txt")
            found.append(run(part, seconds, folder))
            interrupted = found[-1].reason == STOPPED
        say(line(found[-1]))
    return found


def run(part: Part, seconds: float, folder: Path) -> Ended:
    """Run one part; it and what it has started have ended when this returns."""
    out, errors = folder / f"{part.name}.txt", folder / f"{part.name}.errors.txt"
    began = time.monotonic()
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            part.command(seconds),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C goes to this command, which lets the part write what it has
        )
        outcome, reason = wait(process, seconds)
        stop(process)
    shown = tail(out) if outcome == "passed" else "\n".join(filter(None, (tail(out), tail(errors))))
    return Ended(part, outcome, reason, time.monotonic() - began, shown)


def wait(process: subprocess.Popen[bytes], seconds: float) -> tuple[Outcome, str]:
    """How it ended, or why it must be stopped."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "GAP", f"stopped: it did not end within {seconds:.0f} s"
    except KeyboardInterrupt:
        return "GAP", STOPPED
    return ("FAILED", f"exit status {status}") if status else ("passed", "")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it if it still runs, and kill what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(path: Path) -> str:
    """The last lines of a file, without what is blank at their ends."""
    lines = [line.rstrip() for line in path.read_text(errors="replace").strip("\n").splitlines()]
    return "\n".join(lines[-SHOWN:])


def line(ended: Ended) -> str:
    reason = f" ({ended.reason})" if ended.reason else ""
    return f"{ended.part.title}: {ended.outcome} after {ended.seconds:.0f} s{reason}"


def report(found: Machine, ended: Sequence[Ended]) -> str:
    """The page of a run, in Markdown."""
    facts = {**versions(found), **{name: str(value) for name, value in describe_machine().items() if name in HOST}}
    lines = ["# zcompile on a GPU", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "| part | outcome | seconds | |", "|---|---|---|---|"]
    lines += [f"| {one.part.title} | {one.outcome} | {one.seconds:.0f} | {one.reason} |" for one in ended]
    for one in ended:
        if one.shown:
            lines += ["", f"## {one.part.title}: {one.outcome}", "", "~~~~text", one.shown, "~~~~"]
    return "\n".join(lines) + "\n"


def versions(found: Machine) -> dict[str, str]:
    """The GPUs, and what is installed for them."""
    cards = [f"{one.name}, {one.memory / GIB:.1f} GiB, {one.free / GIB:.1f} free" for one in found.cards]
    return {
        "commit": commit(),
        "GPUs": "; ".join(cards),
        "torch": found.torch,
        "CUDA": found.cuda or "-",
        "driver": found.driver or "-",
        "NCCL": found.nccl or "-",
    }


def commit() -> str:
    """What is checked out; a dash where git does not know."""
    with suppress(OSError):
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "-"
    return "-"


def main(arguments: Sequence[str]) -> int:
    """Run all parts, and write the report, also when it is interrupted."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for everything together ({MINUTES:g})")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the report (benchmarks/results/gpu)")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell that puts it into the background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    found = machine()
    if reason := refusal(found):
        print(reason, file=sys.stderr)
        return NO_DEVICE
    output = options.output.resolve()
    folder = output / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    say = partial(print, file=sys.stderr, flush=True)
    ended = run_all(parts_of(found, output), began + 60 * options.minutes, folder, say)
    (output / "report.md").write_text(report(found, ended))
    say(f"the report is {output / 'report.md'}")
    if any(one.reason == STOPPED for one in ended):
        return INTERRUPTED
    return int(any(one.outcome in ("FAILED", "GAP") for one in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
