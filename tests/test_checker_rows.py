"""The checker of texts has its own table of what treats rows alike: against what torch computes, and the compiler's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_rows import CASES, LINEAR, ROWS, Case, computed, divided, graph_of
from zcompile import ProofError
from zcompile.engine.row_loops import looped
from zcompile.ir.placement import PARTIAL, WHOLE, Divided, Placement, RowLoop
from zcompile.ir.row_axes import MixedRowsError
from zcompile.ir.rows import Placements, with_rows
from zcompile.ir.tensor_type import TensorType
from zcompile.proof.checker import prove

SIZE = 3


def texts(case: Case, loop: RowLoop, literals: Sequence[Any]) -> dict[str, str]:
    """A dump whose traced step is one operation, and whose program is a loop of it with other arguments."""
    operation, args, kwargs = case
    given = [*_tensors(args)]
    arguments = [
        f"        x{number},  # {TensorType.of(value)}  argument {number}\n" for number, value in enumerate(given)
    ]
    results = computed(operation, args, kwargs)
    results = [*results] if isinstance(results, (tuple, list)) else [results]
    names = [f"r{number}" for number in range(len(results))]
    left = ", ".join(names) if len(names) > 1 else names[0]
    types = ", ".join(str(TensorType.of(value)) for value in results)
    words = "".join(f", {name}={value!r}" for name, value in kwargs.items())

    def function(name: str, args: Sequence[Any], end: str) -> str:
        numbers = itertools.count()
        spelled = ", ".join(_spelled(arg, numbers) for arg in args)
        head = f"def {name}(box):\n    (\n{''.join(arguments)}    ) = unbox(box)\n"
        library = "" if operation.namespace == "aten" else "ops."
        return f"{head}    {left} = {library}{operation}({spelled}{words})  # {types}\n    return {end}\n"

    called = ", ".join(f"x{number}" for number in range(len(given)))
    program = f"def forward(box):\n    (\n{''.join(arguments)}    ) = unbox(box)\n"
    program += f"    {left} = region_0_in_chunks({called})\n    return [{', '.join(names)}], []\n"
    return {
        "00_capture.py": 'axes = {"dp": "shard 1"}\nunits = {}\n'
        + function("forward", args, f"[{', '.join(names)}], []"),
        "forward.py": program,
        "regions/region_0_in_chunks.py": f"@chunked({loop})\n"
        + function("region_0_in_chunks", literals, f"[{', '.join(names)}]"),
    }


def _spelled(arg: Any, numbers: Iterator[int]) -> str:
    if isinstance(arg, list):
        return f"[{', '.join(_spelled(one, numbers) for one in arg)}]"
    return f"x{next(numbers)}" if isinstance(arg, Tensor) or type(arg).__name__ == "Node" else repr(arg)


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def is_proven(case: Case, loop: RowLoop, literals: Sequence[Any]) -> bool:
    try:
        prove(texts(case, loop, literals))
    except ProofError:
        return False
    return True


def loops(case: Case) -> Iterator[tuple[RowLoop, Sequence[Any]]]:
    """What the compiler makes of an operation: a loop for each way in which it may, and its arguments then."""
    graph, given = graph_of(*case)
    placeholders = graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, given, strict=True):
        for placement in divided(value):
            placed = Placements(ROWS)
            try:
                placed.place(graph, {node: placement})
            except MixedRowsError:
                continue
            takes = tuple(placed.of.get(other, WHOLE) for other in placeholders)
            gives = tuple(placed.of[result] for result in graph.output_node().args[0])  # type: ignore[union-attr]
            if WHOLE not in gives:
                (line,) = [one for one in with_rows(graph, takes, ROWS, SIZE).nodes if one.target is case[0]]
                yield RowLoop(ROWS, SIZE, takes, gives), line.args


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_the_compiler_divides_is_proven_from_its_text(number: int) -> None:
    for loop, literals in loops(CASES[number]):
        prove(texts(CASES[number], loop, literals))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_proven_from_its_text_computes_the_same(number: int) -> None:
    """Also where values are divided in ways that no compiler would choose, and results said to be elsewhere."""
    case, chance = CASES[number], random.Random(number)
    operation, args, kwargs = case
    given, wanted = [*_tensors(args)], computed(operation, args, kwargs)
    wanted = [*wanted] if isinstance(wanted, (tuple, list)) else [wanted]
    ways = [[WHOLE, *divided(value)] for value in given]
    ends: list[list[Placement]] = [[PARTIAL, *divided(value)] for value in wanted]
    every = list(itertools.product(itertools.product(*ways), itertools.product(*ends)))
    spelled = [args, *(literals for _, literals in loops(case))]
    for takes, gives in chance.sample(every, min(len(every), 24)):
        loop = RowLoop(ROWS, SIZE, takes, gives)
        for literals in (chance.choice(spelled),):
            if is_proven(case, loop, literals):
                found = looped(loop, lambda _: lambda box: _run(case, literals, box))([*given])  # noqa: B023
                for one, other in zip(found, wanted, strict=True):
                    torch.testing.assert_close(one, other, equal_nan=True)


PUT = """
def {name}(box):
    (
        x,  # f32[{rows}, 4]  argument 0
        t,  # i64[{rows}]  argument 1
        v,  # f32[{rows}]  argument 2
    ) = unbox(box)
    n = aten.arange.default({rows}, pin_memory=False)  # i64[{rows}]
    {line}
    y = aten.index_put.default(x, {indices}, v)  # f32[{rows}, 4]
    return [y]{end}
