"""Write the programs that the documentation shows: `python -m docs.printed`. A test checks that they are up to date.

stages.md is written as a whole. In other pages, a comment determines the block below it:

    <!-- printed: layers=2 stage=3 phase=forward -->             the printed function
    <!-- printed: layers=4 stage=3 phase=backward body -->       without the unboxing of its arguments
    <!-- printed: layers=4 stage=3 phase=forward replicas=2 -->  on a mesh with 2 ranks along its outer dimension
    <!-- printed: layers=4 stage=3 phase=forward replicas=2 shard=hpz -->  and with this `shard=`
    <!-- printed: layers=4 stage=3 phase=backward last=6 own --> its last 6 lines, with the pass of examples/own_pass.py
    <!-- proven: layers=4 stage=3 -->                            the output of `zcompile prove` for its dump
    <!-- proven: layers=4 stage=3 file=backward.py old=a new=b --> the same, with the first `a` replaced by `b`
"""

from __future__ import annotations

import difflib
import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from examples.own_pass import WAIT_AT_END, Net
from zcompile.cost.hardware import load_profile
from zcompile.cost.memory import model_state
from zcompile.ir.axis import axes_of
from zcompile.ir.layout import STAGES, Hybrid
from zcompile.ir.operation import Phase
from zcompile.ir.printer import lines_with_nodes
from zcompile.ir.program import Program
from zcompile.model.units import make_layout
from zcompile.proof.dumps import prove_dump
from zcompile.report.dumps import write_dump
from zcompile.schedule.options import Options
from zcompile.schedule.pipeline import Journal
from zcompile.tools.tracing import trace

ROOT = Path(__file__).parent.parent
STAGES_PAGE = ROOT / "docs" / "stages.md"
PAGES = ("index.md", "programs.md", "passes.md", "proof.md", "several_machines.md")
WITH_BLOCKS = [ROOT / "README.md", *(ROOT / "docs" / page for page in PAGES)]
WORLD, PREFETCH = 4, 1
COLUMNS = {"stage 0": 0, "stages 1 and 2": 2, "stage 3": 3}
_BYTES = re.compile(r"[+-][\d.]+ [KMG]?i?B")
_CALLS = re.compile(r"= region_\d+\(")

INTRODUCTION = f"""# The stages side by side

This page shows the programs of ZeRO's stages, line by line: four linear layers, {WORLD} ranks, `prefetch={PREFETCH}`,
printed by `python -m docs.printed`. Calls of the same region are in the same row. The regions and the results are the
same in all stages; only the lines between the regions differ. Each line is followed by the bytes that it allocates or
frees. The arguments of a reduction are freed when it has been waited for. Stages 1 and 2 have the same program; they
differ under `no_sync`, where stage 1 holds back full gradients. [How ZeRO looks as a program](programs.md) explains the
lines.
"""


class Ranks(NamedTuple):
    """The number of ranks, the number of them along an outer dimension, and what that dimension divides."""

    world: int = WORLD
    replicas: int = 1
    hybrid: Hybrid = Hybrid.HSDP


FEW = Ranks()


@cache
def journal_of(layers: int, stage: int, ranks: Ranks = FEW, *, own: bool = False) -> Journal:
    """The journal of all passes on the example's model, traced on meta."""
    with torch.device("meta"):
        model, x = Net(layers), torch.empty(8, 64)
    traced, journal = trace(model, (x,)), Journal()
    options = Options(stage=stage, prefetch=PREFETCH, passes={"sink_waits": WAIT_AT_END} if own else None)
    axes = axes_of(ranks.world, replicas=ranks.replicas)
    layout = make_layout(model, STAGES[stage], axes, hybrid=ranks.hybrid)
    options.pipeline().run(replace(traced, layout=layout), journal)
    return journal


def program_of(layers: int, stage: int, ranks: Ranks = FEW, *, own: bool = False) -> Program:
    """The finished program."""
    return journal_of(layers, stage, ranks, own=own).entries[-1].after


def with_blocks(text: str) -> str:
    """The text of a page with every block up to date.

    Raises:
        ValueError: a comment is not right above a block.
    """
    if len(_BLOCK.findall(text)) != text.count("<!-- printed: ") + text.count("<!-- proven: "):
        raise ValueError("a comment of what is printed is not right above a block")
    return _BLOCK.sub(lambda found: f"{found[1]}{found[4]}\n{_MADE[found[2]](found[3].split())}\n```\n", text)


_BLOCK = re.compile(r"(<!-- (printed|proven): (.*?) -->\n)(```\w+)\n.*?\n```\n", re.DOTALL)


def _block(words: Sequence[str]) -> str:
    given = dict(word.split("=") for word in words if "=" in word)
    ranks = Ranks(replicas=int(given.get("replicas", 1)), hybrid=Hybrid(given.get("shard", "hsdp")))
    program = program_of(int(given["layers"]), int(given["stage"]), ranks, own="own" in words)
    lines = program.phase(Phase(given["phase"])).text().strip("\n").split("\n")
    if "body" in words:
        lines = [lines[0], "    ...", *lines[lines.index("    ) = unbox(box)") + 1 :]]
    return "\n".join(lines[-int(given["last"]) :] if "last" in given else lines)


