"""Peak memory of a step beside the peers, in live bytes: `make bench-memory`, or `python -m benchmarks.memory`.

Two ranks over loopback, one configuration after the other. What is counted is every large block that a rank's process
has allocated and not freed, in a step after the warm-up: tensors between operations and within them, buffers of
messages, whatever a library keeps. "beside state" leaves out what is alive between two steps: parameters and optimizer
state, and what a library holds on to. Writes memory.txt and memory.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.common.configurations import BY_NAME, LONG, MIB, Configuration, Sizes, add_sizes, sizes_of
from benchmarks.common.figures import write_json
from benchmarks.common.links import LOOPBACK
from benchmarks.common.live_bytes import build
from benchmarks.common.protocol import Start, Weighed
from benchmarks.common.ranks import LOCAL, Team, TeamError
from benchmarks.common.turns import print_to
from benchmarks.common.turns import table as empty_table

PLAIN = ("ddp", "zcompile-0", "zero-optimizer", "deepspeed-1", "zcompile-1", "fsdp2-2", "deepspeed-2", "zcompile-2",
         "fsdp2-3", "fsdp2-3-compiled", "deepspeed-3", "zcompile-3")  # fmt: skip
CHECKPOINTED = ("ddp", "deepspeed-2", "zcompile-2", "fsdp2-3", "fsdp2-3-compiled", "deepspeed-3", "zcompile-3")
UPDATING = tuple(f"zcompile-{stage}" for stage in range(4))
CONFIGURATIONS = {
    **{name: BY_NAME[name] for name in PLAIN},
    **{f"{name}+step": replace(BY_NAME[name], updates=True) for name in UPDATING},
    **{f"{name}+unit": replace(BY_NAME[name], checkpoint="unit") for name in CHECKPOINTED},
    "zcompile-3+unit+step": replace(BY_NAME["zcompile-3"], checkpoint="unit", updates=True),
}


@dataclass(frozen=True)
class Found:
    """What a configuration takes on the rank that takes more, in bytes; or why that is not known."""

    state: int = 0
    peak: int = 0
    failure: str = ""

    @property
    def beside(self) -> int:
        return self.peak - self.state


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="NAME", help="which (all)")
    add_sizes(parser, LONG)
    add("--timeout", type=float, default=600, help="seconds until one that does not answer has failed (600)")
    add("--output", type=Path, default=LOCAL, help="folder of the results (benchmarks/results/local)")
    options = parser.parse_args(arguments)
    for name in (*asdict(LONG), "timeout"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} is too small: give 1 or more")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure one after the other; returns 1 if one of zcompile's failed."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(options)
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        library = build(Path(folder))
        for name in options.only:
            print(f"{name}: training", file=sys.stderr, flush=True)
            found[name] = weigh(name, CONFIGURATIONS[name], sizes, library, options)
    write_json({"sizes": sizes, "found": found}, options.output / "memory.json")
    print_to([options.output / "memory.txt"], table(found, sizes))
    return int(any(one.failure for name, one in found.items() if CONFIGURATIONS[name].ours))


def weigh(name: str, configuration: Configuration, sizes: Sizes, library: Path, options: argparse.Namespace) -> Found:
    """Train a few steps of one configuration on two ranks that count their bytes."""
    logs = options.output / "logs" / "memory"
    logs.mkdir(parents=True, exist_ok=True)
    preload, worker = {"LD_PRELOAD": str(library)}, "benchmarks.common.worker:Worker"
    with Team(worker, (LOOPBACK, LOOPBACK), logs / name, options.timeout, preload) as team:
        try:
            team.begin(Start(configuration, 2, sizes, 0, library.parent / name, options.timeout, warmup=2))
            team.hear()
            answers: list[Weighed] = team.ask("weigh", 2)
        except TeamError as error:
            return Found(failure=str(error))
    most = max(answers, key=lambda answer: answer.peak)
    return Found(most.state, most.peak)


def table(found: Mapping[str, Found], sizes: Sizes) -> Table:
    """One row a configuration, those of a stage together, with "+unit" the input of each block is saved and no more."""
    title = (
        f"GPT of {sizes.blocks} blocks, width {sizes.width}, vocabulary {sizes.vocabulary}, sequence {sizes.sequence}"
    )
    result = empty_table(
        f"{title}, batch {sizes.batch} a rank, fp32, AdamW; MiB of the larger rank",
        *("stage", "configuration", "state", "peak", "beside state", "peak of the best peer's"),
        left=["configuration"],
        ruled=False,
    )
    for name, one in found.items():
        configuration = CONFIGURATIONS[name]
        if one.failure:
            result.add_row(str(configuration.stage), name, f"FAILED: {one.failure}", style="red")
            continue
        peers = [other.peak for peer, other in found.items()
                 if not other.failure and not CONFIGURATIONS[peer].ours
                 and (CONFIGURATIONS[peer].stage, CONFIGURATIONS[peer].checkpoint)
                 == (configuration.stage, configuration.checkpoint)]  # fmt: skip
        share = f"{one.peak / min(peers):.2f}" if configuration.ours and peers else ""
        figures = (f"{value / MIB:.1f}" for value in (one.state, one.peak, one.beside))
        result.add_row(str(configuration.stage), name, *figures, share, style="bold" if configuration.ours else None)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