"""


@pytest.mark.parametrize(
    ("line", "indices", "wanted"),
    [
        ("_ = aten.neg.default(t)  # i64[{rows}]", "[n, t]", True),
        ("m = aten.neg.default(n)  # i64[{rows}]", "[m, t]", False),
        ("_ = aten.neg.default(t)  # i64[{rows}]", "[t, n]", False),
        ("_ = aten.neg.default(t)  # i64[{rows}]", "[n, n]", False),
        ("_ = aten.neg.default(t)  # i64[{rows}]", "[t]", False),
    ],
)
def test_the_numbers_of_rows_are_only_the_first_index_of_rows(line: str, indices: str, wanted: bool) -> None:
    def function(name: str, rows: int, end: str = "") -> str:
        return PUT.format(name=name, rows=rows, line=line.format(rows=rows), indices=indices, end=end)

    loop = RowLoop(ROWS, SIZE, (Divided(0), Divided(0), Divided(0)), (Divided(0),))
    arguments = "".join(f"        {name},  # argument {number}\n" for number, name in enumerate("xtv"))
    dump = {
        "00_capture.py": 'axes = {"dp": "shard 1"}\nunits = {}\n' + function("forward", ROWS, ", []"),
        "forward.py": f"def forward(box):\n    (\n{arguments}    ) = unbox(box)\n"
        "    y = region_0_in_chunks(x, t, v)\n    return [y], []\n",
        "regions/region_0_in_chunks.py": f"@chunked({loop}){function('region_0_in_chunks', SIZE)}",
    }
    if wanted:
        prove(dump)
    else:
        with pytest.raises(ProofError):
            prove(dump)


def _run(case: Case, literals: Sequence[Any], box: list[Any]) -> Sequence[Any]:
    left = iter(box)

    def filled(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [filled(one) for one in arg]
        return next(left) if isinstance(arg, Tensor) or type(arg).__name__ == "Node" else arg

    found = computed(case[0], [filled(arg) for arg in literals], case[2])
    return found if isinstance(found, (tuple, list)) else [found]


OPERATIONS = {"mul": "mul.Tensor", "add": "add.Tensor", "sub": "sub.Tensor", "div": "div.Tensor", "where": "where.self"}
OPERATIONS |= {"exp": "exp.default", "cat": "cat.default", "masked_fill": "masked_fill.Scalar", "xlogy": "xlogy.Tensor"}


@pytest.mark.parametrize(("text", "wanted"), LINEAR)
def test_what_is_computed_with_1_in_place_of_a_factor_is_linear_in_it(text: str, wanted: bool) -> None:
    """What the loop computes with 1 is multiplied by the factor where it is read."""
    if text == "x" or (wanted and "cat" in text):
        return  # it has no factor, or mixes rows
    lines = []

    class Value(str):
        __slots__ = ()
        __repr__ = str.__str__

    def call(name: str) -> Any:
        def write(*args: Any) -> Value:
            said = f"aten.{OPERATIONS[name]}({', '.join(map(repr, args))})"
            lines.append(f"    v{len(lines)} = {said}  # f32[{'' if args[0] == 's' and name == 'mul' else 6}]\n")
            return Value(f"v{len(lines) - 1}")

        return write

    names = {name: Value(name) for name in ("x", "s", "mask", "zero", "one")}
    result = eval(text, {**names, **{name: call(name) for name in OPERATIONS}})
    given = "    (\n        x,  # f32[6]  argument 0\n        mask,  # b8[6]  argument 1\n"
    of_all, box = "        s,  # f32[]  argument 2\n", "    ) = unbox(box)\n"
    made = "".join(
        f"    {n} = aten.full.default([SIZE], {v}, dtype=torch.float32)  # f32[6]\n"
        for n, v in (("zero", 0), ("one", 1))
    )
    captured = (
        f"def forward(box):\n{given}{of_all}{box}{made.replace('SIZE', '6')}{''.join(lines)}    return [{result}], []\n"
    )
    looped = f"def region_0_in_chunks(box):\n{given}{box}    s = aten.full.default([], 1, dtype=torch.float32)\n"
    looped += f"{made.replace('SIZE', '3')}{''.join(lines)}    return [{result}]\n"
    head = "@chunked(rows=6, size=3, takes=[0, 0], gives=[0], factor='s')\n"
    scaled = "def region_1(box):\n    (\n        r,  # f32[6]  argument 0\n        s,  # f32[]  argument 1\n"
    scaled += box
    scaled += "    m = aten.mul.Tensor(r, s)  # f32[6]\n    return [m]\n"
    program = f"def forward(box):\n{given}{of_all}{box}    r = region_0_in_chunks(x, mask)\n    m = region_1(r, s)\n"
    dump = {
        "00_capture.py": 'axes = {"dp": "shard 1"}\nunits = {}\n' + captured,
        "forward.py": program + "    return [m], []\n",
        "regions/region_0_in_chunks.py": head + looped,
        "regions/region_1.py": scaled,
    }
    if wanted:
        prove(dump)
    else:
        with pytest.raises(ProofError, match="is not linear in s"):
            prove(dump)
