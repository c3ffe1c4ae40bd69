"""Aliasing: which values share memory, derived from the operations, independently of the data that passes set."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from zcompile.ir.operation import data
from zcompile.ir.ops import Call, Input, Item, WaitReduce, called
from zcompile.ir.program_graph import ProgramGraph
from zcompile.ir.region import Region
from zcompile.torch_internals.operators import OpOverload

_MAY_SHOW = frozenset(
    {"_unsafe_view", "reshape", "contiguous", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
)
"""Operations that tracing treats as functional, although their results may alias their argument."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a value: the line that allocated it, and the number of the first of its results that is in it."""

    line: fx.Node
    number: int = 0


def root_of(value: fx.Node) -> fx.Node:
    """Return the operation or placeholder of an ATen graph whose memory `value` uses."""
    while value.op == "call_function" and _shows_first_argument(value) and (given := value.all_input_nodes):
        value = given[0]
    return value


def memory_of_values(program: ProgramGraph) -> dict[fx.Node, Memory]:
    """Return the memory that each value of a program uses."""
    shown = {name: _results(region) for name, region in program.regions.items()}
    result: dict[fx.Node, Memory] = {}
    for node in program.graph.nodes:
        op, made = data(node).op, data(call := called(node)).op
        if isinstance(made, Call):
            number = op.index if isinstance(op, Item) else 0
            result[node] = _of_result(call, number, shown[made.region], result)
        elif isinstance(op, WaitReduce):
            result[node] = Memory(node.all_input_nodes[0])
        else:
            root = root_of(node)
            result[node] = Memory(node) if root is node else result[root]
    return result


def shared_results(program: ProgramGraph) -> list[tuple[bool, int] | None]:
    """Return what each output and gradient of an input shares memory with.

    (True, number of an input), or (False, number of the first such result), or None for memory of its own.
    """
    results = [*program.results.outputs, *program.results.input_gradients]
    if not any(isinstance(value, fx.Node) for value in results):
        return [None] * len(results)
    memory, inputs = memory_of_values(program), program.nodes(Input)
    found: list[tuple[bool, int] | None] = []
    first: dict[Memory, int] = {}
    for number, value in enumerate(results):
        mine = memory[value] if isinstance(value, fx.Node) else None
        if mine is None:
            found.append(None)
        elif mine.line in inputs:
            found.append((True, inputs.index(mine.line)))
        else:
            earlier = first.setdefault(mine, number)
            found.append((False, earlier) if earlier != number else None)
    return found


_Shown = Mapping[int, tuple[int, int | None]]
"""For each result of a region that is a value, the first result in the same memory, and the argument that owns it."""


def _results(region: Region) -> _Shown:
    if region.rows is not None:  # what the turns of a loop give is joined in memory of its own
        return {number: (number, None) for number in range(len(region.outputs))}
    placeholders = {node: number for number, node in enumerate(region.graph.find_nodes(op="placeholder"))}
    first: dict[fx.Node, int] = {}
    found = {}
    for number, value in enumerate(region.outputs):
        if isinstance(value, fx.Node):
            root = root_of(value)
            found[number] = first.setdefault(root, number), placeholders.get(root)
    return {n: (f, region.takes[p][0] if p is not None else None) for n, (f, p) in found.items()}


def _of_result(call: fx.Node, number: int, shown: _Shown, known: Mapping[fx.Node, Memory]) -> Memory:
    first, argument = shown.get(number, (number, None))
    if argument is None:
        return Memory(call, first)
    given = call.args[1 + argument]
    return known[given] if isinstance(given, fx.Node) else Memory(call, first)


def _shows_first_argument(node: fx.Node) -> bool:
    """Return True for an operation that returns, or may return, a view or several views, and for items of these."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.op == "call_function" and _shows_first_argument(source)
    return _may_show(node.target)


@functools.cache
def _may_show(target: object) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return bool(target.is_view) or target.overloadpacket.__name__ in _MAY_SHOW
