"""Mistakes in the texts of pipelines' steps, and whether the checker of dumps sees them.

`python -m benchmarks.mutants.steps --count 400` makes mutants of steps under several schedules and stages. A mutant is
the text of one rank with one mistake in it, or those of all ranks with the same one. What the checker accepts is run
beside the original and has to give the same bits: else it is a hole.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import torch
from torch import nn

from benchmarks.mutants.step_oracle import run, same
from benchmarks.mutants.step_programs import Steps, Texts, steps_of
from zcompile import ProofError
from zcompile.proof.checker_texts import STEP


class Layers(nn.Module):
    """Layers with a matrix that the first and the last of them share, a skip over two cuts, and a mean as loss."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)) for _ in range(5))
        self.norm = nn.BatchNorm1d(4)
        if tied:
            self.blocks[4].get_submodule("1").weight = self.blocks[0].get_submodule("1").weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = h = torch.tanh(self.blocks[0](self.norm(x)))
        for block in self.blocks[1:]:
            h = h + torch.tanh(block(h)) * first
        return ((h - y) ** 2).mean()


PROGRAMS: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "gpipe, stage 0": (False, "gpipe", {"given": {"stage": 0}}),
    "1f1b, stage 1": (False, "1f1b", {"given": {"stage": 1}}),
    "1f1b, stage 3, tied": (True, "1f1b", {"given": {"stage": 3}}),
    "interleaved1f1b, stage 2": (False, "interleaved1f1b", {"given": {"stage": 2}}),
    "interleavedzerobubble, stage 1, tied": (True, "interleavedzerobubble", {"given": {"stage": 1}}),
    "zbvzerobubble, stage 3": (False, "zbvzerobubble", {"given": {"stage": 3}}),
    "dualpipev, stage 1": (False, "dualpipev", {"given": {"stage": 1}}),
}


@cache
def program(name: str) -> tuple[Steps, list[dict[str, Any]], list[Any]]:
    """Steps, what they are given, and what they give."""
    tied, schedule, options = PROGRAMS[name]
    torch.manual_seed(0)
    model = Layers(tied=tied)
    batch = (torch.randn(2, 4), torch.randn(2, 4))
    steps = steps_of(model, batch, schedule, columns=2, units=["blocks.*", "norm"], **options)
    given = [steps.given(number) for number in range(2 * steps.columns)]
    return steps, given, run(steps.texts, given, steps.columns)


# -- mistakes ---------------------------------------------------------------------------------------------------------

Lines = list[str]
_NAME = r"\b(?:m\d+_)?[a-z]\w*\b"


def _calls(lines: Lines) -> list[int]:
    """The lines of a step that call something, none of them broken."""
    return [
        n
        for n, one in enumerate(lines)
        if one.partition("#")[0].rstrip().endswith(")")
        and "unbox" not in one
        and one.startswith("    ")
        and one[4] not in " )"
    ]


def _drop(random: Random, lines: Lines) -> None:
    del lines[random.choice(_calls(lines))]


def _double(random: Random, lines: Lines) -> None:
    at = random.choice(_calls(lines))
    lines.insert(at, lines[at])


def _exchange(random: Random, lines: Lines) -> None:
    at = random.choice(_calls(lines)[:-1])
    other = next(n for n in _calls(lines) if n > at)
    lines[at], lines[other] = lines[other], lines[at]


def _move(random: Random, lines: Lines) -> None:
    one = lines.pop(random.choice(_calls(lines)))
    lines.insert(random.choice(_calls(lines)), one)


def _names(lines: Lines) -> list[str]:
    text = "\n".join(line.partition("#")[0] for line in lines)
    return sorted({name for name in re.findall(_NAME, text) if re.match(r"m\d+_|.*_(full|grads|sum|recv)$", name)})


