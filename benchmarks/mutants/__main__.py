"""Mutants of programs, and who notices: `python -m benchmarks.mutants` prints a table, in ten minutes.

A mutant is a real program with one mistake in it, of the kinds that a pass might make. It is held to all facts that the
program was held to, and to the proof that it computes what was traced; then its text alone is given to the checker of
dumps. What either of them accepts is run beside the original, on numbers, and has to give the same bits: else it is a
hole. A mutant is made from the seed and its number alone, so that one is made again with `--only`.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from benchmarks.mutants.axes import AXES
from benchmarks.mutants.lines import LINES
from benchmarks.mutants.loops import LOOPS
from benchmarks.mutants.oracle import Outcome, outcome
from benchmarks.mutants.programs import PROGRAMS, Original, original
from benchmarks.mutants.regions import REGIONS
from zcompile import Program, ProgramError, ProofError
from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Communication, Fetch
from zcompile.ir.printer import region_text
from zcompile.proof.checker import prove
from zcompile.proof.checker_texts import BACKWARD, CAPTURE, FORWARD
from zcompile.proof.ranks import check_texts

RANKS = {
    f"one rank: {name}": {**LINES, **AXES}[name]
    for name in (
        "drop line",
        "double line",
        "exchange lines",
        "exchange unit",
        "gather in another dtype",
        "reduce in another dtype",
        "flip scatter",
        "another bucket",
        "hold back",
        "turn axes",
        "skip replicas",
        "average over another axis",
        "gather over another axis",
        "send shards otherwise",
        "gather outside again",
        "skip secondary",
    )
}
"""Mutations of the program of one rank, while the others run the original."""
MUTATIONS = {**LINES, **AXES, **REGIONS, **LOOPS, **RANKS}

_ROUNDS = 3
"""How often each program is tried until something has changed."""


class Verdict(StrEnum):
    """What became of a mutant."""

    STRUCTURE = "structure"
    """Refused by a fact about structure or memory."""
    VALUES = "values"
    """Refused because it computes something else than was traced, all other facts being true of it."""
    TEXT = "text"
    """Refused by the checker of texts, or no program that can be printed."""
    RANKS = "ranks"
    """Refused because the ranks' communications do not fit together."""
    UNSEEN = "not in the text"
    """Of the texts of a program nothing is changed."""
    EQUAL = "equal"
    """Accepted; it gives the same bits."""
    FAILS = "fails"
    """Accepted; it gives nothing, since it cannot be run."""
    HOLE = "hole"
    """Accepted; it gives other numbers."""


@dataclass(frozen=True)
class Judged:
    """A mutant by its number, and what the compiler and the checker of texts have said.

    `about`: of what is refused the error, of what is accepted the value that differs.
    """

    number: int
    program: str
    mutation: str
    compiler: Verdict
    checker: Verdict | None
    about: str

    @property
    def is_hole(self) -> bool:
        """True if one of the two has accepted what gives other numbers, or none."""
        return bool({self.compiler, self.checker} & {Verdict.HOLE, Verdict.FAILS})

    def __str__(self) -> str:
        said = ", ".join(filter(None, (self.compiler, self.checker)))
        return f"{self.number}: {self.mutation} in {self.program}: {said}: {self.about}"


def mutant(seed: int, number: int, mutations: Sequence[str], programs: Sequence[str]) -> tuple[Original, str, Program]:
    """Mutant `number`: what it was made of, by which mutation, and the program.

    Raises:
        LookupError: none of the programs has anything of the kind to change.
    """
    random = Random(f"{seed} {number}")
    mutation = mutations[number % len(mutations)]
    for name in _ROUNDS * random.sample(programs, len(programs)):
        given = original(name)
        if mutation in RANKS and given.ranks == 1:
            continue
        found = MUTATIONS[mutation](random, given.program.copy())
        if found is not None and _spelled(found) != _spelled(given.program):
            return given, mutation, found
    raise LookupError(f"{number}: {mutation}: there is nothing to change in any of {len(programs)} programs")


