"""The part of a traced step that each pipeline rank computes: written to a dump, read, and checked for completeness.

The checker proves that each rank computes its part if it receives the values that messages name;
`zcompile.proof.ranks` checks that ranks do not deadlock. So if the parts make up the whole step, all of it is proven.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from torch import fx

from zcompile.errors import ProofError
from zcompile.ir.axis import Axis, AxisKind
from zcompile.ir.operation import Phase, data, op_of
from zcompile.ir.ops import Input, Kind, Receive, RuntimeInput, Send, Shards
from zcompile.ir.printer import inputs_of
from zcompile.ir.program import Program
from zcompile.ir.side_effects import is_random
from zcompile.proof.checker import NamedMessage, RankPart, SharedParam
from zcompile.proof.checker_texts import CAPTURE, Text
from zcompile.proof.values import RankValues

_FIX = "dump the programs of all ranks again, of one step"
_GROUP = re.compile(r"(ops\._c10d_functional\.\w+\.\w+\(.*)'[^']*'\)")


def part_of(values: RankValues, program: Program) -> RankPart:
    """Return the part of the traced step that a rank's program computes."""
    traced = values.terms.traced
    inputs = [op_of(node, Input) for node in traced.nodes(Input)]
    given = inputs_of(program, Phase.STEP)
    drawn = [node for node in traced.graph.nodes if is_random(node)]
    printed = [node for phase in (Phase.FORWARD, Phase.BACKWARD) for node in traced.body(phase) if is_random(node)]
    sent = (op_of(node, Send) for node in program.nodes(Send))
    received = (op_of(node, Receive) for node in program.nodes(Receive))
    return RankPart(
        microbatches=values.microbatches,
        units=tuple(unit.name for unit in program.layout.units),
        bound=tuple(_bound_text(node) for node in given if not _is_input(node)),
        inputs=tuple(
            (_KINDS[op.kind], op.index, op.microbatch)
            for op in (op_of(node, Input) for node in given if _is_input(node))
        ),
        held=frozenset(place for place, op in enumerate(op for op in inputs if op.kind is Kind.DATA) if op.held),
        results=values.results,
        draws=tuple((microbatch, printed.index(drawn[number])) for microbatch, number in values.draws),
        written=tuple(values.written.items()),
        writes=values.writes,
        shared=tuple(SharedParam(p.name, p.value, p.home, p.readers, {**p.parts}) for p in values.shared),
        sent=tuple(NamedMessage(op.to, op.message, op.strides) for op in sent),
        received=tuple(NamedMessage(op.source, op.message, op.strides) for op in received),
    )


def _is_input(node: fx.Node) -> bool:
    """Return True for an argument of the call or a tangent, False for an argument that is identified by name."""
    op = data(node).op
    return isinstance(op, Input) and op.kind in _KINDS


def _bound_text(node: fx.Node) -> str:
    """Return the margin of an argument; for a constant, followed by its name."""
    match data(node).op:
        case Shards(unit):
            return f"unit {unit}"
        case RuntimeInput() as op:
            return " ".join([op.label, *map(str, astuple(op))])  # type: ignore[call-overload]
    return f"constant {node.name}"


_KINDS = {Kind.DATA: "input", Kind.TANGENT: "tangent"}


def described(part: RankPart) -> dict[str, Any]:
    """Return a part as written to a manifest."""
    return {**asdict(part), "held": sorted(part.held)}


def read_part(entry: Mapping[str, Any]) -> RankPart:
    """Read a part from a manifest.

    Raises:
        LookupError, TypeError, ValueError: the manifest's entry is not a part.
    """
    pairs = {
        name: tuple((int(first), int(second)) for first, second in entry[name])
        for name in ("results", "draws", "written", "writes")
    }
    shared = tuple(
        SharedParam(
            str(param["param"]), str(param["value"]), int(param["home"]), tuple(map(int, param["readers"])),
            {int(stage): tuple(map(str, names)) for stage, names in param["parts"].items()},
        )
        for param in entry["shared"]
    )  # fmt: skip
    return RankPart(
        microbatches=int(entry["microbatches"]),
        units=tuple(map(str, entry["units"])),
        bound=tuple(map(str, entry["bound"])),
        inputs=tuple((str(kind), int(at), None if of is None else int(of)) for kind, at, of in entry["inputs"]),
        held=frozenset(map(int, entry["held"])),
        shared=shared,
        sent=tuple(map(_message, entry["sent"])),
        received=tuple(map(_message, entry["received"])),
        **pairs,
    )