def _other_name(random: Random, lines: Lines) -> None:
    """Another value in the place of one that is given."""
    names, at = (
        _names(lines),
        random.choice([n for n in range(len(lines)) if re.search(r"[(,] ?\*?m\d+_|return", lines[n])]),
    )
    code, mark, rest = lines[at].partition("#")
    found = [m for m in re.finditer(_NAME, code) if m[0] in names]
    one = random.choice(found)
    lines[at] = f"{code[: one.start()]}{random.choice(names)}{code[one.end() :]}{mark}{rest}"


def _other_microbatch(random: Random, lines: Lines) -> None:
    """The value of another micro-batch."""
    at = random.choice([n for n in range(len(lines)) if re.search(r"\bm\d+_", lines[n])])
    code, mark, rest = lines[at].partition("#")
    one = random.choice([*re.finditer(r"\bm(\d+)_", code)] or [*re.finditer(r"\bm(\d+)_", lines[at])])
    lines[at] = f"{code[: one.start()]}m{random.randrange(4)}_{code[one.end() :]}{mark}{rest}"


def _swap_names(random: Random, lines: Lines) -> None:
    """Two names of one line in each other's place: arguments, or results."""
    at = random.choice(
        [n for n in range(len(lines)) if len({*re.findall(_NAME, lines[n].partition("#")[0])} & {*_names(lines)}) > 1]
    )
    code, mark, rest = lines[at].partition("#")
    one, other = random.sample(sorted({*re.findall(_NAME, code)} & {*_names(lines)}), 2)
    code = re.sub(_NAME, lambda m: {one: other, other: one}.get(m[0], m[0]), code)
    lines[at] = f"{code}{mark}{rest}"


def _swap_inputs(random: Random, lines: Lines) -> None:
    """Two of the arguments that the step unboxes."""
    end = next(n for n, one in enumerate(lines) if "unbox(box)" in one)
    one, other = random.sample(range(lines.index("    ("), end), 2)
    lines[one], lines[other] = lines[other], lines[one]


def _number(random: Random, lines: Lines) -> None:
    """Another number: of a rank, a size, or in a message's name."""
    found = [
        (n, m)
        for n in range(len(lines))
        for m in re.finditer(r"(?<=[=\[ '_m])\d+", lines[n].partition("#")[0])
        if "recv(" in lines[n] or "send(" in lines[n]
    ]
    at, one = random.choice(found)
    lines[at] = f"{lines[at][: one.start()]}{random.randrange(5)}{lines[at][one.end() :]}"


def _dtype(random: Random, lines: Lines) -> None:
    """A dtype or wire that the layout does not declare."""
    at = random.choice(
        [n for n in _calls(lines) if re.search(r"= (all_gather|reduce_scatter|all_reduce|add|plus)\(", lines[n])]
    )
    code, mark, rest = lines[at].partition("#")
    lines[at] = f"{code.rstrip()[:-1]}, {random.choice(('dtype', 'wire'))}=torch.bfloat16)  {mark}{rest}"


def _function(random: Random, lines: Lines) -> None:
    """Another function, which takes the same."""
    at = random.choice(
        [n for n in _calls(lines) if re.search(r"\b(region_\d+|add|plus|reduce_scatter|all_reduce|update)\(", lines[n])]
    )
    regions = sorted({*re.findall(r"region_\d+", "\n".join(lines))})
    kinds = {
        "add": ["plus"],
        "plus": ["add"],
        "reduce_scatter": ["all_reduce"],
        "all_reduce": ["reduce_scatter"],
        "update": ["release", "copy"],
    }
    lines[at] = re.sub(
        r"\b(region_\d+|add|plus|reduce_scatter|all_reduce|update)(?=\()",
        lambda m: random.choice(kinds.get(m[0], regions)),
        lines[at],
        count=1,
    )


MUTATIONS: dict[str, Callable[[Random, Lines], None]] = {
    "drop line": _drop,
    "double line": _double,
    "exchange lines": _exchange,
    "move line": _move,
    "another value": _other_name,
    "another micro-batch": _other_microbatch,
    "swap names": _swap_names,
    "swap inputs": _swap_inputs,
    "another number": _number,
    "another dtype": _dtype,
    "another function": _function,
}


