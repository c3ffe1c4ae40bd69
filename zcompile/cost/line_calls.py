"""The lines of a program's text with the functions that they call, by which recorded times are reported."""

from __future__ import annotations

from torch import fx

from zcompile.ir.operation import Phase, data
from zcompile.ir.ops import Call, Item
from zcompile.ir.printer import function_text
from zcompile.ir.program import Program
from zcompile.runtime.recorder import Line


def lines_of(program: Program, phase: Phase) -> list[Line]:
    """Return the lines of `phase` that call a function or a region, in order."""
    calls = [node for node in program.body(phase) if not isinstance(data(node).op, Item)]
    return [Line("unbox", "box", ""), *(line_of(program, node) for node in calls)]


def line_of(program: Program, node: fx.Node) -> Line:
    """Return the line of a node that calls a function, or a region, with its name and the enclosing unit."""
    meta = data(node)
    if isinstance(meta.op, Call):
        around = (u.name for u in program.layout.units if f"{meta.source}.".startswith(f"{u.name}."))
        return Line(meta.op.region, meta.op.region, max(around, key=len, default=meta.source), True, node.name)
    name = node.name if meta.op.gives else node.all_input_nodes[0].name
    return Line(function_text(node.target), name, meta.source, node=node.name)
