"""The fact that memory is read only while it holds what it did: it may be released, worked in, or written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from zcompile.facts.fact import Fact, Violation, label
from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import (
    Accumulate,
    Fetch,
    Input,
    Placeholder,
    Reduce,
    ReduceOutside,
    Release,
    Results,
    Sum,
    SumAverages,
)
from zcompile.ir.program import Program
from zcompile.ir.shared_memory import Memory, memory_of_values


def _owned(program: Program) -> Iterator[Violation]:
    memory, gone = memory_of_values(program), dict[Memory, str]()
    inputs = [node for node in program.nodes(Input) if data(node).op.mutated]  # type: ignore[attr-defined]
    overwritten = {memory[node]: f"the forward writes to {node.name}" for node in inputs}
    for node in program.graph.nodes:
        op, in_backward = data(node).op, data(node).phase is Phase.BACKWARD
        known = gone | overwritten if overwritten and in_backward and not isinstance(op, Results) else gone
        for value in node.all_input_nodes if known else ():
            if (why := known.get(memory[value])) is not None:
                yield Violation(node, f"{label(node)} uses {value.name} after its memory has gone: {why}")
        if isinstance(op, Release):
            gone[memory[node.all_input_nodes[0]]] = f"{node.all_input_nodes[0].name} is released"
        elif isinstance(op, Fetch):
            gone[memory[node.all_input_nodes[0]]] = f"{node.name} brings it back, and who keeps it lets it go"
        elif isinstance(op, ReduceOutside):
            gone[memory[node.all_input_nodes[1]]] = f"{node.name} works in it"
        elif isinstance(op, (Sum, Reduce, Accumulate)):
            yield from _taken(node, memory, gone)
        elif isinstance(op, SumAverages):
            gone |= {memory[averages]: f"{node.name} works in it" for averages in node.all_input_nodes[1:]}


def _taken(node: fx.Node, memory: dict[fx.Node, Memory], gone: dict[Memory, str]) -> Iterator[Violation]:
    """A reduction works in the memory of its gradients, and what is held back is kept: nobody else may have it."""
    given, *others = ([one for one in _listed(argument) if isinstance(one, fx.Node)] for argument in node.args[1:])
    added = [gradient for some in others for gradient in some]
    for gradient in given:
        maker = memory[gradient].line
        if isinstance(data(maker).op, Placeholder) or data(maker).phase is Phase.FORWARD:
            yield Violation(node, f"{node.name} works in the memory of {maker.name}, which is not its own; want a copy")
        if sum(memory[other] == memory[gradient] for other in (*given, *added)) > 1:
            yield Violation(node, f"{node.name} is given the memory of {gradient.name} twice; want a copy")
    gone |= {memory[gradient]: f"{node.name} works in it" for gradient in given}
    gone |= {memory[one]: f"{node.name} lets it go" for one in added if data(memory[one].line).phase is Phase.STEP}


def _listed(argument: Any) -> Sequence[Any]:
    """The gradients in a list; their sum, which is one value, in a list of its own."""
    return argument if isinstance(argument, (list, tuple)) else [argument]


OWNED = Fact("memory used only while it holds what it did", _owned)