def mutant(steps: Steps, mutation: str, random: Random) -> tuple[list[Texts], int | None]:
    """Texts with a mistake, and in whose it is; None for a value's or message's name, in those of all ranks."""
    texts = [dict(one) for one in steps.texts]
    if mutation == "another micro-batch" and random.random() < 0.3:  # consistently: two messages in each other's place
        names = sorted({*re.findall(r"message='(m\d+_\w+)'", texts[0][STEP])})
        one, other = random.sample(names, 2)
        for text in texts:
            text[STEP] = re.sub(r"(?<=message=')\w+", lambda m: {one: other, other: one}.get(m[0], m[0]), text[STEP])
        return texts, None
    place = random.randrange(len(texts))
    file = random.choice([STEP, STEP, STEP, *(name for name in texts[place] if name.startswith("regions"))])
    if file != STEP:
        texts[place][file] = _region(random, texts[place][file])
        return texts, place
    lines = texts[place][STEP].split("\n")
    MUTATIONS[mutation](random, lines)
    texts[place][STEP] = "\n".join(lines)
    return texts, place


def _region(random: Random, text: str) -> str:
    """Another operand, number or operation in a region, or another order of what it gives."""
    lines = text.split("\n")
    at = random.choice([n for n, one in enumerate(lines) if "aten." in one or "return [" in one])
    code, mark, rest = lines[at].partition("#")
    target, sign, call = code.rpartition(" = ") if " = " in code else ("", "", code)
    known = sorted({*re.findall(r"\b[a-z]\w*_?\w*\b(?=,| =)", "\n".join(lines[:at]))})
    found = list(re.finditer(r"(?<=[(,\[ ])[a-z]\w*(?=[,)\]])|\b\d+\b|(?<=aten\.)\w+", call))
    one = random.choice(found) if found else None
    if one is not None:
        new = (
            str(random.randrange(3))
            if one[0].isdigit()
            else random.choice(["tanh", "neg", "mul", "add"])
            if call[: one.start()].endswith("aten.")
            else random.choice(known or [one[0]])
        )
        call = f"{call[: one.start()]}{new}{call[one.end() :]}"
    lines[at] = f"{target}{sign}{call}{mark}{rest}"
    return "\n".join(lines)


def judged(name: str, mutation: str, random: Random) -> str:
    """What becomes of a mutant: refused, equal, the same text, or a hole; `alone` is by the rank's own text."""
    steps, given, wanted = program(name)
    texts, place = mutant(steps, mutation, random)
    if texts == [*steps.texts]:
        return "same"
    alone = accepted(steps, texts, place)
    together = accepted(steps, texts, None)
    if not (alone or together):
        return "refused"
    try:
        equal = same(run(texts, given, steps.columns), wanted)
    except RuntimeError:
        equal = False
    if equal:
        return "equal"
    return "HOLE" if together else "refused together"


def accepted(steps: Steps, texts: Sequence[Texts], place: int | None) -> bool:
    try:
        steps.prove(texts, place)
    except ProofError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    options = parser.parse_args()
    found, names = Counter[tuple[str, str]](), [*PROGRAMS]
    for number in options.only or range(options.count):
        random = Random(f"{options.seed} {number}")
        mutation, name = [*MUTATIONS][number % len(MUTATIONS)], names[number // len(MUTATIONS) % len(names)]
        try:
            verdict = judged(name, mutation, random)
        except IndexError:
            verdict = "none"
        found[mutation, verdict] += 1
        if verdict in ("HOLE", "refused together") or options.only:
            print(f"{number}: {mutation} in {name}: {verdict}")
    for (mutation, verdict), count in sorted(found.items()):
        print(f"{mutation:22} {verdict:18} {count}")
    raise SystemExit(any(verdict == "HOLE" for _, verdict in found))


if __name__ == "__main__":
    main()
