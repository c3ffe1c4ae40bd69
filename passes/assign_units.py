"""assign_units: assign every operation to a unit.

An operation belongs to the unit whose parameters it reads, otherwise to the unit whose module it comes from (in the
backward, the module of its forward operation). An operation without a unit is glue: it joins an adjacent region.
Operations that read no parameter, between operations of a single other unit, join that unit: a mask or rotary table
that several blocks share, recomputed in the backward of the last of them, would otherwise split that block's run, and
the unit would be gathered for each piece.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from torch import fx

from zcompile.ir.layout import Layout
from zcompile.ir.operation import data, op_of, set_data
from zcompile.ir.ops import Compute, Item, Parameter
from zcompile.ir.parameter_views import derived_values, parameters_read
from zcompile.ir.program import Program


def assign_units(program: Program) -> Program:
    """Set `Data.unit` of every operation."""
    program = program.copy()
    derived = derived_values(program)
    for node in program.nodes(Compute, Item):
        unit = _unit(node, program.layout, derived)
        set_data(node, replace(data(node), unit=unit))
    for phase in program.phases:
        _join_enclosing([n for n in program.body(phase) if data(n).unit and n not in derived], derived)
    return program


def _join_enclosing(nodes: list[fx.Node], derived: set[fx.Node]) -> None:
    """Assign operations that read no parameter, between operations of a single other unit, to that unit."""
    runs: list[list[fx.Node]] = []
    for _, members in groupby(nodes, key=lambda node: data(node).unit):
        runs.append(list(members))
        while len(runs) > 2 and data(runs[-3][0]).unit == data(runs[-1][0]).unit:
            first, within, last = runs[-3:]
            if any(parameters_read(node, derived) for node in within):
                break
            for node in within:
                set_data(node, replace(data(node), unit=data(first[0]).unit))
            runs[-3:] = [[*first, *within, *last]]


def _unit(node: fx.Node, layout: Layout, derived: set[fx.Node]) -> str:
    if isinstance(data(node).op, Item):
        return data(node.all_input_nodes[0]).unit  # an item stays with the operation that produced it
    read = [layout.unit_of(op_of(source, Parameter).name).name for source in parameters_read(node, derived)]
    home = _unit_of_module(data(node).source, layout)
    return home if home in read or not read else read[0]


def _unit_of_module(path: str, layout: Layout) -> str:
    """Return the unit that owns the innermost module enclosing `path`, or "" if there is none."""
    owners = {module: unit.name for unit in layout.units for module in unit.modules if module}
    while path:
        if path in owners:
            return owners[path]
        path = path.rpartition(".")[0]
    return ""