def _message(entry: Sequence[Any]) -> NamedMessage:
    peer, name, strides = entry
    return NamedMessage(int(peer), str(name), None if strides is None else tuple(map(int, strides)))


def check_parts(parts: Mapping[int, tuple[str, RankPart]]) -> None:
    """Check that the parts of the ranks along each pipeline are of the same traced step and make up all of it.

    Args:
        parts: By rank, the text of the traced step and the rank's part according to its manifest.

    Raises:
        ProofError: they do not; names the ranks and what is missing or differs.
    """
    columns: dict[tuple[int, ...], list[int]] = {}
    for rank, (capture, _) in parts.items():
        columns.setdefault(tuple(pipeline_of(capture).ranks(rank)), []).append(rank)
    for column, present in columns.items():
        lacking = [rank for rank in column if rank not in present]
        problem = f"rank {lacking[0]} is not among them" if lacking else _mistake({r: parts[r] for r in column})
        if problem:
            raise ProofError("the parts of the ranks", problem, _FIX)


def pipeline_of(capture: str) -> Axis:
    """Return the pipeline axis of a traced step."""
    axes = (Axis.parse(name, text) for name, text in _head(capture, "axes").items())
    return next(axis for axis in axes if axis.kind is AxisKind.PIPELINE)


def _head(capture: str, name: str) -> Any:
    bodies = (statement for statement in Text(CAPTURE, capture).body if isinstance(statement, ast.Assign))
    return next(ast.literal_eval(statement.value) for statement in bodies if ast.unparse(statement.targets[0]) == name)


def _mistake(column: Mapping[int, tuple[str, RankPart]]) -> str:
    """Return what is wrong with the parts of the ranks along a pipeline; "" if they make up the whole step."""
    (first, (capture, own)), *others = column.items()
    for rank, (text, part) in others:
        if _without_groups(text) != _without_groups(capture):
            return f"rank {first} and rank {rank} have traced other steps"
        for what in ("microbatches", "held", "written"):
            if getattr(part, what) != getattr(own, what):
                return f"rank {first} has {what} {getattr(own, what)}, rank {rank} {getattr(part, what)}"
    parts = [part for _, part in column.values()]
    shared = [param for part in parts for param in part.shared]
    if parted := [a.param for a in shared for b in shared if a.param == b.param and a != b]:
        return f"ranks disagree about what the gradient of {parted[0]} sums"
    numbers = [(result, number) for number in range(own.microbatches) for result in range(_count(capture))]
    written = {result for result, _ in own.written}
    return (
        _uneven("unit", [*_head(capture, "units")], (unit for part in parts for unit in part.units))
        or _uneven("result", [n for n in numbers if n[0] not in written], (n for part in parts for n in part.results))
        or _uneven("write", [n for n in numbers if n[0] in written], (n for part in parts for n in part.writes))
        or next((f"random draw {n} is made twice" for n, count in _all_draws(parts).items() if count > 1), "")
    )


def _all_draws(parts: Iterable[RankPart]) -> Counter[tuple[int, int]]:
    return Counter(draw for part in parts for draw in part.draws)


def _count(capture: str) -> int:
    """Return the number of results of the traced step."""
    (forward,) = (statement for statement in Text(CAPTURE, capture).body if getattr(statement, "name", "") == "forward")
    returned = forward.body[-1].value.elts[0]  # type: ignore[attr-defined]
    return len(returned.elts)


def _uneven(what: str, wanted: Iterable[Hashable], found: Iterable[Hashable]) -> str:
    """Return the first item that not exactly one rank has, as an error; "" if there is none."""
    count = Counter(found)
    count.subtract(Counter(wanted))
    return next(
        (f"{'several ranks have' if n > 0 else 'no rank has'} {what} {item}" for item, n in count.items() if n), ""
    )


def _without_groups(capture: str) -> str:
    """Return a traced step without the names of tensor-parallel groups, which differ between stages."""
    return _GROUP.sub(r"\1'')", capture)