def judged(seed: int, number: int, mutations: Sequence[str], programs: Sequence[str]) -> Judged:
    """What becomes of mutant `number`."""
    given, mutation, program = mutant(seed, number, mutations, programs)
    right = accepted(given.name)
    if mutation in RANKS:
        return Judged(number, given.name, mutation, *_one_rank(given, program, right))
    about = []
    compiler = checker = Verdict.EQUAL
    try:
        given.verify(program)
    except ProgramError as error:
        compiler = Verdict.VALUES if str(given.verified.values.fact) in error.subject else Verdict.STRUCTURE
        about.append(f"{error.subject}: {error.problem}")
    try:
        texts = texts_of(given, program)
        prove(texts)
        checker = Verdict.UNSEEN if _code(texts) == _code(texts_of(given, given.program)) else checker
    except ProofError as error:
        checker = Verdict.TEXT
        about.append(f"text: {error.problem.splitlines()[0]}")
    except Exception as error:  # of any kind: nothing that cannot be printed can be dumped, or run
        checker = Verdict.TEXT
        about.append(f"text: {type(error).__name__}: {error}")
    if Verdict.EQUAL in (compiler, checker):
        ran, difference = run(given, program)
        about.append(difference)
        compiler, checker = (ran if verdict is Verdict.EQUAL else verdict for verdict in (compiler, checker))
    return Judged(number, given.name, mutation, compiler, checker, "; ".join(filter(None, about)))


@cache
def accepted(name: str) -> str:
    """The text of an original.

    Raises:
        ProofError: it is refused, though it is right: what is said of its mutants says nothing then.
    """
    given = original(name)
    text = given.program.text(regions=True)
    prove(texts_of(given, given.program))
    check_texts(dict.fromkeys(range(given.ranks), text))
    return text


def _one_rank(given: Original, program: Program, right: str) -> tuple[Verdict, None, str]:
    """What is said of ranks of which the second has a mutant of the text `right`: they fit if all send the same."""
    wrong = program.text(regions=True)
    if _code({"": wrong}) == _code({"": right}):
        return Verdict.EQUAL, None, ""
    try:
        check_texts({**dict.fromkeys(range(given.ranks), right), 1: wrong})
    except ProofError as error:
        return Verdict.RANKS, None, error.problem
    is_same = _sent(program) == _sent(given.program)
    return (Verdict.EQUAL, None, "") if is_same else (Verdict.HOLE, None, "its communications are others")


def _sent(program: Program) -> object:
    """What a rank sends, by axis: between two axes ranks need not keep to one order."""
    lines = [node for phase in program.phases for node in program.nodes(Communication, phase=phase)]
    sent: dict[str, list[str]] = {}
    for node, text in zip(lines, program.communications(), strict=True):
        if (traffic := program.traffic(node)) is not None and traffic.axis.size > 1:
            sent.setdefault(traffic.axis.name, []).append(text)
    fetched = [data(node).type for node in program.nodes(Fetch) if program.traffic(node) is not None]
    return sent, fetched, program.layout.axes


def texts_of(given: Original, program: Program) -> dict[str, str]:
    """The files that a dump has of `program`, made of the step that `given` was made of."""
    phases = program.phases if given.traced.has_backward else (Phase.FORWARD,)
    names = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}
    texts = {CAPTURE: _captured(given.name), **{names[phase]: str(program.phase(phase)) for phase in phases}}
    return texts | {f"regions/{name}.py": region_text(region) for name, region in program.regions.items()}


def _code(texts: Mapping[str, str]) -> dict[str, str]:
    """What of texts is executed."""
    return {name: ast.unparse(ast.parse(text)) for name, text in texts.items()}


@cache
def _captured(name: str) -> str:
    return original(name).traced.text(regions=True)