def _proof(words: Sequence[str]) -> str:
    given = dict(word.split("=") for word in words)
    journal = journal_of(int(given["layers"]), int(given["stage"]))
    with tempfile.TemporaryDirectory() as folder:
        write_dump(Path(folder), [journal], "", load_profile("h100"))
        if "file" in given:
            path = Path(folder) / "program_0" / given["file"]
            path.write_text(path.read_text().replace(given["old"], given["new"], 1))
        (verdict,) = prove_dump(Path(folder))
    return str(verdict.error or replace(verdict, seconds=0.01))


_MADE = {"printed": _block, "proven": _proof}


# -- the stages side by side ------------------------------------------------------------------------------------------


def stages_page() -> str:
    """The text of the page."""
    made = {name: program_of(4, stage) for name, stage in COLUMNS.items()}
    parts = [INTRODUCTION]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        columns = [list(_statements(program.phase(phase))) for program in made.values()]
        parts.append(f"\n## {str(phase).capitalize()}\n\n{_table(list(made), columns)}")
    return "".join([*parts, _two_levels()])


NODES, RANKS = 2, 4
LEVELS = f"""
## Two levels

The same layers on {NODES} nodes of {RANKS} ranks, on a mesh `("replicate", "shard")`, for each
[`shard=`](several_machines.md), in bytes. "Kept" is what a rank keeps from step to step:
shards, two optimizer moments, and the full copies of stages 1 and 2. "Until the backward" is kept in addition from the
forward to the backward. "Inside" is sent in a step to ranks of the same node, "across" to the other node. "Flat" is one
dimension of all ranks, where a rank sends the same to every other rank, as exchanges on gloo do. Ψ: {{psi}} bytes of
parameters; N: number of ranks; S: ranks of a node; R: number of nodes.

"""


def _two_levels() -> str:
    """A table of the bytes that each `shard=` keeps and sends, with formulas."""
    headings = ("`shard=`", "stage", "kept", "until the backward", "inside", "across", "across, at most")
    rows = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    world, psi = NODES * RANKS, sum(param.nbytes for param in program_of(4, 3).layout.params)
    flat = ("flat", Ranks(world))
    for shard, ranks in (flat, *((one, Ranks(world, NODES, one)) for one in Hybrid)):
        for stage in (1, 3):
            program = program_of(4, stage, ranks)
            layout, sent = program.layout, program.volumes()
            if ranks.replicas == 1:
                across = sent["dp"] * (world - RANKS) // (world - 1)
                inside, formula = sent["dp"] - across, f"{layout.stage.volume}Ψ(N-S)/N"
            else:
                inside, across, formula = sent["shard"], sent["replicate"], "2Ψ/S (R-1)/R"
            passing = stage == 3 and layout.has_secondary and not layout.keeps_secondary
            beside = sum(layout.secondary_bytes(unit.name) for unit in layout.units) if passing else 0
            figures = (f"{nbytes:,}" for nbytes in (model_state(layout).nbytes, beside, inside, across))
            rows.append(f"| {shard} | {'1 and 2' if stage == 1 else stage} | {' | '.join(figures)} | {formula} |")
    return LEVELS.format(psi=f"{psi:,}") + "\n".join(rows) + "\n"


def _statements(program: Program) -> Iterator[str]:
    """The lines of a function's body, each with the bytes that it allocates or frees."""
    texts = [text for text, _ in lines_with_nodes(program)]
    body = texts[next(i for i, text in enumerate(texts) if ") = unbox(box)" in text) + 1 :]
    statement, gained = "", ""
    for text, following in itertools.pairwise([*body, "    "]):
        code, _, margin = text.partition("  #")
        statement = f"{statement}{'' if statement.endswith('(') else ' '}{code.strip()}".strip()
        gained = gained or next(iter(_BYTES.findall(margin)), "")
        if statement and not following.startswith((" " * 8, "    )")):
            yield f"`{statement}`{f' {gained}' if gained else ''}"
            statement, gained = "", ""


def _table(names: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """A table with calls of the same region in the same row, and similar lines between them, too."""
    rows = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for runs in itertools.zip_longest(*map(_between_calls, columns), fillvalue=[]):
        rows += ["| " + " | ".join(row) + " |" for row in _aligned(runs)]
    return "\n".join(rows) + "\n"


def _aligned(runs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of cells: similar lines in the same row, empty cells where a column has no such line."""
    rows: list[list[str]] = []
    for column, run in enumerate(runs):
        known = [next(_does(cell) for cell in row if cell) for row in rows]
        matcher = difflib.SequenceMatcher(None, known, [_does(line) for line in run], autojunk=False)
        merged = []
        for tag, start, stop, first, last in matcher.get_opcodes():
            if tag == "equal":
                pairs = zip(rows[start:stop], run[first:last], strict=True)
                merged += [[*row, line] for row, line in pairs]
            else:
                merged += [[*row, ""] for row in rows[start:stop]]
                merged += [[""] * column + [line] for line in run[first:last]]
        rows = merged
    return rows


def _does(line: str) -> str:
    """A key of a line, the same in all stages."""
    made, _, rest = line.strip("`").partition(" = ")
    return "region" if _CALLS.search(line) else made if rest else made.split()[0]


def _between_calls(lines: Sequence[str]) -> Iterator[list[str]]:
    """Runs of lines. Each run except the last ends with the call of a region."""
    run: list[str] = []
    for line in lines:
        run.append(line)
        if _CALLS.search(line):
            yield run
            run = []
    yield run


def main() -> None:
    """Write the pages."""
    STAGES_PAGE.write_text(stages_page())
    for path in WITH_BLOCKS:
        path.write_text(with_blocks(path.read_text()))


if __name__ == "__main__":
    main()