def run(given: Original, program: Program) -> tuple[Verdict, str]:
    """Whether a mutant gives what the original gives, and what of it differs."""
    try:
        found = outcome(program, given.parts, given.divided)
    except Exception as error:  # of any kind: it cannot be run
        return Verdict.FAILS, f"{type(error).__name__}: {error}"
    difference = found.differs(expected(given.name))
    return (Verdict.HOLE, f"{difference} differs") if difference else (Verdict.EQUAL, "")


@cache
def expected(name: str) -> Outcome:
    """What the original of this name gives."""
    given = original(name)
    return outcome(given.program, given.parts, given.divided)


def _spelled(program: Program) -> object:
    """All that may be changed in a program."""
    graphs = (program.graph, *(region.graph for region in program.regions.values()))
    lines = [
        [
            (_name(node), node.target, str(node.args), str(node.kwargs), node.meta.get("zcompile"))
            for node in graph.nodes
        ]
        for graph in graphs
    ]
    takes = [(region.name, region.takes, region.rows) for region in program.regions.values()]
    return lines, takes, program.layout, program.unused


def _name(node: fx.Node) -> str:
    """What a line is called; copying a program gives its end another name."""
    return "" if node.op == "output" else node.name


def table(found: Iterable[Judged]) -> Table:
    """A row for each mutation, and one for all."""
    every = list(found)
    result = Table(show_footer=True)
    result.add_column("mutation", "all", no_wrap=True)
    columns = {
        "mutants": lambda rows: len(rows),
        "structure": lambda rows: _count(rows, Verdict.STRUCTURE),
        "values": lambda rows: _count(rows, Verdict.VALUES),
        "ranks": lambda rows: _count(rows, Verdict.RANKS),
        "equal": lambda rows: _count(rows, Verdict.EQUAL),
        "holes": lambda rows: _count(rows, Verdict.HOLE, Verdict.FAILS),
        "text": lambda rows: _count(rows, Verdict.TEXT, of="checker"),
        "text, equal": lambda rows: _count(rows, Verdict.EQUAL, Verdict.UNSEEN, of="checker"),
        "text, holes": lambda rows: _count(rows, Verdict.HOLE, Verdict.FAILS, of="checker"),
    }
    for heading, counted in columns.items():
        result.add_column(heading, str(counted(every)), justify="right")
    for mutation in MUTATIONS:
        rows = [one for one in every if one.mutation == mutation]
        if rows:
            result.add_row(mutation, *(str(counted(rows)) for counted in columns.values()))
    return result


def _count(rows: Sequence[Judged], *verdicts: Verdict, of: str = "compiler") -> int:
    return sum(getattr(row, of) in verdicts for row in rows)


def campaign(seed: int, numbers: Iterable[int], mutations: Sequence[str], programs: Sequence[str]) -> Iterator[Judged]:
    """What becomes of the mutants of these numbers, of which some kinds may have nothing to change."""
    for number in numbers:
        try:
            yield judged(seed, number, mutations, programs)
        except LookupError as error:
            print(error, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge mutants, print what should not be, and the table; gives 1 if there is a hole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants to make again, and to be told of")
    parser.add_argument("--mutation", nargs="*", default=list(MUTATIONS), choices=MUTATIONS, metavar="MUTATION")
    parser.add_argument("--program", nargs="*", default=list(PROGRAMS), choices=PROGRAMS, metavar="PROGRAM")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, found = time.perf_counter(), []
    for one in campaign(options.seed, options.only or range(options.count), options.mutation, options.program):
        found.append(one)
        if one.is_hole or options.only:
            print(one, flush=True)
    Console().print(table(found))
    programs: Mapping[str, int] = Counter(one.program for one in found)
    seconds = time.perf_counter() - started
    print(f"{len(found)} mutants of {len(programs)} programs in {seconds:.0f} s, seed {options.seed}")
    return int(any(one.is_hole for one in found))


if __name__ == "__main__":
    sys.exit(main())
